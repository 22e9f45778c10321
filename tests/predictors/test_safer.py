"""Test SAFER's predictor: few views, few images, chunks, and the options that it refuses."""

import warnings

import pytest
import torch

import safer_tta
from safer_tta import Plain, Safer
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from safer_tta.methods import METHODS
from tests.conftest import LEARNING, adapt_small, batches, learnt, small_net


def chunked(method: str, chunk: int) -> safer_tta.Method:
    return adapt_small(method, {"name": "safer", "chunk": chunk}, **LEARNING.get(method, {}))


@pytest.mark.parametrize("mixing", ["none", "sigmoid", "gate"])
def test_without_views_it_is_the_plain_prediction(model, images, mixing):
    model.eval()
    plain, none = Plain(model)(images), Safer(model, views=0, mixing=mixing)(images)
    assert all(torch.equal(getattr(plain, part), getattr(none, part)) for part in ("probs", "logits", "features"))


def test_with_one_view_the_answer_is_the_augmented_one(model, images):
    model.eval()
    prediction = Safer(model, views=1, seed=3)(images)
    assert prediction.report.dropped == 0
    assert torch.equal(prediction.probs, prediction.report.view_probs[1])


def test_views_of_one_image_get_equal_weights_and_one_warning(model):
    adapted = safer_tta.adapt(model, predictor="safer", seed=0)
    with pytest.warns(UserWarning, match="one image") as caught:
        prediction, *_ = list(adapted.stream(batches(3, size=1)))
    assert len(caught) == 1
    assert torch.allclose(prediction.report.weights, torch.full((5, 1), 0.2))
    assert prediction.report.dropped == -1


def test_a_rule_that_compares_no_views_does_not_warn_of_one_image():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt_small(predictor={"name": "safer", "pool": "top1"})(batches(1, size=1)[0])


def test_a_report_holds_views_reliability_and_signals(model, images):
    report = safer_tta.adapt(model, predictor="safer", seed=0)(images).report
    assert report.suspicion is None
    assert {name: figure.shape for name, figure in report.signals.items()} == {"feat_disagreement": (6,)}
    assert report.reliability.shape == (5,)
    assert len(report.pipelines) == 4
    assert report.pipelines[0][0] == "gaussian_noise"


def test_all_views_share_one_forward_pass_and_its_statistics(model, images):
    calls = []
    adapted = safer_tta.adapt(model, "bn", "safer", seed=0)
    adapted.classifier.model.conv1.register_forward_hook(lambda m, x, y: calls.append(len(x[0])))
    adapted(images)
    assert calls == [30]


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"bn"}))
def test_without_batch_statistics_chunks_change_nothing(method):
    """Answers and lessons are those of all views at once; only TeSLA's policy is judged by the mean inputs of norms."""
    net, stream = small_net(norm="group").double(), [x.double() for x in batches(3)]
    predictors = [{"name": "safer", "chunk": chunk} for chunk in (None, 7)]
    options = {**LEARNING.get(method, {}), **({"policy_lr": 1e-12} if method == "tesla" else {})}
    whole, parts = (safer_tta.adapt(net, method, p, seed=0, **options) for p in predictors)
    torch.testing.assert_close(learnt(parts, stream), learnt(whole, stream), rtol=0, atol=1e-6)
    ours, theirs = ({n: t for n, t in m.state_dict().items() if "policy" not in n} for m in (parts, whole))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["pl", "shot_im", "tsd", "sotta", "tesla", "bn"])
def test_recomputed_chunks_move_running_statistics_once(method):
    """A chunk that is computed again leaves them to its first pass, and SoTTA's second pass at the worst point too."""
    adapted = chunked(method, 10)
    learnt(adapted, batches(1))
    passes = 2 if method == "tesla" else 1  # its student sees a second view
    assert int(adapted.classifier.model.norm1.num_batches_tracked) == 3 * passes  # 30 images in chunks of 10


@pytest.mark.parametrize("method", ["tent", "eata", "sar", "cotta", "note", "rotta", "rdumb"])
def test_other_methods_learn_in_chunks_too(method):
    assert all(torch.isfinite(answer).all() for answer in learnt(chunked(method, 10), batches(2)))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"views": -1}, InvalidValueError, "views is -1; expected .* 0 or more"),
        ({"views": True}, InvalidValueError, "views is True; expected .* 0 or more"),
        ({"views": 2, "mixing": "gate"}, InvalidValueError, "views is 2, too few .*at least 3"),
        ({"pool": "best"}, UnknownNameError, "cc_drop"),
        ({"mixing": "soft"}, UnknownNameError, "sigmoid"),
        ({"pipeline": ["gaussian_blur"]}, InvalidTypeError, "pipeline is list; expected .*Pipeline"),
        ({"pipeline": "mine"}, UnknownNameError, "released"),
        ({"pipeline": {"opertors": 2}}, InvalidTypeError, "pipeline has no option opertors.*'max_operators'"),
        ({"chunk": 0}, InvalidValueError, "chunk is 0; expected"),
        ({"chunk": -1}, InvalidValueError, "chunk is -1; expected"),
        ({"chunk": True}, InvalidTypeError, "chunk is True; expected"),
        ({"chunk": 1.5}, InvalidTypeError, "chunk is 1.5; expected"),
    ],
)
def test_mistakes_are_refused(model, options, error, says):
    with pytest.raises(error, match=says):
        Safer(model, **options)
