"""What a SAFER step costs beside a plain one, and where the time goes; rows as JSON Lines, the page from the rows.

Everything that is compared is measured in one process, taking turns, as a median with its quartiles.

python benchmarks/speed.py run --out demo/speed.jsonl                # all sections; --sections steps views … for some
python benchmarks/speed.py page docs/results/speed-*.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import safer_tta
from safer_tta.attacks import pgd
from safer_tta.models import zoo
from safer_tta.views import OPERATORS, Pipeline
from safer_tta.views.pipeline import Draw, Step

Row = dict[str, Any]
Way = tuple[str, bool]  # precision, and whether it is compiled
WAYS: list[Way] = [("float32", False), ("bfloat16", False), ("bfloat16", True)]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def timed(functions: dict[str, Callable[[], object]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each, in turns, after some rounds to warm up."""
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
    """What the device alone takes: everything is queued behind a pause, so that it never waits for the host."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(50_000_000)
    started.record()
    function()
    ended.record()
    torch.cuda.synchronize()
    return started.elapsed_time(ended)


def figures(values: list[float]) -> Row:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"ms": middle, "ms_low": low, "ms_high": high, "rounds": len(values)}


def pictures(batch: int, side: int) -> torch.Tensor:
    return torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def adapted(
    architecture: str, method: str, views: int, way: Way = ("float32", False), **options: Any
) -> safer_tta.Method:
    """A method at work. On CUDA nobody looks at the images' values: that would wait for the step before."""
    model, safer = zoo.create(architecture, num_classes=7), {"views": views, **options} if views else False
    look = DEVICE == "cpu"
    return safer_tta.adapt(
        model, method, safer, seed=0, precision=way[0], compile=way[1], validate=look
    ).to(DEVICE)  # fmt: skip


# --- sections -------------------------------------------------------------------------------------------------------


def steps(o: argparse.Namespace) -> Iterator[Row]:
    """SAFER steps over plain ones."""
    images = pictures(o.batch, o.side)
    for architecture in o.architectures:
        for method in o.methods:
            variants = {n: adapted(architecture, method, n, (o.precision, False)) for n in o.views}
            times = timed({str(n): lambda m=m: m(images) for n, m in variants.items()}, o.rounds)
            plain = statistics.median(times["0"])
            for n, taken in times.items():
                ratios = [a / b for a, b in zip(taken, times["0"], strict=True)]
                row = {"architecture": architecture, "method": method, "views": int(n), "batch": o.batch}
                yield {
                    **row,
                    "precision": o.precision,
                    "side": o.side,
                    **figures(taken),
                    "ratio": statistics.median(ratios),
                    "plain_ms": plain,
                }


