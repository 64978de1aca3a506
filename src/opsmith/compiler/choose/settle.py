"""Whether a merged site runs as one call or as its parts: the sum of the parts' times against its own.

Where a model learns, those are the times of forward and backward together: an operator may take longer forward so that
its backward has less to do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from opsmith import measure
from opsmith.compiler.choose.select import Choice, device_of
from opsmith.compiler.find.operands import nodes_in
from opsmith.compiler.find.site import Site, following

Choose = Callable[[Site, dict[str, Any]], Choice]


def settle(
    site: Site, choice: Choice, choose: Choose, value: Callable[[Node], Any], learn: Collection[Node] = ()
) -> tuple[bool, Choice]:
    """True to run the site as its parts, else False, and its choice with what was found out about the parts.

    `learn` are the nodes whose values need gradients.
    """
    mine = choice.times.get(choice.implementation)
    if not site.parts or mine is None:
        return False, choice
    what = ""
    if any(_learning_arguments(s, learn) for s in (site, *site.parts)):
        mine, total = _steps(site, value, learn)
        what = " forward and backward"
    else:
        total = 0.0
        for part in site.parts:
            best = choose(part, part.call(value))
            if best.implementation not in best.times:
                return False, choice
            total += best.times[best.implementation]
    names = " and ".join(part.card.name for part in site.parts)
    if total < mine:
        return True, choice
    return False, replace(choice, reason=f"{choice.reason}; {total / mine:.2f}x as fast as {names}{what}")


def _steps(site: Site, value: Callable[[Node], Any], learn: Collection[Node]) -> tuple[float, float]:
    """Seconds for the site, and for its parts together, forward and backward."""
    steps = {str(i): _step(s, value, learn) for i, s in enumerate((site, *site.parts))}
    device = device_of(site.call(value).values())
    result = measure.quick(steps, budget_s=0.3, drop=float("inf"), device=device)
    times = [min(result.samples[name]) for name in steps]
    return times[0], sum(times[1:])


def _step(site: Site, value: Callable[[Node], Any], learn: Collection[Node]) -> Callable[[], object]:
    """A call of the public function, and its gradients."""
    call = site.call(value)
    leaves = {name: call[name].detach().requires_grad_() for name in _learning_arguments(site, learn)}
    return with_gradients(partial(site.card.function, **call | leaves), [*leaves.values()])


def with_gradients(run: Callable[[], Any], leaves: Sequence[Tensor]) -> Callable[[], object]:
    """A call and the gradients of these, where there are any."""
    upstream: list[Tensor] = []  # made once: a model's own come from behind

    def step() -> object:
        with torch.enable_grad():
            found = run()
            each = found if isinstance(found, tuple | list) else [found]
            results = [r for r in each if isinstance(r, Tensor) and r.requires_grad]
            upstream.extend(map(torch.ones_like, results[len(upstream) :]))
            return torch.autograd.grad(results, leaves, upstream, allow_unused=True)

    return step if leaves else run


def _learning_arguments(site: Site, learn: Collection[Node]) -> list[str]:
    return [n for n, v in site.arguments.items() if any(node in learn for node in nodes_in(v))]


def learning(nodes: Sequence[Node], args: Sequence[Any]) -> set[Node]:
    """The nodes whose values need gradients: what comes of an input that asks for one."""
    given = zip((n for n in nodes if n.op == "placeholder"), args, strict=True)
    found = {n for n, a in given if isinstance(a, Tensor) and a.requires_grad}
    values = ((n, n.meta.get("val")) for n in nodes)
    return found | following(found, [n for n, v in values if isinstance(v, Tensor) and v.is_floating_point()])
