"""What the API answers, for the OpenAPI page."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


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
    state: str


class Streams(Schema):
    streams: list[Stream]


class Suspicion(Schema):
    mean: float
    histogram: list[int]


class Report(Schema):
    stream: str
    number: int
    time: float
    images: int
    adapted: bool
    seconds: float
    reliability: list[float | None] | None
    dropped: int | None
    views: list[str]
    suspicion: Suspicion | None
    abstained: int
    shares: list[float]
    accuracy: float | None
    alarm: str
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


class Event(Schema):
    time: float
    owner: str
    stream: str
    what: str


class Audit(Schema):
    events: list[Event]


class Error(Schema):
    error: str
