"""Stochastic views of a batch: operators and the pipelines drawn from them."""

from .operators import OPERATORS, Operator, operator
from .pipeline import PRESETS, Draw, Pipeline, Step

__all__ = ["OPERATORS", "PRESETS", "Draw", "Operator", "Pipeline", "Step", "operator"]
