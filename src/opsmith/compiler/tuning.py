"""The tuning cache: what was measured on this machine, so that it is measured once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from opsmith import measure
from opsmith.kernels import libraries

SCHEMA = 2  # 2: times of calls as programs make them


def directory() -> Path:
    """Where tuning results are kept: OPSMITH_TUNING, or the user's cache folder."""
    forced = os.environ.get("OPSMITH_TUNING")
    if forced:
        return Path(forced)
    import platformdirs

    return Path(platformdirs.user_cache_dir("opsmith")) / "tuning"


class TuningCache:
    """Measured times by call signature, for this machine, these kernels and this PyTorch.

    A file that is damaged or unreadable counts as empty: it holds nothing that can't be measured again.
    """

    def __init__(self, path: Path | None = None):
        self._scope = f"{measure.describe().fingerprint()}/{libraries.content()}"
        self._path = path or directory() / f"{_slug(self._scope)}.json"
        self._entries: dict[str, dict[str, float]] = self._read()
        self._changed = False

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("scope") != self._scope:
            return {}
        entries = data.get("entries")
        return {k: v for k, v in entries.items() if _is_times(v)} if isinstance(entries, dict) else {}

    def get(self, signature: str) -> dict[str, float] | None:
        """Seconds by implementation, where this call was measured before."""
        return self._entries.get(signature)

    def put(self, signature: str, times: dict[str, float]) -> None:
        """Remember a measurement."""
        self._entries[signature] = times
        self._changed = True

    def items(self) -> list[tuple[str, dict[str, float]]]:
        """All that is known."""
        return list(self._entries.items())

    def save(self) -> None:
        """Write through a temporary file; a folder that can't be written costs only the memory of this run."""
        if not self._changed:
            return
        import filelock

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(str(self._path) + ".lock", timeout=10):
                merged = {**self._read(), **self._entries}
                temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
                temporary.write_text(json.dumps({"schema": SCHEMA, "scope": self._scope, "entries": merged}))
                temporary.replace(self._path)
        except (OSError, filelock.Timeout):
            return
        self._changed = False


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def _is_times(value: Any) -> bool:
    # Also refuses NaN, and True, which is an int.
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(v, float) and 0.0 < v < math.inf for v in value.values())
    )
