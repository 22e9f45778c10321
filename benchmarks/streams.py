"""Measure several streams that learn at once: in turns, one step for each, and side by side, one step for all.

It measures what the engine of the service does between taking batches and writing answers: the guard and the states
too, without HTTP. Both ways take turns in one process. With "packed" the states are also turned into the bytes that the
service writes to its disk. The model has random weights, which name few classes, and learns from them all the same.

python benchmarks/streams.py --out demo/streams.csv
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from rows import Row, append, machine
from speed import figures
from torch import Tensor

import safer_tta
from safer_tta._internal import safetensors_io
from safer_tta.guards import Guard, Memory
from safer_tta.methods import Lockstep, Snapshot, learnt, moved
from safer_tta.models import statistics, zoo

FIELDS = (
    "what", "model", "method", "predictor", "norm", "precision", "streams", "batch", "side", "ms", "ms_low", "ms_high",
    "rounds", "ratio", "images_per_s", "difference", "peak_mb", "machine", "threads", "torch",
)  # fmt: skip


class Streams:
    """As many streams as asked for, as an engine keeps them, and a batch of each for every round."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        statistics.LEAST_DIVERSE = 0.0
        model = zoo.create(options.model, num_classes=options.classes)
        method = safer_tta.adapt(
            model, options.method, options.predictor, norm=options.norm, seed=0, precision=options.precision,
            mean=0.45, std=0.25, copy=False,
        )  # fmt: skip
        self.method = method.to(options.device)
        self.guard, self.lockstep = Guard(self.method, least_agreement=0), Lockstep(self.method)
        if not self.lockstep.agrees(options.side):
            raise SystemExit("the model does not keep streams apart")
        fresh = self.method.state_dict()
        seeds = [torch.Generator().manual_seed(seed).get_state() for seed in range(options.streams)]
        self.states: list[Snapshot] = [{**fresh, "generator": seed} for seed in seeds]
        self.memories = [Memory() for _ in seeds]
        shape = options.streams, options.batch, 3, options.side, options.side
        self.images = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def in_turns(self) -> list[Tensor]:
        answers = []
        for number, images in enumerate(self.images):
            before = self.states[number]
            self.guard.lend(self.memories[number], state=before)
            answers.append(self.guard(images).probs.cpu())
            self._keep(number, before, self.guard.state_dict())
        return answers

    def side_by_side(self) -> list[Tensor]:
        answers = []
        steps = self.lockstep.step(self.states, self.images)
        for number, (images, taken) in enumerate(zip(self.images, steps, strict=True)):
            how = {"frozen": False, "learn": True, "seconds": 0.0}
            answers.append(self.guard.adopt(self.memories[number], images, taken, **how).probs)
            self._keep(number, self.states[number], self.guard.lent_state())
        return answers

    def _keep(self, number: int, before: Snapshot, after: Snapshot) -> None:
        learnt(before, after)
        moved(before, after)
        self.states[number], self.memories[number] = after, self.guard.memory

    def packed(self, answer: Callable[[], object]) -> None:
        answer()
        for state in self.states:
            safetensors_io.dumps(state)


def measure(options: argparse.Namespace) -> list[Row]:
    streams = {"turns": Streams(options), "side by side": Streams(options)}
    first, other = streams["turns"], streams["side by side"]
    answers = zip(first.in_turns(), other.side_by_side(), strict=True)
    difference = max(float((a - b).abs().max()) for a, b in answers)  # of the very first batches
    ways: dict[str, Callable[[], object]] = {"turns": first.in_turns, "side by side": other.side_by_side}
    ways |= {f"{name}, packed": lambda s=streams[name], way=way: s.packed(way) for name, way in ways.items()}
    times, peaks = timed(ways, options.rounds)
    rows = []
    for name, taken in times.items():
        beside = times["turns, packed" if name.endswith("packed") else "turns"]
        row: Row = {"what": name, "difference": f"{difference:.1e}", "peak_mb": peaks[name], **figures(taken, beside)}
        row["ratio"] = 1 / row["ratio"]  # how many times as many images
        rows.append({**row, "images_per_s": 1e3 * options.streams * options.batch / row["ms"]})
    return rows


def timed(ways: Mapping[str, Callable[[], object]], rounds: int, warm: int = 2) -> tuple[dict[str, list[float]], Row]:
    """Return the milliseconds of each way, in turns, after some rounds to warm up; and what each took of a GPU."""
    cuda = torch.cuda.is_available()
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: Row = dict.fromkeys(ways)
    for number in range(warm + rounds):
        for name, way in ways.items():
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            way()
            if cuda:
                torch.cuda.synchronize()
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            if number >= warm:
                times[name].append(1e3 * (time.perf_counter() - started))
    return times, peaks


def profile(options: argparse.Namespace) -> None:
    """Write where the time of each way goes, for a look at it."""
    streams = Streams(options)
    for name, way in (("turns", streams.in_turns), ("side by side", streams.side_by_side)):
        way()
        with torch.profiler.profile() as found:
            way()
        rows = found.key_averages()
        calls = sum(row.count for row in rows if row.key in ("cudaLaunchKernel", "cuLaunchKernel"))
        table = rows.table(sort_by="self_cpu_time_total", row_limit=40)
        with options.profile.open("a") as file:
            file.write(f"{name}: {calls} kernels\n{table}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--model", default="small")
    parser.add_argument("--classes", type=int, default=7)
    parser.add_argument("--method", default="tent")
    parser.add_argument("--predictor", default="safer-g")
    parser.add_argument("--norm", help='"stream" or "model"; by default what the predictor prefers')
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", type=Path, help="append where the time goes to this file")
    options = parser.parse_args()
    safer_tta.keep_freed_memory()
    if options.profile:
        profile(options)
    told = {name: value for name, value in vars(options).items() if name in FIELDS and name != "rounds"}
    about = {"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    for row in measure(options):
        append(options.out, FIELDS, {**told, **row, **about})
        print({**told, **row})


if __name__ == "__main__":
    main()
