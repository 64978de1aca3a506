"""Where built files are kept, and which of the files found there may be used.

Every file is stored beside a manifest, ``NAME.json``, that is written last and holds the file's SHA-256. A
file counts only if its digest matches and nobody but this user (or root) could have written it, so a
truncated, half-written or planted library is never loaded.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith.files import Unusable as Unusable, distrust, own, suspect

_FOLDERS = ("libraries", "objects", "locks", "building")
# Files kept, those made or looked up last: editing sources leaves old ones behind.
_KEEP = {"libraries": 512, "objects": 1024}
# Longer than any build; a lock dies with its process, so only a hung one is waited for.
_LOCK_SECONDS = 1800.0


@dataclass(frozen=True)
class Store:
    """One folder of built files."""

    path: Path

    def folder(self, name: str) -> Path:
        """``libraries``, ``objects``, ``locks`` or ``building``."""
        return self.path / name

    def prepare(self) -> None:
        """Create the folders, owner-only, and make sure that this process alone can put files there.

        Raises:
            Unusable: the folder cannot be created, cannot be written, or others can write to it.
        """
        try:
            own(self.path)
            for folder in map(self.folder, _FOLDERS):
                folder.mkdir(mode=0o700, exist_ok=True)
            if reason := self.distrust():
                raise Unusable(reason)
            with tempfile.TemporaryFile(dir=self.folder("building")):
                pass
        except OSError as error:
            raise Unusable(f"{self.path}: {error.strerror or error}") from error

    def distrust(self) -> str | None:
        """Why no file here may be loaded: others could have put it there. None if they could not."""
        reason = distrust(self.path)
        for folder in map(self.folder, _FOLDERS):
            reason = reason or suspect(folder)
        return reason

    @contextlib.contextmanager
    def lock(self, key: str, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
        """Hold one key's lock, across threads and processes; ``TimeoutError`` after ``seconds``."""
        from filelock import FileLock

        with FileLock(self.folder("locks") / f"{key}.lock", timeout=seconds, mode=0o600):
            yield

    @contextlib.contextmanager
    def workshop(self, key: str) -> Iterator[Path]:
        """A private temporary folder for the build that holds ``key``'s lock, gone afterwards.

        A killed build leaves its folder; whoever builds next removes it. The name is never used twice:
        compilers that outlive their build write to a folder that nobody reads.
        """
        self._sweep(key)
        path = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self.folder("building")))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _sweep(self, held: str) -> None:
        for left in self.folder("building").iterdir():
            key = left.name.rpartition(".")[0]
            if key == held:
                shutil.rmtree(left, ignore_errors=True)
                continue
            with contextlib.suppress(TimeoutError), self.lock(key, seconds=0):  # a live build keeps its lock
                shutil.rmtree(left, ignore_errors=True)

    def seal(self, built: Path, final: Path, facts: Mapping[str, Any], mode: int) -> None:
        """Move a finished file to its place, then write its manifest."""
        built.chmod(mode)
        manifest = built.with_name(built.name + ".json")
        manifest.write_text(json.dumps({**facts, "sha256": _digest(built)}, indent=1))
        manifest.chmod(0o600)
        os.replace(built, final)
        os.replace(manifest, _manifest(final))

    def manifest(self, path: Path) -> dict[str, Any] | None:
        """The manifest of a stored file, or None if the file is missing, damaged or not to be trusted."""
        try:
            if any(suspect(file) for file in (path, _manifest(path))) or self.distrust():
                return None
            facts = json.loads(_manifest(path).read_bytes())
            return facts if isinstance(facts, dict) and facts.get("sha256") == _digest(path) else None
        except (OSError, ValueError, RecursionError):
            return None

    def find(self, pattern: str) -> list[Path]:
        """Stored libraries whose names match, newest first."""
        with contextlib.suppress(OSError):
            return sorted(self.folder("libraries").glob(pattern), key=_age)
        return []

    def used(self, path: Path) -> None:
        """Note that a file serves still, so that pruning spares it."""
        with contextlib.suppress(OSError):  # a folder that can only be read is never pruned
            os.utime(path)

    def prune(self, needed: Collection[Path] = ()) -> None:
        """Drop all but the files that were made or used last; what is needed now counts as such."""
        for name, count in _KEEP.items():
            files = [path for path in self.folder(name).iterdir() if path.suffix != ".json"]
            for path in sorted(files, key=lambda path: (path not in needed, _age(path)))[count:]:
                _manifest(path).unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def size(self) -> int:
        total = 0
        for folder, _, names in os.walk(self.path):
            for name in names:
                with contextlib.suppress(OSError):  # a build next door may take its files away meanwhile
                    total += os.lstat(os.path.join(folder, name)).st_size
        return total

    def clean(self) -> int:
        """Remove the built files, not those of builds under way, and return the bytes freed."""
        before = self.size()
        if self.folder("building").is_dir():
            self._sweep("")
        for name in _KEEP:
            shutil.rmtree(self.folder(name), ignore_errors=True)
        return max(0, before - self.size())


def of_user() -> Path:
    """opsmith's folder in the user's cache folder; of a user without a home, in the system's temporary folder."""
    from platformdirs import user_cache_path

    # Without a home, newer versions of platformdirs raise, and older ones begin with "~".
    with contextlib.suppress(RuntimeError):
        if (folder := user_cache_path("opsmith", appauthor=False)).is_absolute():
            return folder
    return fallback().path.parent


def configured() -> Store:
    """The store under ``OPSMITH_CACHE``, or under the user's cache folder."""
    chosen = os.environ.get("OPSMITH_CACHE")
    return Store((Path(chosen).expanduser().absolute() if chosen else of_user()) / "kernels")


def fallback() -> Store:
    """The store under the system's temporary folder, for a cache folder that cannot be written."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Store(Path(tempfile.gettempdir()) / f"opsmith-{user}" / "kernels")


@functools.cache  # asked for each library
def shipped() -> Store:
    """The store inside this package: a wheel has built kernels there, and nobody writes to it."""
    return Store(Path(__file__).resolve().parent / "built")


def readable() -> Iterator[Store]:
    """The stores to look in: the wheel's, the configured one, and only if that cannot be written, the temporary one."""
    yield shipped()
    first = configured()
    yield first
    try:
        first.prepare()
    except Unusable:
        yield fallback()


def writable() -> Store:
    """The store to build into: the configured one, or with a warning the temporary one.

    Raises:
        Unusable: neither can be written.
    """
    first = configured()
    try:
        first.prepare()
        return first
    except Unusable as reason:
        second = fallback()
        try:
            second.prepare()
        except Unusable as worse:
            raise Unusable(f"no folder to build kernels in: {reason}; {worse}") from worse
        warnings.warn(
            f"opsmith: cannot keep kernels in the cache folder ({reason}), so they are kept in {second.path}."
            " Clear that, or set OPSMITH_CACHE to a folder that you alone can write to",
            RuntimeWarning,
            stacklevel=2,
        )
        return second


def _manifest(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
