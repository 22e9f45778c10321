"""One contract for every registered norm under every method and predictor."""

import pytest
import torch

from safer_tta import api, methods, predictors
from safer_tta.errors import InvalidValueError
from safer_tta.models.norm import NORMS
from tests.conftest import CLASSES, LEARNING, batches, classifier, identical, learnt
from tests.contract.parts import BAD_BATCHES

pytestmark = pytest.mark.usefixtures("learn_from_few_classes")
REFUSED = {("medbn", "bn")}  # it refuses a model whose batch norms are replaced
OWN = [name for name in methods.METHODS if methods.METHODS[name].own_norms]
OTHERS = [name for name in methods.METHODS if name not in OWN]
FOLLOWING = [name for name in NORMS if NORMS[name].follows]
PAIRS = [
    (norm, method)
    for norm in NORMS
    for method in (OTHERS if norm in FOLLOWING else methods.METHODS)
    if (norm, method) not in REFUSED
]


def make(norm: str, method: str, predictor: str) -> methods.Method:
    options = {**LEARNING.get(method, {}), **({"margin": 1.0, "redundancy": 1.0} if method == "rdumb" else {})}
    return api.build(classifier(), method, predictor, norm=norm, seed=0, options=options)


@pytest.fixture
def adapted(norm: str, method: str, predictor: str) -> methods.Method:
    return make(norm, method, predictor)


@pytest.mark.parametrize("predictor", predictors.PREDICTORS)
@pytest.mark.parametrize(("norm", "method"), PAIRS)
class TestNorm:
    def test_answers_and_repeats_itself(self, norm, method, predictor, adapted):
        start = adapted.state_dict()
        first = learnt(adapted, batches(3))
        assert all(answer.shape == (6, CLASSES) and torch.isfinite(answer).all() for answer in first)
        adapted.reset()
        assert identical(adapted.state_dict(), start)
        assert all(torch.equal(a, b) for a, b in zip(first, learnt(adapted, batches(3)), strict=True))

    def test_a_look_and_a_refused_batch_change_nothing(self, adapted):
        learnt(adapted, batches(2))
        before = adapted.state_dict()
        adapted.predict(batches(1)[0])
        with pytest.raises(InvalidValueError):
            adapted(BAD_BATCHES["above one"])
        assert identical(adapted.state_dict(), before)

    def test_works_under_inference_mode(self, norm, method, predictor, adapted):
        expected = [p.probs for p in adapted.stream(batches(2))]
        other = make(norm, method, predictor)
        with torch.inference_mode():
            found = [p.probs for p in other.stream(batches(2))]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))

    def test_a_saved_state_resumes_bit_for_bit(self, norm, method, predictor, adapted, tmp_path):
        *stream, last = batches(3)
        learnt(adapted, stream)
        adapted.save(tmp_path / "state")
        back = make(norm, method, predictor).load(tmp_path / "state")
        assert torch.equal(back(last).probs, adapted(last).probs)
        assert identical(back.state_dict(), adapted.state_dict())


@pytest.mark.parametrize(("norm", "method"), sorted(REFUSED))
def test_a_norm_that_a_method_cannot_use_is_refused(norm, method):
    with pytest.raises(InvalidValueError):
        make(norm, method, "plain")


@pytest.mark.parametrize("norm", FOLLOWING)
@pytest.mark.parametrize("method", OWN)
def test_layers_of_its_own_are_not_mixed_with_it(norm, method):
    with pytest.raises(InvalidValueError, match=r"brings batch norms of its own.*leave norm out"):
        make(norm, method, "plain")


@pytest.mark.parametrize("norm", FOLLOWING)
@pytest.mark.parametrize("method", OTHERS)
class TestFollowing:
    @pytest.mark.filterwarnings("ignore:a batch of one image")
    def test_single_images_are_answered_and_noted(self, norm, method):
        adapted = make(norm, method, "safer")
        for image in batches(4, size=1):
            assert torch.isfinite(adapted(image).probs).all()
        stream = adapted.classifier.statistics
        since_restored = {"rdumb": 1, "memo": 0}.get(method, 4)
        assert stream.window.images.item() == (since_restored if stream.active else 0)

    def test_an_exported_model_answers_single_images_as_in_a_batch(self, norm, method, images):
        adapted = make(norm, method, "plain")
        learnt(adapted, batches(3))
        model = adapted.export()
        together = model(images)
        torch.testing.assert_close(torch.cat([model(image[None]) for image in images]), together)
        fresh = classifier().model
        fresh.load_state_dict(model.state_dict())
        torch.testing.assert_close(fresh.eval()(images), together)
