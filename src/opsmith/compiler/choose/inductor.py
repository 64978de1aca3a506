"""PyTorch's Inductor as a contestant: for which operators, and in what time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opsmith.compiler.reasons import raised
from opsmith.operator import Implementation, Kind, Operator

# Inductor generates code of its own for these; for the rest it calls the library that eager calls.
KINDS = (Kind.NORM, Kind.SOFTMAX, Kind.ACTIVATION)
# Seconds, at the least, in which its code is called by itself: the guards. Here it was 45 microseconds.
CALL = 20e-6


class Inductor:
    """The definitions of operators, compiled by Inductor within a budget of seconds."""

    def __init__(self, seconds: float):
        self._left = seconds
        self.compiled: dict[str, Implementation] = {}
        self._ran: set[str] = set()

    def enter(
        self,
        card: Operator,
        call: Mapping[str, Any],
        key: str,
        may_compile: bool,
        forced: bool,
        short: Callable[[], bool] = lambda: False,
    ) -> Implementation | str:
        """The contestant for this call, or why there is none: a model at work never waits for a compilation.

        The budget is looked at before each one, and whether another one is so `short` that it can't be beaten; whoever
        asked for Inductor by name, `forced`, is held to neither.
        """
        if card.kind not in KINDS:
            return "Inductor calls the same library as eager for this operator"
        if key in self._ran:
            return self.compiled[card.name]
        if not may_compile and not forced:
            return "not tried at sizes that were no example"
        if self._left <= 0 and not forced:
            return "not tried: the time for Inductor's compilations is spent"
        if not forced and short():
            return (
                f"not tried: another takes less than the {CALL * 1e6:.0f} us in which compiled code is called"
            )
        if card.name not in self.compiled:
            compiled = torch.compile(card.reference, dynamic=True)
            self.compiled[card.name] = Implementation("inductor", compiled)
        sizes = [size for v in call.values() if isinstance(v, Tensor) for size in v.shape]
        start = time.monotonic()
        try:
            with compiling(general=1 not in sizes and 0 not in sizes):
                self.compiled[card.name].fn(**call)
        except Exception as error:  # whatever a foreign compiler raises is its reason for not taking part
            return f"failed to compile: {raised(error)}"
        finally:
            self._left -= time.monotonic() - start
        self._ran.add(key)
        return self.compiled[card.name]


@contextmanager
def compiling(general: bool) -> Iterator[None]:
    """The settings under which Inductor compiles for us; what it finds out under them is forgotten afterwards.

    Before its first compilation it tries the C++ compiler on one instruction set after the other, for nine seconds
    where its cache is empty. Here it takes for granted what the processor has: our kernels were built so, and where
    the compiler cannot do it after all, the compilation fails and Inductor does not take part. Whoever compiles with
    it in this process later gets the trials. `general` code serves a batch of one too.
    """
    from torch._inductor import config, cpu_vec_isa

    untried = config.cpp.vec_isa_ok is None and not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize
    try:
        with (
            config.patch({"cpp.vec_isa_ok": True} if untried else {}),
            torch.fx.experimental._config.patch(backed_size_oblivious=general),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        if untried:
            forget_trials()


def forget_trials() -> None:
    """Let Inductor try the C++ compiler anew before its next compilation."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for isa in (cpu_vec_isa.VecAVX512, cpu_vec_isa.VecAVX512VNNI, cpu_vec_isa.VecAMX):
        isa.__bool__.cache_clear()
