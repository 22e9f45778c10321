"""Files of models that somebody else wrote: nothing outside is reached, and what they hold is refused in words."""

import json

import pytest
import torch

from safer_tta import Classifier, load_classifier
from safer_tta._internal import safetensors_io
from safer_tta.errors import InvalidValueError
from safer_tta.models import building, pack
from tests.models.parts import HAD, SIDE, rewritten

MASKED = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, images):
        return self.head(images.mean((2, 3)) + self.mask.exp()[0])
"""
IMAGES = torch.rand(3, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))

SETTING, NAME = "may load code or other weights", "is invalid; expected a name"
KIND = "which builds a model that its file does not describe"
GEMMA = {"model_type": "gemma3_text", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
WRAPPED = {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/model"}
REACHING = [  # cards that would fetch, unpickle or import something
    ("timm:resnet10t", {"pretrained": True}, SETTING),
    ("timm:resnet10t", {"checkpoint_path": "x.pth"}, SETTING),
    ("timm:resnet10t", {"pretrained_cfg_overlay": {"file": "x.pth"}}, SETTING),
    ("timm:hf-hub:someone/model", {}, NAME),
    ("timm:local-dir:/tmp/x", {}, NAME),
    ("torchvision:resnet18", {"weights": "DEFAULT"}, SETTING),
    ("torchvision:fasterrcnn_resnet50_fpn", {}, "'fasterrcnn_resnet50_fpn' is unknown"),
    ("hf:X", {"config": {"model_type": "vit", "auto_map": {"AutoModel": "x--y.Z"}}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "attn_implementation": "someone/kernel"}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "quantization_config": {"quant_method": "awq"}}}, SETTING),
    ("hf:X", {"config": WRAPPED}, KIND),
    ("hf:X", {"config": {"model_type": "timm_wrapper", "architecture": "hf_hub:model"}}, KIND),
    ("hf:X", {"config": {"model_type": "timm_wrapper", "attribute_map": {"a": "architecture"}, "a": "hf-hub:m"}}, KIND),
    ("hf:X", {"config": {"model_type": "shieldgemma2", "text_config": GEMMA, "vision_config": WRAPPED}}, KIND),
    ("hf:X", {"config": {"model_type": "clip", "vision_config": WRAPPED}}, KIND),
    ("hf:X", {"config": {"model_type": "vit", "architecture": "hf-hub:someone/model"}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "attribute_map": {"a": "_attn_implementation"}, "a": "o/k"}}, SETTING),
    ("hf:X", {"config": {"model_type": "clip", "text_config": {"attribute_map": {"a": "b"}}}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "label2id": {"cat": {"attribute_map": {"a": "b"}}}}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "_attn_implementation_internal": "someone/kernel"}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "_name_or_path": "/"}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "name_or_path": "/"}}, SETTING),
    ("hf:X", {"config": {"model_type": "vit", "__dict__": {"image_size": 32}}}, SETTING),
    ("hf:X", {"config": {"model_type": "no_such_model"}}, "model_type 'no_such_model' is unknown"),
    ("hf:X", {"config": {"model_type": "depth_anything"}}, "model_type 'depth_anything' is unknown"),
    ("hf:X", {}, "cannot be built"),
]


@pytest.mark.parametrize(("architecture", "arguments", "says"), REACHING)
def test_a_card_that_reaches_beyond_its_file_is_refused(architecture, arguments, says, packed, tmp_path, monkeypatch):
    def reach(*_, **__):
        raise AssertionError("something was fetched")

    monkeypatch.setattr("socket.getaddrinfo", reach)
    monkeypatch.setattr("socket.socket.connect", reach)
    monkeypatch.setattr("torch.load", reach)
    with pytest.raises(InvalidValueError, match=says):
        load_classifier(rewritten(packed[0], tmp_path, architecture=architecture, arguments=arguments))


def test_what_says_where_a_folder_was_is_not_packed(tmp_path):
    """Names of classes may be any words, also those of settings that are refused."""
    had = HAD["hugging_face"](tmp_path)
    file = tmp_path / "vit" / "config.json"
    config = json.loads(file.read_text())
    names = dict(enumerate(["cat", "weights", "_dog", "architecture"]))
    config |= {"_name_or_path": "someone/model", "name_or_path": "someone/model", "_commit_hash": "1f"}
    config |= {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    file.write_text(json.dumps(config))
    card = pack(tmp_path / "vit", tmp_path / "a")
    assert not {"_name_or_path", "name_or_path", "_commit_hash"} & set(card.arguments["config"])
    assert card.classes == tuple(names.values())
    with torch.no_grad():
        loaded = load_classifier(tmp_path / "a")
        assert torch.equal(loaded(IMAGES)[1], Classifier(had.model, mean=[0.4] * 3, std=[0.5] * 3)(IMAGES)[1])
    nested = {"model_type": "clip", "text_config": {"_name_or_path": "x", "hidden_size": 8}, "label2id": {"_a": 1}}
    shaped = {"model_type": "clip", "text_config": {"hidden_size": 8}, "label2id": {"_a": 1}}
    assert building.shaping(nested) == shaped
    building.build("timm:swinv2_tiny_window8_256", {"pretrained_window_sizes": [8, 8, 8, 8], "img_size": 64})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"arguments": [1]}, r"arguments are \[1\]; expected a dict of names and values"),
        ({"arguments": "num_classes"}, "expected a dict of names and values"),
        ({"arguments": {"num_classes": json.loads("[" * 99 + "]" * 99)}}, "nested deeper than 20 levels"),
        ({"mean": "white"}, "mean is white; expected a finite number for each channel"),
        ({"std": [float("nan")]}, "expected a finite number for each channel"),
        ({"architecture": "hf:X", "arguments": {"config": "vit"}}, "config is vit; expected a dict with model_type"),
        ({"architecture": "hf:X", "arguments": {"config": {"model_type": ["vit"]}}}, "expected a dict with model_type"),
        ({"architecture": "hf:X", "arguments": {"config": {"model_type": "vit", "architecture": ["x"]}}}, "'architect"),
    ],
)
def test_a_description_of_other_types_is_refused_in_words(changes, says, packed, tmp_path):
    with pytest.raises(InvalidValueError, match=rf"crafted\.safetensors.*{says}"):
        load_classifier(rewritten(packed[0], tmp_path, **changes))


def test_a_description_that_is_too_deep_to_read_is_refused(packed, tmp_path):
    tensors, metadata = safetensors_io.read(packed[0])
    for deep in ("[" * 200_000, '{"arguments":' * 200_000, "[" * 200_000 + "]" * 200_000, '{"architecture": 5}'):
        safetensors_io.write(tmp_path / "a", tensors, metadata | {"packed": deep})
        with pytest.raises(InvalidValueError, match="describes its model in another way"):
            load_classifier(tmp_path / "a")


def test_weights_of_another_kind_of_numbers_are_refused_by_name(packed, tmp_path):
    tensors, metadata = safetensors_io.read(packed[0])
    for dtype in (torch.int8, torch.bool):
        safetensors_io.write(tmp_path / "a", tensors | {"fc.weight": tensors["fc.weight"].to(dtype)}, metadata)
        with pytest.raises(InvalidValueError, match=rf"fc.weight has numbers of {dtype}; expected such as torch.float"):
            load_classifier(tmp_path / "a")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(number, packed, tmp_path):
    """In a file that is loaded, in weights that are packed and in a model that is saved."""
    tensors, metadata = safetensors_io.read(packed[0])
    tensors["fc.weight"][1, 2] = number
    safetensors_io.write(tmp_path / "a", tensors, metadata)
    torch.save(tensors, tmp_path / "w.pth")
    broken = load_classifier(packed[0])
    broken.model.load_state_dict(tensors)
    for attempt in (
        lambda: load_classifier(tmp_path / "a"),
        lambda: pack("small", tmp_path / "b", weights=tmp_path / "w.pth", side=SIDE, mean=0, std=1),
        lambda: broken.save(tmp_path / "b"),
    ):
        with pytest.raises(InvalidValueError, match=r"fc\.weight has 1 of \d+ numbers that are NaN or infinite"):
            attempt()
    assert not (tmp_path / "b").exists()


def test_a_mask_may_be_minus_infinity(tmp_path, forget):
    """What a buffer holds beside that is refused as in a weight."""
    code = tmp_path / "masked.py"
    code.write_text(MASKED)
    pack(f"{code}:Masked", tmp_path / "a", side=SIDE, mean=0, std=1)
    assert load_classifier(tmp_path / "a").model.mask.isneginf().any()
    tensors, metadata = safetensors_io.read(tmp_path / "a")
    for number in (float("nan"), float("inf")):
        tensors["mask"][0] = number
        safetensors_io.write(tmp_path / "b", tensors, metadata)
        with pytest.raises(InvalidValueError, match="mask has 1 of 2 numbers that are NaN or infinite"):
            load_classifier(tmp_path / "b")
