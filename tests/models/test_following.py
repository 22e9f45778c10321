"""Layers that follow a stream, inside models of all kinds: the right layer gets the right votes, and nothing else."""

import pytest
import torch
from torch import Tensor, nn

import safer_tta
from safer_tta.errors import InvalidValueError
from safer_tta.models.stream_norm import StreamNorm
from tests.conftest import batches, small_net


class Auxiliary(nn.Module):
    """Has a batch norm that runs in training only, between two that always run."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.aux, self.last = (nn.Conv2d(3, 8, 3), *(nn.BatchNorm2d(8) for _ in range(3)))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.conv(x)).relu()
        if self.training:
            self.aux(x)
        return self.fc(self.last(x).mean(dim=(2, 3)))


class DropInside(nn.BatchNorm2d):
    """As timm has it: drop-out and an activation inside the norm."""

    def __init__(self) -> None:
        super().__init__(8)
        self.drop, self.act = nn.Dropout(), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class OneByOne(nn.Module):
    """Passes images to its layers one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.fc = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.cat([self.layers(image[None]).mean(dim=(2, 3)) for image in x]))


def adapt(model: nn.Module, *names: str, **options) -> safer_tta.methods.Method:
    normalised = {} if isinstance(model, safer_tta.Classifier) else {"mean": 0, "std": 1}
    return safer_tta.adapt(model, *names, seed=0, **normalised, **options)


def following(adapted: safer_tta.methods.Method) -> list[StreamNorm]:
    return [norm for norm in adapted.classifier.norms() if isinstance(norm, StreamNorm)]


def test_a_layer_that_does_not_run_takes_no_votes():
    adapted = adapt(Auxiliary().eval())
    adapted(batches(1, size=16)[0])
    first, aux, last = following(adapted)
    assert not aux.deviations.any()
    assert not aux.votes.any()
    for norm in (first, last):
        expected = norm.count(norm.votes.float())  # sixteen images, sixteen votes
        torch.testing.assert_close(norm.deviations, expected, rtol=0.01, atol=0.01)


def test_what_has_adapted_can_be_adapted_again():
    before = adapt(small_net())
    before(batches(1, size=16)[0])
    again = adapt(before.classifier, "tent", {"name": "safer-g", "views": 3})
    start = again.state_dict()
    again(batches(1, size=7)[0])
    assert again.statistics.window.images == 7
    assert all(norm._window[0] is again.statistics.window for norm in following(again))
    again.reset()
    assert all(torch.equal(a, b) for a, b in zip(start.values(), again.state_dict().values(), strict=True))
    assert not following(adapt(before.classifier, norm="model"))
    assert not following(adapt(before.classifier, "none", "plain"))
    assert len(following(adapt(before.classifier, norm="stream"))) == len(following(before))


def test_a_model_that_is_adapted_in_place_stays_usable():
    net = small_net()
    adapted = adapt(net, copy=False)
    adapted(batches(1, size=16)[0])
    assert net(batches(1, size=7)[0]).shape == (7, 5)
    before = [norm.deviations.clone() for norm in following(adapted)]
    net.eval()
    adapted(batches(1, size=16, seed=1)[0])
    assert all(not torch.equal(a, norm.deviations) for a, norm in zip(before, following(adapted), strict=True))


def test_a_model_without_batch_norms_is_used_as_it_is():
    images = batches(1, size=8)[0]
    one, other = adapt(small_net(norm="group")), adapt(small_net(norm="group"), norm="model")
    assert torch.equal(one(images).probs, other(images).probs)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("method", ["tent", "pl"])
def test_what_is_random_behind_a_norm_stays_off(method):
    layers = [nn.Conv2d(3, 8, 3), DropInside(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    adapted, images = adapt(nn.Sequential(*layers).eval(), method, "plain", norm="stream"), batches(1)[0]
    assert torch.equal(adapted.predict(images).probs, adapted.predict(images).probs)


def test_views_that_do_not_come_together_are_refused():
    with pytest.raises(InvalidValueError, match="no multiple of the 5 views"):
        adapt(OneByOne().eval())(batches(1)[0])
    assert adapt(OneByOne().eval(), "none", norm="model")(batches(1)[0]).probs.shape == (6, 5)
