"""Measure when the alarm "attack suspected" is raised: never on clean images, one hopes, and how soon under attack.

Every stream begins clean. From its middle on, a share of its images is attacked (PGD, 8/255, on another model).

python benchmarks/alarms.py --out demo/alarms.csv
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rows import Row, append, machine

import safer_tta
from safer_tta.data import ArrayStore, Domain, Stream, StreamSpec, open_dataset
from safer_tta.data.store import digest_file
from safer_tta.guards import Guard
from safer_tta.models import load_classifier
from safer_tta.training import attacked_copies, source_recipe, surrogate_recipe, train_source, train_surrogate

FIELDS = (
    "target", "rate", "seed", "batch", "clean_images", "clean_flagged", "false_alarms", "late_images", "late_flagged",
    "images_until", "machine", "torch",
)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    dataset = open_dataset("synthetic", count=options.images)
    trained = {} if options.steps is None else {"steps": options.steps}
    with tempfile.TemporaryDirectory() as folder:
        for target in options.targets:
            source, surrogate = (Path(folder) / f"{kind}-{target}.safetensors" for kind in ("source", "surrogate"))
            train_source(dataset, target, source_recipe("synthetic", **trained), source)
            recipe = surrogate_recipe("synthetic", **trained)
            attacker = train_surrogate(dataset.domain(target), recipe, surrogate)
            store, made_on = ArrayStore(Path(folder) / "attacked"), digest_file(surrogate)
            attacked = attacked_copies(dataset.domain(target), attacker, store, source=made_on)
            for rate in options.rates:
                for seed in range(options.seeds):
                    spec = StreamSpec(attack_rate=rate, draw="late", batch=options.batch, seed=seed)
                    row = watch(source, dataset.domain(target), attacked, spec)
                    about = {"target": target, "rate": rate, "seed": seed, "batch": options.batch}
                    row |= {**about, "machine": machine(), "torch": torch.__version__}
                    append(options.out, FIELDS, row)
                    print(row, flush=True)


def watch(source: Path, domain: Domain, attacked: NDArray[np.uint8], spec: StreamSpec) -> Row:
    """Answer a stream, and note when alarms are raised before and after the attack begins."""
    guard = Guard(safer_tta.adapt(load_classifier(source), seed=spec.seed))
    stream = Stream([domain], spec, [attacked])
    images, flagged, false_alarms, until = [0, 0], [0, 0], 0, None  # before the attack, and from then on
    for number, batch in enumerate(stream):
        late = int(spec.attack_rate > 0 and number >= len(stream) // 2)
        before, seen = suspected(guard), guard.memory.watch.abstained
        guard(batch.images)
        images[late] += len(batch.images)
        flagged[late] += guard.memory.watch.abstained - seen
        if suspected(guard) and not late:
            false_alarms += not before
        elif suspected(guard) and until is None:
            until = images[1]
    return {
        "clean_images": images[0],
        "clean_flagged": flagged[0],
        "false_alarms": false_alarms,
        "late_images": images[1],
        "late_flagged": flagged[1],
        "images_until": until,
    }


def suspected(guard: Guard) -> bool:
    return any(alarm.kind == "attack" for alarm in guard.alarms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", nargs="*", default=["photo", "painting", "cartoon", "sketch"])
    parser.add_argument("--rates", type=int, nargs="*", default=[0, 10, 25, 50, 100], help="attacked, % of each batch")
    parser.add_argument("--seeds", type=int, default=3, help="streams of each target and rate")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, default=1400, help="of each domain")
    parser.add_argument("--steps", type=int, help="of each training, instead of the recipe's")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
