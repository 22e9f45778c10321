"""Test `adapt`: what it leaves alone, what it accepts as a predictor, and which mistakes it refuses."""

import copy
import warnings

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import AdaptiveMixing, Classifier, Plain, Safer
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from tests.conftest import LEARNING, SmallNet, batches, classifier, identical, learnt, small_net
from tests.models.families.build import ODD


def test_the_callers_model_stays_as_it_is(model, images):
    kept = copy.deepcopy(model.state_dict())
    assert safer_tta.adapt(model)(images).labels.shape == (6,)
    assert identical(model.state_dict(), kept)
    assert all(p.requires_grad for p in model.parameters())
    assert model.training


def test_copy_false_adapts_the_callers_model(model, images):
    before = model.norm1.weight.clone()
    safer_tta.adapt(model, norm="model", copy=False)(images)
    assert not torch.equal(model.norm1.weight, before)


def test_learning_does_not_reach_into_the_callers_graph(model, images):
    scale = torch.ones(1, requires_grad=True)
    safer_tta.adapt(model, seed=0)(images * scale)
    assert scale.grad is None


def test_ordinary_use_prints_and_warns_nothing(model, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(safer_tta.adapt(model, mean=0, std=1, seed=0).stream(batches(2)))
    assert capfd.readouterr() == ("", "")


def test_a_predictor_is_a_name_a_dict_or_an_object(model, images):
    options = {"views": 2, "pool": "cc", "mixing": AdaptiveMixing(curve="step")}
    by_dict = safer_tta.adapt(model, predictor={"name": "safer", **options}, seed=3)
    by_object = safer_tta.adapt(model, predictor=Safer(model, 2, "cc", "step"), seed=3)
    assert torch.equal(by_dict(images).probs, by_object(images).probs)
    assert by_dict(images).report.weights.shape == (3, 6)
    named, given = (safer_tta.adapt(model, predictor=p, seed=3) for p in ("safer", Safer(model)))
    assert torch.equal(named(images).probs, given(images).probs)


def test_a_predictor_given_twice_is_not_shared(model, images):
    predictor = Safer(model, mixing="gate", seed=5)
    one, two = (safer_tta.adapt(model, predictor=predictor, validate=False) for _ in range(2))
    first = one(images)
    assert [bool(asked.memory.seen.any()) for asked in (one.predictor, two.predictor, predictor)] == [
        True,
        False,
        False,
    ]
    assert torch.equal(first.probs, two(images).probs)
    assert predictor.validate


def test_torchs_seed_decides_unless_one_is_given(model, images):
    answers = []
    for _ in range(2):
        torch.manual_seed(4)
        answers.append(safer_tta.adapt(model)(images).probs)
    assert torch.equal(*answers)


def test_mean_std_and_head_are_those_of_a_classifier(model, images):
    options = {"mean": (0.5, 0.4, 0.3), "std": 0.3, "head": "fc"}
    by_hand = safer_tta.adapt(Classifier(model, **options), "none", "plain")
    adapted = safer_tta.adapt(model, "none", "plain", **options)
    assert torch.equal(adapted(images).probs, by_hand(images).probs)
    assert not torch.equal(adapted(images).probs, safer_tta.adapt(model, "none", "plain")(images).probs)


def test_the_normalisation_of_a_given_predictor_is_used(model, images):
    predictor = Plain(Classifier(model.eval(), mean=0.4, std=0.3))
    adapted = safer_tta.adapt(model, "none", predictor)
    assert torch.equal(adapted(images).probs, predictor(images, track=False).probs)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"method": "tnet"}, UnknownNameError, "did you mean 'tent'"),
        ({"method": "tent+medbn"}, UnknownNameError, "expected one of .*tent"),
        ({"norm": "batch"}, UnknownNameError, "medbn"),
        ({"predictor": "saver"}, UnknownNameError, "did you mean 'safer'"),
        ({"predictor": True}, InvalidTypeError, "predictor is True; expected a name"),
        ({"predictor": {"views": 2}}, InvalidTypeError, "expected a name"),
        ({"predictor": {"name": "safer", "seed": 1}, "seed": 2}, InvalidValueError, "one of them"),
        ({"predictor": {"name": "safer", "pol": "mean"}}, InvalidTypeError, "no option pol .*'pool'.*views"),
        ({"predictor": {"name": "jpeg", "quality": 3}}, InvalidTypeError, "'jpeg' has no option quality; it has none"),
        ({"rate": 1}, InvalidTypeError, "tent has no option rate; expected some of lr"),
        ({"method": "none", "lr": 1}, InvalidTypeError, "none has no option lr; it has none"),
        ({"lr": "1e-3"}, InvalidTypeError, r"lr is '1e-3'; expected a positive number\. It is a string.*lr=0\.001"),
        ({"seed": "0"}, InvalidTypeError, r"seed is '0'; expected a whole number\. It is a string.*seed=0"),
        ({"seed": 1.5}, InvalidTypeError, "seed is 1.5; expected a whole number"),
        ({"predictor": Plain(small_net()), "seed": "0"}, InvalidTypeError, "seed is '0'; expected a whole number"),
        ({"lr": -1.0}, InvalidValueError, "lr is -1.0; expected a positive number"),
        ({"precision": "float8"}, UnknownNameError, "expected one of .*bfloat16"),
        ({"model": "resnet18"}, InvalidTypeError, "nn.Module"),
        ({"model": classifier(), "mean": 0.5, "std": 0.5}, InvalidValueError, "is a Classifier already"),
        ({"model": small_net(norm="group"), "norm": "medbn"}, InvalidValueError, "no batch-norm"),
        ({"model": small_net(norm="group"), "method": "bn"}, InvalidValueError, "no batch-norm"),
        ({"model": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())}, InvalidValueError, "no head found"),
    ],
)
def test_mistakes_are_refused(model, options, error, says):
    with pytest.raises(error, match=says):
        safer_tta.adapt(**{"model": model, **options})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("eval", r"adapted\.freeze\(\)"),
        ("train", r"adapted\.unfreeze\(\)"),
        ("parameters", r"adapted\.classifier\.parameters\(\)"),
        ("model", r"adapted\.classifier\.model"),
        ("cuda", r"adapted\.to\('cuda'\)"),
    ],
)
def test_what_modules_have_and_methods_lack_is_named(model, name, instead):
    with pytest.raises(AttributeError, match=f"'Tent' object has no attribute '{name}'. Use {instead}"):
        getattr(safer_tta.adapt(model), name)


