"""Measure what a SAFER step costs beside a plain one, and where the time goes.

Everything that is compared is measured in one process, taking turns, as a median with its quartiles.

python benchmarks/speed.py --out demo/speed.csv          # all sections; --sections steps views for some of them
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rows import Row, append, machine

import safer_tta
from safer_tta.attacks import pgd
from safer_tta.data import Stream, StreamSpec, open_dataset
from safer_tta.models import zoo
from safer_tta.views import OPERATORS, Pipeline
from safer_tta.views.pipeline import Draw, Stage

FIELDS = (
    "section", "what", "architecture", "method", "predictor", "views", "precision", "compile", "batch", "side",
    "target", "ms", "ms_low", "ms_high", "rounds", "ratio", "stream_ms", "device_ms", "images_per_s", "peak_mb",
    "accuracy", "machine", "threads", "torch", "system_allocator",
)  # fmt: skip
Way = tuple[str, bool]  # precision, and whether it is compiled
WAYS: list[Way] = [("float32", False), ("bfloat16", False), ("bfloat16", True)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PREDICTORS = ("safer", "safer-a", "safer-g")
STREAM = 20  # batches of a stream whose time is taken as a whole


def timed(functions: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Return the milliseconds of each function, in turns, after some rounds to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(warm + rounds):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            if number >= warm:
                times[name].append(1e3 * (time.perf_counter() - started))
    return times


def device_ms(function: Callable[[], object]) -> float:
    """Return the time of the device only: everything is queued behind a pause, so it never waits for the host."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(50_000_000)
    started.record()
    function()
    ended.record()
    torch.cuda.synchronize()
    return started.elapsed_time(ended)


def figures(taken: list[float], beside: list[float] | None = None) -> Row:
    """Return a median with its quartiles, and the median ratio to what was measured in the same rounds."""
    low, middle, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else (taken[0],) * 3
    found: Row = {"ms": middle, "ms_low": low, "ms_high": high, "rounds": len(taken)}
    if beside is not None:
        found["ratio"] = statistics.median(a / b for a, b in zip(taken, beside, strict=True))
    return found


def pictures(batch: int, side: int) -> torch.Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def adapted(model: torch.nn.Module, predictor: Any, way: Way, method: str = "tent") -> safer_tta.Method:
    """Return a method at work. On CUDA it does not look at the images' values, which would wait for earlier steps."""
    look = DEVICE == "cpu"
    wrapped = safer_tta.adapt(model, method, predictor, seed=0, precision=way[0], compile=way[1], validate=look)
    return wrapped.to(DEVICE)


def network(architecture: str) -> torch.nn.Module:
    return zoo.create(architecture, num_classes=7)


def with_views(views: int, **options: Any) -> Any:
    return {"name": "safer", "views": views, **options} if views else "plain"


# --- sections -------------------------------------------------------------------------------------------------------


def steps(o: argparse.Namespace) -> Iterator[Row]:
    """Measure SAFER steps beside plain ones."""
    images, way = pictures(o.batch, o.side), (o.precision, False)
    for architecture in o.architectures:
        for method in o.methods:
            variants = {n: adapted(network(architecture), with_views(n), way, method) for n in (0, *o.views)}
            times = timed({str(n): lambda m=m: m(images) for n, m in variants.items()}, o.rounds)
            for n, taken in times.items():
                row = {"architecture": architecture, "method": method, "views": int(n), "precision": o.precision}
                yield {**row, "batch": o.batch, "side": o.side, **figures(taken, times["0"])}


