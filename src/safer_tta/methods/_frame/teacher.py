"""A slowly following copy of the adapted model."""

import copy

import torch

from ...predictors import Predictor
from .state import State


def make_teacher(predictor: Predictor, state: State) -> Predictor:
    """Return the predictor with a copy of its classifier, whose tensors are declared as state."""
    statistics = predictor.classifier.statistics
    shared = {} if statistics is None else {id(statistics.window): statistics.window}  # both see the same images
    classifier = copy.deepcopy(predictor.classifier, shared).requires_grad_(False)
    state.models["teacher"] = classifier.model
    state.constants["teacher"] = classifier  # its mean and std follow to a device too
    return predictor.fork(classifier, validate=False)  # what it sees was checked when it arrived


@torch.no_grad()
def follow(teacher: Predictor, student: Predictor, keep: float) -> None:
    """Set teacher = keep · teacher + (1 - keep) · student, for parameters; statistics of a stream are the student's."""
    for slow, fast in zip(teacher.classifier.parameters(), student.classifier.parameters(), strict=True):
        slow.lerp_(fast, 1 - keep)
    mine, theirs = teacher.classifier.statistics, student.classifier.statistics
    if mine is not None and theirs is not None:
        mine.copy_(theirs)
