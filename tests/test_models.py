"""Classifier on foreign models, our residual networks, the zoo."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

import safer_tta
from safer_tta import Classifier, tensorfile
from safer_tta.models import trunk, zoo
from tests.conftest import WEIGHTS, SmallNet, batches, classifier, needs_pacs, needs_weights, photographs, small_net


@pytest.fixture(scope="module")
def timm():
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # its CUDA build beside CPU torch misses the schemas of two operators that nobody calls here
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        pytest.MonkeyPatch().setattr(torch, "_kept_alive", library, raising=False)
    except ImportError:
        pass
    return pytest.importorskip("timm")


class TwoHeads(nn.Module):
    """Registers its heads in an order that misleads: the last Linear is an auxiliary one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(8, 4)
        self.auxiliary = nn.Linear(8, 2)

    def forward(self, x):
        z = self.body(x)
        self.auxiliary(z)
        return self.head(z)


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


def test_a_wrong_head_is_found_out_on_the_first_pass(images):
    with pytest.raises(ValueError, match="output is not what its head 'auxiliary' returned"):
        Classifier(TwoHeads().eval())(images)


def test_a_head_name_that_is_no_linear():
    with pytest.raises(ValueError, match="'fc'"):
        Classifier(small_net(), head="conv1")


def test_softmax_behind_the_head_is_refused(images):
    with pytest.raises(ValueError, match="softmax"):
        Classifier(nn.Sequential(small_net(), nn.Softmax(dim=1)).eval())(images)


def test_a_head_that_runs_twice_is_refused(images):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return self.net(x) + self.net(x.flip(3))

    with pytest.raises(ValueError, match="2 times"):
        Classifier(Twice().eval())(images)


def test_a_head_on_tokens_is_refused(images):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(24, 3)

        def forward(self, x):
            return self.fc(x[:, 0])

    with pytest.raises(ValueError, match=r"received \(6, 24, 24\)"):
        Classifier(Tokens())(images)


def test_an_output_object_with_logits(images):
    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return Output(self.net(x))

    assert Classifier(Wrapped().eval())(images)[1].shape == (6, 5)


