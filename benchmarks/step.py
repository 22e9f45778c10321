"""What a SAFER step costs beside a plain step, measured in one process, interleaved, as a ratio of medians."""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import safer_tta


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.rand(options.batch, 3, options.side, options.side, device=device)
    model = safer_tta.models.zoo.create(options.model, num_classes=7)
    methods = {
        f"N={n}": safer_tta.adapt(model, safer={"views": n} if n else False, seed=0).to(device) for n in (0, 1, 2, 4)
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for step in range(options.steps + 1):
        for name, method in methods.items():
            started = time.perf_counter()
            method(images)
            if device == "cuda":
                torch.cuda.synchronize()
            if step:  # the first round warms up
                times[name].append(time.perf_counter() - started)
    plain = statistics.median(times["N=0"])
    print(
        f"Tent, {options.model}, batch {options.batch}, {options.side} px, {device}, {torch.get_num_threads()} threads"
    )
    for name, taken in times.items():
        print(f"{name}: {1e3 * statistics.median(taken):8.1f} ms  {statistics.median(taken) / plain:5.2f} x plain")


if __name__ == "__main__":
    main()
