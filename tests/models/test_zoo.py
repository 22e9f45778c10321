"""Models by name: our residual networks against timm's, models of other libraries, weights from files."""

import importlib

import pytest
import torch

import safer_tta
from safer_tta import Classifier
from safer_tta._internal import safetensors_io
from safer_tta.errors import UnknownNameError
from safer_tta.models import zoo
from safer_tta.models.norm import MedBN
from safer_tta.training import SHIPPED
from tests.conftest import WEIGHTS, identical, needs_pacs, needs_weights, photographs


@pytest.fixture(scope="module")
def timm():
    importlib.import_module("tests.schemas")
    return pytest.importorskip("timm")


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50"])
def test_resnets_have_torchvisions_names_and_numbers(timm, name):
    """timm's residual networks use torchvision's parameter names; the same tensors must give the same scores."""
    ours, theirs = zoo.create(name, num_classes=9).eval(), timm.create_model(name, num_classes=9).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(2, 3, 64, 64)
    assert torch.allclose(ours(images), theirs(images), atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050", "convnext_atto"])
def test_timm_models_adapt(timm, name):
    model = zoo.create(f"timm:{name}", num_classes=6)
    side = 224 if name.startswith("vit") else 64
    adapted = safer_tta.adapt(model, "tent", {"name": "safer", "views": 2}, seed=0)
    assert adapted.classifier.mean.flatten().tolist() == pytest.approx(model.pretrained_cfg["mean"])
    before = adapted.state_dict()
    assert adapted(torch.rand(3, 3, side, side)).probs.shape == (3, 6)
    assert any(not torch.equal(t, before[n]) for n, t in adapted.state_dict().items() if n.startswith("model."))


def test_torchvision_models_adapt(timm):
    pytest.importorskip("torchvision")
    adapted = safer_tta.adapt(zoo.create("torchvision:resnet18", num_classes=6), seed=0)
    assert adapted(torch.rand(2, 3, 64, 64)).probs.shape == (2, 6)


def test_medbn_keeps_what_stands_behind_timms_batch_norm(timm):
    from timm.layers import BatchNormAct2d

    assert MedBN.like(BatchNormAct2d(4))(torch.randn(5, 4, 3, 3)).min() >= 0


def test_weights_go_round(tmp_path):
    path = tmp_path / "r.safetensors"
    model = zoo.create("small", num_classes=7)
    header = {"architecture": "small", "mean": "0.5,0.5,0.5", "std": "0.2,0.2,0.2"}
    safetensors_io.write(path, model.state_dict(), header)
    again = zoo.create(str(path))
    assert identical(again.state_dict(), model.state_dict())
    assert Classifier(again).mean.flatten().tolist() == [0.5] * 3
    other_head = zoo.create("small", num_classes=3, weights=path)
    assert torch.equal(other_head.conv1.weight, model.conv1.weight)
    assert other_head.fc.out_features == 3


def test_weights_of_another_architecture_are_refused(tmp_path):
    path = tmp_path / "r.safetensors"
    safetensors_io.write(path, zoo.create("small", num_classes=7).state_dict())
    with pytest.raises(ValueError, match="does not fit this architecture"):
        zoo.create("resnet18", weights=path)
    with pytest.raises(ValueError, match="does not name its architecture"):
        zoo.create(str(path))


def test_a_shipped_model_is_created_from_the_path_of_its_file():
    assert zoo.create(SHIPPED).state_dict().keys() == zoo.create("small").state_dict().keys()


def test_unknown_model_is_named():
    with pytest.raises(UnknownNameError, match="resnet18"):
        zoo.create("resnet19")


@needs_weights
def test_imagenet_weights_load_with_their_own_normalisation():
    model = zoo.create("resnet50", num_classes=7, weights=WEIGHTS)
    assert Classifier(model).mean.flatten().tolist() == pytest.approx([0.485020, 0.457957, 0.407604])
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
