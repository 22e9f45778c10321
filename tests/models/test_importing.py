"""From what people have on disk to a packed model: checkpoints, Hugging Face folders, code of one's own."""

import argparse
import ast
import contextlib
import io
import logging
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import safer_tta
from safer_tta import Classifier, SaferError, load_classifier
from safer_tta._internal import safetensors_io, user_code
from safer_tta.errors import InvalidValueError
from safer_tta.models import building, pack, zoo
from safer_tta.models.card import read_card
from safer_tta.models.importing import read_weights
from tests.conftest import identical
from tests.models.parts import CLASSES, HAD, OWN, SIDE, spread
from tests.models.test_packing import IMAGES, Whole

VIT = "timm:vit_tiny_patch16_224"
PLAIN = {"mean": 0, "std": 1, "side": SIDE}


@pytest.fixture
def small():
    return spread(zoo.create("small", num_classes=4))


def wrappings(model):
    """The state of a model as training programs keep it."""
    state = model.state_dict()
    other = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    return {
        "plain": state,
        "timm": {"epoch": 3, "state_dict": state, "args": argparse.Namespace(lr=0.1, opt="sgd"), "metric": 0.5},
        "averaged": {"state_dict": other, "state_dict_ema": state},
        "own": {"model": state, "optimizer": {"lr": 0.1}},
        "data parallel": {f"module.{name}": tensor for name, tensor in state.items()},
        "compiled in parallel": {f"_orig_mod.module.{name}": tensor for name, tensor in state.items()},
        "compiled inside": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},
        "nested": {"model": {"state_dict": state, "epoch": 3}, "optimizer": {"lr": 0.1}},
        "lightning": {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}, "epoch": 1},
    }


