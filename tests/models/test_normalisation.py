"""Test where the normalisation of a model is found, and that it is neither lost nor doubled unnoticed."""

import json
import logging
import types
import warnings

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import Classifier
from safer_tta.errors import InvalidValueError
from tests.conftest import batches, small_net

MEAN, STD = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7]


class Around(nn.Module):
    """A wrapper around a model that may change the images before it."""

    def __init__(self, net: nn.Module, change=lambda x: x) -> None:
        super().__init__()
        self.net, self.change = net, change

    def forward(self, x):
        return self.net(self.change(x))


def timm_like() -> nn.Module:
    net = small_net().eval()
    net.pretrained_cfg = {"mean": MEAN, "std": STD}
    return net


def open_clip_like() -> nn.Module:
    net = small_net().eval()
    net.image_mean, net.image_std = MEAN, STD
    return net


def torchvision_like() -> nn.Module:
    net = small_net().eval()
    used = types.SimpleNamespace(mean=MEAN, std=STD)
    net.weights = types.SimpleNamespace(transforms=lambda: used)
    return net


def hugging_face_like(folder, file="preprocessor_config.json", **processor) -> nn.Module:
    net = small_net().eval()
    net.config = types.SimpleNamespace(_name_or_path=str(folder))
    (folder / file).write_text(json.dumps(processor))
    return net


@pytest.mark.parametrize("wrap", [lambda net: net, Around, nn.DataParallel], ids=["bare", "wrapped", "DataParallel"])
@pytest.mark.parametrize("make", [timm_like, open_clip_like, torchvision_like])
def test_it_is_taken_from_what_the_model_carries(make, wrap, images, caplog):
    model = wrap(make())
    with caplog.at_level(logging.INFO, logger="safer_tta"), warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = safer_tta.adapt(model, "none", "plain")
    assert len(caplog.records) == 1
    by_hand = model.eval()((images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))
    torch.testing.assert_close(adapted(images).logits, by_hand)


@pytest.mark.parametrize(
    ("processor", "mean", "std"),
    [
        ({"image_mean": MEAN, "image_std": STD, "do_normalize": True}, MEAN, STD),
        ({"image_mean": MEAN, "image_std": STD, "do_normalize": True, "rescale_factor": 1 / 255}, MEAN, STD),
        ({"image_processor": {"image_mean": MEAN, "image_std": STD, "do_normalize": True}}, MEAN, STD),
        ({"image_mean": MEAN, "image_std": STD, "do_normalize": False}, [0.0] * 3, [1.0] * 3),
        (
            {"image_mean": [127.5] * 3, "image_std": [255.0] * 3, "do_normalize": True, "do_rescale": False},
            [0.5] * 3,
            [1.0] * 3,
        ),
        ({"do_normalize": False, "rescale_factor": 1 / 127.5, "rescale_offset": True}, [0.5] * 3, [0.5] * 3),
    ],
)
def test_it_is_taken_from_the_image_processor_of_hugging_face(processor, mean, std, tmp_path, images):
    adapted = safer_tta.adapt(hugging_face_like(tmp_path, **processor), "none", "plain")
    by_hand = small_net().eval()((images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1))
    torch.testing.assert_close(adapted(images).logits, by_hand)


@pytest.mark.parametrize(
    "processor",
    [
        {"do_normalize": None},
        {"do_flip_channel_order": True},
        {"image_processor_type": "EfficientNetImageProcessor", "include_top": True},
        {"image_processor_type": "EfficientNetImageProcessor"},
    ],
)
def test_what_an_image_processor_does_not_say_clearly_is_not_taken(processor, tmp_path, images):
    told = {"image_mean": MEAN, "image_std": STD, "do_normalize": True, **processor}
    told = {name: value for name, value in told.items() if value is not None}
    model = hugging_face_like(tmp_path, **told)
    with pytest.warns(UserWarning, match="no normalisation is declared"):
        safer_tta.adapt(model, "none", "plain")
    assert Classifier(model).mean is None


def test_the_newer_file_of_hugging_face_is_read_too(tmp_path):
    told = {"image_mean": MEAN, "image_std": STD, "do_normalize": True}
    model = hugging_face_like(tmp_path, "processor_config.json", image_processor=told)
    assert Classifier(model).mean.flatten().tolist() == pytest.approx(MEAN)


def test_an_image_processor_that_is_not_json_is_named(tmp_path):
    model = hugging_face_like(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(InvalidValueError, match=r"preprocessor_config\.json is not valid JSON"):
        Classifier(model)


def test_what_is_given_goes_before_what_is_carried(images):
    adapted = safer_tta.adapt(timm_like(), "none", "plain", mean=0, std=1)
    torch.testing.assert_close(adapted(images).logits, small_net().eval()(images))


def test_a_model_that_declares_nothing_is_warned_about_once(images):
    with pytest.warns(UserWarning, match="no normalisation is declared") as caught:
        safer_tta.adapt(small_net(), "none", "plain")(images)
    assert [str(warning.filename) for warning in caught] == [__file__]


def test_a_model_that_declares_that_there_is_none_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        safer_tta.adapt(small_net(), mean=0, std=1)


class Normalise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(0.4))
        self.register_buffer("std", torch.tensor(0.2))

    def forward(self, x):
        return (x - self.mean) / self.std


def test_a_model_that_normalises_itself_is_left_to_do_so(images):
    model = nn.Sequential(Normalise(), timm_like())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapted = safer_tta.adapt(model, "none", "plain")
    torch.testing.assert_close(adapted(images).logits, model(images))


def test_a_model_that_normalises_itself_and_is_declared_as_well_is_warned_about():
    with pytest.warns(UserWarning, match="seems to normalise images too"):
        safer_tta.adapt(nn.Sequential(Normalise(), small_net()), mean=0.4, std=0.2)


def test_a_wrapper_that_normalises_before_a_model_that_carries_its_own_is_refused(images):
    model = Around(timm_like(), lambda x: (x - 0.4) / 0.2)
    with pytest.raises(InvalidValueError, match=r"adapt\(model, mean=0, std=1\)"):
        safer_tta.adapt(model, "none", "plain")(images)
    adapted = safer_tta.adapt(model, "none", "plain", mean=0, std=1)
    torch.testing.assert_close(adapted(images).logits, model(images))


def test_values_for_other_channels_are_not_taken():
    net = timm_like()
    net.conv1 = nn.Conv2d(1, 8, 3)
    assert Classifier(net).mean is None
    assert Classifier(net, mean=0.4, std=0.2).mean.shape == (1, 1, 1)
    with pytest.raises(InvalidValueError, match="each of 1 channels"):
        Classifier(net, mean=MEAN, std=STD)


@pytest.mark.parametrize("validate", [True, False])
def test_images_that_are_normalised_already_are_refused(validate, images):
    adapted = safer_tta.adapt(small_net(), mean=MEAN, std=STD, validate=validate, seed=0)
    with pytest.raises(InvalidValueError, match="before any normalisation"):
        adapted((images - 0.4) / 0.2)


def test_only_the_first_batch_of_a_trusted_stream_is_looked_at():
    adapted = safer_tta.adapt(small_net(), "none", "plain", validate=False)
    first, second = batches(2)
    adapted(first)
    adapted((second - 0.4) / 0.2)
