"""The ladder of an audit, as data: who attacks, from the weakest attacker to the strongest, and how."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..attacks import ATTACKS, describe

EFFORTS = ("quick", "full")


@dataclass(frozen=True)
class Threat:
    """One rung of the ladder."""

    name: str  # what users type
    attacker: str  # who attacks, in one sentence
    attack: str | None = None  # a key of `safer_tta.attacks.ATTACKS`; None for clean images
    quick: Mapping[str, Any] = field(default_factory=dict)  # what the attack is told besides its defaults
    full: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[int, int] = (64, 512)  # how many images, at quick and at full effort
    rate: float = 100.0  # percent of each batch that is attacked
    times: int = 1  # how often an attacked image is sent; it is right if it is right every time
    suspected: bool = False  # whether the attack needs a predictor that estimates suspicion

    @property
    def live(self) -> bool:
        """Whether it goes through the deployed predictor, batch by batch."""
        return self.attack is not None and ATTACKS[self.attack].live

    @property
    def poisons(self) -> bool:
        """Whether it harms the answers to other people's images, which are the ones that count then."""
        return self.attack is not None and ATTACKS[self.attack].poisons

    def told(self, effort: str) -> Mapping[str, Any]:
        return {"quick": self.quick, "full": self.full}[effort]

    def count(self, effort: str) -> int:
        return self.images[EFFORTS.index(effort)]


# The white box, at quick and at full effort: later threats go on from there.
BRIEFLY: Mapping[str, Any] = {"draws": 2, "steps": 20, "step": 2 / 255}
THOROUGHLY: Mapping[str, Any] = {"draws": 4, "restarts": 2}

LADDER = (
    Threat("clean", "There is no attack.", images=(128, 1024)),
    Threat("pgd", "They have a model of their own and do not know the defence.", "pgd", images=(128, 1024)),
    Threat(
        "transfer", "They have a model of their own, and make images that carry over to other models.", "transfer",
        full={"steps": 50}, images=(128, 1024),
    ),
    Threat(
        "aware", "They have a model of their own, and put the same defence around it.", "aware",
        quick={"draws": 1, "steps": 10}, full={"draws": 4},
    ),
    Threat(
        "square", "They see the probabilities of every answer, and send many queries.", "square",
        quick={"queries": 100}, full={"queries": 1000}, images=(64, 256),
    ),
    Threat(
        "rays", "They see only the class of every answer, and send many queries.", "rays",
        quick={"queries": 100}, full={"queries": 1000}, images=(64, 256),
    ),
    Threat(
        "white-box", "They have the adapted model, know the defence, and compute gradients through both.", "eot-margin",
        BRIEFLY, THOROUGHLY, images=(64, 256),
    ),
    Threat(
        "cautious", "They know all of this, and also keep the suspicion low.", "eot-margin",
        {**BRIEFLY, "caution": 0.3}, {**THOROUGHLY, "caution": 0.3}, images=(64, 256), suspected=True,
    ),
    Threat(
        "resubmission", "They send each image of the white box ten times, and one wrong answer is enough.",
        "eot-margin", BRIEFLY, THOROUGHLY, images=(64, 256), times=10,
    ),
    Threat(
        "dia", "They own a fifth of each batch, and harm the answers to the images of others.", "dia",
        {"eps": 16 / 255, "steps": 20, "step": 2 / 255}, {"eps": 16 / 255}, images=(64, 256), rate=20.0,
    ),
)  # fmt: skip
BY_NAME = {threat.name: threat for threat in LADDER}

# What no attack here does.
BEYOND = (
    "An attacker who also computes how the model will have adapted to the attacked images.",
    "Changes of another kind than small ones of every pixel, such as stickers, other objects or bad weather.",
    "More queries, steps or restarts than this audit took, and larger budgets.",
)


def untried(measured: Iterable[str]) -> list[str]:
    """Return in sentences what an audit that measured these threats did not try."""
    names = set(measured)
    rungs = [f"{threat.name}: {threat.attacker}" for threat in LADDER if threat.name not in names]
    known = {threat.attack for threat in LADDER}
    others = [f"{name}: {describe(name)['what']}" for name in sorted(ATTACKS) if name not in known]
    return [*rungs, *others, *BEYOND]