def test_a_prediction_is_no_tensor(model, images):
    prediction = safer_tta.adapt(model)(images)
    with pytest.raises(AttributeError, match=r"no attribute 'argmax'\. Use prediction\.labels"):
        prediction.argmax(dim=1)
    with pytest.raises(AttributeError, match=r"no attribute 'shape'\. A prediction is not a tensor"):
        _ = prediction.shape


def test_a_property_that_fails_says_why(model):
    class Broken(type(safer_tta.adapt(model))):
        @property
        def size(self) -> int:
            return torch.zeros(1).no_such_attribute

    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = Broken(Plain(model)).size


@pytest.mark.parametrize("method", ["pl", "tsd", "shot_im", "tesla", "cotta"])
def test_layers_that_keep_what_they_computed_learn_and_are_copied(method):
    """Some attention layers keep tensors with a graph in eval mode. They are stale after a step, and not copied."""
    model = Remembers().eval()
    model(batches(1)[0])
    adapted = safer_tta.adapt(model, method, "safer", seed=0, **LEARNING.get(method, {}))
    learnt(adapted, batches(3))
    assert not torch.equal(adapted.classifier.model.bias, model.bias)


def test_a_head_that_nobody_named_is_still_checked_behind_a_given_predictor(images):
    model = ODD["TwoHeads"]()
    with pytest.raises(InvalidValueError, match=r"head='fc\+other'"):
        safer_tta.adapt(model, "none", Plain(model))(images)


class Remembers(SmallNet):
    """Keeps what it computes from a parameter in eval mode, as LeViT and TinyViT do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(16))
        self.bias_cache = {}

    def forward(self, x):
        if "cpu" not in self.bias_cache:
            self.bias_cache["cpu"] = self.bias * 2
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x))).mean(dim=(2, 3))
        return self.fc(x * self.bias_cache["cpu"])