def accelerated(o: argparse.Namespace) -> Iterator[Row]:
    """Measure Tent and Tent+SAFER in each way to compute them, call by call and through stream()."""
    images = pictures(o.batch, o.side)
    for architecture in o.architectures:
        cases = {f"{way[0]} {way[1]} {n}": (way, n) for way in WAYS for n in (0, 4)}
        variants = {name: adapted(network(architecture), with_views(n), way) for name, (way, n) in cases.items()}
        calls = timed({name: lambda m=m: m(images) for name, m in variants.items()}, o.rounds, o.warm)
        streams = timed(
            {name: lambda m=m: list(m.stream([images] * STREAM)) for name, m in variants.items()}, max(3, o.rounds // 4)
        )
        fastest = min(statistics.median(taken) for name, taken in calls.items() if cases[name][1] == 0)
        for name, (way, n) in cases.items():
            row = {"architecture": architecture, "precision": way[0], "compile": way[1], "views": n, "batch": o.batch}
            found, flowing = figures(calls[name]), statistics.median(streams[name]) / STREAM
            yield {**row, "side": o.side, **found, "ratio": found["ms"] / fastest, "stream_ms": flowing}


def predictors(o: argparse.Namespace) -> Iterator[Row]:
    """Measure Tent on SAFER's variants beside Tent on SAFER."""
    images, way = pictures(o.batch, o.side), WAYS[1] if DEVICE == "cuda" else WAYS[0]
    for architecture in o.architectures:
        variants = {name: adapted(network(architecture), name, way) for name in PREDICTORS}
        times = timed({name: lambda m=m: m(images) for name, m in variants.items()}, o.rounds, o.warm)
        for name, taken in times.items():
            row = {"architecture": architecture, "predictor": name, "precision": way[0], "compile": way[1]}
            yield {**row, "batch": o.batch, "side": o.side, **figures(taken, times["safer"])}


def views(o: argparse.Namespace) -> Iterator[Row]:
    """Measure four views: batched, by the same operators image by image, and in the step that they are part of."""
    images = pictures(o.batch, o.side)
    for compile in (False, True) if DEVICE == "cuda" else (False,):
        method = adapted(network("resnet18"), "safer", (o.precision, compile))
        draws = [Pipeline().draw(4, o.batch, torch.Generator().manual_seed(seed)) for seed in range(o.rounds + o.warm)]
        for draw in draws if compile else []:  # every operator is compiled once
            draw.views(images, room(o, images, True), compile=True)
        turn = {"batched": iter(draws), "image by image": iter(draws)}
        functions: dict[str, Callable[[], object]] = {
            "batched": lambda turn=turn, c=compile: next(turn["batched"]).views(images, room(o, images, c), compile=c),
            "step": lambda m=method: m(images),
        }
        if not compile:
            functions["image by image"] = lambda turn=turn: one_by_one(next(turn["image by image"]), images)
        times = timed(functions, o.rounds, o.warm)
        turn["batched"] = iter(draws)
        for name, taken in times.items():
            row = {"what": name, "precision": o.precision, "compile": compile, "batch": o.batch, "side": o.side}
            if DEVICE == "cuda" and name != "image by image":
                row["device_ms"] = statistics.median(device_ms(functions[name]) for _ in range(o.rounds))
            yield {**row, **figures(taken, times["batched"])}


def room(o: argparse.Namespace, images: torch.Tensor, compile: bool) -> torch.Tensor:
    """Return where the views go, in the precision that a compiled step wants them in."""
    half = compile and o.precision == "bfloat16"
    return images.new_empty(5, *images.shape, dtype=torch.float16 if half else images.dtype)


def one_by_one(draw: Draw, images: torch.Tensor) -> torch.Tensor:
    """Make views as research code does: a loop over images, each through its own pipeline."""
    parts = []
    for index in range(len(images)):
        pipelines = tuple(
            tuple(Stage(s.name, None if s.values is None else s.values[index : index + 1], s.seed) for s in pipeline)
            for pipeline in draw.pipelines
        )
        parts.append(Draw(1, pipelines).views(images[index : index + 1]))
    return torch.cat(parts, dim=1)


def operators(o: argparse.Namespace) -> Iterator[Row]:
    """Measure each operator, beside itself compiled and beside kornia where that has the same."""
    images = pictures(o.batch, o.side)
    rivals = kornia_operators(images)
    for name, operator in OPERATORS.items():
        values = operator.sample(o.batch, torch.Generator().manual_seed(0))
        functions: dict[str, Callable[[], object]] = {name: lambda op=operator, v=values: op(images, v)}
        if name in rivals:
            functions[f"{name}, kornia"] = rivals[name]
        if DEVICE == "cuda":
            functions[f"{name}, compiled"] = lambda op=operator, v=values: op(images, v, compile=True)
        times = timed(functions, o.rounds)
        for what, taken in times.items():
            yield {"what": what, "batch": o.batch, "side": o.side, **figures(taken, times[name])}


def kornia_operators(images: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return kornia's versions of our operators, with one level for the whole batch where it knows no other."""
    try:
        import kornia.enhance as enhance
        import kornia.filters as filters
        import kornia.geometry.transform as transform
    except ImportError:
        return {}
    batch = len(images)
    angle, factor = torch.full((batch,), 10.0, device=images.device), torch.full((batch,), 1.2, device=images.device)
    matrix = torch.eye(2, 3, device=images.device).repeat(batch, 1, 1)
    sigma = torch.full((batch, 2), 2.0, device=images.device)
    affine = {
        name: lambda: transform.affine(images, matrix, mode="nearest")
        for name in ("shear_x", "shear_y", "translate_x", "translate_y")
    }
    return affine | {
        "gaussian_blur": lambda: filters.gaussian_blur2d(images, (9, 9), sigma),
        "equalize": lambda: enhance.equalize(images),
        "invert": lambda: enhance.invert(images),
        "solarize": lambda: enhance.solarize(images, 0.5),
        "posterize": lambda: enhance.posterize(images, 4),
        "contrast": lambda: enhance.adjust_contrast_with_mean_subtraction(images, factor),
        "brightness": lambda: enhance.adjust_brightness_accumulative(images, factor),
        "saturation": lambda: enhance.adjust_saturation(images, factor),
        "sharpness": lambda: enhance.sharpness(images, factor),
        "rotate": lambda: transform.rotate(images, angle, mode="nearest"),
    }


def attack(o: argparse.Namespace) -> Iterator[Row]:
    """Measure how many images PGD attacks in a second: 20 steps on a ResNet-18."""
    images, labels = pictures(o.batch, o.side), torch.zeros(o.batch, dtype=torch.long, device=DEVICE)
    model = network("resnet18").eval().requires_grad_(False).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    budget = {"eps": 8 / 255, "step": 2 / 255, "steps": 20}
    taken = timed({"pgd": lambda: pgd(model, images, labels, **budget, generator=generator)}, max(2, o.rounds // 5))
    found = figures(taken["pgd"])
    yield {"batch": o.batch, "side": o.side, **found, "images_per_s": 1e3 * o.batch / found["ms"]}


def scaling(o: argparse.Namespace) -> Iterator[Row]:
    """Measure Tent+SAFER as the batch, the number of views and the side grow."""
    cases = [(o.batch // 2, 4, o.side), (o.batch, 4, o.side), (o.batch * 2, 4, o.side)]
    cases += [(o.batch, n, o.side) for n in (1, 2, 8)] + [(o.batch, 4, o.side // 2)]
    for batch, n, side in cases:
        images, method = pictures(batch, side), adapted(network("resnet18"), with_views(n), (o.precision, False))
        found = figures(timed({"step": lambda m=method, x=images: m(x)}, max(2, o.rounds // 4))["step"])
        yield {"batch": batch, "views": n, "side": side, **found, "images_per_s": 1e3 * batch / found["ms"]}


def memory(o: argparse.Namespace) -> Iterator[Row]:
    """Measure the peak memory of a step above what was there before it, in a process for each case."""
    cases = {"plain": "plain", "SAFER": "safer", "SAFER in chunks": with_views(4, chunk=o.batch)}
    found = {name: peak(o, predictor) for name, predictor in cases.items()}
    for name, megabytes in found.items():
        row = {"what": name, "batch": o.batch, "side": o.side, "peak_mb": megabytes}
        # A tiny plain step may need no memory beyond what was there.
        yield {**row, "ratio": megabytes / found["plain"]} if found["plain"] else row


def peak(o: argparse.Namespace, predictor: Any) -> float:
    program = f"""
import resource, torch, safer_tta
from safer_tta.models import zoo
torch.set_num_threads({torch.get_num_threads()})
{"" if o.system_allocator else "safer_tta.keep_freed_memory()"}
images = torch.rand({o.batch}, 3, {o.side}, {o.side}).to({DEVICE!r})
model, precision = zoo.create("resnet18", num_classes=7), {o.precision!r}
method = safer_tta.adapt(model, "tent", {predictor!r}, seed=0, precision=precision).to({DEVICE!r})
if {DEVICE!r} == "cuda":
    method(images)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    method(images)
    print((torch.cuda.max_memory_allocated() - before) / 2**20)
else:
    safer_tta.adapt(zoo.create("resnet18", num_classes=7), "tent", "plain", seed=0)(images[:2, :, :32, :32])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method(images)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
"""
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def chunks(o: argparse.Namespace) -> Iterator[Row]:
    """Measure what little memory costs in time: views at once, and in chunks of a batch each."""
    images, model, way = pictures(o.batch, o.side), network("resnet18"), (o.precision, False)
    cases = {"at once": with_views(4), "in chunks": with_views(4, chunk=o.batch)}
    variants = {name: adapted(model, predictor, way) for name, predictor in cases.items()}
    times = timed({name: lambda m=m: m(images) for name, m in variants.items()}, o.rounds)
    for name, taken in times.items():
        yield {"what": name, "batch": o.batch, "side": o.side, **figures(taken, times["at once"])}


def accuracy(o: argparse.Namespace) -> Iterator[Row]:
    """Measure what the faster ways cost in accuracy: Tent and Tent+SAFER on a domain, in three orders of the stream."""
    domain = open_dataset(o.data).domain(o.target)
    for n in (0, 4):
        for way in WAYS:
            scores = []
            for seed in range(3):
                method = safer_tta.adapt(
                    safer_tta.load_classifier(o.source),
                    "tent",
                    with_views(n),
                    seed=seed,
                    precision=way[0],
                    compile=way[1],
                ).to(DEVICE)
                stream = Stream((domain,), StreamSpec(seed=seed, batch=o.batch))
                scores.append(method.evaluate((batch.images, batch.labels) for batch in stream).accuracy)
            row = {"target": o.target, "views": n, "precision": way[0], "compile": way[1], "batch": o.batch}
            yield {**row, "accuracy": statistics.mean(scores)}


def startup(o: argparse.Namespace) -> Iterator[Row]:
    """Measure processes from start to end, and what our imports add to those of torch."""
    wrap = "from safer_tta import adapt, models; adapt(models.zoo.create('resnet18', num_classes=7))"
    programs = {
        "python": ["-c", ""],
        "import torch": ["-c", "import torch"],
        "import torch, safer_tta.adapt": ["-c", "import torch; from safer_tta import adapt"],
        "safer --help": ["-m", "safer_tta.cli", "--help"],
        "wrap a ResNet-18": ["-c", wrap],
    }

    def run(program: list[str]) -> None:
        subprocess.run([sys.executable, *program], capture_output=True, check=True)

    for name, taken in timed({name: lambda p=p: run(p) for name, p in programs.items()}, 7).items():
        yield {"what": name, **figures(taken)}


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    function.__name__: function
    for function in (
        steps, accelerated, predictors, accuracy, views, operators, attack, scaling, memory, chunks, startup,
    )
}  # fmt: skip


def run(o: argparse.Namespace) -> None:
    if not o.system_allocator:
        safer_tta.keep_freed_memory()
    where = {"machine": machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    for section in o.sections:
        for row in SECTIONS[section](o):
            append(o.out, FIELDS, {"section": section, **row, **where, "system_allocator": o.system_allocator})
            print(section, {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to those that are there")
    given = [name for name in SECTIONS if name != "accuracy"]  # which needs data and a model
    parser.add_argument("--sections", nargs="*", default=given, choices=list(SECTIONS))
    parser.add_argument("--source", type=Path, help="a model of `safer train source`, for the section accuracy")
    parser.add_argument("--data", help="the images of its target")
    parser.add_argument("--target", default="art_painting")
    parser.add_argument("--architectures", nargs="*", default=["resnet18", "resnet50"])
    parser.add_argument("--methods", nargs="*", default=["tent", "pl", "tsd"])
    parser.add_argument("--views", nargs="*", type=int, default=[1, 2, 4, 8], help="besides none")
    parser.add_argument("--batch", type=int, default=64 if DEVICE == "cuda" else 8)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm", type=int, default=8 if DEVICE == "cuda" else 1, help="rounds before it counts")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--system-allocator", action="store_true", help="as the C library has it")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
