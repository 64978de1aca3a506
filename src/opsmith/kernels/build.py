"""Build the native kernels at first use and load them.

    load()    True once the kernels of this CPU's tier are loaded, built if need be; False if they cannot be
    build()   ahead of time
    status()  what there is, for ``opsmith doctor``
    clean()   forget everything built

A library is named after the content of all that it was built from, so an edit gives another library and
touching a file gives the same one. ``OPSMITH_NATIVE=0`` turns native kernels off, and ``1`` makes it an error
when they cannot be built.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opsmith.kernels import cache, compiler, isa, nvcc
from opsmith.kernels.compiler import BuildError, Compiler, Unit, Watch
from opsmith.kernels.progress import shown

__all__ = [
    "BuildError",
    "Status",
    "build",
    "build_best",
    "build_library",
    "clean",
    "load",
    "loaded",
    "status",
]

SOURCES = Path(__file__).parent / "cpu"
_NAME = "opsmith"
# The oldest torch whose stable ABI the library asks for, so that one build serves many versions.
_TORCH_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Checks have no loops that more would help, and take a quarter longer to compile with it.
_BINDING_LEVEL = "-O2"
_ATTEMPTS = 3
# What compilers and assemblers older than a tier say of its flags and instructions.
_TOO_OLD = re.compile("unrecognized command.line option|unknown argument|no such instruction")

_TURNED_OFF = "OPSMITH_NATIVE=0 turns native kernels off"

_lock = threading.RLock()
_outcome: bool | None = None  # of load(): None until it was called
_reason: str | None = None
_loaded: tuple[Path, str] | None = None  # the library and its tier


@dataclass(frozen=True)
class Status:
    """What there is of the native kernels on this machine."""

    tier: str
    forced: bool  # by OPSMITH_ISA
    compiler: str | None  # path and version
    cache: Path
    library: Path | None  # None until it is built
    built: bool
    loaded: bool
    bytes: int  # in the cache
    reason: str | None  # why native kernels are unavailable


class NoCompiler(BuildError):
    """There is no C++ compiler, and no library that was built earlier."""


def load() -> bool:
    """Load the native kernels, built first if need be; False, after one warning, if that cannot be.

    >>> load() in (True, False)
    True

    Raises:
        ValueError: ``OPSMITH_ISA`` names a tier that does not exist or that this CPU cannot run.
        BuildError: ``OPSMITH_NATIVE=1`` and the kernels cannot be built.
    """
    if _outcome is not None:
        return _outcome
    with _lock:
        if _outcome is None:
            _load()
        return bool(_outcome)


def loaded() -> Path | None:
    """The library that was loaded."""
    return _loaded and _loaded[0]


def _load() -> None:
    global _outcome, _reason, _loaded
    wanted = os.environ.get("OPSMITH_NATIVE")
    if wanted == "0":
        _outcome, _reason = False, _TURNED_OFF
        return
    try:
        path, tier = build_best(_NAME, _sources(), include_dirs=[SOURCES])
        _loaded = _open(path, tier), tier
        _outcome, _reason = True, None
    except BuildError as error:
        _reason = str(error)
        if wanted == "1":
            raise
        _outcome = False
        warnings.warn(f"{error}\nUntil then opsmith computes in plain PyTorch.", RuntimeWarning, stacklevel=3)


def build_best(
    name: str, sources: Sequence[Path], *, include_dirs: Sequence[Path] = (), watch: Watch | None = None
) -> tuple[Path, str]:
    """A library for this CPU, and its tier: the best whose instructions the compiler knows too.

    Args:
        name: of the library, as the other arguments: see `build_library`.

    Raises:
        ValueError, BuildError: as `build_library`; or ``OPSMITH_ISA`` names a tier that this CPU cannot run.
    """
    best = isa.tier()
    tiers = [best] if os.environ.get("OPSMITH_ISA") else isa.supported()[::-1]
    for tier in tiers:
        try:
            return build_library(name, sources, include_dirs=include_dirs, tier=tier, watch=watch), tier
        except BuildError as error:
            if tier == tiers[-1] or not _TOO_OLD.search(error.output):
                raise
    raise AssertionError("there is always a tier")


def _open(path: Path, tier: str) -> Path:
    import torch

    try:
        torch.ops.load_library(path)
        return path
    except OSError:  # intact, yet not for this process: a home shared with another system, say
        path = build_library(_NAME, _sources(), include_dirs=[SOURCES], tier=tier, force=True)
    try:
        torch.ops.load_library(path)
        return path
    except OSError as error:
        raise BuildError(f"opsmith: the native kernels were built but do not load: {error}") from error


def build(tiers: Sequence[str] | None = None, force: bool = False) -> list[Path]:
    """Build the kernels of some tiers ahead of time; by default of the tier that ``load`` would take.

    >>> build()  # doctest: +SKIP
    [PosixPath('.../opsmith-avx512_bf16-....so')]

    Args:
        tiers: names from ``opsmith.kernels.isa.TIERS``; they need not be supported by this CPU.
        force: build even what the cache already holds.

    Raises:
        ValueError: a tier that does not exist.
        BuildError: there is no compiler, or it reports an error.
    """
    chosen = [isa.tier()] if tiers is None else tiers
    return [build_library(_NAME, _sources(), include_dirs=[SOURCES], tier=t, force=force) for t in chosen]


def status() -> Status:
    """What there is of the native kernels: tier, compiler, library, cache.

    Raises:
        ValueError: ``OPSMITH_ISA`` names a tier that does not exist or that this CPU cannot run.
    """
    best = isa.tier()
    library, tier = _loaded or (None, best)
    found = compiler.find_compiler()
    library = library or _Job.of(_NAME, _sources(), [SOURCES], (), tier).find(found)
    reason = _reason
    if reason is None and os.environ.get("OPSMITH_NATIVE") == "0":
        reason = _TURNED_OFF
    if reason is None and library is None and found is None:
        reason = _no_compiler()
    stores = {cache.configured(), cache.fallback()}
    return Status(
        tier=tier,
        forced=bool(os.environ.get("OPSMITH_ISA")),
        compiler=f"{' '.join(found.command)} ({found.version})" if found else None,
        cache=cache.configured().path,
        library=library,
        built=library is not None,
        loaded=_loaded is not None,
        bytes=sum(store.size() for store in stores),
        reason=reason,
    )


def clean() -> int:
    """Remove everything built, except what a build under way uses, and return the bytes freed."""
    return cache.configured().clean() + cache.fallback().clean()


def build_library(
    name: str,
    sources: Sequence[Path],
    *,
    include_dirs: Sequence[Path] = (),
    flags: Sequence[str] = (),
    links: Sequence[str] = (),
    tier: str,
    force: bool = False,
    watch: Watch | None = None,
) -> Path:
    """A shared library of C++ sources, from the cache if its content is there, else built.

    Sources whose names begin with ``binding`` may include torch's stable ABI, and the library is then linked
    with torch; the others see no torch header. Beside a ``.cu`` file, which nvcc compiles, every C++ file binds.

    Args:
        name: of the library.
        sources: C++ files, with different names.
        include_dirs: folders of headers of the project; headers count as content, like sources.
        flags: for the compiler, after those of every build and of the tier.
        links: for the linker, likewise.
        tier: a name from ``opsmith.kernels.isa.TIERS``.
        force: build even if the cache holds the library.
        watch: is told of every step; by default a line on the terminal shows them.

    Raises:
        ValueError: an unknown tier, or two sources of one name.
        BuildError: there is no compiler, it reports an error, or the disk is full.
    """
    for _ in range(_ATTEMPTS):
        try:
            job = _Job.of(name, sources, include_dirs, flags, tier, links)
            found = compiler.find_compiler()
            if not force and (path := job.find(found)):
                return path
            if found is None:
                raise NoCompiler(_no_compiler())
            if path := job.build(cache.writable(), found, force, watch):
                return path
        except cache.Unusable as error:
            raise BuildError(f"opsmith: {error}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise compiler.disk_full() from error
            raise BuildError(f"opsmith: {name} could not be built: {error}") from error
    raise BuildError(f"opsmith: the sources of {name} changed during each of {_ATTEMPTS} builds; build again")


@dataclass(frozen=True)
class _Job:
    """One library to build: its units, each with the key that its content had."""

    name: str
    tier: str
    units: dict[Unit, str]
    links: tuple[str, ...] = ()

    @staticmethod
    def of(
        name: str,
        sources: Sequence[Path],
        include_dirs: Sequence[Path],
        flags: Sequence[str],
        tier: str,
        links: Sequence[str] = (),
    ) -> _Job:
        if tier not in isa.FLAGS:
            raise ValueError(f"opsmith: {tier!r} is no tier: expected one of {', '.join(isa.TIERS)}")
        if len({_object(s) for s in sources}) < len(sources):
            raise ValueError(
                f"opsmith: sources of {name} need different names, got {[s.name for s in sources]}"
            )
        folders = tuple(Path(folder).absolute() for folder in include_dirs)
        flags = (*flags, *compiler.sanitizer_flags())
        units = []
        gpu = nvcc.require() if any(s.suffix == ".cu" for s in sources) else None
        for source in map(Path.absolute, sources):
            if source.suffix == ".cu":
                units.append(Unit(source, folders, nvcc.FLAGS, compiler=gpu))
            elif gpu is not None or source.name.startswith("binding"):
                system = (_torch_folder() / "include", *([nvcc.include(gpu)] if gpu else ()))
                more = (_TORCH_ABI, _BINDING_LEVEL, *(["-DUSE_CUDA"] if gpu else ()))
                units.append(Unit(source, folders, (*isa.FLAGS[tier], *more, *flags), system, binds=True))
            else:
                units.append(Unit(source, folders, (*isa.FLAGS[tier], *flags)))
        return _Job(name, tier, {unit: unit.key() for unit in units}, tuple(links))

    @property
    def key(self) -> str:
        system = [
            sys.platform,
            platform.machine(),
            *compiler.COMPILE_FLAGS,
            *compiler.LINK_FLAGS,
            *self.links,
        ]
        if any(unit.compiler for unit in self.units):  # linked with what this torch has of CUDA
            system += self.link_flags
        return f"{self.name}-{self.tier}-{compiler.fingerprint([*system, *self.units.values()])[:20]}"

    @property
    def binds(self) -> bool:
        return any(unit.binds for unit in self.units)

    @property
    def link_flags(self) -> list[str]:
        found = [*compiler.sanitizer_flags(), *self.links]
        if self.binds:
            found += [f"-L{_torch_folder() / 'lib'}", "-ltorch_cpu", "-lc10"]
        gpu = next((unit.compiler for unit in self.units if unit.compiler), None)
        return found if gpu is None else [*found, *nvcc.link_flags(gpu, _torch_folder() / "lib")]

    def library(self, store: cache.Store, built_by: Compiler) -> Path:
        return store.folder("libraries") / f"{self.key}-{compiler.fingerprint([built_by.identity])[:8]}.so"

    def find(self, built_by: Compiler | None) -> Path | None:
        """The library, if a store holds it; without a compiler, whichever compiler built it."""
        for store in cache.readable():
            paths = [self.library(store, built_by)] if built_by else store.find(f"{self.key}-*.so")
            for path in paths:
                if self.usable(store, path):
                    store.used(path)
                    return path
        return None

    def usable(self, store: cache.Store, path: Path) -> bool:
        return _usable(store, path, self.binds)

    def build(
        self, store: cache.Store, built_by: Compiler, force: bool, watch: Watch | None = None
    ) -> Path | None:
        """Build into the store and return the library, or None if a source changed meanwhile."""
        final = self.library(store, built_by)
        try:
            with store.lock(self.key):
                if not force and self.usable(store, final):  # another process built it while we waited
                    return final
                with store.workshop(self.key) as folder:
                    return self._build(store, built_by, force, folder, final, watch)
        except TimeoutError as error:
            raise BuildError(
                f"opsmith: another process has been building {self.key} for too long; stop it"
            ) from error

    def _build(
        self,
        store: cache.Store,
        built_by: Compiler,
        force: bool,
        folder: Path,
        final: Path,
        watch: Watch | None,
    ) -> Path | None:
        base = (built_by.identity, *compiler.COMPILE_FLAGS)
        stored = {
            unit: store.folder("objects") / f"{compiler.fingerprint([*base, key])[:40]}.o"
            for unit, key in self.units.items()
        }
        todo: dict[str, Unit] = {}
        reused = []
        for unit in self.units:
            name = _object(unit.source)
            if not force and _usable(store, stored[unit], unit.binds):
                _link(stored[unit], folder / name)  # so that a cleanup next door cannot take it from under us
                reused.append(name)
            else:
                todo[name] = unit
        facts: dict[str, Any] = {"name": self.name, "tier": self.tier, "compiler": built_by.identity}
        if self.binds:
            facts["torch"] = _torch_version()
        try:
            with shown(f"building {self.name} kernels ({self.tier})", len(todo) + 1, watch) as told:
                compiler.compile_and_link(built_by, folder, todo, reused, self.link_flags, final.name, told)
        finally:
            done = compiler.finished(folder)
            for name, unit in todo.items():
                if name in done and unit.key() == self.units[unit]:
                    _link(folder / name, folder / f"{name}.kept")
                    store.seal(folder / f"{name}.kept", stored[unit], facts, 0o600)
        if any(unit.key() != key for unit, key in self.units.items()):
            return None
        store.seal(folder / final.name, final, facts, 0o700)
        store.prune()
        return final


def _sources() -> list[Path]:
    return sorted(SOURCES.rglob("*.cpp"))


def _object(source: Path) -> str:
    return f"{source.stem}.cu.o" if source.suffix == ".cu" else f"{source.stem}.o"


def _usable(store: cache.Store, path: Path, binds: bool) -> bool:
    """Whether a file is intact and, if it binds to torch, made with headers no newer than this torch."""
    facts = store.manifest(path)
    return facts is not None and (not binds or tuple(facts["torch"]) <= _torch_version())


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _torch_version() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _no_compiler() -> str:
    chosen, distrust = os.environ.get("CXX"), cache.configured().distrust()
    problem = f"CXX={chosen} does not run" if chosen else "no C++ compiler (g++, c++, clang++) is on PATH"
    return (
        f"opsmith: native kernels cannot be built: {problem}. Install one (Debian, Ubuntu: apt-get install"
        " g++; Fedora: dnf install gcc-c++; conda: conda install gxx), or set CXX to one."
        + (f" The cache cannot be trusted either: {distrust}." if distrust else "")
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
