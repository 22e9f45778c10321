"""Test CLIP as a classifier, and what else comes without class scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import safer_tta
from safer_tta.errors import InvalidTypeError, InvalidValueError
from safer_tta.models import zero_shot
from tests.models.families.build import allow_torchvision, build

SMALL = '{"layers": 2, "width": 64, "head_width": 32, "patch_size": 8}'
TOWER = '"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64'
TOWERS = (
    f'"vision_config": {{{TOWER}, "patch_size": 8, "image_size": 32}}, "text_config": {{{TOWER}, "vocab_size": 99}}'
)


def image_features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the features by the model's own function."""
    if hasattr(model, "encode_image"):
        return model.encode_image(images)
    found = model.get_image_features(pixel_values=images)
    return getattr(found, "pooler_output", found)


@pytest.fixture(params=["open_clip", "CLIP:CLIPModel", "Siglip:SiglipModel"])
def clip(request):
    allow_torchvision()
    library = "open_clip" if request.param == "open_clip" else "transformers"
    pytest.importorskip(library)
    more = ', "projection_dim": 32' if request.param.startswith("CLIP") else ""
    options = SMALL if library == "open_clip" else f"{{{TOWERS}{more}}}"
    return build(library, request.param, 32, options).eval()


@pytest.mark.filterwarnings("ignore")
def test_scores_are_scaled_cosines_with_the_text_features(clip):
    images, texts = torch.rand(3, 3, 32, 32), torch.randn(5, 32)
    by_hand = clip.logit_scale.exp() * F.normalize(image_features(clip, images)) @ F.normalize(texts).T
    torch.testing.assert_close(zero_shot(clip, texts)(images), by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_only_the_image_tower_is_kept_and_learns(clip):
    wrapped = zero_shot(clip, torch.randn(5, 32))
    assert sum(p.numel() for p in wrapped.parameters()) < sum(p.numel() for p in clip.parameters())
    adapted = safer_tta.adapt(wrapped, "tent", "safer", seed=0)
    before = adapted.state_dict()
    assert adapted(torch.rand(3, 3, 32, 32)).probs.shape == (3, 5)
    assert any(
        not torch.equal(tensor, before[name])
        for name, tensor in adapted.state_dict().items()
        if "norm" in name or "ln" in name
    )


def test_a_module_without_a_scale_gets_clips_or_the_one_that_is_given():
    encoder, images, texts = nn.Flatten(), torch.rand(2, 3, 2, 2), torch.randn(4, 12)
    cosine = F.normalize(images.flatten(1)) @ F.normalize(texts).T
    torch.testing.assert_close(zero_shot(encoder, texts)(images), 100 * cosine)
    torch.testing.assert_close(zero_shot(encoder, texts, scale=7.0)(images), 7 * cosine)


@pytest.mark.parametrize(
    ("encoder", "texts", "error", "says"),
    [
        (len, torch.randn(4, 12), InvalidTypeError, "expected a torch.nn.Module"),
        (nn.Flatten(), torch.randn(4), InvalidTypeError, r"text_features are \(4,\); expected floats \(K,d\)"),
        (nn.Flatten(), ["a cat"], InvalidTypeError, "text_features are list"),
        (nn.Flatten(), torch.randn(1, 12), InvalidValueError, "at least two classes"),
    ],
)
def test_mistakes_are_refused(encoder, texts, error, says):
    with pytest.raises(error, match=says):
        zero_shot(encoder, texts)


def test_an_encoder_that_returns_maps_is_refused():
    with pytest.raises(InvalidTypeError, match=r"\(2, 3, 4, 4\); expected one feature for each image"):
        zero_shot(nn.Identity(), torch.randn(4, 12))(torch.rand(2, 3, 4, 4))