def accelerated(o: argparse.Namespace) -> Iterator[Row]:
    """Tent and Tent+SAFER (N = 4), each way to compute them: call by call, and through stream()."""
    images = pictures(o.batch, o.side)
    for architecture in o.architectures:
        cases = [(way, n) for way in WAYS for n in (0, 4)]
        variants = {f"{way[0]} {way[1]} {n}": adapted(architecture, "tent", n, way) for way, n in cases}
        calls = timed({name: lambda m=m: m(images) for name, m in variants.items()}, o.rounds, o.warm)
        streams = timed(
            {name: lambda m=m: list(m.stream([images] * STREAM)) for name, m in variants.items()}, max(3, o.rounds // 4)
        )
        fastest = min(statistics.median(calls[f"{p} {c} 0"]) for p, c in WAYS)
        for way, n in cases:
            name = f"{way[0]} {way[1]} {n}"
            found, flowing = figures(calls[name]), statistics.median(streams[name]) / STREAM
            row = {"architecture": architecture, "precision": way[0], "compile": way[1], "views": n, "batch": o.batch}
            ratio = {"ratio": found["ms"] / fastest, "stream_ms": flowing}
            yield {**row, "side": o.side, **found, **ratio}


MIXED = {"none": None, "sigmoid": "sigmoid", "gate": "gate"}


def mixings(o: argparse.Namespace) -> Iterator[Row]:
    """SAFER with each mixing of the views (N = 4), over SAFER with none."""
    images = pictures(o.batch, o.side)
    for architecture in o.architectures:
        for way in WAYS[1:] if DEVICE == "cuda" else WAYS[:1]:
            variants = {name: adapted(architecture, "tent", 4, way, mixing=mixing) for name, mixing in MIXED.items()}
            times = timed({name: lambda m=m: m(images) for name, m in variants.items()}, o.rounds, o.warm)
            for name, taken in times.items():
                ratios = [a / b for a, b in zip(taken, times["none"], strict=True)]
                row = {"architecture": architecture, "mixing": name, "precision": way[0], "compile": way[1]}
                size = {"batch": o.batch, "side": o.side}
                yield {**row, **size, **figures(taken), "ratio": statistics.median(ratios)}


STREAM = 20  # batches of a stream whose time is taken as a whole


def views(o: argparse.Namespace) -> Iterator[Row]:
    """The four views: batched, the same operators image by image, and the whole step they are part of."""
    images = pictures(o.batch, o.side)
    for compile in (False, True) if DEVICE == "cuda" else (False,):
        method = adapted("resnet18", "tent", 4, (o.precision, compile))
        draws = [Pipeline().draw(4, o.batch, torch.Generator().manual_seed(seed)) for seed in range(o.rounds + o.warm)]
        for draw in draws if compile else []:  # every operator is made into a program once
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
            ratios = [a / b for a, b in zip(taken, times["batched"], strict=True)]
            row = {"what": name, "precision": o.precision, "compile": compile, "batch": o.batch, "side": o.side}
            if DEVICE == "cuda" and name != "image by image":
                alone = [device_ms(functions[name]) for _ in range(o.rounds)]
                row["device_ms"] = statistics.median(alone)
            yield {**row, **figures(taken), "ratio": statistics.median(ratios)}


def room(o: argparse.Namespace, images: torch.Tensor, compile: bool) -> torch.Tensor:
    """Where the views go, in the precision a compiled step wants them in."""
    half = compile and o.precision == "bfloat16"
    return images.new_empty(5, *images.shape, dtype=torch.float16 if half else images.dtype)


def one_by_one(draw: Draw, images: torch.Tensor) -> torch.Tensor:
    """As research code does it: a loop over images, each through its pipeline alone."""
    rows = []
    for index in range(len(images)):
        pipelines = tuple(
            tuple(Step(s.name, None if s.values is None else s.values[index : index + 1], s.seed) for s in pipeline)
            for pipeline in draw.pipelines
        )
        rows.append(Draw(1, pipelines).views(images[index : index + 1]))
    return torch.cat(rows, dim=1)


def operators(o: argparse.Namespace) -> Iterator[Row]:
    """Each operator alone; beside kornia where it has the same."""
    images = pictures(o.batch, o.side)
    rivals = kornia_operators(images)
    for name, operator in OPERATORS.items():
        values = operator.sample(o.batch, torch.Generator().manual_seed(0))
        functions: dict[str, Callable[[], object]] = {"ours": lambda op=operator, v=values: op(images, v)}
        if name in rivals:
            functions["kornia"] = rivals[name]
        if DEVICE == "cuda":
            functions["compiled"] = lambda op=operator, v=values: op(images, v, compile=True)
        times = timed(functions, o.rounds)
        rival = {f"{n}_ms": statistics.median(times[n]) for n in ("kornia", "compiled") if n in times}
        yield {"operator": name, "batch": o.batch, "side": o.side, **figures(times["ours"]), **rival}


def kornia_operators(images: torch.Tensor) -> dict[str, Callable[[], object]]:
    """kornia's versions of ours, one level for the whole batch where it knows no other."""
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
    return {
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
        "shear_x": lambda: transform.affine(images, matrix, mode="nearest"),
        "shear_y": lambda: transform.affine(images, matrix, mode="nearest"),
        "translate_x": lambda: transform.affine(images, matrix, mode="nearest"),
        "translate_y": lambda: transform.affine(images, matrix, mode="nearest"),
    }


def attack(o: argparse.Namespace) -> Iterator[Row]:
    """Attacked images per second: PGD, 20 steps, on a ResNet-18."""
    images, labels = pictures(o.batch, o.side), torch.zeros(o.batch, dtype=torch.long, device=DEVICE)
    model = zoo.create("resnet18", num_classes=7).eval().requires_grad_(False).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    run = lambda: pgd(model, images, labels, eps=8 / 255, step=2 / 255, steps=20, generator=generator)  # noqa: E731
    taken = timed({"pgd": run}, max(2, o.rounds // 5))["pgd"]
    seconds = statistics.median(taken) / 1e3
    yield {"batch": o.batch, "side": o.side, **figures(taken), "images_per_s": o.batch / seconds}


def scaling(o: argparse.Namespace) -> Iterator[Row]:
    """Tent+SAFER as batch, views and side grow."""
    cases = [(o.batch // 2, 4, o.side), (o.batch, 4, o.side), (o.batch * 2, 4, o.side)]
    cases += [(o.batch, n, o.side) for n in (1, 2, 8)] + [(o.batch, 4, o.side // 2)]
    for batch, n, side in cases:
        images, method = pictures(batch, side), adapted("resnet18", "tent", n, (o.precision, False))
        taken = timed({"step": lambda m=method, x=images: m(x)}, max(2, o.rounds // 4))["step"]
        yield {
            "batch": batch,
            "views": n,
            "side": side,
            **figures(taken),
            "ms_per_image": statistics.median(taken) / batch,
        }


def memory(o: argparse.Namespace) -> Iterator[Row]:
    """Peak memory of a step above what was there before it; each case in a process of its own."""
    cases: list[tuple[str, Any]] = [
        ("plain", False),
        ("SAFER", {"views": 4}),
        ("SAFER in chunks", {"views": 4, "chunk": o.batch}),
    ]
    found = {name: peak(o, safer) for name, safer in cases}
    for name, megabytes in found.items():
        yield {
            "what": name,
            "batch": o.batch,
            "side": o.side,
            "peak_mb": megabytes,
            "ratio": megabytes / found["plain"],
        }


def peak(o: argparse.Namespace, safer: Any) -> float:
    program = f"""
import resource, torch, safer_tta
from safer_tta.models import zoo
torch.set_num_threads({torch.get_num_threads()})
{"" if o.system_allocator else "safer_tta.keep_freed_memory()"}
images = torch.rand({o.batch}, 3, {o.side}, {o.side}).to({DEVICE!r})
model, precision = zoo.create("resnet18", num_classes=7), {o.precision!r}
method = safer_tta.adapt(model, "tent", {safer!r}, seed=0, precision=precision).to({DEVICE!r})
if {DEVICE!r} == "cuda":
    method(images)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    method(images)
    print((torch.cuda.max_memory_allocated() - before) / 2**20)
else:
    safer_tta.adapt(zoo.create("resnet18", num_classes=7), "tent", False, seed=0)(images[:2, :, :32, :32])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    method(images)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
"""
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def chunks(o: argparse.Namespace) -> Iterator[Row]:
    """What little memory costs in time: views at once, and in chunks of a batch each."""
    images, model = pictures(o.batch, o.side), zoo.create("resnet18", num_classes=7)
    cases = {"at once": {"views": 4}, "in chunks": {"views": 4, "chunk": o.batch}}
    variants = {
        name: safer_tta.adapt(model, "tent", safer, seed=0, precision=o.precision).to(DEVICE)
        for name, safer in cases.items()
    }
    times = timed({name: lambda m=m: m(images) for name, m in variants.items()}, o.rounds)
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, times["at once"], strict=True)]
        yield {"what": name, "batch": o.batch, "side": o.side, **figures(taken), "ratio": statistics.median(ratios)}


def accuracy(o: argparse.Namespace) -> Iterator[Row]:
    """What the faster ways cost in accuracy: Tent and Tent+SAFER on a target domain, three orders of the stream."""
    from safer_tta.data import Stream, StreamSpec, open_dataset
    from safer_tta.training import load

    domain = open_dataset(o.data).domain(o.target)
    for n in (0, 4):
        for precision, compile in WAYS:
            scores = []
            for seed in range(3):
                method = safer_tta.adapt(
                    load(o.source), "tent", {"views": n} if n else False, seed=seed, precision=precision,
                    compile=compile, copy=False,
                ).to(DEVICE)  # fmt: skip
                stream = Stream((domain,), StreamSpec(seed=seed, batch=o.batch))
                right = [
                    (p.labels.cpu() == batch.labels).double()
                    for p, batch in zip(method.stream(b.images for b in stream), stream, strict=True)
                ]
                scores.append(100 * float(torch.cat(right).mean()))
            row = {"target": o.target, "views": n, "precision": precision, "compile": compile, "batch": o.batch}
            yield {**row, "accuracy": statistics.mean(scores), "accuracies": scores}


def startup(o: argparse.Namespace) -> Iterator[Row]:
    """Processes from start to end, and what our imports add to torch's."""
    programs = {
        "python": [sys.executable, "-c", ""],
        "import torch": [sys.executable, "-c", "import torch"],
        "import torch, safer_tta.adapt": [sys.executable, "-c", "import torch; from safer_tta import adapt"],
        "safer --help": [sys.executable, "-m", "safer_tta.cli", "--help"],
        "wrap a ResNet-18": [
            sys.executable, "-c",
            "from safer_tta import adapt, models; adapt(models.zoo.create('resnet18', num_classes=7))",
        ],
    }  # fmt: skip
    run = lambda program: subprocess.run(program, capture_output=True, check=True)  # noqa: E731
    times = timed({name: lambda p=p: run(p) for name, p in programs.items()}, 7)
    for name, taken in times.items():
        yield {"what": name, **figures(taken)}


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    function.__name__: function
    for function in (steps, accelerated, mixings, accuracy, views, operators, attack, scaling, memory, chunks, startup)
}


def machine() -> Row:
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU {platform.machine()}, {os.cpu_count()} cores"
    return {"machine": name, "threads": torch.get_num_threads(), "torch": torch.__version__}


def run(o: argparse.Namespace) -> None:
    if not o.system_allocator:
        safer_tta.keep_freed_memory()
    o.out.parent.mkdir(parents=True, exist_ok=True)
    with open(o.out, "a") as file:
        if file.tell():
            print(f"adding to what is in {o.out} already", file=sys.stderr)
        for section in o.sections:
            for row in SECTIONS[section](o):
                written = {"section": section, **row, **machine(), "system_allocator": o.system_allocator}
                file.write(json.dumps(written) + "\n")
                file.flush()
                print(section, {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


# --- the page -------------------------------------------------------------------------------------------------------

HEADERS = {
    "steps": (
        "architecture", "method", "views", "precision", "batch", "side", "ms", "ms_low", "ms_high", "ratio", "rounds",
    ),
    "accelerated": (
        "architecture", "precision", "compile", "views", "batch", "side", "ms", "ms_low", "ms_high", "ratio",
        "stream_ms", "rounds",
    ),
    "mixings": (
        "architecture", "mixing", "precision", "compile", "batch", "side", "ms", "ms_low", "ms_high", "ratio", "rounds",
    ),
    "accuracy": ("target", "views", "precision", "compile", "batch", "accuracy"),
    "views": (
        "what", "precision", "compile", "batch", "side", "ms", "ms_low", "ms_high", "ratio", "device_ms", "rounds",
    ),
    "operators": ("operator", "batch", "side", "ms", "compiled_ms", "kornia_ms"),
    "attack": ("batch", "side", "ms", "images_per_s"),
    "scaling": ("batch", "views", "side", "ms", "ms_per_image"),
    "memory": ("what", "batch", "side", "peak_mb", "ratio"),
    "chunks": ("what", "batch", "side", "ms", "ms_low", "ms_high", "ratio", "rounds"),
    "startup": ("what", "ms", "ms_low", "ms_high"),
}  # fmt: skip


def page(rows: list[Row]) -> str:
    """Tables, by machine and section."""
    lines = []
    for name in dict.fromkeys(where(r) for r in rows):
        lines += [f"## {name}", ""]
        for section, header in HEADERS.items():
            found = [r for r in rows if r["section"] == section and where(r) == name]
            columns = [column for column in header if any(column in row for row in found)]
            if found:
                lines += [
                    f"### {SECTIONS[section].__doc__}",
                    "",
                    f"| {' | '.join(columns)} |",
                    "|---" * len(columns) + "|",
                ]
                lines += [f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in found]
                lines.append("")
    return "\n".join(lines)


def where(row: Row) -> str:
    kept = "the system's allocator" if row["system_allocator"] else "keep_freed_memory()"
    return f"{row['machine']}, {row['threads']} threads, torch {row['torch']}, {kept}"


def shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--out", type=Path, required=True)
    given = [name for name in SECTIONS if name != "accuracy"]  # which needs data and a model
    runner.add_argument("--sections", nargs="*", default=given, choices=list(SECTIONS))
    runner.add_argument("--source", type=Path, help="a model of `safer train source`, for the section accuracy")
    runner.add_argument("--data", help="the images of its target")
    runner.add_argument("--target", default="art_painting")
    runner.add_argument("--architectures", nargs="*", default=["resnet18", "resnet50"])
    runner.add_argument("--methods", nargs="*", default=["tent", "pl", "tsd"])
    runner.add_argument("--views", nargs="*", type=int, default=[0, 1, 2, 4, 8])
    runner.add_argument("--batch", type=int, default=64 if DEVICE == "cuda" else 8)
    runner.add_argument("--side", type=int, default=224)
    runner.add_argument("--rounds", type=int, default=20)
    runner.add_argument("--warm", type=int, default=8 if DEVICE == "cuda" else 1, help="rounds before it counts")
    runner.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    runner.add_argument("--system-allocator", action="store_true", help="as the C library has it")
    commands.add_parser("page").add_argument("rows", nargs="+", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        sys.stdout.write(page([json.loads(line) for path in options.rows for line in path.read_text().splitlines()]))


if __name__ == "__main__":
    main()
