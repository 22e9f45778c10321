"""What an audit must show, such as "dia>=90,transfer>=80": accuracies in percent that threats must leave."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .._internal.checks import one_of
from ..errors import InvalidValueError
from .threats import BY_NAME


@dataclass(frozen=True)
class Requirement:
    """A threat, and the accuracy in percent that it must leave."""

    threat: str
    least: float

    def met(self, accuracies: Mapping[str, float]) -> bool:
        return accuracies.get(self.threat, -1.0) >= self.least

    def problem(self, accuracies: Mapping[str, float]) -> str:
        """Say how it is not met."""
        found = accuracies.get(self.threat)
        came = "was not measured" if found is None else f"left an accuracy of {found:.1f} %"
        return f"{self.threat} {came}; required are {self.least:g} %"


def parse(text: str) -> list[Requirement]:
    """Read requirements such as "dia>=90,transfer>=80"."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([\w-]+)\s*>=\s*(\d+(?:\.\d+)?)\s*", part)
        if match is None or float(match[2]) > 100:
            raise InvalidValueError(
                f"require is {text!r}; expected threats with the accuracy in percent that they must leave, such as "
                "dia>=90,transfer>=80"
            )
        one_of(BY_NAME, threat=match[1])
        found.append(Requirement(match[1], float(match[2])))
    return found
