"""PyTorch's Inductor as a contestant: for which operators, in what time, and what of it can be done beforehand."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping
from typing import Any

import torch

from opsmith.compiler.reasons import raised
from opsmith.operator import Implementation, Kind, Operator

# Inductor generates code of its own for these; for the rest it calls the library that eager calls.
KINDS = (Kind.NORM, Kind.SOFTMAX, Kind.ACTIVATION)


class Inductor:
    """The definitions of operators, compiled by Inductor within a budget of seconds."""

    def __init__(self, seconds: float):
        self._left = seconds
        self._compiled: dict[str, Implementation] = {}
        self._ran: set[str] = set()
        self._probing: concurrent.futures.Future[Any] | None = None

    def get_ready(self) -> None:
        """Begin what Inductor does before its first compilation, in the background.

        Where its cache is empty it tries the C++ compiler on one instruction set after the other, for some ten
        seconds in which this process waits. They pass while a model is captured, which keeps one core busy.
        """
        # Here and not in the thread: two threads that import PyTorch's modules may meet half of one.
        from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401

        pool = concurrent.futures.ThreadPoolExecutor(1, "opsmith-inductor")
        self._probing = pool.submit(cpu_vec_isa.pick_vec_isa)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Return once nothing runs in the background: before anything is timed."""
        if self._probing is not None:
            # Where it failed, so will the compilation, and say why.
            concurrent.futures.wait([self._probing])
            self._probing = None

    def enter(
        self, card: Operator, call: Mapping[str, Any], key: str, may_compile: bool, forced: bool
    ) -> Implementation | str:
        """The contestant for this call, or why there is none: a model at work never waits for a compilation.

        The budget is looked at before each one; whoever asked for Inductor by name, `forced`, is not held to it.
        """
        if card.kind not in KINDS:
            return "Inductor calls the same library as eager for this operator"
        if key in self._ran:
            return self._compiled[card.name]
        if not may_compile and not forced:
            return "not tried at sizes that were no example"
        if self._left <= 0 and not forced:
            return "not tried: the time for Inductor's compilations is spent"
        if card.name not in self._compiled:
            compiled = torch.compile(card.reference, dynamic=True)
            self._compiled[card.name] = Implementation("inductor", compiled)
        start = time.monotonic()
        try:
            self._compiled[card.name].fn(**call)
        except Exception as error:  # whatever a foreign compiler raises is its reason for not taking part
            return f"failed to compile: {raised(error)}"
        finally:
            self._left -= time.monotonic() - start
        self._ran.add(key)
        return self._compiled[card.name]

    def compiled(self, card: Operator) -> Implementation | None:
        """What there is of this operator."""
        return self._compiled.get(card.name)
