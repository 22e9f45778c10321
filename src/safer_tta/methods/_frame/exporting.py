"""An adapted model as a module of its own."""

import copy
import warnings

from torch import nn

from ...models import norm


def export(model: nn.Module, method: str) -> nn.Module:
    """Return a copy of a method's model in eval mode that is right on single images; a warning says if it cannot be."""
    exported = copy.deepcopy(model)
    trouble = norm.export(exported)
    if trouble:
        warnings.warn(f"the exported model of {method} differs: {trouble}", stacklevel=4)
    return exported.eval().requires_grad_(True)
