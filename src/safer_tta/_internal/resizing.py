"""How images come to the side that a model takes: the whole image is stretched to a square, or its centre is taken."""

from typing import Any, NamedTuple, Self

from ..errors import InvalidValueError

FILTERS = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers for them


class Resize(NamedTuple):
    """A rule such as "stretch", "crop 0.875" or "crop 0.9 bicubic"."""

    share: float | None = None  # of the shorter side that the crop keeps; None stretches the whole image
    filter: str = "bilinear"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a rule; "crop" keeps the whole shorter side."""
        try:
            rule, *rest = text.split()
            filter = rest.pop() if rest and rest[-1] in FILTERS else "bilinear"
            share = float(rest.pop() if rest else 1) if rule == "crop" else None
            if rule in ("stretch", "crop") and not rest and (share is None or 0.1 <= share <= 1):
                return cls(share, filter)
        except ValueError:
            pass
        raise InvalidValueError(
            f"resize is {text!r}; expected 'stretch', or 'crop' with the share of the shorter side that is kept, and "
            "then 'bilinear' or 'bicubic': 'crop 0.875 bicubic'"
        )

    def __str__(self) -> str:
        return f"{'stretch' if self.share is None else f'crop {self.share:g}'} {self.filter}"

    def apply(self, picture: Any, side: int) -> Any:
        """Return a picture of Pillow's as one of side × side pixels."""
        width, height = picture.size
        kept = (width, height) if self.share is None else (self.share * min(width, height),) * 2
        if kept == (side, side) == (width, height):
            return picture
        # A part is scaled, not the whole: of a long strip the whole would be a picture of any size.
        left, top = (width - kept[0]) / 2, (height - kept[1]) / 2
        return picture.resize((side, side), FILTERS[self.filter], box=(left, top, left + kept[0], top + kept[1]))


STRETCH = Resize()
