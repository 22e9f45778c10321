"""Random views of a batch: operators, and the pipelines that are drawn from them."""

from .operators import OPERATORS, Operator
from .pipeline import PRESETS, Draw, Pipeline, Preset, Stage
from .side_by_side import side_by_side

__all__ = ["OPERATORS", "PRESETS", "Draw", "Operator", "Pipeline", "Preset", "Stage", "side_by_side"]
