"""Calls that Dynamo need not be asked about: it let one like it through, and nothing it looked at has changed since.

Before every call Dynamo checks all that a model's code read while it was captured: a thousand guards, which wait for
memory when a program of many megabytes has just run. We look at the same objects, but only whether anything was written
into them, and run what Dynamo would have run. Where we cannot tell, Dynamo is asked.
"""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from opsmith.kernels import calls

_MOST = 1 << 10  # calls to remember
_PATIENCE = 1 << 12  # calls to wait at most until a model that changes is looked at again
_NONE = object()
# Nothing can be written into these; what is in a tuple that was looked at has a guard of its own.
_IMMUTABLE = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        tuple,
        frozenset,
        range,
        slice,
        types.NoneType,
        types.EllipsisType,
    ),
    *(types.CodeType, types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodType, types.MappingProxyType),
    *(property, staticmethod, classmethod),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


class Standing:
    """The calls of one model, whose `forward` Dynamo compiles, that have been let through without gradients."""

    def __init__(self, forward: Callable[..., Any]):
        self._forward = forward
        self._routes: dict[tuple[Any, ...], _Route] = {}
        self._wait = self._patience = 1  # calls

    def route(self, key: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
        """What to call for inputs of this key; None where Dynamo has to be asked."""
        route = self._routes.get(key)
        if route is None:
            return None
        if not route.stands():
            self._routes.clear()
            self._wait = self._patience = min(2 * self._patience, _PATIENCE)
            return None
        return route.run if route.apart(tensors) else None

    def learn(
        self,
        key: tuple[Any, ...],
        tensors: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Take note of a call that Dynamo has just let through."""
        self._wait -= 1
        if self._wait > 0 or len(self._routes) >= _MOST:
            return
        try:
            route = _route(self._forward, args, kwargs, self._routes.values())
        except Exception:  # Dynamo's guards have no public face: with another PyTorch it is asked, as ever
            route = None
        if route is None:
            self._wait = _PATIENCE
        elif route.apart(tensors):
            self._routes[key] = route


class _Route:
    """What Dynamo made of a model under one set of guards, and a watch on what these read."""

    def __init__(self, entry: Any, forward: Callable[..., Any], objects: tuple[Any, ...]):
        from torch._C._dynamo.eval_frame import get_eval_frame_callback
        from torch._C._dynamo.guards import GlobalStateGuard
        from torch._dynamo import eval_frame

        self.guards = entry.guard_manager
        self.run = types.FunctionType(
            entry.code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
        )
        self._watch = calls.watch(objects, False)
        self._state = GlobalStateGuard()
        self._own = {id(o) for o in objects if isinstance(o, torch.Tensor)}
        self._eval_frame = eval_frame
        self._callback = get_eval_frame_callback

    def stands(self) -> bool:
        """Whether Dynamo would let the same call through again."""
        return (
            self._watch is not None
            and self._watch()
            and self._state.check()
            and calls.undiverted()
            and self.guards.cache_entry is not None  # Dynamo has not been told to forget
            and self._eval_frame._stance.stance == "default"
            and self._callback() is None  # nor is it reading our caller
        )

    def apart(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no tensor is given twice or is one of the model's own, which a graph may take for two."""
        given = {id(t) for t in tensors}
        return len(given) == len(tensors) and given.isdisjoint(self._own)


def _route(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], known: Collection[_Route]
) -> _Route | None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    free = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    variables = {"args": args, "kwargs": kwargs} | {name: cell.cell_contents for name, cell in free}
    for entry in _debug_get_cache_entry_list(forward.__code__):
        manager, code = entry.guard_manager, entry.code
        if not manager.check(variables):
            continue
        # Behind a break of the graph, or where no graph was begun, Dynamo reads on in the functions that are called.
        whole = any("compiled_fn" in n for n in code.co_names) and not any(
            "resume" in n for n in code.co_names
        )
        if not whole or code.co_freevars != forward.__code__.co_freevars:
            return None
        route = next((r for r in known if r.guards is manager), None)
        if route is None:
            objects = _objects(manager, variables, forward.__globals__)
            route = None if objects is None else _Route(entry, forward, objects)
        # Once more: what changes from here on is seen.
        return route if route is not None and manager.check(variables) and route.stands() else None
    return None


def _objects(manager: Any, variables: Mapping[str, Any], globals_: dict[str, Any]) -> tuple[Any, ...] | None:
    """What guards read, but for a call's own inputs; None where something in it could change unseen."""
    from torch._dynamo.guards import _get_closure_vars

    device = vars(torch.utils._device)  # the default one stands there, and a guard asks for it by no source
    found: dict[int, Any] = {id(device): device}
    known, scope = _get_closure_vars(), {"L": variables, "G": globals_}
    nodes: list[tuple[Any, Any]] = [(manager.root, variables)]
    while nodes:
        node, value = nodes.pop()
        for one in () if value is variables else _written(value):
            if one is None:
                return None
            found[id(one)] = one
        for child, name in _children(node):
            source = child.get_source()
            if source.startswith(("L['args']", "L['kwargs']")):
                continue
            if name is None:
                nodes.append((child, eval(source, known, scope)))  # as Dynamo itself does
            elif source == node.get_source():  # only whether there is such an attribute
                if inspect.getattr_static(value, name, _NONE) is _NONE:
                    return None
            elif _is_plain(value, name):
                nodes.append((child, getattr(value, name)))
            else:
                return None
    return tuple(found.values())


def _children(node: Any) -> Iterator[tuple[Any, str | None]]:
    """What else guards read of a value, and the name of the attribute, where it is one."""
    from torch._C._dynamo.guards import DictGuardManager, GetAttrGuardAccessor

    for accessor, child in zip(node.get_accessors(), node.get_child_managers(), strict=True):
        yield child, accessor.get_attr_name() if isinstance(accessor, GetAttrGuardAccessor) else None
    if isinstance(node, DictGuardManager):
        for pair in node.get_key_value_managers().values():
            yield from ((child, None) for child in pair if child is not None)


def _is_plain(owner: Any, name: str) -> bool:
    """Whether an attribute is what stands in its owner, or in the owner's type, and no code computes it."""
    if isinstance(owner, types.ModuleType | types.FunctionType | types.CellType | type | property):
        return True
    stands = inspect.getattr_static(owner, name, _NONE)
    return name == "__class__" or stands is getattr(owner, name) or isinstance(stands, types.FunctionType)


def _written(value: Any) -> Iterator[Any]:
    """What is written into when a value changes; None where that cannot be said."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return
    if isinstance(value, types.ModuleType):
        yield vars(value)
    elif isinstance(value, type | types.CellType) or kind in (dict, list, torch.Tensor, torch.nn.Parameter):
        yield value
    elif isinstance(value, types.FunctionType):
        yield from (value, vars(value))
    elif hasattr(value, "__dict__") and all(map(_holds_no_more, kind.__mro__)):
        yield from (value, vars(value), kind)
    else:
        yield None


def _holds_no_more(kind: type) -> bool:
    """Whether what a type's instances hold stands in their `__dict__`, or in themselves as dictionaries."""
    by_statement = kind.__flags__ & 1 << 9  # a class statement made it, no extension
    # The order of an OrderedDict changes unseen only by `move_to_end`.
    return kind in (object, dict, OrderedDict) or bool(by_statement and not kind.__dict__.get("__slots__"))
