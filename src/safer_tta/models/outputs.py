"""What a model returns: where the class scores are in it, and whether they are those of the head."""

import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import InvalidTypeError, InvalidValueError
from . import head as heads

Output = str | int | Callable[[Any], Any]
Passed = Mapping[str, list[tuple[Tensor, Tensor]]]  # what entered and left each layer, once for every call


class Watch:
    """Inside, note what enters and leaves layers. Passes of other threads through the same layers are ignored."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self.passed: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}

    def __enter__(self) -> Self:
        caller = threading.get_ident()

        def note(calls: list[tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if threading.get_ident() == caller:
                calls.append((inputs[0], output))

        self._hooks = [
            layer.register_forward_hook(lambda _, inputs, output, calls=self.passed[name]: note(calls, inputs, output))
            for name, layer in self.layers.items()
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def inputs(self) -> list[Tensor]:
        """Return what entered the layers, in every call."""
        return [entered for calls in self.passed.values() for entered, _ in calls]

    def features(self) -> Tensor:
        """Return what entered the layers (B,d), side by side."""
        entered = [heads.over_places(calls[0][0]) for calls in self.passed.values()]
        return entered[0] if len(entered) == 1 else torch.cat(entered, dim=1)

    def scores(self) -> Tensor:
        """Return what left the layers (B,K), averaged."""
        left = [heads.over_places(calls[0][1]) for calls in self.passed.values()]
        return left[0] if len(left) == 1 else torch.stack(left).mean(dim=0)


def scores_of(output: Any, select: Output | None) -> Any:
    """Return the scores in a model's output: its `logits` if it has some, or what `select` names or computes."""
    if callable(select):
        return select(output)
    if select is None:
        return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(output, Mapping):
        known = select in output
    elif isinstance(select, int):
        known = isinstance(output, (tuple, list)) and -len(output) <= select < len(output)
    else:
        known = hasattr(output, select)
    if not known:
        raise InvalidValueError(f"output is {select!r} and the model returned {_kind(output)}; expected a part of it")
    return getattr(output, select) if isinstance(select, str) and not isinstance(output, Mapping) else output[select]


def check_output(output: Any, scores: Any, batch: int, explain: Callable[[], Passed]) -> None:
    """Refuse what is not a matrix of scores, and say which part of the output is one."""
    if not isinstance(scores, Tensor):
        passed = explain()
        part = next((key for key, value in _parts(output) if _fits(value, passed)), None)
        raise InvalidTypeError(
            f"the model returned {_kind(output)}; expected a tensor of class scores (B,K), or an object with such a "
            "tensor as .logits. "
            + (
                "It returns no scores of a linear layer. Use a model with a classification head, or give it class "
                "prototypes: adapt(safer_tta.models.zero_shot(model, prototypes))"
                if part is None
                else f"The scores are in it: adapt(model, output={part!r})"
            )
        )
    if scores.ndim != 2 or len(scores) != batch:
        raise InvalidValueError(
            f"the model returned {tuple(scores.shape)} for {batch} images; expected class scores ({batch}, classes). "
            "If they are a part of it: adapt(model, output=lambda output: ...)"
        )


def check_scores(scores: Tensor, watch: Watch, *, name: str, named: bool, explain: Callable[[], Passed]) -> bool:
    """Refuse scores that are not those of the head, called once on one feature vector per image.

    A head that was named may be followed by more: the scores are then the model's own, and False is returned.
    """
    runs = {part: len(calls) for part, calls in watch.passed.items()}
    wrong = next((part for part, count in runs.items() if count != 1), None)
    problem = ""
    if wrong is not None:
        problem = f"head {wrong!r} ran {runs[wrong]} times in one pass; expected once"
    else:
        features, found = watch.features(), watch.scores()
        if heads.same_scores(found, scores):
            return True
        if features.ndim != 2 or len(features) != len(scores):
            came = tuple(next(iter(watch.passed.values()))[0][0].shape)
            problem = f"head {name!r} received {came} for {len(scores)} images; expected ({len(scores)}, features)"
        elif found.shape != scores.shape:
            problem = f"head {name!r} returned {tuple(found.shape)} and the model {tuple(scores.shape)} scores"
        elif heads.is_probabilities(scores, found):
            undo = "torch.logit" if heads.same_scores(found, scores.logit()) else "torch.log"
            raise InvalidValueError(
                "the model returns probabilities, as after a softmax or sigmoid; expected the scores before it. "
                f"Return those, or undo it: adapt(model, output={undo})"
            )
        elif named:
            return False
        else:
            problem = (
                f"the model's output is not what its head {name!r} returned; expected the scores of the head, without "
                "another layer after it"
            )
    raise InvalidValueError(f"{problem}. {_way_on(explain(), scores, name)}")


def _way_on(passed: Passed, scores: Tensor, name: str) -> str:
    fitting = heads.explanation(passed, scores)
    if fitting:
        return f"The scores are those of {fitting!r}: adapt(model, head={fitting!r})"
    once = [part for part, calls in passed.items() if len(calls) == 1 and calls[0][1].shape[1:2] == scores.shape[1:]]
    if once:
        chosen = name if name in once else once[-1]
        return (
            f"To take its input as features and the model's own output as scores: adapt(model, head={chosen!r}). "
            f"Other layers with as many outputs: {', '.join(part for part in once if part != chosen) or 'none'}"
        )
    return f"No layer that runs once gives {scores.shape[1]} scores. Name one in a wrapper that calls it once"


def _fits(value: Any, passed: Passed) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and bool(heads.explanation(passed, value))


def _parts(output: Any) -> Iterable[tuple[str | int, Any]]:
    """Return the parts of an output with the key, attribute or index of each."""
    if isinstance(output, Mapping):
        return output.items()
    if isinstance(output, (tuple, list)):
        return list(enumerate(output))
    return vars(output).items() if hasattr(output, "__dict__") else []


def _kind(output: Any) -> str:
    """Return what an output is, with its parts: "a dict with scores, features"."""
    parts = ", ".join(str(key) for key, _ in _parts(output)) if not isinstance(output, Tensor) else ""
    return f"a {type(output).__name__}" + (f" with {parts}" if parts else "")
