"""Every exception that this library raises on purpose.

    SaferError
    ├── InvalidValueError   (ValueError)    an argument, an option or a file's content cannot be used
    │   ├── UnknownNameError                a name is not registered
    │   ├── DataError                       a dataset is missing or damaged
    │   ├── PlanError                       a plan cannot be carried out
    │   ├── StoreError                      something in a store is missing, damaged or of another run
    │   └── TensorFileError                 a safetensors file cannot be read
    ├── InvalidTypeError    (TypeError)     an argument has the wrong type, or an option does not exist
    ├── MissingPackageError (ImportError)   a package of an optional extra is not installed
    ├── NotFiniteError      (RuntimeError)  a gradient is NaN or infinite
    ├── JournalError        (RuntimeError)  the folder of a service cannot be used
    │   ├── StorageError                    nothing can be written there: the disk is full, or the folder is gone
    │   └── DamagedStreamError              the stored state of one stream is not what was written
    └── ServiceError        (RuntimeError)  a service refused a request, or did not answer

A message says what came, what was expected and what to do about it. Anything else that escapes is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SaferError(Exception):
    """The base of all exceptions of this library."""


class InvalidValueError(SaferError, ValueError):
    """An argument, an option or a file's content cannot be used."""


class UnknownNameError(InvalidValueError):
    """A name is not registered. `kind` says what was named: method, predictor, attack and so on."""

    kind = ""

    @classmethod
    def of(cls, kind: str, name: object, known: Iterable[object], *, advice: str = "") -> UnknownNameError:
        """Make the error for a name, with the nearest known one; the command line calls the option by its `kind`."""
        names = sorted(map(str, known))
        near = [repr(found) for found in difflib.get_close_matches(str(name), names, n=1)]
        first, plus, norm = str(name).partition("+")
        if kind == "method" and plus and first in names:
            near = [f"{first!r} with norm {norm!r}"]
        guess = f" (did you mean {near[0]}?)" if near else ""
        error = cls(f"{kind} {name!r} is unknown{guess}; expected one of {', '.join(names)}{advice}")
        error.kind = kind
        return error


class DataError(InvalidValueError):
    """A dataset is missing, damaged or laid out in another way."""


class PlanError(InvalidValueError):
    """A plan cannot be carried out; the message says where and why."""


class StoreError(InvalidValueError):
    """Something in a store is missing, damaged or of another run."""


class TensorFileError(InvalidValueError):
    """A safetensors file cannot be read."""


class InvalidTypeError(SaferError, TypeError):
    """An argument has the wrong type, or an option does not exist."""


class MissingPackageError(SaferError, ImportError):
    """A package of an optional extra is not installed."""


class NotFiniteError(SaferError, RuntimeError):
    """A gradient is NaN or infinite; it was found before the optimiser could use it."""


class JournalError(SaferError, RuntimeError):
    """The folder of a service cannot be used."""


class StorageError(JournalError):
    """Nothing can be written to the folder of a service: the disk is full, or the folder is gone."""


class DamagedStreamError(JournalError):
    """The stored state of one stream is not what was written."""


class ServiceError(SaferError, RuntimeError):
    """A service refused a request, or did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status  # of HTTP; 0 if the service could not be reached or broke off its answer
        self.message = message  # the reason, in the service's words

    def __str__(self) -> str:
        return f"{self.message} (HTTP {self.status})" if self.status else self.message
