"""What a model's call runs that Dynamo does not ask about: hooks of its modules and methods of their classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


class Code:
    """Hooks and methods as they are now, to be compared with at every call."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        methods = {(kind, name): None for kind in dict.fromkeys(map(type, modules)) for name in _called(kind)}
        self._hooks = [getattr(module, name) for module in modules for name in _HOOKS]
        self._kinds, self._names = zip(*methods, strict=True)
        self._seen = self._now()

    def _now(self) -> tuple[list[int], list[Any]]:
        return list(map(len, self._hooks)), list(map(getattr, self._kinds, self._names))

    def changed(self) -> bool:
        """Whether a hook came or went, or a method was exchanged."""
        return self._now() != self._seen or _has_any_global_hook()


def _called(kind: type) -> dict[str, None]:
    """The methods of a class that its `forward` names, directly or through others of them."""
    names, left = {"forward": None}, ["forward"]
    while left:
        method = inspect.unwrap(getattr(kind, left.pop()))
        code = getattr(getattr(method, "__func__", method), "__code__", None)
        for name in _names(code) if code else ():
            own = getattr(kind, name, None)
            if name not in names and inspect.isroutine(own) and own is not getattr(nn.Module, name, None):
                names[name] = None
                left.append(name)
    return names


def _names(code: CodeType) -> Iterator[str]:
    """What a function's code names, and that of the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
