"""What a guard knows of one stream."""

from collections import Counter, deque
from dataclasses import dataclass, field

from torch import Tensor

from ..methods import Snapshot
from ..models.window import MOST_INDEPENDENT
from .anchor import Anchor
from .watch import Watch

COUNTERS = (
    "batches",
    "collapses",
    "rollbacks",
    "drifted_snapshots",
    "concentrated",
    "periodic_resets",
    "skipped_updates",
    "non_finite_answers",
    "non_finite_losses",
    "non_finite_gradients",
    "non_finite_weights",
)


@dataclass
class Memory:
    """What a guard knows of one stream. A guard that serves several streams in turn has one for each."""

    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTERS, 0)))
    anchor: Anchor = field(default_factory=Anchor)
    behind: float = 0.0  # seconds
    since_reset: int = 0
    judged: int = 0  # batches with an answer that can be judged
    recent: deque[Tensor] = field(default_factory=deque)  # probabilities
    healthy: list[tuple[int, Snapshot]] = field(default_factory=list)
    last: deque[int] = field(default_factory=lambda: deque(maxlen=int(MOST_INDEPENDENT)))  # classes that were answered
    # A state counts as healthy a whole window after it was taken; until then it may belong to an unseen collapse.
    pending: deque[tuple[int, Snapshot]] = field(default_factory=deque)
    watch: Watch = field(default_factory=Watch)

    @property
    def snapshots(self) -> list[Snapshot]:
        """The states that it keeps, oldest first."""
        return [snapshot for _, snapshot in (*self.healthy, *self.pending)]
