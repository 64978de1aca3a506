"""`copy.deepcopy` of an optimized model: a model of its own, optimized alike."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

OURS = ("opsmith", "_compiled_call_impl", "__deepcopy__")  # what `optimize` puts into a model


class Copier:
    """What `copy.deepcopy` finds in an optimized model, and asks for the copy.

    Programs and packed weights belong to the model they were made for. So the copy is made of the model as it is
    without them, and optimized with the same configuration and the same choices.
    """

    def __init__(self, model: nn.Module, again: Callable[[nn.Module, Any], nn.Module]) -> None:
        self._model, self._again = weakref.ref(model), again

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        model = self._model()
        assert model is not None
        session: Any = model.opsmith
        session.packing.refuse("copy.deepcopy")
        with _plain(model, [*session.packing.modules, *(site.module for site in session.latent.sites)]):
            twin = copy.deepcopy(model, memo)
        return self._again(twin, session)

    def __reduce__(self) -> Any:
        return (type(None), ())  # a pickled model is one that was never optimized


@contextmanager
def _plain(model: nn.Module, rewritten: list[nn.Module]) -> Iterator[None]:
    """The model without what was put into it, for a moment."""
    held = [(model, {name: model.__dict__.pop(name) for name in OURS if name in model.__dict__})]
    held += [(m, {"forward": m.__dict__.pop("forward")}) for m in rewritten if "forward" in m.__dict__]
    try:
        yield
    finally:
        for module, content in held:
            module.__dict__.update(content)
