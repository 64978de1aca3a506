"""Proof of a rewritten attention: against the module's own code in float64, on hidden states that the model gave it.

The module's forward runs as it stands, with every number that it reads widened and casts to lower precision lifted.
That settles two things at once: which reading of the module's children is the right one, since
no other computes the same, and that both forms of the rewritten one, through a cache, are accurate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.compiler.meanwhile import meanwhile
from opsmith.compiler.modules.conventions import Roles, alone, masked, new_cache, place
from opsmith.compiler.modules.latent.pages import LatentPages
from opsmith.compiler.modules.latent.site import LatentSite
from opsmith.compiler.prove.site import worst
from opsmith.compiler.prove.wide import Exact, widened
from opsmith.compiler.reasons import raised
from opsmith.operator import Tolerance, Verdict

# Pre-processing and attention are an operator each, and each is held to the policy.
TOLERANCE = Tolerance(factor=2.0, ulps=2.0)
_TOKENS = 24  # the last ones of a sequence: both forms, and a decoding step, in a moment
_BLOCK = 8  # so that they fill several
_SAME = 0.05  # of the largest number in a row: another order of its numbers differs by all of it
_HEADROOM = 1.25  # of an int8 cache's range over what the examples have


@dataclass
class Seen:
    """What one attention module was called with."""

    x: Tensor  # [1, n, D]
    table: tuple[Tensor, ...]  # [1, n, ...]: cosines and sines, or complex numbers, of these tokens
    rest: dict[str, Any] = field(default_factory=dict)


def seen(roles: Roles, given: Mapping[str, Any]) -> Seen:
    """The first sequence's last tokens in a call."""
    some = slice(-_TOKENS, None)
    table = tuple((t if t.dim() > 2 else t[None])[:1, some].clone() for t in roles.parts(given))
    return Seen(given[roles.hidden][:1, some].detach().clone(), table, alone(roles, given, some))


