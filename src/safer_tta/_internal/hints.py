"""What to use instead of an attribute that users look for in vain."""

from collections.abc import Mapping
from typing import NoReturn

# What users of a module look for, and where a method has it.
OF_MODULES = {
    "eval": "adapted.freeze(), after which it only predicts; the model is in eval mode already",
    "train": "adapted.unfreeze(), after which it learns again",
    "parameters": "adapted.classifier.parameters()",
    "named_parameters": "adapted.classifier.named_parameters()",
    "model": "adapted.classifier.model, or adapted.export() for a copy",
    "cuda": "adapted.to('cuda')",
    "cpu": "adapted.to('cpu')",
}


def refuse_attribute(instance: object, name: str, instead: Mapping[str, str], advice: str = "") -> NoReturn:
    """Raise the error for a missing attribute, with what to use instead of it if that is known."""
    if hasattr(type(instance), name):
        object.__getattribute__(instance, name)  # a property that failed: raise its own error once more
    message = f"{type(instance).__name__!r} object has no attribute {name!r}"
    hint = f"Use {instead[name]}" if name in instead else advice
    raise AttributeError(f"{message}. {hint}" if hint else message, name=name, obj=instance)
