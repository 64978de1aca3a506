"""What was found out on this machine and is kept for the next process: a JSON file of entries by key."""

from __future__ import annotations

import functools
import json
import os
import warnings
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter

from opsmith import files, measure
from opsmith.kernels import cache, compiler, libraries

T = TypeVar("T")


def directory() -> Path:
    """Where it is kept: OPSMITH_TUNING, or the user's cache folder."""
    forced = os.environ.get("OPSMITH_TUNING")
    return Path(forced).expanduser().absolute() if forced else cache.of_user() / "tuning"


@functools.cache
def code(*folders: str) -> str:
    """What names the Python of all of this package, or of some folders: as much part of a finding as the kernels."""
    package = Path(__file__).parents[1]
    files = sorted(file for folder in folders or ["."] for file in (package / folder).rglob("*.py"))
    return compiler.fingerprint(file.read_text(encoding="utf-8") for file in files)[:20]


def ours(fn: Any) -> bool:
    """True for what `code` speaks for: this package's, as it is written and not as Inductor compiles it."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    compiled = hasattr(fn, "_torchdynamo_orig_callable")
    return not compiled and str(getattr(fn, "__module__", "")).startswith("opsmith.")


class Kept(dict[str, T]):
    """Entries that hold within one scope (a machine, its kernels, its PyTorch).

    A file that is damaged, unreadable, of another scope, or in a folder that others can write to counts as empty: it
    holds nothing that can't be found again. Without a path, entries are this process's alone.
    """

    def __init__(self, path: Path | None, schema: int, scope: str, entry: Any, most: int = 1 << 16):
        self._path, self._schema, self._scope = path, schema, scope
        self._type: TypeAdapter[dict[str, T]] = TypeAdapter(dict[str, entry])
        self._most = most
        self._new: dict[str, T] = {}
        super().__init__(self._read())

    def _read(self) -> dict[str, T]:
        try:
            if self._path is None or files.distrust(self._path.parent) or files.distrust(self._path):
                return {}
            data = json.loads(self._path.read_text(encoding="utf-8"))
            mine = (data["schema"], data["scope"]) == (self._schema, self._scope)
            return self._type.validate_python(data["entries"]) if mine else {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return {}

    def put(self, key: str, entry: T) -> None:
        self[key] = self._new[key] = entry

    def save(self) -> None:
        """Write the file; a folder that can't be written costs only the memory of this run."""
        if not self._new or self._path is None:
            return
        import filelock

        try:
            files.own(self._path.parent)
            with filelock.FileLock(str(self._path) + ".lock", timeout=10, mode=0o600):
                for left in self._path.parent.glob(f".{self._path.name}.*.tmp"):  # by one who died
                    left.unlink()
                others = {k: v for k, v in self._read().items() if k not in self._new}
                entries = dict([*others.items(), *self._new.items()][-self._most :])  # the oldest go
                text = json.dumps({"schema": self._schema, "scope": self._scope, "entries": entries})
                files.write(self._path, text, 0o600)
        except (OSError, filelock.Timeout):
            return
        except files.Unusable as reason:
            message = f"opsmith: what was measured is neither kept nor looked up ({reason})"
            warnings.warn(f"{message}, or set OPSMITH_TUNING", RuntimeWarning, stacklevel=2)
        self._new = {}


TIMES_SCHEMA = 3  # 3: of weights as cold as in a model; 2: of calls as programs make them
Seconds = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Times = Annotated[dict[str, Seconds], Field(min_length=1)]


class TuningCache(Kept[dict[str, float]]):
    """Measured seconds of contestants by what they contested, for this machine, these operators and this PyTorch."""

    def __init__(self, path: Path | None = None):
        scope = f"{measure.describe().fingerprint()}/{libraries.content()}/{code('call', 'ops')}"
        super().__init__(path or directory() / f"{scope.replace('/', '_')}.json", TIMES_SCHEMA, scope, Times)

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
