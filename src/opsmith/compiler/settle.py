"""Whether a merged site runs as one call or as its parts: the sum of the parts' times against its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from opsmith.compiler.operands import evaluate
from opsmith.compiler.select import Choice
from opsmith.compiler.site import Site

Choose = Callable[[Site, dict[str, Any]], Choice]


def settle(site: Site, choice: Choice, choose: Choose, value: Callable[[Node], Any]) -> tuple[bool, Choice]:
    """True to run the site as its parts, else False, and its choice with what was found out about the parts."""
    mine = choice.times.get(choice.implementation)
    if not site.parts or mine is None:
        return False, choice
    total = 0.0
    for part in site.parts:
        best = choose(part, call_of(part, value))
        if best.implementation not in best.times:
            return False, choice
        total += best.times[best.implementation]
    names = " and ".join(part.card.name for part in site.parts)
    if total < mine:
        return True, choice
    return False, replace(choice, reason=f"{choice.reason}; {total / mine:.2f}x as fast as {names}")


def call_of(site: Site, value: Callable[[Node], Any]) -> dict[str, Any]:
    """The call of a site on the values of its inputs."""
    return {k: evaluate(v, value) for k, v in site.arguments.items()}
