"""How good answers are: figures, and the evaluation of a method on labelled batches."""

from .scores import Evaluation, Scores, evaluate

__all__ = ["Evaluation", "Scores", "evaluate"]
