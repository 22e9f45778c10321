"""Which parameters a method learns."""

import torch
from torch import nn

from ...errors import InvalidValueError
from ...models import Classifier
from ...models.classifier import Updates


def trainable_parameters(classifier: Classifier, updates: Updates, name: str) -> list[nn.Parameter]:
    """Return the parameters that the method of this name learns; a model in which it cannot learn them is refused."""
    parameters = classifier.trainable_parameters(updates)
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
        raise InvalidValueError(
            f"the model is {parameters[0].dtype}, in which the small steps of {name} round to nothing; "
            "expected float32: model.float()"
        )
    if updates == "norm" and not parameters:
        raise InvalidValueError(
            f"{name} updates the scale and shift of normalisation layers and the model has none; "
            "expected BatchNorm, LayerNorm, GroupNorm, InstanceNorm or RMSNorm with affine parameters. "
            "Use a method that updates other parameters: adapt(model, method='pl')"
        )
    return parameters
