"""Normalisation layers that are replaced: nothing behind them is lost, and nothing changes silently."""

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import Classifier
from safer_tta.models.norm import MedBN
from tests.conftest import small_net


class NormAct(nn.BatchNorm2d):
    """As timm has it: an activation inside the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


def network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def test_medbn_keeps_the_activation_and_the_memory_layout():
    assert MedBN.like(NormAct(4))(torch.randn(5, 4, 3, 3)).min() >= 0
    assert MedBN.like(nn.BatchNorm2d(4))(torch.randn(5, 4, 3, 3)).is_contiguous()


def test_replace_norms_reaches_every_layer_and_every_use_of_it(images):
    net = small_net()
    net.again = net.norm1
    wrapped = Classifier(net)
    wrapped.replace_norms(lambda norm: nn.GroupNorm(1, norm.num_features))
    assert [type(n) for n in wrapped.norms()] == [nn.GroupNorm] * 2
    assert net.again is net.norm1
    assert wrapped(images)[1].shape == (6, 5)


@pytest.mark.parametrize("method", ["rotta", "note"])
def test_a_replaced_norm_keeps_the_activation_behind_it(method):
    torch.manual_seed(0)
    net = network(NormAct(8)).eval()
    images = torch.rand(4, 3, 16, 16)
    adapted = safer_tta.adapt(net, method, "plain", seed=0)
    assert [type(m) for m in adapted.classifier.model.modules()].count(nn.ReLU) == 1
    if method == "rotta":  # at its start it normalises as the source does
        torch.testing.assert_close(adapted.predict(images).logits, net(images))


def test_a_norm_with_a_forward_of_its_own_is_not_replaced_silently():
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(ValueError, match="forward of its own"):
        safer_tta.adapt(network(Odd(8)), "rotta", "plain")
    with pytest.raises(ValueError, match="norm='model' keeps it"):
        safer_tta.adapt(network(Odd(8)))
    safer_tta.adapt(network(Odd(8)), norm="model")
    with pytest.raises(ValueError, match="track_running_stats"):
        safer_tta.adapt(network(nn.BatchNorm2d(8, track_running_stats=False)), "note", "plain")


def test_norm_stream_needs_running_statistics_and_the_default_does_not():
    net = network(nn.BatchNorm2d(8, track_running_stats=False))
    with pytest.raises(ValueError, match="no batch norm with running statistics"):
        safer_tta.adapt(net, norm="stream")
    assert safer_tta.adapt(net, seed=0)(torch.rand(4, 3, 16, 16)).probs.shape == (4, 5)
