"""Check this machine for known problems: `safer doctor`, or `python -m safer_tta.doctor` where typer is missing.

It changes nothing and needs no network.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PYTHON = (3, 11)
EXTRAS = {  # the modules of each extra
    "models": ["timm"],
    "attacks": ["pyautoattack"],
    "bench": ["duckdb", "matplotlib", "PIL", "pydantic", "rich", "typer"],
    "serve": [
        "fastapi",
        "fastapi_swagger",
        "httpx",
        "PIL",
        "prometheus_client",
        "multipart",
        "rich",
        "typer",
        "uvicorn",
    ],
    "otel": ["opentelemetry"],
    "ray": ["ray"],
}
MISSING_OPERATOR = "torchvision::nms does not exist"
MISMATCH = (
    "It was built for torch with CUDA and this torch is for CPUs, or the versions do not match. Install both from the "
    "same source: both for CPUs, or both for CUDA. Until then timm and everything else that imports torchvision fail. "
    "safer-tta works without timm."
)


@dataclass(frozen=True)
class Finding:
    what: str
    state: str  # good, note (you may want to know it) or bad (something will fail)
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Yield the result of every check as soon as it is known."""
    for check in CHECKS:
        yield check()


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        return Finding("Python", "bad", found, f"Use Python {PYTHON[0]}.{PYTHON[1]} or newer.")
    return Finding("Python", "good", found)


def _library() -> Finding:
    from . import __version__

    return Finding("safer-tta", "good", __version__)


def _torch() -> Finding:
    import torch

    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return Finding("torch", "good", f"{torch.__version__}, built {build}, {torch.get_num_threads()} threads")


def _devices() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Finding("devices", "good", f"cpu, cuda: {', '.join(names)}")
    if torch.backends.mps.is_available():
        return Finding("devices", "good", "cpu, mps")
    advice = ""
    if torch.version.cuda and shutil.which("nvidia-smi"):
        advice = "A GPU driver is installed, but torch finds no GPU: the driver may be too old for torch's CUDA."
    return Finding("devices", "note" if advice else "good", "cpu only", advice)


def _torchvision() -> Finding:
    """Import torchvision, which timm needs, in another process: a failed import leaves half a module behind."""
    if importlib.util.find_spec("torchvision") is None:
        return Finding("torchvision", "good", "not installed; only timm needs it")
    tried = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    version = importlib.metadata.version("torchvision")
    if tried.returncode == 0:
        return Finding("torchvision", "good", version)
    error = tried.stderr.strip().rpartition("\n")[2]
    advice = MISMATCH if MISSING_OPERATOR in error else "Reinstall it together with torch."
    return Finding("torchvision", "bad", f"{version} does not import: {error}", advice)


def _extras() -> Finding:
    lacking = {extra: [n for n in names if importlib.util.find_spec(n) is None] for extra, names in EXTRAS.items()}
    missing = {extra: names for extra, names in lacking.items() if names}
    present = [extra for extra in EXTRAS if extra not in missing]
    found = f"installed: {', '.join(present) or 'none'}"
    if not missing:
        return Finding("extras", "good", found)
    found += "; not: " + ", ".join(f"{extra} (no {', '.join(names)})" for extra, names in missing.items())
    return Finding("extras", "note", found, f"To install them: pip install 'safer-tta[{','.join(missing)}]'")


def _compiler() -> Finding:
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
        return Finding("compile=True", "note", "no triton", "On a GPU torch.compile needs triton.")
    if not torch.cuda.is_available() and not (shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")):
        return Finding("compile=True", "note", "no C++ compiler", "On a CPU torch.compile needs a C++ compiler.")
    return Finding("compile=True", "good", "torch.compile has what it needs")


def _allocator() -> Finding:
    if platform.libc_ver()[0] == "glibc":
        return Finding("memory", "good", "keep_freed_memory() works: call it once in programs that adapt on a CPU")
    return Finding("memory", "note", "keep_freed_memory() changes nothing with this C library")


def _cache() -> Finding:
    from .data.domains import default_cache

    folder = default_cache()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free / 2**30
    found = f"{folder}, {free:.0f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding("cache", "bad", f"{found}, not writable", "Set SAFER_CACHE to a writable folder.")
    if free < 4:
        return Finding("cache", "note", found, "Decoded PACS and attacked copies take 1.4 GiB each. See SAFER_CACHE.")
    return Finding("cache", "good", found)


def _step() -> Finding:
    """Adapt a small network to one batch: views, pooling and a step of learning."""
    import torch

    from . import adapt
    from .models import zoo

    with tempfile.TemporaryDirectory() as folder:
        adapted = adapt(zoo.create("small", num_classes=3), mean=0, std=1, seed=0)
        prediction = adapted(torch.rand(4, 3, 32, 32))
        adapted.save(os.path.join(folder, "state.safetensors"))
    if not bool(torch.isfinite(prediction.probs).all()):
        return Finding("a step of adaptation", "bad", "answers are not finite", "Please report all of the above.")
    return Finding("a step of adaptation", "good", "answered four images, learnt from them and saved the state")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python, _library, _torch, _devices, _torchvision, _extras, _compiler, _allocator, _cache, _step,
)  # fmt: skip


def describe(finding: Finding) -> str:
    mark = {"good": "  ", "note": "! ", "bad": "✗ "}[finding.state]
    advice = f"\n{'':24}→ {finding.advice}" if finding.advice else ""
    return f"{mark}{finding.what:22}{finding.found}{advice}"


if __name__ == "__main__":
    failed = False
    for finding in examine():
        sys.stdout.write(describe(finding) + "\n")
        failed |= finding.state == "bad"
    sys.exit(failed)