def inputs_as_they_are(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Packed layers round no inputs: what that takes is no error of arithmetic, and stands in the report."""
    rounding = [m for m in module.children() if getattr(m, "format", None) == "int8_dynamic"]
    return meanwhile(rounding, "format", "int8")


def identify(site: LatentSite, found: Seen) -> Verdict:
    """Give the site the reading that computes what its module does, or say why none does."""
    best = Verdict(False, math.inf, 0.0, "no reading of its layers computes what it does")
    for out in {r.out for r in site.readings}:
        try:
            exact, rows = _own(site, out, found, exact=True)
            eager, _ = _own(site, out, found, exact=False)
        except Exception as error:  # a call that is not what it was taken for
            best = Verdict(False, math.inf, 0.0, f"called alone it {raised(error)}")
            continue
        for reading in [r for r in site.readings if r.out is out]:
            for interleaved in (True, False):
                site.reading, site.interleaved = reading, interleaved
                site.close()
                verdict = _judge(site, found, eager, exact)
                if verdict.ok:
                    _order(site, _ours(site, found, "split", "absorbed")[1], rows)
                    return verdict
                if verdict.error < best.error:
                    best = verdict
    return best


def calibrate(site: LatentSite, found: Seen) -> None:
    """The scales of an int8 cache, from what the examples have and a quarter more."""
    first = found.table[0]
    table = (first.real, first.imag) if first.is_complex() else found.table
    cos, sin = (t.reshape(-1, t.shape[-1]).contiguous() for t in table)
    with torch.no_grad():
        cache, slots = site.cache("split", 1, len(cos)), torch.arange(len(cos), device=cos.device)
        q_out, _ = site.preprocess(site.weights(), found.x[0], (cos, sin, slots, cache))
        ctkv = (cache.latent.float().abs().max() * _HEADROOM / 127).clamp(min=1e-12)
        heads = (q_out.float().abs().amax((0, 2)) * _HEADROOM).clamp(min=1e-12)
    site.scales = (ctkv, 127 / heads)


def lost(site: LatentSite, found: Seen, mode: str) -> float:
    """How far the results are from the exact ones, relative to these: what rounding weights or rows took."""
    with inputs_as_they_are(site.module):
        exact, _ = _own(site, site.reading.out, found, exact=True)
    got = _ours(site, found, mode, "absorbed")[0].double()
    return float((got - exact).norm() / exact.norm().clamp(min=1e-300))


def _judge(site: LatentSite, found: Seen, eager: Tensor, exact: Tensor) -> Verdict:
    def judged(form: str) -> Verdict:
        try:
            got, _ = _ours(site, found, "split", form)
        except (TypeError, ValueError) as error:
            return Verdict(False, math.inf, 0.0, str(error))
        verdict = TOLERANCE.check(got, eager, exact)
        return verdict if verdict.ok else replace(verdict, why=f"{form}: {verdict.why}")

    return worst(map(judged, ("absorbed", "expanded")))


def _ours(site: LatentSite, found: Seen, mode: str, form: str) -> tuple[Tensor, Tensor]:
    """[1, n, heads * value], all tokens but the last at once, the last by decoding; and the rotated rows."""
    tokens = found.x.shape[1]
    pages = LatentPages([site.cache(mode, 1, _BLOCK)], _BLOCK, 1, found.x.device)
    results = []
    for some in (slice(0, tokens - 1), slice(tokens - 1, tokens)):
        n = some.stop - some.start
        if n:
            cos, *sin = (t[:, some] for t in found.table)
            given = (found.x[:, some], cos, sin[0] if sin else None, pages, pages.begin(n))
            results.append(site.compute(*given, form if n > 1 else "absorbed"))
            pages.commit(n)
    return torch.cat(results, 1), pages.read(0, tokens)[1]


def _own(site: LatentSite, out: nn.Module, found: Seen, *, exact: bool) -> tuple[Tensor, Tensor | None]:
    """The module's own results before its output projection, and what it put into a cache as rotated rows."""
    roles, module = site.roles, site.module
    x, table = (widened(found.x), widened(found.table)) if exact else (found.x, found.table)
    several = len(table) > 1 and len(roles.table) == 1
    given = dict(zip(roles.table, (table,) if several else table, strict=True))
    call: dict[str, Any] = {**found.rest, **given, roles.hidden: x}
    if roles.mask is not None:
        call[roles.mask] = masked(found.rest.get(roles.mask), x)
    cache = new_cache() if exact and roles.cache is not None else None
    if roles.cache is not None:
        call[roles.cache] = cache
    widening = Exact() if exact else contextlib.nullcontext()
    try:
        with out.register_forward_pre_hook(_reach), torch.no_grad(), widening:
            type(module).forward(module, **call)
        raise RuntimeError("does not call its output projection")
    except _Reached as reached:
        result: Tensor = reached.args[0]
    layers = [] if cache is None else cache.layers
    at = place(module)
    return result, layers[at].values if at is not None and at < len(layers) else None


class _Reached(Exception):
    """The output projection was called, with this."""


def _reach(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Reached(*args)


def _order(site: LatentSite, mine: Tensor, rows: Tensor | None) -> None:
    """How the model's own cache orders the rotated dimensions that ours keeps in halves.

    Where it keeps something else there, keys of heads perhaps, such a cache cannot be taken over in the middle.
    """
    site.portable, site.order = False, None
    if rows is None or rows.shape[1] != 1 or rows.shape[-1] != site.reading.rope:
        return
    theirs, mine = rows[0, 0].double(), mine[0].double()
    halves = torch.arange(site.reading.rope, device=mine.device)
    for order in (None, halves.view(-1, 2).t().reshape(-1), halves.view(2, -1).t().reshape(-1)):
        difference = (theirs if order is None else theirs[:, order]) - mine
        if float(difference.abs().max()) <= _SAME * float(mine.abs().max()):
            site.portable, site.order = True, order
            return
