"""Test which layers are the head, how several are read as one, and where scores are in what a model returns."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import safer_tta
from safer_tta import Classifier
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.models import binary_head
from safer_tta.models import head as heads
from tests.conftest import batches, small_net
from tests.models.families.build import ODD, After

LINEAR = {"TwoHeads": "fc+other", "a 1x1 convolution": None, "a 1x1 convolution before pooling": None, "Tokens": None}


@pytest.mark.parametrize("name", LINEAR)
def test_scores_are_a_linear_function_of_features(name):
    model, images = ODD[name]().eval(), torch.rand(4, 3, 32, 32)
    classifier = Classifier(model, head=LINEAR[name])
    features, logits = classifier(images)
    torch.testing.assert_close(logits, model(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(classifier.head(features), logits, rtol=1e-4, atol=1e-5)
    rows = classifier.head.weight
    assert rows.shape == (classifier.num_classes, features.shape[1]) == (10, classifier.head.in_features)
    difference = features @ rows.T - logits  # a bias alone is left
    torch.testing.assert_close(difference, difference[:1].expand_as(difference), rtol=1e-4, atol=1e-4)


def test_features_of_a_joined_head_are_those_of_its_layers_side_by_side():
    model = ODD["TwoHeads"]().eval()
    features, _ = Classifier(model, head="fc+other")(torch.rand(2, 3, 32, 32))
    assert torch.equal(features[:, :16], features[:, 16:])


@pytest.mark.parametrize("method", ["t3a", "tsd", "tesla", "eata", "cotta", "shot_im"])
@pytest.mark.parametrize("name", ["TwoHeads", "a cosine head", "a 1x1 convolution"])
def test_methods_that_read_the_head_take_any_kind(method, name):
    adapted = safer_tta.adapt(ODD[name](), method, "safer", head=LINEAR.get(name), seed=0)
    for images in batches(2):
        assert adapted(images).probs.shape == (6, 10)


def test_the_head_may_be_given_as_a_layer(images):
    model = small_net()
    assert safer_tta.adapt(model, head=model.fc).classifier.head_name == "fc"
    assert Classifier(model, head=model.fc).head is model.fc
    with pytest.raises(InvalidValueError, match="not a layer of this model"):
        safer_tta.adapt(model, head=nn.Linear(16, 5))
    with pytest.raises(InvalidTypeError, match="head is 3; expected a layer of the model or its name"):
        safer_tta.adapt(small_net(), head=3)


def test_a_binary_head_keeps_the_probability(images):
    model = small_net(classes=1).eval()
    before = model(images).sigmoid()[:, 0]
    model.fc = binary_head(model.fc)
    after = safer_tta.adapt(model, "none", "plain")(images).probs[:, 1]
    torch.testing.assert_close(after, before)


def test_a_head_with_several_outputs_is_not_made_binary():
    with pytest.raises(InvalidTypeError, match="one output"):
        binary_head(nn.Linear(4, 3))


@pytest.mark.parametrize("select", ["scores", lambda output: output["scores"]])
def test_scores_are_taken_from_where_the_user_says(select, images):
    model = After(lambda scores: {"loss": None, "scores": scores}).eval()
    adapted = safer_tta.adapt(model, "none", "plain", output=select)
    assert torch.equal(adapted(images).logits, model(images)["scores"])
    assert torch.equal(safer_tta.adapt(model, "none", adapted.predictor)(images).logits, model(images)["scores"])


@pytest.mark.parametrize(
    ("name", "select", "says"),
    [
        ("a dict", "logit", "a dict with loss, scores; expected a part of it"),
        ("a tuple", 2, "a tuple with 0, 1; expected a part of it"),
        ("TwoHeads", 0, "a Tensor; expected a part of it"),
        ("a tuple", "logits", "a tuple with 0, 1; expected a part of it"),
    ],
)
def test_an_output_without_the_part_that_is_asked_for_is_refused(name, select, says, images):
    with pytest.raises(InvalidValueError, match=says):
        safer_tta.adapt(ODD[name](), output=select)(images)


SCORES = st.lists(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3), min_size=2, max_size=4)


@given(SCORES, st.floats(0.1, 10), st.floats(-5, 5))
def test_a_temperature_and_a_shift_do_not_change_which_scores_they_are(values, factor, shift):
    scores = torch.tensor(values)
    varied = (scores - scores.mean(dim=1, keepdim=True)).abs().max() > 0.1
    assert heads.same_scores(scores, scores)
    if varied:
        assert heads.same_scores(scores, factor * scores + shift)
        assert heads.same_scores(scores, scores.log_softmax(dim=1))
        assert not heads.same_scores(scores, -factor * scores + shift)


def test_probabilities_are_not_scores():
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert not heads.same_scores(scores, scores.softmax(dim=1))
    assert heads.is_probabilities(scores.softmax(dim=1), scores)
    assert heads.is_probabilities(scores.sigmoid(), scores)
    assert not heads.is_probabilities(scores, scores)


def test_what_follows_a_head_that_was_named_stays(images):
    """The features are what enters the named layer; the scores are the model's own."""
    model = ODD["a tanh behind"]().eval()
    answer = safer_tta.adapt(model, "none", "plain", head="net.fc")(images)
    assert torch.equal(answer.logits, model(images))
    torch.testing.assert_close(torch.tanh(model.net.fc(answer.features)), answer.logits)


def test_a_copied_classifier_keeps_its_own_head():
    adapted = safer_tta.adapt(ODD["TwoHeads"](), "cotta", "plain", head="fc+other", threshold=1.1, versions=1, seed=0)
    student, teacher = adapted.classifier, adapted.teacher.classifier
    assert teacher.head.layers[0] is teacher.model.fc
    assert teacher.model.fc is not student.model.fc
    adapted(batches(1)[0])
    assert not torch.equal(F.normalize(student.head.weight), F.normalize(teacher.head.weight))
