"""The views of several batches at once: pipelines that have the same operator at one place take one call together.

An operator treats every image by itself, so the views are those that each batch would get alone. On a GPU, where a
small batch takes as long as a large one, eight batches take little longer than one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .operators import OPERATORS
from .pipeline import Draw, Stage


def side_by_side(images: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the views of several batches (G,B,3,H,W), an image of each batch in turn: (V,B,G,3,H,W)."""
    batches, size = images.shape[:2]
    pipelines = {(g, v): stages for g, draw in enumerate(draws) for v, stages in enumerate(draw.pipelines, start=1)}
    made = {place: images[place[0]] for place in pipelines}
    for number in range(max((len(stages) for stages in pipelines.values()), default=0)):
        alike: dict[str, list[tuple[int, int]]] = {}
        for place, stages in pipelines.items():
            if number < len(stages):
                alike.setdefault(stages[number].name, []).append(place)
        for places in alike.values():
            together = torch.cat([made[place] for place in places])
            results = _apply([pipelines[place][number] for place in places], together)
            made.update(zip(places, torch.split(results, size), strict=True))
    views = images.new_empty(1 + len(draws[0].pipelines), size, batches, *images.shape[2:])
    views[0] = images.transpose(0, 1)
    for (g, v), view in made.items():
        views[v, :, g] = view
    return views


def _apply(stages: Sequence[Stage], images: Tensor) -> Tensor:
    """Apply stages of one operator to their batches, one after the other in `images`."""
    operator = OPERATORS[stages[0].name]
    drawn = [stage.values for stage in stages if stage.values is not None]
    noise = [torch.Generator(images.device).manual_seed(stage.seed) for stage in stages if operator.random]
    return operator(images, torch.cat(drawn) if drawn else None, generator=noise)
