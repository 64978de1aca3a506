"""What was found out on this machine and is kept for the next process: a JSON file of entries by key."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def directory() -> Path:
    """Where it is kept: OPSMITH_TUNING, or the user's cache folder."""
    forced = os.environ.get("OPSMITH_TUNING")
    if forced:
        return Path(forced)
    import platformdirs

    return Path(platformdirs.user_cache_dir("opsmith")) / "tuning"


class Kept(Generic[T]):
    """Entries that hold within one scope (a machine, its kernels, its PyTorch).

    A file that is damaged, unreadable or of another scope counts as empty: it holds nothing that can't be found again.
    """

    def __init__(
        self, path: Path, schema: int, scope: str, valid: Callable[[Any], bool], most: int = 1 << 16
    ):
        self._path, self._schema, self._scope = path, schema, scope
        self._valid, self._most = valid, most
        self._entries: dict[str, T] = self._read()
        self._new: dict[str, T] = {}

    def _read(self) -> dict[str, T]:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or (data.get("schema"), data.get("scope")) != (
            self._schema,
            self._scope,
        ):
            return {}
        entries = data.get("entries")
        return {k: v for k, v in entries.items() if self._valid(v)} if isinstance(entries, dict) else {}

    def get(self, key: str) -> T | None:
        """The entry, where there is one."""
        return self._entries.get(key)

    def put(self, key: str, entry: T) -> None:
        """Enter something new."""
        self._entries[key] = self._new[key] = entry

    def items(self) -> list[tuple[str, T]]:
        """All that is known."""
        return list(self._entries.items())

    def save(self) -> None:
        """Write through a temporary file; a folder that can't be written costs only the memory of this run."""
        if not self._new:
            return
        import filelock

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(str(self._path) + ".lock", timeout=10):
                others = {k: v for k, v in self._read().items() if k not in self._new}
                entries = dict([*others.items(), *self._new.items()][-self._most :])  # the oldest go
                temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
                text = json.dumps({"schema": self._schema, "scope": self._scope, "entries": entries})
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self._path)
        except (OSError, filelock.Timeout):
            return
        self._new = {}


def named(scope: str) -> str:
    """A scope as part of a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in scope)
