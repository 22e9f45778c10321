"""One contract for every registered predictor."""

from __future__ import annotations

import copy

import pytest
import torch

from safer_tta import predictors
from tests.conftest import CLASSES, classifier
from tests.contract.parts import BAD_BATCHES


@pytest.mark.parametrize("name", predictors.PREDICTORS)
class TestPredictor:
    def make(self, name, seed=0):
        predictor = predictors.create(name, classifier(), seed=seed)
        predictor.classifier.eval()
        return predictor

    def test_prediction(self, name, images):
        prediction = self.make(name)(images)
        assert prediction.probs.shape == prediction.logits.shape == (6, CLASSES)
        assert prediction.features.shape == (6, 16)
        assert torch.allclose(prediction.probs.sum(1), torch.ones(6), atol=1e-5)
        assert torch.allclose(prediction.logits.softmax(1), prediction.probs, atol=1e-4)
        weights = prediction.report.weights
        assert torch.allclose(weights.sum(0), torch.ones(6), atol=1e-5)
        views_agree = (weights.unsqueeze(-1) * prediction.report.view_probs).sum(0)
        assert torch.allclose(views_agree, prediction.probs, atol=1e-5)

    def test_same_seed_same_answers(self, name, images):
        one, two = self.make(name), self.make(name)
        for _ in range(2):
            assert torch.equal(one(images).probs, two(images).probs)

    def test_a_draw_can_be_replayed(self, name, images):
        predictor = self.make(name)
        draw = predictor.draw(images)
        first = predictor(images, draw)
        predictor(images)
        assert torch.equal(predictor(images, draw).probs, first.probs)

    def test_untracked_moves_nothing(self, name, images):
        predictor = self.make(name)
        for norm in predictor.classifier.norms():
            norm.train()
        before, state = copy.deepcopy(predictor.classifier.state_dict()), predictor.generator.get_state()
        predictor(images, track=False)
        assert torch.equal(predictor.generator.get_state(), state)
        assert all(torch.equal(t, before[n]) for n, t in predictor.classifier.state_dict().items())
        predictor(images)
        assert not all(torch.equal(t, before[n]) for n, t in predictor.classifier.state_dict().items())

    def test_gradients_reach_images_and_parameters(self, name, images):
        predictor = self.make(name)
        images = images.requires_grad_(True)
        predictor(images).logits.square().sum().backward()
        assert images.grad.abs().sum() > 0
        assert all(p.grad is not None for p in predictor.classifier.parameters())

    def test_a_fork_looks_through_another_classifier(self, name, images):
        predictor = self.make(name)
        other = classifier(seed=9).eval()
        draw = predictor.draw(images)
        moved = predictor.fork(other)
        assert moved.classifier is other
        assert not torch.equal(moved(images, draw).probs, predictor(images, draw).probs)

    def test_a_fork_shares_the_generator_unless_it_has_a_seed(self, name, images):
        predictor = self.make(name)
        assert predictor.fork().generator is predictor.generator
        assert torch.equal(predictor.fork(seed=3)(images).probs, self.make(name, seed=3)(images).probs)
        assert torch.equal(predictor(images).probs, self.make(name)(images).probs)

    def test_what_it_shows_is_the_answer_and_the_lesson(self, name, images):
        predictor = self.make(name)
        draw = predictor.draw(images)
        seen = predictor.look(images, draw)
        assert torch.equal(seen.answer.probs, predictor(images, draw).probs)
        for prediction in (seen.answer, seen.lesson, seen.aligned):
            assert torch.allclose(prediction.probs.sum(1), torch.ones(6), atol=1e-5)
        assert (seen.memory is not None) == (predictor.memory is not None)
        assert (seen.answer.suspicion is not None) == predictor.estimates_suspicion

    def test_uint8_equals_its_floats(self, name, images):
        eight = (images * 255).round().byte()
        assert torch.equal(self.make(name)(eight).probs, self.make(name)(eight / 255).probs)

    @pytest.mark.parametrize("bad", BAD_BATCHES)
    def test_refuses_and_draws_nothing(self, name, bad):
        predictor = self.make(name)
        state = predictor.generator.get_state()
        with pytest.raises((ValueError, TypeError), match="expected"):
            predictor(BAD_BATCHES[bad])
        assert torch.equal(predictor.generator.get_state(), state)

    def test_refuses_a_draw_of_another_batch(self, name, images):
        predictor = self.make(name)
        with pytest.raises(ValueError, match="draw"):
            predictor(images, predictor.draw(images[:3]))
