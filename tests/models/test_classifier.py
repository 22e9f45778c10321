"""Classifier: which layer is the head, how images are normalised, and what is compiled."""

import copy
import shutil
import types

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import Classifier
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from safer_tta.models import trunk, zoo
from tests.conftest import SmallNet, adapt_small, batches, classifier, small_net


class TwoHeads(nn.Module):
    """Registers its heads in an order that misleads: the last Linear is an auxiliary one."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 8, 3, stride=2)
        self.body = nn.Sequential(conv, nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(8, 4)
        self.auxiliary = nn.Linear(8, 2)

    def forward(self, x):
        z = self.body(x)
        self.auxiliary(z)
        return self.head(z)


class Wrapped(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.net, self.function = small_net(), function

    def forward(self, x):
        return self.function(self.net, x)


def test_features_are_what_enters_the_head(images):
    model = small_net().eval()
    wrapped = Classifier(model)
    features, logits = wrapped(images)
    assert torch.equal(model.fc(features), logits)
    assert torch.equal(wrapped.features(images), features)
    assert wrapped.head is model.fc


def test_head_by_name_and_by_get_classifier(images):
    model = TwoHeads().eval()
    assert Classifier(model, head="head")(images)[1].shape == (6, 4)
    model.get_classifier = lambda: model.head
    assert Classifier(model).head is model.head


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (TwoHeads(), r"head 'auxiliary' returned \(6, 2\).* adapt\(model, head='head'\)"),
        (Wrapped(lambda net, x: net(x).softmax(dim=1)), "softmax"),
        (Wrapped(lambda net, x: net(x) + net(x.flip(3))), "2 times"),
        (Wrapped(lambda net, x: net.fc(x[:, 0, :, :16])), r"returned \(6, 24, 5\) for 6 images"),
    ],
    ids=["auxiliary", "softmax", "twice", "tokens"],
)
def test_a_head_that_is_not_the_last_step_is_refused_on_the_first_pass(model, says, images):
    with pytest.raises(InvalidValueError, match=says):
        Classifier(model.eval())(images)


def test_a_head_name_that_is_not_a_linear_layer():
    with pytest.raises(UnknownNameError, match="fc"):
        Classifier(small_net(), head="conv1")


def test_an_output_object_with_logits(images):
    model = Wrapped(lambda net, x: types.SimpleNamespace(logits=net(x))).eval()
    assert Classifier(model)(images)[1].shape == (6, 5)


def test_normalisation_is_declared(images):
    model = small_net().eval()
    wrapped = Classifier(model, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    scaled = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    assert torch.allclose(wrapped(images)[1], model(scaled), atol=1e-6)
    assert torch.equal(Classifier(model)(images)[1], model(images))
    assert torch.allclose(Classifier(model, mean=0.5, std=0.5)(images)[1], model((images - 0.5) / 0.5), atol=1e-6)


@pytest.mark.parametrize(
    ("mean", "std", "says"),
    [
        ((0.5,) * 3, None, "std"),
        (None, (0.5,) * 3, "std"),
        ((0.5,) * 3, (0.5, 0.5, 0.0), "std"),
        ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4), "divide both by 255"),
        (127.5, 127.5, "divide both by 255"),
        ((0.5, 0.5), (0.2, 0.2), "3 channels"),
    ],
)
def test_a_normalisation_that_cannot_work_is_refused(mean, std, says):
    with pytest.raises(InvalidValueError, match=f"(?i){says}"):
        Classifier(small_net(), mean=mean, std=std)


def test_a_model_that_returns_no_scores_is_refused(images):
    with pytest.raises(InvalidTypeError, match=r"returned a tuple with 0, 1; expected .* output=0"):
        Classifier(Wrapped(lambda net, x: (net(x), None)).eval())(images)


def test_one_image_that_leaves_one_value_for_each_channel_is_refused():
    adapted = safer_tta.adapt(zoo.create("resnet18", num_classes=3), predictor="plain")
    with pytest.raises(InvalidValueError, match="at least two images"):
        adapted(torch.rand(1, 3, 32, 32))


def test_float64_and_small_batches():
    adapted = safer_tta.adapt(small_net().double(), predictor="safer", seed=0)
    assert adapted(batches(1, size=2)[0]).probs.dtype == torch.float64


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_model_answers_and_learns_as_it_is():
    whole, compiled = (adapt_small("tent", {"name": "safer", "views": 2}, compile=given) for given in (False, True))
    for images in batches(3):
        a, b = whole(images), compiled(images)
        torch.testing.assert_close(b.probs, a.probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(b.features, a.features, rtol=1e-4, atol=1e-5)
    assert compiled.classifier._split
    torch.testing.assert_close(compiled.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_model_that_does_more_with_its_head_than_call_it_is_run_as_it_is():
    class Peeks(SmallNet):
        def forward(self, x):
            return super().forward(x) if self.fc.out_features else x

    torch.manual_seed(0)
    net = Peeks().eval()
    adapted = safer_tta.adapt(net, "none", "plain", compile=True)
    for images in batches(2):
        torch.testing.assert_close(adapted(images).logits, net(images))
    assert not adapted.classifier._split


def test_a_copy_of_a_compiled_model_answers_with_its_own_weights(monkeypatch, images):
    monkeypatch.setattr(trunk, "compile_function", lambda function, **options: function)
    model = classifier().eval()
    model.accelerate(compile=True)
    for _ in range(2):  # the first looks at the head, the second runs without it
        model(images)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert float(twin(images)[0].abs().max()) == 0  # features: a head of zeros would hide whose they are
        assert float(model(images)[0].abs().max()) > 0
