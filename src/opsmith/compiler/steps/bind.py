"""What a step comes to once its sizes and its memory are known: calls of kernels, without the Python before them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class _Unbound(Exception):
    """The function computes something that is no kernel."""


class Kernels(TorchDispatchMode):
    """The calls of kernels that a function makes, and what they read that is new at every call.

    While it listens, none of them is made: they only write to what they are given.
    """

    def __init__(self, still: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.inputs: list[str] = []  # the function's arguments
        self.views: list[tuple[Tensor, Call]] = []  # of these
        self._still = still

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "opsmith" and not func._schema.returns:
            self.calls.append((func, tuple(args), dict(kwargs or {})))
            return None
        if not func.is_view:
            raise _Unbound
        view = func(*args, **(kwargs or {}))
        if isinstance(view, Tensor) and not self._still(view):
            self.views.append((view, (func, tuple(args), dict(kwargs or {}))))
        return view


def kernel_calls(
    fn: Callable[..., Any], arguments: Mapping[str, Any], still: Callable[[Tensor], bool]
) -> Kernels | None:
    """The kernels that a function calls for these arguments, or None where it does more than that.

    A tensor is `still` when it is at the same place at every call; the others come anew. All have the same sizes and
    strides at every call, so the function would take the same way through its Python.
    """
    found = Kernels(still)
    try:
        with found:
            fn(**arguments)
    except _Unbound:
        return None
    found.inputs = [k for k, v in arguments.items() if isinstance(v, Tensor) and not still(v)]
    named = {id(arguments[k]) for k in found.inputs} | {id(view) for view, _ in found.views}
    given = pytree.tree_leaves([call[1:] for call in found.calls])
    known = all(still(v) or id(v) in named for v in given if isinstance(v, Tensor))
    return found if known else None
