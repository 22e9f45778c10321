"""Every model of the listing works as it is, or is refused by a message with a line that works.

`make test` takes a few models of each library and all odd ones; `make test-models` takes the whole listing.
"""

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import safer_tta
from safer_tta.errors import SaferError
from tests.conftest import learnt, small_net
from tests.models.families.build import CLASSES, FEATURES, LIBRARIES, ODD, allow_torchvision, build

pytestmark = pytest.mark.usefixtures("learn_from_few_classes")
LISTING = Path(__file__).with_name("listing.csv")
QUICK = {
    "resnet18", "deit_tiny_distilled_patch16_224", "mobilenetv3_small_050", "convnext_atto", "shufflenet_v2_x0_5",
    "ViT", "DeiT:DeiTForImageClassificationWithTeacher", "Levit", "CLIP:CLIPModel", "CLIP", *ODD,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {"tent": {}, "pl": {"threshold": 0.01}, "tsd": {}}
PREDICTORS = ("plain", {"name": "safer", "views": 2}, {"name": "safer-g", "views": 3})
STARTS = ("adapt(", "model.set_submodule(", "model(images)")

Row = Mapping[str, str]


def listing() -> list[Row]:
    with LISTING.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    row = getattr(request.node, "callspec", None) and request.node.callspec.params.get("row")
    if row and row["library"] != "own":
        allow_torchvision()
        pytest.importorskip(row["library"])


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if row["model"] in QUICK else pytest.mark.models) for row in listing()],
    ids=lambda row: f"{row['library']}-{row['model']}",
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_works_or_is_refused_with_a_line_that_works(row: Row) -> None:
    refusals = [refusal(row, method, predictor) for method, predictor in itertools.product(METHODS, PREDICTORS)]
    assert ("advice" if any(refusals) else "works") == row["outcome"], refusals


def refusal(row: Row, method: str, predictor: Any) -> str:
    """Adapt over two batches; return the message of a refusal, after its advice was followed, or "" without one."""
    model = build(row["library"], row["model"], int(row["side"]), row["options"])
    images = torch.rand(3, int(row["channels"]), int(row["side"]), int(row["side"]))

    def adapt(model: Any, method: str = method, predictor: Any = predictor, **given: Any) -> None:
        adapted = safer_tta.adapt(model, method, predictor, seed=0, **METHODS[method], **given)
        for probs in learnt(adapted, [images, images.flip(0)]):
            assert probs.shape == (3, scores_in(row))
            assert torch.isfinite(probs).all()

    try:
        adapt(model)
    except SaferError as error:
        follow(advised(str(error)), model, images, adapt)
        return str(error)
    return ""


def scores_in(row: Row) -> int:
    return 2 if row["model"].startswith("one score") else CLASSES


def advised(message: str) -> str:
    """Return the line of code in a message: from its start to the bracket that closes it."""
    starts = [message.find(start) for start in STARTS if start in message]
    assert starts, f"there is no line in {message!r}"
    line = message[min(starts) :]
    depth = 0
    for place, sign in enumerate(line):
        depth += (sign == "(") - (sign == ")")
        if sign == ")" and depth == 0:
            return line[: place + 1]
    raise AssertionError(f"the line in {message!r} does not end")


def follow(line: str, model: Any, images: Tensor, adapt: Any) -> None:
    """Run a line, and adapt after it if that is not what it does."""
    features = torch.randn(CLASSES, FEATURES)
    names = {"adapt": adapt, "model": model, "images": images, "module": small_net(CLASSES), "torch": torch}
    exec(line, {**names, "safer_tta": safer_tta, "text_features": features, "prototypes": features})
    if not line.startswith("adapt("):
        adapt(model)


def test_the_listing_names_every_odd_model_once() -> None:
    rows = listing()
    assert len({(row["library"], row["model"]) for row in rows}) == len(rows)
    assert {row["model"] for row in rows if row["library"] == "own"} == set(ODD)
    assert {row["library"] for row in rows} == set(LIBRARIES)
    assert {row["model"] for row in rows} >= QUICK


def test_lines_are_found_in_messages() -> None:
    assert advised("So do this: adapt(model, output=f(1)). Or not (at all)") == "adapt(model, output=f(1))"
    assert advised("First (once): model(images)") == "model(images)"
