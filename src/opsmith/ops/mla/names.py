"""What arguments are called beside the names of the published kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

BESIDE = {
    "input_norm": "gamma0",
    "input_shift": "beta0",
    "q_norm": "gamma1",
    "q_shift": "beta1",
    "kv_norm": "gamma2",
    "k_up": "wuk",
    "v_up": "wuv",
    "slots": "slot_mapping",
    "latent_scale": "ctkv_scale",
    "query_scale": "q_nope_scale",
}
for _i, (_ours, _theirs) in enumerate((("down", "wdqkv"), ("up", "wuq"))):
    BESIDE |= {_ours: _theirs, f"{_ours}_int8": f"{_theirs}_int8"}
    BESIDE |= {f"{_ours}_{part}": f"{part}{_i}" for part in ("bias", "descale", "scale", "offset")}


def either_name(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, each of whose arguments may be called by either name.

    >>> def width(wuk): return wuk.shape[2]
    >>> either_name(width)(k_up=torch.ones(4, 16, 32))
    32
    """
    taken = inspect.signature(function).parameters
    beside = {ours: published for ours, published in BESIDE.items() if published in taken}
    ours_alone = frozenset(beside)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if not ours_alone.isdisjoint(options):  # one step where all names are the published ones
            for ours in ours_alone.intersection(options):
                if beside[ours] in options:
                    raise TypeError(
                        f"{function.__name__}: {ours} and {beside[ours]} are one argument; give one"
                    )
                options[beside[ours]] = options.pop(ours)
        return function(*args, **options)

    return call
