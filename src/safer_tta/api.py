"""From a model to a method at work: `adapt` in one line, and `build` for runs and services."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import methods, predictors
from ._internal.defaults import METHOD, PREDICTOR
from .errors import InvalidValueError
from .methods import Method
from .models import Classifier
from .models.copies import copy_model
from .models.head import name_of
from .models.kinds import check_kind
from .models.norm import NORMS
from .models.normalisation import Statistics, advice, own_layer
from .models.outputs import Output
from .predictors import Predictor

log = logging.getLogger("safer_tta")


def adapt(
    model: nn.Module,
    method: str = METHOD,
    predictor: str | Mapping[str, Any] | Predictor = PREDICTOR,
    *,
    mean: Statistics | None = None,
    std: Statistics | None = None,
    head: str | nn.Module | None = None,
    output: Output | None = None,
    norm: str | None = None,
    seed: int | None = None,
    precision: str | None = None,
    compile: bool | None = None,
    copy: bool = True,
    validate: bool = True,
    **options: Any,
) -> Method:
    """Wrap a trained classifier: `adapt(model)(images)` predicts a batch and learns from it.

    Args:
        model: An nn.Module that returns class scores, or a Classifier. For CLIP, `safer_tta.models.zero_shot(...)`.
        method: A name from `safer_tta.methods.METHODS`.
        predictor: What the method asks for predictions: a name from `safer_tta.predictors.PREDICTORS` ("safer-g" is
            recommended, "safer" is the paper's own, "plain" the model itself), a dict with a name and options such as
            {"name": "safer", "views": 6}, or a Predictor whose settings to use.
        mean: The mean per channel that the model's inputs were normalised with, for pixels in [0,1]. By default it is
            what the model carries; a warning says if that is nothing. `mean=0, std=1` declares that there is none.
        std: The standard deviation per channel that belongs to `mean`.
        head: The layer that turns features into class scores, or its name, if it cannot be found.
        output: Where the scores are in what the model returns: a key or attribute, an index, or a function of it.
        norm: What replaces the batch-norm layers: "stream" (robust statistics that follow the stream), "medbn" (medians
            of the batch) or "model" (nothing). By default it is what the predictor prefers: "stream" for SAFER-G,
            "model" for all others.
        seed: Decides every draw. By default it is drawn from torch's own generator.
        precision: "bfloat16" or "float32" for passes through the model, not for learning. None keeps the Classifier's.
        compile: Whether to compile the model; None keeps the Classifier's. The first batch of every shape is slow then.
        copy: Whether to adapt a copy and leave the model as it is.
        validate: Whether to look at the values of every batch. Pass False for trusted, fast streams.
        **options: The method's own, such as lr.

    Returns:
        The method: call it with images (B,3,H,W), floats in [0,1] or uint8.

    Raises:
        UnknownNameError: If a method, predictor or norm of that name does not exist.
        InvalidValueError: If the model or an option cannot be used.
        InvalidTypeError: If an option does not exist or has the wrong type.
    """
    check_names(method, predictor, norm)
    with torch.inference_mode(False):
        check_kind(model)
        head = name_of(model, head)  # of the layer in the caller's model, before that is copied
        model = copy_model(model) if copy else model
        like = predictor.classifier if isinstance(predictor, Predictor) else None
        classifier = _classifier(model, like, mean, std, head, output)
        _say_normalisation(classifier)
        classifier.accelerate(precision=precision, compile=compile)
        return build(classifier, method, predictor, norm=norm, seed=seed, validate=validate, options=options)


def build(
    classifier: Classifier,
    method: str,
    predictor: str | Mapping[str, Any] | Predictor,
    *,
    norm: str | None = None,
    seed: int | None = None,
    validate: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Method:
    """Return a method that adapts this very classifier; `adapt` explains the arguments."""
    check_names(method, predictor, norm)
    asked = _predictor(classifier, predictor, seed)
    _use_norm(classifier, norm, asked, method)
    asked.validate = asked.validate and validate
    return methods.create(method, asked, **(options or {}))


def _use_norm(classifier: Classifier, norm: str | None, predictor: Predictor, method: str) -> None:
    """Replace the batch norms as asked, or else as preferred."""
    classifier.stop_following()  # of an earlier method
    if norm is None:
        preferred = preferred_norm(method, predictor)
        if preferred is not None:
            classifier.use_norm(NORMS[preferred])
    elif not classifier.use_norm(NORMS[norm]) and norm != "model":
        kind = "batch norm with running statistics" if NORMS[norm].follows else "batch-norm layer"
        raise InvalidValueError(f"norm is {norm!r} and the model has no {kind} to replace; leave norm out")


def preferred_norm(method: str, predictor: Predictor) -> str | None:
    """Return what replaces the batch norms if the user names nothing; None if the method has layers of its own."""
    return None if methods.METHODS[method].own_norms else predictor.norm


def check_names(method: str, predictor: str | Mapping[str, Any] | Predictor, norm: str | None = None) -> None:
    """Refuse an unknown method, predictor or norm before anything expensive starts."""
    methods.METHODS.find(method)
    if not isinstance(predictor, Predictor):
        predictors.PREDICTORS.find(predictors.parse(predictor)[0])
    if norm is not None:
        NORMS.find(norm)


def _classifier(
    model: nn.Module,
    like: Classifier | None,
    mean: Statistics | None,
    std: Statistics | None,
    head: str | None,
    output: Output | None,
) -> Classifier:
    """Return the model as a classifier; where nothing else is said, split and normalised like another one."""
    if isinstance(model, Classifier):
        if any(given is not None for given in (mean, std, head, output)):
            raise InvalidValueError("the model is a Classifier already; give mean, std, head and output to that")
        return model
    if like is not None:
        head = like.named_head if head is None else head
        output = like.output if output is None else output
        if mean is None and std is None and like.mean is not None and like.std is not None:
            mean, std = like.mean.flatten().tolist(), like.std.flatten().tolist()
    return Classifier(model, head=head, mean=mean, std=std, output=output)


def _say_normalisation(classifier: Classifier) -> None:
    """Log what images are normalised with; warn if nothing declares it, or if it seems to happen twice."""
    own = own_layer(classifier.model)
    if not classifier.normalised_by:
        warnings.warn(
            f"no normalisation is declared, so the model gets images in [0,1]. {'. '.join(advice(classifier.model))}",
            stacklevel=3,
        )
    elif classifier.mean is None or classifier.std is None:
        log.info("images are normalised by %s", classifier.normalised_by)
    else:
        mean, std = ([round(value, 4) for value in t.flatten().tolist()] for t in (classifier.mean, classifier.std))
        log.info("images are normalised with mean %s and std %s, from %s", mean, std, classifier.normalised_by)
        if own is not None and {*mean, *std} != {0, 1}:
            warnings.warn(
                f"mean and std were given, and the model seems to normalise images too (in layer {own!r}). If so: "
                "adapt(model, mean=0, std=1)",
                stacklevel=3,
            )


def _predictor(classifier: Classifier, predictor: str | Mapping[str, Any] | Predictor, seed: int | None) -> Predictor:
    if isinstance(predictor, Predictor):
        # A generator and a memory of its own: two wrapped models must not share them.
        return predictor.fork(classifier, seed=predictor.seed if seed is None else seed, fresh_memory=True)
    name, options = predictors.parse(predictor)
    own = options.pop("seed", seed)
    if seed is not None and own != seed:
        raise InvalidValueError(f"seed is {seed} and the predictor's own seed {own}; give one of them")
    return predictors.create(name, classifier, seed=own, **options)
