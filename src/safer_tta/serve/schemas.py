"""What the API answers, for the OpenAPI page."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Alarm(Schema):
    kind: str
    since: float
    batch: int
    words: str


class Stream(Schema):
    name: str
    owner: str
    created: float
    last: float
    batches: int
    images: int
    frozen: bool
    health: dict[str, int]
    accuracy: float | None
    labelled: int
    suspicious: float | None
    abstained: int
    alarms: list[Alarm]
    state: str


class Streams(Schema):
    streams: list[Stream]


class Suspicion(Schema):
    mean: float
    median: float | None = None  # of reports that an earlier version wrote
    histogram: list[int]


class Report(Schema):
    stream: str
    number: int
    time: float
    images: int
    adapted: bool
    noted: bool
    seconds: float
    reliability: list[float | None] | None
    dropped: int | None
    views: list[str]
    suspicion: Suspicion | None
    abstained: int
    shares: list[float]
    accuracy: float | None
    alarm: str
    alarms: list[Alarm] = []  # this and the next are missing in reports that an earlier version wrote
    suspicious: float | None = None
    health: dict[str, int]


class Reports(Schema):
    reports: list[Report]


class Answer(Schema):
    stream: str
    number: int
    labels: list[int]
    classes: list[str]
    probabilities: list[list[float | None]]
    suspicion: list[float | None] | None
    abstain: list[bool]
    weights: list[list[float | None]]
    adapted: bool
    noted: bool
    model: str
    report: Report


class Model(Schema):
    version: str
    method: str
    predictor: str
    norm: str | None
    classes: list[str]
    side: int
    resize: str
    views: int
    abstain: float | None
    state_bytes: int
    limits: dict[str, Any]
    rollout: bool  # whether a new model is rolled out, and you may see how it compares


class Event(Schema):
    time: float
    owner: str
    stream: str
    what: str


class Audit(Schema):
    events: list[Event]


class StreamAlarm(Alarm):
    stream: str


class Alarms(Schema):
    alarms: list[StreamAlarm]


class Role(Schema):
    version: str
    model: str
    since: float


class Both(Schema):
    live: float | None
    shadow: float | None


class Rollout(Schema):
    live: Role
    shadow: Role
    waiting: int
    counts: dict[str, float]
    agreement: float | None
    flagged: Both
    accuracy: Both
    seconds: Both


class Switched(Rollout):
    switched: bool


class Error(Schema):
    error: str
    request_id: str  # which the log has too
