"""Which is faster here, vLLM's own or ours: measured when a model is loaded, and told in one line of the log.

A part that OPSMITH_VLLM names is taken without a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from vllm.logger import init_logger

from opsmith import measure
from opsmith_vllm import measured

logger = init_logger(f"vllm.{__name__}")

Call = Callable[[], object]

_known: dict[str, bool] = {}


def ours(what: str, cases: Callable[[], Iterable[tuple[Call, Call]]]) -> bool:
    """Whether opsmith's way to compute `what` is to be taken; it is asked for and measured once in a process.

    Args:
        what: a layer, its sizes and its dtype.
        cases: pairs of vLLM's own call and ours, which should together be faster: one for decode, one for prefill.
    """
    if not measured():
        return True
    if what not in _known:
        ratios, times = [], []
        for own, mine in cases():
            found = measure.quick({"vLLM": own, "opsmith": mine})
            ratios.append(found.median("vLLM") / found.median("opsmith"))
            times.append(f"{found.median('opsmith') * 1e6:.1f} for {found.median('vLLM') * 1e6:.1f} µs")
        _known[what] = math.prod(ratios) >= 1
        logger.info(
            "opsmith: %s: %s, so %s is taken",
            what,
            ", ".join(times),
            "opsmith's" if _known[what] else "vLLM's own",
        )
    return _known[what]
