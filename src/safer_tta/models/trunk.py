"""A model without its last layer: its features without hooks, so that it compiles as a whole."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .._internal.compiling import compile_function


class Trunk:
    """The model with an identity in place of its head.

    Only the modules that contain the head are copied, and only shallowly: parameters, buffers and all other layers are
    those of the model.
    """

    def __init__(
        self, model: nn.Module, head_name: str, prepare: Callable[[Tensor], Tensor], *, compile: bool = False
    ) -> None:
        self.originals, self.twins = [model], [_shallow(model)]
        *path, last = head_name.split(".")
        for name in path:
            self.originals.append(self.originals[-1].get_submodule(name))
            self.twins.append(_shallow(self.originals[-1]))
            self.twins[-2]._modules[name] = self.twins[-1]
        self.twins[-1]._modules[last] = nn.Identity()
        twin = self.twins[0]

        def run(images: Tensor) -> Any:
            return twin(prepare(images))

        self._run = compile_function(run, tuned=True) if compile else run

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a trunk is bound to the layers of its model, so a copied classifier builds its own."""

    def __call__(self, images: Tensor) -> Any:
        """Run images through the model without its head, in the mode that the model is in."""
        for original, twin in zip(self.originals, self.twins, strict=True):
            twin.training = original.training
        return self._run(images)


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin
