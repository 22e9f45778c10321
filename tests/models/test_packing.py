"""One file for a model: the same answers again, nothing lost, nothing run, and damage is noticed."""

import contextlib
import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from safer_tta import Classifier, SaferError, adapt, load_classifier
from safer_tta._internal import safetensors_io
from safer_tta.errors import InvalidTypeError, InvalidValueError, TensorFileError
from safer_tta.models import building, pack, packing, zoo
from safer_tta.models.card import Card, read_card
from safer_tta.models.norm import MedBN
from safer_tta.models.recognising import resolve
from tests.conftest import identical
from tests.models.parts import CLASSES, HAD, OWN, SIDE, rewritten, spread

IMAGES = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", HAD)
def test_a_saved_model_answers_as_before(kind, tmp_path, forget):
    had = HAD[kind](tmp_path)
    before = Classifier(had.model, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    before.save(tmp_path / "a", classes=CLASSES, side=SIDE, **had.saving)
    after = load_classifier(tmp_path / "a", code=had.code)
    with torch.no_grad():
        for one, other in zip(before(IMAGES), after(IMAGES), strict=True):
            assert torch.equal(one, other)
    assert identical(before.model.state_dict(), after.model.state_dict())
    assert (after.card.classes, after.card.side, after.head_name) == (CLASSES, SIDE, before.head_name)
    assert torch.equal(adapt(before, seed=0)(IMAGES).probs, adapt(after, seed=0)(IMAGES).probs)


@pytest.mark.parametrize(
    ("architecture", "arguments", "kind"),
    [
        ("timm:deit_tiny_distilled_patch16_224", {"img_size": SIDE}, nn.Linear),  # two heads, which are averaged
        ("torchvision:squeezenet1_1", {}, nn.Conv2d),
    ],
)
def test_a_head_of_any_kind_is_kept_and_renewed(architecture, arguments, kind, tmp_path):
    """The classes are counted in the weights, and a model with other classes starts with a new head."""
    network = spread(building.build(architecture, {**arguments, "num_classes": 4}))
    torch.save(network.state_dict(), tmp_path / "w.pth")
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    packed_as = {"weights": tmp_path / "w.pth", "arguments": arguments, "mean": mean, "std": std}
    card = pack(architecture, tmp_path / "a", side=SIDE, **packed_as)
    again = load_classifier(tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(again(IMAGES)[1], Classifier(network, mean=mean, std=std)(IMAGES)[1])
        assert len(card.classes) == again.num_classes == 4
        fresh = packing.load(tmp_path / "a", classes=7)
        assert fresh(IMAGES)[1].shape == (3, 7)
    assert all(isinstance(fresh.model.get_submodule(name), kind) for name in fresh.head_name.split("+"))


PARTS = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(8, 4)

    def forward(self, images):
        features = self.body(images)
        return {"features": features, "scores": self.head(features)}
"""


def test_where_the_scores_are_is_kept_and_any_number_of_channels(tmp_path, forget):
    code = tmp_path / "parts.py"
    code.write_text(PARTS)
    network = building.build(resolve(f"{code}:Net")["architecture"], {})
    before, grey = Classifier(network, output="scores"), IMAGES[:, :1]
    before.save(tmp_path / "a", architecture=f"{code}:Net", side=SIDE)
    after = load_classifier(tmp_path / "a", code=code)
    with torch.no_grad():
        assert torch.equal(after(grey)[1], before(grey)[1])
    torch.save(network.state_dict(), tmp_path / "w.pth")
    pack(f"{code}:Net", tmp_path / "b", weights=tmp_path / "w.pth", side=SIDE, mean=0, std=1, output="scores")
    with torch.no_grad():
        assert torch.equal(load_classifier(tmp_path / "b")(grey)[1], before(grey)[1])
    computed = Classifier(network, output=lambda output: output["scores"])
    with pytest.raises(InvalidTypeError, match="output is a function, and a model's file holds no code"):
        computed.save(tmp_path / "c", architecture=f"{code}:Net", side=SIDE)


def test_what_is_loaded_is_saved_again_byte_for_byte(packed, tmp_path):
    path, saved = packed
    load_classifier(path).save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    card = read_card(path)
    assert (card.classes, card.side, card.resize, card.mean) == (CLASSES, SIDE, "crop 0.9", (0.5, 0.4, 0.3))
    assert torch.equal(load_classifier(path).std, saved.std)


CARDS = st.builds(
    Card,
    architecture=st.text(min_size=1),
    arguments=st.dictionaries(
        st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.floats(0, 1))
    ),
    classes=st.lists(st.text(), min_size=1, unique=True).map(tuple),
    side=st.integers(1, 4096),
    head=st.none() | st.text(),
    output=st.none() | st.text() | st.integers(),
    mean=st.none() | st.tuples(*[st.floats(-2, 2)] * 3),
    std=st.none() | st.tuples(*[st.floats(0.1, 2)] * 3),
)


@given(card=CARDS)
def test_a_card_is_read_as_it_is_written(card):
    file = safetensors_io.dumps({}, card.metadata())
    assert Card.of("file", safetensors_io.loads(file)[1]) == card


def test_a_model_that_a_trainer_wrote_before_there_were_cards_is_loaded(packed, tmp_path):
    path, saved = packed
    tensors, metadata = safetensors_io.read(path)
    kept = {name: metadata[name] for name in ("format", "architecture", "mean", "std")}
    safetensors_io.write(tmp_path / "old", tensors, kept | {"recipe": json.dumps({"classes": CLASSES, "side": SIDE})})
    old = load_classifier(tmp_path / "old")
    with torch.no_grad():
        assert torch.equal(old(IMAGES)[1], saved(IMAGES)[1])
    assert (old.card.classes, old.card.side) == (CLASSES, SIDE)


def test_a_model_without_normalisation_gets_none_from_the_name_of_its_network(tmp_path):
    model = HAD["timm"](tmp_path).model
    Classifier(model, mean=0, std=1).save(tmp_path / "a")
    assert torch.equal(load_classifier(tmp_path / "a").normalise(IMAGES), IMAGES)
    bare = Classifier(model)
    bare.mean = bare.std = None
    bare.save(tmp_path / "b")
    assert torch.equal(load_classifier(tmp_path / "b").normalise(IMAGES), IMAGES)
    Classifier(zoo.create("small", num_classes=4)).save(
        tmp_path / "c", architecture="small", arguments={"num_classes": 4}, side=SIDE
    )
    for name in "abc":  # no warning that nothing is declared
        assert load_classifier(tmp_path / name).normalised_by


@pytest.mark.parametrize("normalised", [{}, {"mean": [0.485, 0.456, 0.406], "std": 0.2}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_type_of_the_numbers_is_kept(dtype, normalised, tmp_path):
    model = zoo.create("small", num_classes=4).to(dtype)
    had = Classifier(model, **normalised).eval()
    had.save(tmp_path / "a", architecture="small", arguments={"num_classes": 4}, side=SIDE)
    loaded = load_classifier(tmp_path / "a")
    assert identical(loaded.model.state_dict(), model.state_dict())
    assert torch.equal(loaded(IMAGES.to(dtype))[1], had(IMAGES.to(dtype))[1])


def test_the_stride_of_the_imagenet_network_is_kept(tmp_path):
    strided = zoo.builder("resnet50, stride 2 on the first 1x1 convolution")(num_classes=4).eval()
    name = "resnet50, stride 2 on the first 1x1 convolution"
    Classifier(strided).save(tmp_path / "a", architecture=name, arguments={"num_classes": 4}, side=SIDE)
    assert load_classifier(tmp_path / "a").model.layer2[0].conv1.stride == (2, 2)


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": None}, "does not show how it was built. Give architecture='timm:NAME'"),
        ({"side": None}, "Give side, in pixels"),
        ({"classes": ["a", "b"]}, "2 class names were given for a model with 4 classes"),
        ({"classes": ["a", "b", "c", "a"]}, "all different"),
        ({"resize": "squash"}, "resize is 'squash'; expected 'stretch'"),
        ({"resize": "crop 7"}, "expected 'stretch'"),
        ({"arguments": {"num_classes": torch.tensor(4)}}, "Give numbers, words, lists and dicts"),
        ({"architecture": "resnet18"}, "does not fit this architecture"),
        ({"architecture": "smal"}, "did you mean 'small'"),
    ],
)
def test_a_model_that_could_not_be_loaded_again_is_not_saved(options, says, tmp_path):
    whole = {"architecture": "small", "arguments": {"num_classes": 4}, "side": SIDE}
    with pytest.raises((InvalidValueError, InvalidTypeError), match=says):
        Classifier(zoo.create("small", num_classes=4)).save(tmp_path / "a", **{**whole, **options})
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_changed_after_it_was_built_is_not_saved(tmp_path):
    how = {"architecture": "small", "arguments": {"num_classes": 4}, "side": SIDE}
    other_norms = Classifier(spread(zoo.create("small", num_classes=4)))
    other_norms.replace_norms(MedBN.like)
    other_layers = Classifier(spread(zoo.create("small", num_classes=4)))
    other_layers.model.conv1.stride = (1, 1)
    for classifier in (other_norms, other_layers):
        with pytest.raises(InvalidValueError, match=r"gives other answers|does not fit"):
            classifier.save(tmp_path / "a", **how)
    assert not list(tmp_path.iterdir())


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_noticed(packed, data, tmp_path_factory):
    """Wherever one byte differs or the file ends, it is refused, unless it still says the same."""
    path, saved = packed
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    place = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(content) - 1)), label="place")
    if data.draw(st.booleans(), label="cut"):
        content = content[:place]
    else:
        content[place] ^= data.draw(st.integers(1, 255), label="change")
    damaged = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    damaged.write_bytes(content)
    with contextlib.suppress(SaferError):
        found = load_classifier(damaged)
        assert found.card == read_card(path)
        assert identical(found.model.state_dict(), saved.model.state_dict())


def test_a_description_that_this_version_does_not_know_is_refused(packed, tmp_path):
    unknown = (
        {"flavour": 1},
        {"classes": 3},
        {"side": "wide"},
        {"side": 4097},
        {"resize": 4},
        {"arguments": {"depth": 2}},
    )
    for changes in (*unknown, {"head": 3}, {"head": "fc+body"}, {"output": ["scores"]}):
        with pytest.raises(InvalidValueError, match=r"crafted\.safetensors"):
            load_classifier(rewritten(packed[0], tmp_path, **changes))


def test_a_head_that_is_missing_is_not_left_random(packed, tmp_path):
    tensors, metadata = safetensors_io.read(packed[0])
    del tensors["fc.bias"]
    safetensors_io.write(tmp_path / "a", tensors, metadata)
    with pytest.raises(InvalidValueError, match="1 tensors are missing"):
        load_classifier(tmp_path / "a")


# --- no file of a model runs code -----------------------------------------------------------------------------------


def test_a_users_own_code_runs_only_if_it_is_named(tmp_path, forget, monkeypatch):
    had = HAD["own"](tmp_path)
    Classifier(had.model).save(tmp_path / "a", side=SIDE, **had.saving)
    forget()
    monkeypatch.chdir(tmp_path)  # my_models.py lies right there, and on the path
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidValueError, match=r"make\(\) in your file my_models.py, .*never runs code by itself"):
        load_classifier(tmp_path / "a")
    assert not [name for name in sys.modules if "my_models" in name]
    assert load_classifier(tmp_path / "a", code="my_models.py").num_classes == 4
    assert load_classifier(tmp_path / "a").num_classes == 4, "it has been named in this process"


@pytest.mark.parametrize("function", ["system", "NUMBER", "nn", "nowhere", "__loader__", "system.x"])
def test_only_what_the_named_file_defines_is_called(function, packed, tmp_path, forget):
    (tmp_path / "my_models.py").write_text(OWN)
    crafted = rewritten(packed[0], tmp_path, architecture=f"my_models:{function}", arguments={"command": "exit"})
    with pytest.raises(InvalidValueError, match="defines no function or class"):
        load_classifier(crafted, code=tmp_path / "my_models.py")


def test_a_file_that_has_changed_since_is_noticed(tmp_path, forget, caplog):
    had = HAD["own"](tmp_path)
    Classifier(had.model).save(tmp_path / "a", side=SIDE, **had.saving)
    forget()
    had.code.write_text(OWN + "\n# another comment\n")
    load_classifier(tmp_path / "a", code=had.code)
    assert "my_models.py is not the file that it was when" in caplog.text


# --- other kinds of files -------------------------------------------------------------------------------------------


class Whole:
    """A pickle that would run code."""

    def __reduce__(self):
        return exec, ("raise SystemExit('the pickle was run')",)


def test_other_files_are_refused_with_the_line_that_packs_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    had = HAD["hugging_face"](tmp_path)
    torch.save(Whole(), "whole.pth")
    torch.save({}, "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.trace(nn.Conv2d(3, 4, 1), IMAGES).save("program.pt")
    (tmp_path / "graph.onnx").write_bytes(b"anything")
    (tmp_path / "folder").mkdir()
    (tmp_path / "words").write_text("some words that are no tensors")
    safetensors_io.write("state", {"x": torch.zeros(1)}, {"format": "safer-tta.state"})
    expected = {
        "whole.pth": "safer pack timm:NAME --weights whole.pth --out",
        "old.pt": "safer pack timm:NAME --weights old.pt --out",
        "program.pt": "TorchScript .*safer pack FILE.py:FUNCTION --weights",
        "graph.onnx": "ONNX .*safer pack FILE.py:FUNCTION --weights",
        "vit": "Hugging Face folder. Pack it: safer pack vit --out",
        "vit/model.safetensors": "safer pack timm:NAME --weights",
        "folder": "expected a file that `safer pack`",
        "state": "has the format 'safer-tta.state'; expected a model",
        "words": "not a safetensors file",
    }
    assert had.words == [str(tmp_path / "vit")]
    for name, says in expected.items():
        for function in (load_classifier, read_card):
            with pytest.raises((InvalidValueError, TensorFileError), match=says):
                function(name)
    with pytest.raises(FileNotFoundError):
        load_classifier("nowhere")
