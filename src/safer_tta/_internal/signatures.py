"""Check the names of options: an unknown one is refused with a list of those that exist."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import InvalidTypeError


def check_options(function: Callable[..., Any], options: Iterable[str], what: str, *, own: Iterable[str] = ()) -> None:
    """Refuse options that a function or class does not take; `own` are those of its parameters that are not options."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return  # it takes all options and refuses unknown ones itself
    check_names(options, [name for name in parameters if name not in own], what)


def check_names(options: Iterable[str], accepted: Iterable[str], what: str) -> None:
    """Refuse options that are not among those accepted."""
    known = list(accepted)
    unknown = [option for option in options if option not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        guess = f" (did you mean {near[0]!r}?)" if near else ""
        expected = f"expected some of {', '.join(known)}" if known else "it has none"
        raise InvalidTypeError(f"{what} has no option {', '.join(unknown)}{guess}; {expected}")


def changed_fields(instance: object) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults; of any other object, nothing."""
    if not dataclasses.is_dataclass(instance):
        return {}
    values = ((field, getattr(instance, field.name)) for field in dataclasses.fields(instance))
    return {field.name: value for field, value in values if value != _default(field)}


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