def test_normalisation_is_declared(images):
    model = small_net().eval()
    wrapped = Classifier(model, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    scaled = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
    assert torch.allclose(wrapped(images)[1], model(scaled), atol=1e-6)
    assert torch.equal(Classifier(model)(images)[1], model(images))
    assert torch.allclose(Classifier(model, mean=0.5, std=0.5)(images)[1], model((images - 0.5) / 0.5), atol=1e-6)


@pytest.mark.parametrize(("mean", "std"), [((0.5,) * 3, None), (None, (0.5,) * 3), ((0.5,) * 3, (0.5, 0.5, 0.0))])
def test_half_a_normalisation_is_refused(mean, std):
    with pytest.raises(ValueError, match="std"):
        Classifier(small_net(), mean=mean, std=std)


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_have_torchvisions_names_and_numbers(timm, name):
    """timm's residual networks use torchvision's parameter names; the same tensors must give the same scores."""
    ours = zoo.create(name, num_classes=9).eval()
    theirs = timm.create_model(name, num_classes=9).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(2, 3, 64, 64)
    assert torch.allclose(ours(images), theirs(images), atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050", "convnext_atto"])
def test_timm_models_adapt(timm, name):
    model = zoo.create(f"timm:{name}", num_classes=6)
    side = 224 if name.startswith("vit") else 64
    adapted = safer_tta.adapt(model, "tent", seed=0, safer={"views": 2})
    assert adapted.classifier.mean.flatten().tolist() == pytest.approx(model.pretrained_cfg["mean"])
    before = adapted.state_dict()
    assert adapted(torch.rand(3, 3, side, side)).probs.shape == (3, 6)
    after = adapted.state_dict()
    assert any(not torch.equal(after[n], before[n]) for n in before if n.startswith("model."))


def test_torchvision_models_adapt(timm):
    pytest.importorskip("torchvision")
    adapted = safer_tta.adapt(zoo.create("torchvision:resnet18", num_classes=6), seed=0)
    assert adapted(torch.rand(2, 3, 64, 64)).probs.shape == (2, 6)


def test_medbn_keeps_what_stands_behind_timms_batch_norm(timm):
    from timm.layers import BatchNormAct2d

    from safer_tta.models.norm import MedBN

    assert MedBN.like(BatchNormAct2d(4))(torch.randn(5, 4, 3, 3)).min() >= 0


def test_medbn_keeps_the_memory_layout():
    from safer_tta.models.norm import MedBN

    assert MedBN.like(nn.BatchNorm2d(4))(torch.randn(5, 4, 3, 3)).is_contiguous()


def test_a_norm_used_twice_is_replaced_twice():
    net = small_net()
    net.again = net.norm1
    Classifier(net).replace_norms(lambda norm: nn.GroupNorm(1, norm.num_features))
    assert net.again is net.norm1
    assert isinstance(net.again, nn.GroupNorm)


def test_weights_go_round(tmp_path):
    model = zoo.create("resnet18", num_classes=7)
    header = {"architecture": "resnet18", "mean": "0.5,0.5,0.5", "std": "0.2,0.2,0.2"}
    tensorfile.write(tmp_path / "r.safetensors", model.state_dict(), header)
    again = zoo.create(str(tmp_path / "r.safetensors"))
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())
    assert Classifier(again).mean.flatten().tolist() == [0.5] * 3
    other_head = zoo.create("resnet18", num_classes=3, weights=tmp_path / "r.safetensors")
    assert torch.equal(other_head.conv1.weight, model.conv1.weight)
    assert other_head.fc.out_features == 3


def test_weights_of_another_architecture_are_refused(tmp_path):
    tensorfile.write(tmp_path / "r.safetensors", zoo.create("resnet18", num_classes=7).state_dict())
    with pytest.raises(ValueError, match="does not fit this architecture"):
        zoo.create("resnet34", weights=tmp_path / "r.safetensors")
    with pytest.raises(ValueError, match="does not say its architecture"):
        zoo.create(str(tmp_path / "r.safetensors"))


def test_unknown_model_is_named():
    with pytest.raises(ValueError, match="resnet18"):
        zoo.create("resnet19")


def test_replace_norms_reaches_nested_layers(images):
    wrapped = Classifier(small_net())
    wrapped.replace_norms(lambda norm: nn.GroupNorm(1, norm.num_features))
    assert [type(n) for n in wrapped.norms()] == [nn.GroupNorm] * 2
    assert wrapped(images)[1].shape == (6, 5)


@needs_weights
def test_imagenet_weights_load_with_their_own_normalisation():
    model = zoo.create("resnet50", num_classes=7, weights=WEIGHTS)
    wrapped = Classifier(model)
    assert wrapped.mean.flatten().tolist() == pytest.approx([0.485020, 0.457957, 0.407604])
    assert model.layer2[0].conv1.stride == (2, 2), "these weights have the stride on the first 1x1"


@needs_weights
@needs_pacs
def test_imagenet_weights_see_what_is_there():
    """Photographs of PACS through the 1,000-class head: most find their kind in the top five; chance would not."""
    model = Classifier(zoo.create("resnet50", weights=WEIGHTS).eval())
    kinds = {"dog": range(151, 269), "elephant": range(385, 388), "guitar": (402, 546), "horse": (339, 603)}
    for kind, labels in kinds.items():
        with torch.no_grad():
            scores = model(photographs(12, side=224, kind=kind))[1]
        best = scores.topk(5, dim=1).indices
        hits = torch.isin(best, torch.tensor(list(labels))).any(dim=1)
        assert hits.float().mean() > 0.6, (kind, hits)


def test_float64_and_small_batches(images):
    adapted = safer_tta.adapt(small_net().double(), seed=0)
    assert adapted(batches(1, size=2)[0]).probs.dtype == torch.float64


class _NormAct(nn.BatchNorm2d):
    """As timm has it: an activation inside the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x))


@pytest.mark.parametrize("method", ["rotta", "note"])
def test_a_replaced_norm_keeps_the_activation_behind_it(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), _NormAct(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    images = torch.rand(4, 3, 16, 16)
    adapted = safer_tta.adapt(net, method, safer=False, seed=0)
    assert [type(m) for m in adapted.classifier.model.modules()].count(nn.ReLU) == 1
    if method == "rotta":  # at its start it normalises as the source does
        torch.testing.assert_close(adapted.predict(images).logits, net(images))


def test_a_norm_with_a_forward_of_its_own_is_not_replaced_silently():
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    net = nn.Sequential(nn.Conv2d(3, 8, 3), Odd(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    with pytest.raises(ValueError, match="forward of its own"):
        safer_tta.adapt(net, "rotta", safer=False)
    net[1] = nn.BatchNorm2d(8, track_running_stats=False)
    with pytest.raises(ValueError, match="track_running_stats"):
        safer_tta.adapt(net, "note", safer=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_model_answers_and_learns_as_it_is():
    """torch.compile with the whole model as one program; the features are those that enter the head."""
    whole, compiled = (safer_tta.adapt(small_net(), "tent", {"views": 2}, seed=0, compile=c) for c in (False, True))
    for images in batches(3):
        a, b = whole(images), compiled(images)
        torch.testing.assert_close(b.probs, a.probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(b.features, a.features, rtol=1e-4, atol=1e-5)
    assert compiled.classifier._split
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_model_that_wants_more_of_its_head_is_run_as_it_is():
    class Peeks(SmallNet):
        def forward(self, x):
            return super().forward(x) if self.fc.out_features else x

    torch.manual_seed(0)
    net = Peeks().eval()
    adapted = safer_tta.adapt(net, "none", safer=False, compile=True)
    images = batches(2)
    torch.testing.assert_close(adapted(images[0]).logits, net(images[0]))
    torch.testing.assert_close(adapted(images[1]).logits, net(images[1]))
    assert not adapted.classifier._split


def test_a_copy_of_a_compiled_model_answers_with_its_own_weights(monkeypatch):
    monkeypatch.setattr(trunk, "compiled", lambda function, **options: function)
    model = classifier()
    model.accelerate(compile=True)
    model.eval()
    images = batches(1)[0]
    for _ in range(2):  # the first looks at the head, the second runs without it
        model(images)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    with torch.no_grad():
        assert float(twin(images)[0].abs().max()) == 0  # features: a head of zeros would hide whose they are
        assert float(model(images)[0].abs().max()) > 0