@pytest.mark.parametrize("kind", list(wrappings(nn.Linear(1, 1))))
@pytest.mark.parametrize("zipped", [True, False])
def test_weights_are_found_in_checkpoints(kind, zipped, small, tmp_path):
    torch.save(wrappings(small)[kind], tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
    pack("small", tmp_path / "out", weights=tmp_path / "w.pth", **PLAIN)
    assert identical(load_classifier(tmp_path / "out").model.state_dict(), small.state_dict())


@pytest.mark.parametrize("prefix", ["model.", "module._orig_mod.model."])
def test_prefixes_in_safetensors_are_taken_off_too(prefix, small, tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_io.write(path, {f"{prefix}{name}": tensor for name, tensor in small.state_dict().items()})
    pack("small", tmp_path / "out", weights=path, **PLAIN)
    assert identical(load_classifier(tmp_path / "out").model.state_dict(), small.state_dict())


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_prefix_of_the_network_itself_is_kept(prefix, tmp_path, forget):
    code = tmp_path / "mine.py"
    code.write_text(f"{OWN}\n\ndef wrapped():\n    return nn.Sequential(OrderedDict(model=make()))\n")
    code.write_text(f"from collections import OrderedDict\n{code.read_text()}")
    model = spread(nn.Sequential(OrderedDict(model=user_code.load(code).module.make())))
    torch.save({f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "w.pth")
    pack(f"{code}:wrapped", tmp_path / "out", weights=tmp_path / "w.pth", **PLAIN)
    assert identical(load_classifier(tmp_path / "out").model.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (Whole(), "to unpickle it could run code.*torch.save"),
        (nn.Linear(2, 3), "to unpickle it could run code.*torch.save"),
        ([1, 2], "holds list; expected a state dict"),
        ({"epoch": 3}, r"holds \['epoch'\]; expected a state dict"),
        ({}, "expected a state dict"),
    ],
)
def test_what_is_no_state_dict_is_refused_and_never_run(content, says, tmp_path):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(InvalidValueError, match=says):
        pack("small", tmp_path / "out", weights=tmp_path / "w.pth", **PLAIN)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_holds_itself_is_refused(tmp_path):
    content = {"epoch": 3}
    content["model"] = content
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(InvalidValueError, match="expected a state dict"):
        read_weights(tmp_path / "w.pth")


def test_damaged_and_exported_files_are_refused(small, tmp_path):
    torch.save(small.state_dict(), tmp_path / "w.pth")
    (tmp_path / "cut.pth").write_bytes((tmp_path / "w.pth").read_bytes()[:5000])
    (tmp_path / "empty.pth").write_bytes(b"")
    torch.jit.trace(small, IMAGES).save(tmp_path / "program.pt")
    for name in ("cut.pth", "empty.pth"):
        with pytest.raises(InvalidValueError, match="or is damaged"):
            pack("small", tmp_path / "out", weights=tmp_path / name, **PLAIN)
    with pytest.raises(InvalidValueError, match="TorchScript"):
        pack("small", tmp_path / "out", weights=tmp_path / "program.pt", **PLAIN)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_checkpoint_raises_nothing_of_its_own(checkpoint, data, tmp_path_factory):
    """It is read or refused, wherever a byte differs or the file ends, in the zipped and in the older format."""
    content = bytearray(data.draw(st.sampled_from(checkpoint)))
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content = content[:place]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damaged") / "w.pth"
    path.write_bytes(content)
    with contextlib.suppress(SaferError):
        assert read_weights(path)[0]


@pytest.fixture(scope="module")
def checkpoint():
    found = []
    for zipped in (True, False):
        file = io.BytesIO()
        torch.save({"state_dict": nn.Linear(2, 3).state_dict()}, file, _use_new_zipfile_serialization=zipped)
        found.append(file.getvalue())
    return found


def test_pickles_are_read_in_one_place_only():
    """And there only weights: nowhere else is torch.load called, and never without weights_only=True."""
    readers = ("torch.load", "torch.jit.load", "pickle.load", "pickle.loads")
    trees = {path: ast.parse(path.read_text()) for path in Path(safer_tta.__file__).parent.rglob("*.py")}
    calls = [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ((path, found),) = [(path, node) for path, node in calls if ast.unparse(node.func) in readers]
    assert path.name == "importing.py"
    assert {word.arg: ast.unparse(word.value) for word in found.keywords}["weights_only"] == "True"


@pytest.mark.parametrize("classes", [3, 1000])
def test_the_number_of_classes_is_that_of_the_weights(classes, tmp_path):
    model = spread(zoo.create("small", num_classes=classes))
    torch.save(model.state_dict(), tmp_path / "w.pth")
    pack("small", tmp_path / "out", weights=tmp_path / "w.pth", **PLAIN)
    assert read_card(tmp_path / "out").classes == tuple(map(str, range(classes)))


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        ("small", {}, "small names a network without weights"),
        ("smal", {"weights": "w.pth"}, "did you mean 'small'"),
        ("small", {"weights": "w.pth", "mean": None, "std": None}, "Give mean and std"),
        ("small", {"weights": "w.pth", "side": None}, "Give side"),
        ("small", {"weights": "w.pth", "classes": ["a"]}, "1 class names were given for a model with 4"),
        ("resnet18", {"weights": "w.pth"}, "does not fit this architecture.*Give the arguments"),
        ("small", {"weights": "w.pth", "arguments": {"depth": 3}}, "cannot be built with {'depth': 3"),
        ("small", {"weights": "w.pth", "head": "conv1"}, "head 'conv1' is unknown"),
        ("nowhere.py:make", {}, "'nowhere.py' is not a Python file"),
        ("mine.py:nothing", {}, "defines no function or class 'nothing'"),
        ("mine.py:system", {"arguments": {"command": "exit"}}, "defines no function or class 'system'"),
        ("mine.py:make", {"weights": "w.pth"}, "does not fit this architecture"),
        ("folder", {}, "cannot be loaded as an image classifier"),
        ("hf:nowhere", {}, "nowhere is not a folder"),
        ("nowhere", {}, "architecture 'nowhere' is unknown"),
        ("w.pth", {}, "Pack it with its architecture: safer pack timm:NAME --weights w.pth"),
        (
            VIT,
            {"weights": "vit.pth", "arguments": {"img_size": 32}, "side": 40},
            "Give the side",
        ),
    ],
)
def test_mistakes_are_refused(source, options, says, small, tmp_path, monkeypatch, forget):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)
    Path("folder").mkdir()
    torch.save(small.state_dict(), "w.pth")
    if options.get("weights") == "vit.pth":
        torch.save(building.build(source, {"img_size": 32, "num_classes": 2}).state_dict(), "vit.pth")
    with pytest.raises(InvalidValueError, match=says):
        pack(source, "out", **{**PLAIN, **options})
    assert not Path("out").exists()


def test_a_function_of_ones_own_may_bring_its_weights(tmp_path, forget):
    (tmp_path / "mine.py").write_text(OWN)
    pack(f"{tmp_path}/mine.py:make", tmp_path / "out", **PLAIN)
    assert load_classifier(tmp_path / "out").num_classes == 4


def test_a_packed_file_is_packed_again_with_other_words(small, tmp_path):
    torch.save(small.state_dict(), tmp_path / "w.pth")
    out = tmp_path / "out.safetensors"
    pack("small", out, weights=tmp_path / "w.pth", **PLAIN)
    pack(out, tmp_path / "again", classes=CLASSES, mean=0.5, std=0.2)
    card = read_card(tmp_path / "again")
    assert (card.classes, card.mean, card.std, card.side) == (CLASSES, (0.5,) * 3, (0.2,) * 3, SIDE)
    assert identical(load_classifier(tmp_path / "again").model.state_dict(), small.state_dict())


