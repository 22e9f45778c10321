"""How much memory a stream takes."""

from ..errors import InvalidValueError
from ..methods import Method


def check_memory(method: Method, most: int) -> None:
    """Refuse a method whose state fits no stream into the memory, before a folder is taken."""
    needed = adapted_bytes(method)
    if needed > most:
        raise InvalidValueError(
            f"a stream of {method.name} takes {needed} bytes and {most} are allowed for all of them. "
            "Allow more memory, or serve a method that adapts less, such as tent"
        )


def adapted_bytes(method: Method) -> int:
    """Return the size of a stream once it has learnt: its state, and the optimiser's two numbers per parameter."""
    learning = sum(p.numel() * p.element_size() for p in method.classifier.model.parameters() if p.requires_grad)
    return method.state_bytes + 2 * learning
