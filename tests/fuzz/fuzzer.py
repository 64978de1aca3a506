"""What a fuzzer is: cases that Hypothesis draws, and a check that raises where one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@dataclass
class Fuzzer:
    """One kind of cases; `seen` counts those that were checked, those of shrinking among them."""

    name: str
    cases: SearchStrategy[Any]
    check: Callable[[Any], None]
    seen: int = 0

    def run(self, examples: int, seed: int | None = None, **more: Any) -> None:
        """Check so many cases: the same ones every time, or those of a seed; raises for the least wrong one."""

        @given(self.cases)
        def holds(case: Any) -> None:
            self.seen += 1
            self.check(case)

        # A seed takes the database away, which the settings give back: so they come last.
        settings(**_how(examples, seed, more))(holds if seed is None else hypothesis.seed(seed)(holds))()


@dataclass
class StateFuzzer:
    """Sequences of calls on something that remembers; a case is a sequence."""

    name: str
    machine: type[RuleBasedStateMachine]
    seen: int = 0

    def run(self, examples: int, seed: int | None = None, **more: Any) -> None:
        """As of `Fuzzer`."""

        def made() -> RuleBasedStateMachine:
            self.seen += 1
            return self.machine()

        if seed is not None:
            hypothesis.seed(seed)(made)
        run_state_machine_as_test(made, settings=settings(**_how(examples, seed, more)))


def _how(examples: int, seed: int | None, more: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_examples": examples,
        "deadline": None,
        "derandomize": seed is None,
        "suppress_health_check": _SLOW,
        **more,
    }
