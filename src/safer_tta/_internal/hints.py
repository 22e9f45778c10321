"""What to use instead of an attribute that users look for in vain."""

from collections.abc import Mapping


def no_attribute(instance: object, name: str, instead: Mapping[str, str], advice: str = "") -> AttributeError:
    """Return the error for a missing attribute, with what to use instead of it if that is known."""
    message = f"{type(instance).__name__!r} object has no attribute {name!r}"
    hint = f"use {instead[name]}" if name in instead else advice
    return AttributeError(f"{message}. {hint}" if hint else message, name=name, obj=instance)
