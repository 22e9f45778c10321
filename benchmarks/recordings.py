"""What a gate has to go by, recorded: the views' answers and how far they stray, under a method that learns from
SAFER's own pooling. A gate that only answers (`teaches=False`) changes nothing there, unless the method aligns features
that the gate lets in (TSD; not with `features="pooled"`). So whatever such a gate would have said follows from a
recording, to the last bit and without a GPU.

As an extension it gives the bench one more kind of task, made once like any other:

python benchmarks/pacs.py tasks --recordings --out tasks.json … main
safer --extension benchmarks/recordings.py bench tasks tasks.json …
python benchmarks/evidence.py judge STORE/made docs/results/evidence-pacs.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from safer_tta import api, tensorfile
from safer_tta.bench.run import Tick
from safer_tta.bench.tasks import KINDS, Place, Task, stream_of
from safer_tta.data import Batch, Stream, StreamSpec
from safer_tta.gate import EVIDENCE, _angles, _distances
from safer_tta.mixing import signal
from safer_tta.predictors import Prediction
from safer_tta.training import load

KIND = "recording"


def pairs(matrix: Tensor) -> Tensor:
    """(V,V,B), the same above its diagonal as below, as (V(V-1)/2,B)."""
    first, second = torch.triu_indices(len(matrix), len(matrix), offset=1)
    return matrix[first, second]


def matrix(paired: Tensor) -> Tensor:
    """The way back."""
    views = round((1 + (1 + 8 * len(paired)) ** 0.5) / 2)
    first, second = torch.triu_indices(views, views, offset=1)
    whole = paired.new_zeros(views, views, paired.shape[1])
    whole[first, second] = whole[second, first] = paired
    return whole


class Recorder:
    """A mixing that changes nothing, and keeps what it sees."""

    least_views = 3

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def mix(self, base_weights: Tensor, probs: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            kept = {
                "base": base_weights.float(),
                "probs": probs.float(),
                "distances": pairs(_distances(features)).half(),  # to look at; a gate has the evidence as it was
                "angles": pairs(_angles(features)).half(),
                "disagreement": signal("feat_disagreement", probs, features),
                **{f"evidence.{kind}": of(features) for kind, of in EVIDENCE.items()},
            }
            self.seen.append({name: tensor.detach().cpu() for name, tensor in kept.items()})
        return base_weights, torch.zeros_like(base_weights[0])


@dataclass(frozen=True)
class Recording:
    """One stream. Tensors have the images last but for probs (V,N,K); sizes: of the batches."""

    of: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def batches(self) -> Iterator[dict[str, Tensor]]:
        first = 0
        for size in self.tensors["sizes"].tolist():
            part = slice(first, first + size)
            yield {
                name: tensor[:, part] if name == "probs" else tensor[..., part]
                for name, tensor in self.tensors.items()
                if name != "sizes"
            }
            first += size

    @property
    def place(self) -> tuple[str, str, float, int]:
        """(method, target, rate, seed)."""
        stream, released = self.of["stream"], " (released)" if self.of["options"].get("released") else ""
        return f"{self.of['method']}{released}", self.of["target"], stream["attack_rate"], stream["seed"]

    def write(self, path: Path) -> None:
        tensorfile.write(path, self.tensors, {"recording": json.dumps(self.of, sort_keys=True)})

    @classmethod
    def read(cls, path: Path) -> Recording:
        tensors, metadata = tensorfile.read(path)
        return cls(json.loads(metadata["recording"]), tensors)


def task_for(run: Task) -> Task:
    """The recording beside a run on SAFER."""
    what = {"recording": sorted(EVIDENCE), **run.definition}
    return Task(KIND, f"views of {run.label}", what, run.needs, run.passes)


def recorded(
    what: Mapping[str, Any],
    place: Place,
    tick: Tick = lambda done, total, **figures: None,
    look: Callable[[Prediction, Batch], None] = lambda prediction, batch: None,
) -> Recording:
    """As the bench makes the run itself (`bench.run.perform`), with somebody looking on."""
    domains, copies, _ = stream_of(what, place)
    stream, recorder = Stream(domains, StreamSpec(**what["stream"]), copies), Recorder()
    classifier = load(Task("source", "", what["source"]).path(place)).to(place.device)
    classifier.accelerate(precision=what.get("precision", "float32"))
    method = api.build(
        classifier,
        what["method"],
        what["predictor"],
        options=what["options"],
        predictor_options={**what["predictor_options"], "mixing": recorder},
        seed=what["stream"]["seed"],
        device=place.device,
    )
    batches = []
    for number, batch in enumerate(stream):
        look(method(batch.images), batch)
        batches.append(batch)
        tick(number + 1, len(stream))
    joined = {
        name: torch.cat([seen[name] for seen in recorder.seen], dim=1 if name == "probs" else -1)
        for name in recorder.seen[0]
    }
    joined["labels"] = torch.cat([batch.labels for batch in batches])
    joined["attacked"] = torch.cat([batch.attacked for batch in batches])
    joined["sizes"] = torch.tensor([len(batch.labels) for batch in batches])
    return Recording(what, joined)


def _do_recording(task: Task, place: Place, tick: Tick) -> None:
    recorded(task.definition, place, tick).write(task.path(place))


KINDS[KIND] = _do_recording


def found_in(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob(f"{KIND}-*.safetensors"))