@pytest.mark.parametrize("kind", ["packed", "folder"])
def test_what_has_weights_takes_no_others(kind, small, tmp_path):
    torch.save(small.state_dict(), tmp_path / "w.pth")
    source = tmp_path / "packed.safetensors"
    if kind == "packed":
        pack("small", source, weights=tmp_path / "w.pth", **PLAIN)
    else:
        source = Path(HAD["hugging_face"](tmp_path).words[0])
    with pytest.raises(InvalidValueError, match="has its own; leave weights out"):
        pack(source, tmp_path / "out", weights=tmp_path / "w.pth")


def test_the_header_of_weights_declares_their_normalisation(small, tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors_io.write(path, small.state_dict(), {"mean": "0.5,0.4,0.3", "std": "0.2,0.2,0.2"})
    pack("small", tmp_path / "out", weights=path, side=SIDE)
    assert read_card(tmp_path / "out").mean == (0.5, 0.4, 0.3)


PROCESSORS = [
    {},
    {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]},
    {"rescale_factor": 1 / 127.5},
    {"do_normalize": False},
    {"do_rescale": False, "image_mean": [120, 110, 100], "image_std": [60, 60, 60]},
]


@pytest.mark.parametrize("told", PROCESSORS)
def test_images_are_normalised_as_the_folders_processor_does(told, tmp_path):
    from transformers import ViTImageProcessor

    HAD["hugging_face"](tmp_path)
    processor = ViTImageProcessor(size={"height": SIDE, "width": SIDE}, **told)
    processor.save_pretrained(tmp_path / "vit")
    pictures = (IMAGES * 255).to(torch.uint8)
    expected = processor(list(pictures), return_tensors="pt")["pixel_values"]
    undone = {"do_rescale": False, "do_normalize": False}
    pack(tmp_path / "vit", tmp_path / "out", **({"mean": 0, "std": 1} if told == undone else {}))
    found = load_classifier(tmp_path / "out").normalise(pictures.float() / 255)
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_backbone_without_a_head_is_refused(tmp_path):
    from transformers import ViTConfig, ViTModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    ViTModel(ViTConfig(**small, image_size=SIDE, patch_size=8)).save_pretrained(tmp_path / "vit")
    with pytest.raises(InvalidValueError, match="lacks 2 weights of a ViTForImageClassification, such as classifier"):
        pack(tmp_path / "vit", tmp_path / "out", mean=0, std=1)


@pytest.mark.parametrize("save", [lambda had, path: pack(had.words[0], path), lambda had, path: saved(had.model, path)])
def test_class_names_of_the_folder_that_are_not_unique_get_their_number(save, tmp_path, caplog):
    had = HAD["hugging_face"](tmp_path)
    had.model.config.id2label = dict(enumerate(["crane", "dog", "crane", "bee"]))
    had.model.config.save_pretrained(tmp_path / "vit")
    with caplog.at_level(logging.WARNING, logger="safer_tta"):
        card = save(had, tmp_path / "out")
    assert card.classes == ("crane (0)", "dog", "crane (2)", "bee")
    assert "crane (0)" in caplog.text


def saved(model, path):
    Classifier(model, mean=0, std=1).save(path)
    return read_card(path)


def test_only_the_double_names_are_in_the_error(small, tmp_path):
    torch.save(small.state_dict(), tmp_path / "w.pth")
    with pytest.raises(InvalidValueError, match=r"^classes have 'b', 'c' more than once; expected .* all different$"):
        pack("small", tmp_path / "out", weights=tmp_path / "w.pth", **PLAIN, classes=list("abbcc"))


def test_a_folder_of_a_timm_model_is_packed_as_the_error_says(tmp_path):
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    shown = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "input_size": [3, SIDE, SIDE], "num_classes": 4}
    config = TimmWrapperConfig(architecture="resnet10t", num_labels=4, pretrained_cfg=shown)
    model = spread(TimmWrapperForImageClassification(config))
    model.save_pretrained(tmp_path / "net")
    with pytest.raises(InvalidValueError, match=r"safer pack timm:resnet10t --weights .* --mean 0.5,0.4,0.3 --std "):
        pack(tmp_path / "net", tmp_path / "out")
    weights = tmp_path / "net" / "model.safetensors"
    pack("timm:resnet10t", tmp_path / "out", weights=weights, mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4])
    assert identical(load_classifier(tmp_path / "out").model.state_dict(), model.timm_model.state_dict())


def test_a_timm_model_is_resized_as_timm_evaluates_it(tmp_path):
    had = HAD["timm"](tmp_path)
    pack("timm:resnet10t", tmp_path / "out", weights=tmp_path / "model_best.pth.tar")
    card = read_card(tmp_path / "out")
    assert (card.side, card.resize) == (had.model.pretrained_cfg["input_size"][-1], "crop 0.875 bicubic")
    assert card.mean == tuple(had.model.pretrained_cfg["mean"])
    assert torch.equal(Classifier(had.model).mean, load_classifier(tmp_path / "out").mean)
