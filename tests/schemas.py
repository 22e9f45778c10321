"""Define two operators that PyPI's torchvision expects of its own build of torch, so that it imports beside CPU torch.

Nothing here calls them. Import this before timm, torchvision or transformers.
"""

import contextlib
import importlib

import torch

try:
    importlib.import_module("torchvision")
except RuntimeError:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    with contextlib.suppress(ImportError):
        importlib.import_module("torchvision")
except ImportError:
    pass
