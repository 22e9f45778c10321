"""That a packed Hugging Face model gets the pixels that the folder's own image processor gives."""

import json

import pytest

from safer_tta.errors import InvalidValueError
from safer_tta.models import pack
from tests.models.parts import SIDE


@pytest.fixture
def folder(tmp_path):
    """A residual network, which takes images of any side, as transformers saves it."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "net")
    return tmp_path / "net"


def tell(folder, kind, **told):
    """Save an image processor of this kind in a folder."""
    import transformers

    getattr(transformers, f"{kind}ImageProcessor")(**told).save_pretrained(folder)


def settle(told):
    return {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], **told}


@pytest.mark.parametrize(
    ("kind", "told", "side", "resize"),
    [
        ("ViT", {"size": {"height": 48, "width": 48}, "resample": 3}, 48, "stretch bicubic"),
        ("Bit", {"size": {"shortest_edge": 64}, "crop_size": {"height": 56, "width": 56}}, 56, "crop 0.875 bilinear"),
        ("CLIP", {"size": {"shortest_edge": 64}, "crop_size": 60, "resample": 3}, 60, "crop 0.9375 bicubic"),
        ("ConvNext", {"size": {"shortest_edge": 224}, "crop_pct": 0.875}, 224, "crop 0.875 bicubic"),
        ("ConvNext", {"size": {"shortest_edge": 384}, "crop_pct": 0.875, "resample": 2}, 384, "stretch bilinear"),
    ],
)
def test_side_and_resize_rule_are_those_of_the_folder(kind, told, side, resize, folder, tmp_path):
    tell(folder, kind, **settle({"resample": 3 if "bicubic" in resize else 2, **told}))
    card = pack(folder, tmp_path / "out")
    assert (card.side, card.resize) == (side, resize)
    assert card.mean == pytest.approx((0.5, 0.4, 0.3))


def test_the_older_files_of_convnext_give_the_shorter_side(folder, tmp_path):
    told = settle({"feature_extractor_type": "ConvNextFeatureExtractor", "size": 64, "crop_pct": 0.875, "resample": 3})
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    card = pack(folder, tmp_path / "out")
    assert (card.side, card.resize) == (64, "crop 0.875 bicubic")


def test_without_a_size_it_is_that_of_the_options(folder, tmp_path):
    card = pack(folder, tmp_path / "out", mean=0, std=1, side=SIDE)
    assert (card.side, card.resize) == (SIDE, "stretch bilinear")


ODD = {  # processors that do other things than their settings seem to say, and the options that do the same
    "MobileViT": ({"size": 72, "crop_size": 64, "do_flip_channel_order": False}, ["--mean 0,0,0 --std 1,1,1"]),
    "DeiT": (
        {"size": {"height": 72, "width": 72}, "crop_size": {"height": 64, "width": 64}},
        ["--side 64", "--resize"],
    ),
    "Levit": ({"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}, ["--resize 'crop 0.8"]),
    "EfficientNet": ({"size": {"height": 64, "width": 64}, "include_top": True}, ["--mean", "--std 0.04,0.09,0.16"]),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_processor_that_gives_other_pixels_is_refused_with_the_options(kind, folder, tmp_path):
    told, says = ODD[kind]
    tell(folder, kind, **settle(told))
    with pytest.raises(InvalidValueError, match="gives other pixels") as caught:
        pack(folder, tmp_path / "out")
    assert all(word in str(caught.value) for word in says), caught.value
    assert not (tmp_path / "out").exists()
    pack(folder, tmp_path / "out", side=64, resize="crop 0.875", mean=0.5, std=0.5)


def test_an_older_file_of_mobilevit_is_refused(folder, tmp_path):
    told = {"feature_extractor_type": "MobileViTFeatureExtractor", "size": 72, "crop_size": 64, "do_center_crop": True}
    (folder / "preprocessor_config.json").write_text(json.dumps({**told, "do_flip_channel_order": False}))
    with pytest.raises(InvalidValueError, match=r"--side 64 --resize 'crop 0.8[89]"):
        pack(folder, tmp_path / "out", mean=0, std=1)


def test_a_processor_that_flips_the_channels_is_refused_whatever_is_given(folder, tmp_path):
    tell(folder, "MobileViT", size=72, crop_size=64)
    with pytest.raises(InvalidValueError, match="changes the order of the channels"):
        pack(folder, tmp_path / "out", side=64, resize="crop 0.889", mean=0, std=1)


def test_a_processor_that_cannot_be_run_leaves_all_to_the_options(folder, tmp_path):
    (folder / "preprocessor_config.json").write_text(json.dumps(settle({"size": [], "crop_size": "all"})))
    with pytest.raises(InvalidValueError, match=r"cannot be run.*Give all of it"):
        pack(folder, tmp_path / "out", side=64)
    pack(folder, tmp_path / "out", side=64, resize="stretch", mean=0.5, std=0.5)
