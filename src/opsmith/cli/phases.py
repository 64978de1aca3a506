"""What the demos share: a model and its kernels loaded side by side, phases that are timed, faults that are kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rich.console import Console

from opsmith import measure
from opsmith.kernels import libraries
from opsmith.operator import Kind, registry

T = TypeVar("T")


class Phases:
    """One run: prints as it goes, and keeps how long each phase took and what went wrong."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.faults: list[str] = []
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, what: str, show: bool = True) -> Iterator[None]:
        """Times a phase, with a spinner where there is a terminal (optimize has a progress line of its own)."""
        start = time.perf_counter()
        with self.console.status(what) if show else contextlib.nullcontext():
            yield
        self.seconds[what] = time.perf_counter() - start

    def load(self, what: str, model: Callable[[], T], kinds: Set[Kind]) -> T:
        """The model, with the kernels of what it may be made of loaded beside it; and prints what it runs on.

        Kernels that have to be built first are built in one run.
        """
        self._started = time.perf_counter()
        cards = [card for card in registry().values() if card.patterns and card.kind in kinds]
        names = [card.schemas[0].partition("(")[0] for card in cards if card.schemas]
        with ThreadPoolExecutor(1) as beside:
            kernels = beside.submit(libraries.load, *names)
            with self.phase(what):
                loaded = model()
            with self.phase("build and load the kernels"):
                native = kernels.result()
        self.machine = measure.describe()
        self.tier = libraries.status().tier if native else "none, plain PyTorch"
        self.console.print(
            f"{self.machine.cpu}, {self.machine.threads} threads, kernels: {self.tier}, torch {self.machine.torch}"
        )
        return loaded

    def data(self, **particular: Any) -> dict[str, Any]:
        """The JSON, with what is particular to this run; and prints how long the phases took."""
        self.seconds["total"] = time.perf_counter() - self._started
        phases = ", ".join(f"{what} {spent:.1f} s" for what, spent in self.seconds.items())
        self.console.print(f"time: {phases}")
        head = {"ok": not self.faults, "faults": self.faults, "machine": self.machine.to_json()}
        return {**head, "tier": self.tier, **particular, "seconds": self.seconds}
