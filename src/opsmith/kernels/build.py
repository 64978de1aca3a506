"""Build shared libraries of C++ sources, and find what was built before.

    build_libraries()  some, in one run of the compiler
    build_best()       the same for this CPU, in the best tier that the compiler knows too

A library is named after the content of all that it was built from, so an edit gives another library and
touching a file gives the same one. Objects are kept too: libraries share them, and an edit compiles what it changed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opsmith.kernels import cache, compiler, isa, nvcc
from opsmith.kernels.compiler import BuildError as BuildError, Compiler, Unit, Watch

# The oldest torch whose stable ABI a library asks for, so that one build serves many versions.
_TORCH_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Checks have no loops that more would help, and take a quarter longer to compile with it.
_BINDING_LEVEL = "-O2"
_ATTEMPTS = 3
_LOG = logging.getLogger("opsmith")


class TooOld(BuildError):
    """The compiler, or its assembler, is older than the instructions of a tier."""


@dataclass(frozen=True)
class Library:
    """What a shared library is made of.

    Sources whose names begin with ``binding`` may include torch's stable ABI, and the library is then linked
    with torch; the others see no torch header. Beside a ``.cu`` file, which nvcc compiles, every C++ file binds.
    """

    name: str
    sources: Sequence[Path]  # C++ files, with different names
    include_dirs: Sequence[Path] = ()  # of the project: headers count as content, like sources
    system_dirs: Sequence[Path] = ()  # of others, for what binds: a flag says which version it is
    flags: Sequence[str] = ()  # for the compiler, after those of every build and of the tier
    links: Sequence[str] = ()  # for the linker, likewise
    tier: str | None = None  # from ``opsmith.kernels.isa.TIERS``; None is for `build_best` to choose


def build_best(wanted: Sequence[Library], *, watch: Watch | None = None) -> tuple[list[Path], str]:
    """Libraries for this CPU, and their tier: the best whose instructions the compiler knows too.

    Raises:
        ValueError, BuildError: as `build_libraries`; or ``OPSMITH_ISA`` names a tier that this CPU cannot run.
    """
    best = isa.tier()
    tiers = [best] if os.environ.get("OPSMITH_ISA") else isa.supported()[::-1]
    for tier in tiers:
        try:
            chosen = [replace(library, tier=library.tier or tier) for library in wanted]
            return build_libraries(chosen, watch=watch), tier
        except TooOld:
            if tier == tiers[-1]:
                raise
    raise AssertionError("there is always a tier")


def build_libraries(
    wanted: Sequence[Library], *, force: bool = False, watch: Watch | None = None
) -> list[Path]:
    """Shared libraries of C++ sources, from the cache if their content is there, else built, all in one run.

    Args:
        wanted: each in a tier; what several of them compile alike is compiled once.
        force: build even what the cache holds.
        watch: is told of every step; by default a line on the terminal shows them.

    Raises:
        ValueError: an unknown tier, or two sources of one name.
        BuildError: there is no compiler, it reports an error, or the disk is full.
    """
    names = ", ".join(library.name for library in wanted)
    for _ in range(_ATTEMPTS):
        try:
            jobs = [_Job.of(library) for library in wanted]
            found = compiler.find_compiler()
            there = {} if force else {job: path for job in jobs if (path := job.find(found))}
            missing = [job for job in jobs if job not in there]
            if missing:
                if found is None:
                    raise BuildError(no_compiler())
                store = cache.writable()
                if not _build(missing, store, found, force, watch):
                    continue
                there |= {job: job.library(store, found) for job in missing}
            return [there[job] for job in jobs]
        except cache.Unusable as error:
            raise BuildError(f"opsmith: {error}") from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise compiler.disk_full() from error
            raise BuildError(f"opsmith: {names} could not be built: {error}") from error
    raise BuildError(
        f"opsmith: the sources of {names} changed during each of {_ATTEMPTS} builds; build again"
    )


def find(library: Library) -> Path | None:
    """The library, if it was built already."""
    return _Job.of(library).find(compiler.find_compiler())


def content(library: Library) -> str:
    """What a library is named after, built or not."""
    return _Job.of(library).key


@dataclass(frozen=True, eq=False)
class _Job:
    """One library to build: its units, each with the key that its content had."""

    name: str
    tier: str
    units: dict[Unit, str]
    links: tuple[str, ...] = ()

    @staticmethod
    def of(library: Library) -> _Job:
        name, tier, sources = library.name, library.tier or "", library.sources
        if tier not in isa.FLAGS:
            raise ValueError(f"opsmith: {tier!r} is no tier: expected one of {', '.join(isa.TIERS)}")
        if len({s.name for s in sources}) < len(sources):
            raise ValueError(
                f"opsmith: sources of {name} need different names, got {[s.name for s in sources]}"
            )
        folders = tuple(Path(folder).absolute() for folder in library.include_dirs)
        flags = (*library.flags, *compiler.sanitizer_flags())
        units = []
        gpu = nvcc.require() if any(s.suffix == ".cu" for s in sources) else None
        for source in map(Path.absolute, sources):
            if source.suffix == ".cu":
                units.append(Unit(source, folders, nvcc.FLAGS, compiler=gpu))
            elif gpu is not None or source.name.startswith("binding"):
                gpus = [nvcc.include(gpu)] if gpu else []
                system = (_torch_folder() / "include", *gpus, *library.system_dirs)
                more = (_TORCH_ABI, _BINDING_LEVEL, *(["-DUSE_CUDA"] if gpu else ()))
                # A binding computes nothing: one serves every tier, and is compiled once.
                its = () if source.name.startswith("binding") else isa.FLAGS[tier]
                units.append(Unit(source, folders, (*its, *more, *flags), system, binds=True))
            else:
                units.append(Unit(source, folders, (*isa.FLAGS[tier], *flags)))
        return _Job(name, tier, {unit: unit.key() for unit in units}, tuple(library.links))

    @property
    def key(self) -> str:
        where = [sys.platform, platform.machine()]
        flags = [*compiler.COMPILE_FLAGS, *compiler.LINK_FLAGS, *self.links]
        if any(unit.compiler for unit in self.units):  # linked with what this torch has of CUDA
            flags += self.link_flags
        return f"{self.name}-{self.tier}-{compiler.fingerprint([*where, *flags, *self.units.values()])[:20]}"

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
        """The library, if a store holds it; in a wheel or without a compiler, whichever compiler built it."""
        for store in cache.readable():
            if built_by is None or store == cache.shipped():
                paths = store.find(f"{self.key}-*.so")
            else:
                paths = [self.library(store, built_by)]
            for path in paths:
                if _usable(store, path, self.binds):
                    store.used(path)
                    return path
        return None


def _build(
    jobs: list[_Job], store: cache.Store, built_by: Compiler, force: bool, watch: Watch | None
) -> bool:
    """Build into the store; False if a source changed meanwhile."""
    for job in jobs:
        if not compiler.accepts(built_by, isa.FLAGS[job.tier], isa.INSTRUCTIONS[job.tier]):
            raise TooOld(
                f"opsmith: {job.name} cannot be built for {job.tier}, whose instructions {built_by.version} lacks;"
                " install a newer compiler, or set OPSMITH_ISA to a lower tier"
            )
    with contextlib.ExitStack() as held:
        # In one order, so that no two processes wait for each other.
        for job in sorted(jobs, key=lambda job: job.key):
            try:
                held.enter_context(store.lock(job.key))
            except TimeoutError as error:
                raise BuildError(
                    f"opsmith: another process has been building {job.key} for too long; stop it"
                ) from error
        if not force:  # another process may have built one while we waited
            jobs = [job for job in jobs if not _usable(store, job.library(store, built_by), job.binds)]
        if not jobs:
            return True
        folder = held.enter_context(store.workshop(jobs[0].key))
        return _run(jobs, store, built_by, force, folder, watch)


def _run(
    jobs: list[_Job], store: cache.Store, built_by: Compiler, force: bool, folder: Path, watch: Watch | None
) -> bool:
    keys = {unit: key for job in jobs for unit, key in job.units.items()}
    base = (built_by.identity, *compiler.COMPILE_FLAGS)
    stored: dict[Unit, Path] = {}
    objects: dict[Unit, str] = {}  # their names in the folder
    todo: dict[str, Unit] = {}
    for unit, key in keys.items():
        stored[unit] = store.folder("objects") / f"{compiler.fingerprint([*base, key])[:40]}.o"
        objects[unit] = f"{unit.source.stem}-{stored[unit].name[:12]}.o"
        if not force and _usable(store, stored[unit], unit.binds):
            # So that a cleanup next door cannot take it from under us.
            _link(stored[unit], folder / objects[unit])
        else:
            todo[objects[unit]] = unit
    finals = [job.library(store, built_by) for job in jobs]
    links = {
        final.name: ([objects[unit] for unit in job.units], job.link_flags)
        for job, final in zip(jobs, finals, strict=True)
    }
    what = f"{jobs[0].name} kernels" if len(jobs) == 1 else f"{len(jobs)} libraries of kernels"
    title = f"building {what} ({jobs[0].tier})"
    _LOG.info("%s: %d steps", title, len(todo) + len(links))
    try:
        with _shown(title, len(todo) + len(links), watch) as told:
            compiler.compile_and_link(built_by, folder, todo, links, told)
    finally:
        done = compiler.finished(folder)
        for name, unit in todo.items():
            if name in done and unit.key() == keys[unit]:
                _link(folder / name, folder / f"{name}.kept")
                facts = _facts(unit.source.name, jobs[0].tier, built_by, unit.binds)
                store.seal(folder / f"{name}.kept", stored[unit], facts, 0o600)
    if any(unit.key() != key for unit, key in keys.items()):
        return False
    for job, final in zip(jobs, finals, strict=True):
        store.seal(folder / final.name, final, _facts(job.name, job.tier, built_by, job.binds), 0o700)
    store.prune({*finals, *stored.values()})
    return True


@contextlib.contextmanager
def _shown(title: str, steps: int, watch: Watch | None) -> Iterator[Watch]:
    """The one who watches, or a line on the terminal; nothing where nobody does."""
    if watch is not None or not sys.stderr.isatty():
        yield watch or (lambda done, total, file: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda done, total, file: bar.update(task, completed=done, total=total)


def _facts(name: str, tier: str, built_by: Compiler, binds: bool) -> dict[str, Any]:
    """What the manifest of a stored file says."""
    facts: dict[str, Any] = {"name": name, "tier": tier, "compiler": built_by.identity}
    return {**facts, "torch": _torch_version()} if binds else facts


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


def no_compiler() -> str:
    """Why nothing can be built, and what to do."""
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
