import pytest
import torch

import safer_tta
from safer_tta.attacks import resubmit
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import drawings, eight_bit, generator, labels, trained_net
from tests.conftest import small_net


def test_an_image_counts_if_every_draw_is_right():
    predictor, (x, y) = safer_tta.Safer(trained_net(), views=2, seed=0), drawings()
    asked = predictor.fork(seed=int(torch.randint(2**62, (), generator=generator())))
    right = torch.stack([asked(x).labels == y for _ in range(6)])
    assert torch.equal(resubmit(predictor, x, y, times=6, generator=generator()), right.all(dim=0))
    assert torch.equal(resubmit(predictor, x, y, times=2, generator=generator()), right[:2].all(dim=0))
    assert right[:2].all(dim=0).sum() > right.all(dim=0).sum(), "the defence is random enough to be worn down"


def test_a_fixed_defence_cannot_be_worn_down():
    predictor, (x, y) = safer_tta.Plain(trained_net()), drawings()
    y = y.where(torch.arange(len(y)) > 4, (y + 1) % 5)
    expected = predictor(x).labels == y
    assert torch.equal(resubmit(predictor, x, y), expected)
    assert 0 < expected.sum() < len(y)


def test_the_predictor_is_not_moved():
    adapted = safer_tta.adapt(small_net(), "tent", "safer-g", seed=0)
    adapted(eight_bit(side=24))
    before = adapted.state_dict()
    resubmit(adapted.predictor, eight_bit(side=24), labels(), times=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapted.state_dict().items())


def test_models_and_no_submission_are_refused():
    with pytest.raises(InvalidTypeError, match="predictor is SmallNet; expected a Predictor"):
        resubmit(small_net(), eight_bit(), labels())
    with pytest.raises(InvalidValueError, match="times is 0; expected a whole number of at least 1"):
        resubmit(safer_tta.Plain(small_net()), eight_bit(), labels(), times=0)
