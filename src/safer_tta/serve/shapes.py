"""What the API answers with, for the OpenAPI page; a test holds the answers to it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Stream(Shape):
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


class Streams(Shape):
    streams: list[Stream]


class Suspicion(Shape):
    mean: float
    histogram: list[int]


class Report(Shape):
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


class Reports(Shape):
    reports: list[Report]


class Answer(Shape):
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


class Model(Shape):
    version: str
    method: str
    predictor: str
    classes: list[str]
    side: int
    views: int
    abstain: float
    state_bytes: int
    limits: dict[str, Any]


class Event(Shape):
    time: float
    owner: str
    stream: str
    what: str


class Audit(Shape):
    events: list[Event]


class Error(Shape):
    error: str
