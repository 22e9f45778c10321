"""One contract for every registered predictor."""

import copy

import pytest
import torch

from safer_tta import predictors
from tests.conftest import CLASSES, classifier, identical
from tests.contract.parts import BAD_BATCHES


@pytest.mark.parametrize("name", predictors.PREDICTORS)
class TestPredictor:
    def make(self, name, seed=0):
        return predictors.create(name, classifier().eval(), seed=seed)

    @pytest.fixture
    def predictor(self, name):
        return self.make(name)

    @pytest.fixture
    def draw(self, predictor, images):
        return predictor.draw(images)

    def test_prediction(self, predictor, images):
        prediction = predictor(images)
        assert prediction.probs.shape == prediction.logits.shape == (6, CLASSES)
        assert prediction.features.shape == (6, 16)
        assert torch.allclose(prediction.probs.sum(1), torch.ones(6), atol=1e-5)
        assert torch.allclose(prediction.logits.softmax(1), prediction.probs, atol=1e-4)
        weights = prediction.report.weights
        assert torch.allclose(weights.sum(0), torch.ones(6), atol=1e-5)
        views_agree = (weights.unsqueeze(-1) * prediction.report.view_probs).sum(0)
        assert torch.allclose(views_agree, prediction.probs, atol=1e-5)

    def test_same_seed_same_answers(self, name, predictor, images):
        other = self.make(name)
        for _ in range(2):
            assert torch.equal(predictor(images).probs, other(images).probs)

    def test_a_draw_can_be_replayed(self, predictor, draw, images):
        first = predictor(images, draw)
        predictor(images)
        assert torch.equal(predictor(images, draw).probs, first.probs)

    def test_untracked_moves_nothing(self, predictor, images):
        for norm in predictor.classifier.norms():
            norm.train()
        before, state = copy.deepcopy(predictor.classifier.state_dict()), predictor.generator.get_state()
        predictor(images, track=False)
        assert torch.equal(predictor.generator.get_state(), state)
        assert identical(predictor.classifier.state_dict(), before)
        predictor(images)
        assert not identical(predictor.classifier.state_dict(), before)

    def test_gradients_reach_images_and_parameters(self, predictor, images):
        images = images.requires_grad_(True)
        predictor(images).logits.square().sum().backward()
        assert images.grad.abs().sum() > 0
        assert all(p.grad is not None for p in predictor.classifier.parameters())

    def test_a_fork_looks_through_another_classifier(self, predictor, draw, images):
        other = classifier(seed=9).eval()
        moved = predictor.fork(other)
        assert moved.classifier is other
        assert not torch.equal(moved(images, draw).probs, predictor(images, draw).probs)

    def test_a_fork_shares_the_generator_unless_it_has_a_seed(self, name, predictor, images):
        assert predictor.fork().generator is predictor.generator
        assert torch.equal(predictor.fork(seed=3)(images).probs, self.make(name, seed=3)(images).probs)
        assert torch.equal(predictor(images).probs, self.make(name)(images).probs)

    def test_what_it_shows_is_the_answer_and_the_lesson(self, predictor, draw, images):
        seen = predictor.look(images, draw)
        assert torch.equal(seen.answer.probs, predictor(images, draw).probs)
        for prediction in (seen.answer, seen.lesson, seen.aligned):
            assert torch.allclose(prediction.probs.sum(1), torch.ones(6), atol=1e-5)
        assert (seen.memory is not None) == (predictor.memory is not None)
        assert (seen.answer.suspicion is not None) == predictor.estimates_suspicion

    def test_uint8_equals_its_floats(self, name, predictor, images):
        eight = (images * 255).round().byte()
        assert torch.equal(predictor(eight).probs, self.make(name)(eight / 255).probs)

    @pytest.mark.parametrize("bad", BAD_BATCHES)
    def test_refuses_and_draws_nothing(self, predictor, bad):
        state = predictor.generator.get_state()
        with pytest.raises((ValueError, TypeError), match="expected"):
            predictor(BAD_BATCHES[bad])
        assert torch.equal(predictor.generator.get_state(), state)

    def test_refuses_a_draw_of_another_batch(self, predictor, images):
        with pytest.raises(ValueError, match="draw"):
            predictor(images, predictor.draw(images[:3]))
