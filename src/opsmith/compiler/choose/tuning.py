"""The tuning cache: what was measured on this machine, so that it is measured once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from opsmith import measure
from opsmith.compiler.kept import Kept, directory, named
from opsmith.kernels import libraries

SCHEMA = 2  # 2: times of calls as programs make them


class TuningCache(Kept[dict[str, float]]):
    """Measured seconds of each contestant by what they contested, for this machine, these kernels and this PyTorch."""

    def __init__(self, path: Path | None = None):
        scope = f"{measure.describe().fingerprint()}/{libraries.content()}"
        super().__init__(path or directory() / f"{named(scope)}.json", SCHEMA, scope, _is_times)

    def settled(self, key: str, times: dict[str, float], steady: bool) -> dict[str, float]:
        """Enter a measurement. One that other work disturbed is a guess for its run only, which the next one repeats:
        the best of the two stays.
        """
        guess = f"{key} disturbed"
        before = self.get(guess)
        if not steady and before is not None:
            times = {name: min(t, before.get(name, t)) for name, t in times.items()}
        self.put(key if steady or before is not None else guess, times)
        return times


def _is_times(value: Any) -> bool:
    # Also refuses NaN, and True, which is an int.
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(v, float) and 0.0 < v < math.inf for v in value.values())
    )
