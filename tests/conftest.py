"""Small models and images that every test room uses."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import safer_tta
from safer_tta.models import statistics

SHARED = Path(os.environ.get("SAFER_SHARED", Path(__file__).parents[2] / "shared"))
PACS = SHARED / "data" / "PACS"
WEIGHTS = SHARED / "weights" / "resnet50_imagenet1k.safetensors"

needs_pacs = pytest.mark.skipif(not PACS.is_dir(), reason="the PACS images are not beside this checkout")
needs_weights = pytest.mark.skipif(not WEIGHTS.is_file(), reason="the ImageNet weights are not beside this checkout")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

# What a test may be skipped for. Anything else is something that is missing: CI, which sets SAFER_STRICT_SKIPS, fails.
SKIPS = {
    needs_pacs.kwargs["reason"], needs_weights.kwargs["reason"], needs_cuda.kwargs["reason"], "there is a GPU here",
    "mps has no float64", "noise is drawn for the whole batch at once", "not a command of ours", "another C library",
    "no file system can be mounted here", "no gcc on Linux here",
    "nginx is not installed", "systemd is not installed", "hadolint is not installed",
}  # fmt: skip
surprises: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs a GPU is marked so, for `make test-gpu`; first, so that -m sees it."""
    for item in items:
        reasons = {mark.kwargs.get("reason") for mark in item.iter_markers("skipif")}
        device = item.callspec.params.get("device") if hasattr(item, "callspec") else None
        if device == "cuda" or needs_cuda.kwargs["reason"] in reasons:
            item.add_marker("cuda")


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason not in SKIPS:
            surprises.append(f"{report.nodeid}: {reason}")


pytest_collectreport = pytest_runtest_logreport


def pytest_sessionfinish(session: pytest.Session) -> None:
    if surprises and "SAFER_STRICT_SKIPS" in os.environ:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if surprises and "SAFER_STRICT_SKIPS" in os.environ:
        terminalreporter.section("skipped for a reason that is not in tests/conftest.py: SKIPS")
        terminalreporter.write_line("\n".join(surprises))


CHROMIUM = next((p for p in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser")) if p.exists()), None)
CHROMIUM_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]

CLASSES = 5
SMOOTHING = {"gaussian_blur", "fft_low_pass"}  # the SPEC: every pipeline contains at least one of these
NORMS = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(1, channels), "none": nn.Identity}

# One thread, so that sums come out the same to the last bit in whichever thread of a service they are made; and `make
# test` has one process for each core anyway.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


class SmallNet(nn.Module):
    """Two convolutions, batch norm, a linear head: everything a method touches, in milliseconds."""

    def __init__(self, classes: int = CLASSES, norm: str = "batch") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm1 = NORMS[norm](8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm2 = NORMS[norm](16)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.fc(self.dropout(x.mean(dim=(2, 3))))


def small_net(classes: int = CLASSES, norm: str = "batch", seed: int = 0) -> SmallNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SmallNet(classes, norm)
        for module in model.modules():  # statistics as source training would leave them, not 0 and 1
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.uniform_(-0.2, 0.2)
                module.running_var.uniform_(0.5, 1.5)
        model.fc.weight.data *= 10  # confident enough for pseudo-labels
        return model


def batches(count: int, size: int = 6, side: int = 24, seed: int = 1) -> list[Tensor]:
    """Noise over a colour of its own: images that a random network tells apart."""
    draw = functools.partial(torch.rand, generator=torch.Generator().manual_seed(seed))
    return [0.3 * draw(size, 3, side, side) + 0.7 * draw(size, 3, 1, 1) for _ in range(count)]


def identical(one: Mapping[str, Tensor], other: Mapping[str, Tensor], but: str = "") -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one if n != but)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states are, but for the generator: a batch that teaches nothing moves it too."""
    return identical(one, other, but="generator")


@pytest.fixture
def model() -> nn.Module:
    return small_net()


@pytest.fixture
def images() -> Tensor:
    return batches(1)[0]


@pytest.fixture(scope="session")
def source_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to serve, trained once for all rooms of the service."""
    from tests.serve.helpers import trained

    return trained(tmp_path_factory.mktemp("model") / "source.safetensors")


def classifier(**options: object) -> safer_tta.Classifier:
    return safer_tta.Classifier(small_net(**options))  # type: ignore[arg-type]


def adapt_small(method: str = "tent", predictor: object = "plain", **options: object) -> safer_tta.Method:
    declared = {"mean": 0, "std": 1, "seed": 0}  # images in [0,1] as they are
    return safer_tta.adapt(small_net(), method, predictor, **declared | options)


def overflow_gradients(adapted: safer_tta.Method | safer_tta.Guard) -> torch.utils.hooks.RemovableHandle:
    return adapted.classifier.model.norm1.weight.register_hook(lambda gradient: gradient * torch.inf)


def photographs(count: int = 6, side: int = 60, kind: str = "*") -> Tensor:
    """Real photographs of PACS, of one class or one of each, as floats (count,3,side,side)."""
    import numpy as np
    from PIL import Image

    folders = sorted((PACS / "photo").glob(kind))
    paths = [path for folder in folders for path in sorted(folder.iterdir())[: 1 if kind == "*" else count]]
    pictures = [np.asarray(Image.open(p).convert("RGB").resize((side, side))) for p in paths[:count]]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255


# With their defaults these wait for 64 images, need more certain answers than those of `small_net`, or make more views
# than a test needs. The memories are small enough to overflow before a stream ends, and RDumb starts over within one.
LEARNING: dict[str, dict[str, float]] = {
    "cotta": {"threshold": 1.1, "versions": 2},
    "eata": {"margin": 1.0, "redundancy": 1.0},
    "memo": {"copies": 2},
    "note": {"every": 6, "capacity": 10},
    "pl": {"threshold": 0.3},
    "rdumb": {"every": 3},
    "rotta": {"every": 6, "capacity": 10},
    "sar": {"margin": 1.0},
    "sotta": {"threshold": 0.3, "every": 6, "capacity": 10},
    "tesla": {"easy_views": 1},
}


@pytest.fixture
def learn_from_few_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network with random weights names few classes, and norm "stream" learns nothing from those."""
    monkeypatch.setattr(statistics, "LEAST_DIVERSE", 0.0)


def learnt(adapted: safer_tta.Method, stream: list[Tensor]) -> list[Tensor]:
    """The answers to a stream, from which the method has learnt, where it is one that does: else it tests nothing."""
    steps: list[object] = []
    hook = adapted.optimizer and adapted.optimizer.register_step_post_hook(lambda *_: steps.append(None))
    answers = [prediction.probs for prediction in adapted.stream(stream)]
    if hook is not None:
        hook.remove()
    assert bool(steps) == (adapted.updates != "none")
    return answers
