"""Settings of layers and parameters that hold for a while."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def temporarily(things: Iterable[Any], **attributes: Any) -> Iterator[None]:
    """Set attributes of things inside, and give each thing its own values back."""
    before = [(thing, name, getattr(thing, name)) for thing in things for name in attributes]
    try:
        for thing, name, _ in before:
            setattr(thing, name, attributes[name])
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)
