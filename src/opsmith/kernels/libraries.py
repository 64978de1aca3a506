"""The native kernels: which libraries they are, and which of them are loaded.

    load("layer_norm")   True once the library of this kernel is loaded, built if need be; False if it cannot be
    load()               the same of all libraries
    build()              ahead of time
    status()             what there is, for ``opsmith doctor``
    clean()              forget everything built

A folder ``cpu*`` of an operator's family is a library, named after both: ``ops/gelu/cpu_backward`` is
``gelu_backward``. A first call waits for what it needs, and for nothing else. Sources elsewhere are shared: each is
compiled once, and linked where a header of its name is included. Which kernels a library offers is declared beside
their signatures (`offer`). A kernel that is called before anybody has asked for it loads its library itself.

``OPSMITH_NATIVE=0`` turns native kernels off, and ``1`` makes it an error when they cannot be built.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith.kernels import build as builder, cache, compiler, isa, triton
from opsmith.kernels.build import BuildError, Library

SHARED = Path(__file__).resolve().parent / "cpu"
HEADERS = (SHARED, SHARED / "binding", SHARED.parent)  # where includes of what is shared are looked for
SOURCES = Path(__file__).resolve().parents[1] / "ops"
_TURNED_OFF = "OPSMITH_NATIVE=0 turns native kernels off"

_lock = threading.RLock()
_loaded: dict[str, Path] = {}  # by library
_refused: dict[str, str] = {}  # by library: why it is not loaded
_offered: dict[str, str] = {}  # the library of each kernel
_bindings: dict[str, dict[str, str]] = {}  # by library and kernel: C++ that binds it and is in no file
_followers: list[Callable[[Path], None]] = []  # are told of every library that is loaded
# What is to be built with kernels, or with gradients.
_wanted_beside: list[Callable[[bool], list[Library]]] = []
_tier: str | None = None  # of all that is loaded, as one library reads what another one has packed


@dataclass(frozen=True)
class Status:
    """What there is of the native kernels on this machine."""

    tier: str
    forced: bool  # by OPSMITH_ISA
    compiler: str | None  # path and version
    cache: Path
    libraries: dict[str, Path | None]  # None until it is built
    loaded: tuple[str, ...]
    bytes: int  # in the cache
    reason: str | None  # why native kernels, or some of them, are unavailable


def kernels() -> dict[str, str]:
    """The library of each kernel."""
    return dict(_offered)


def offer(library: str, *kernels: str, binding: str = "") -> None:
    """Say that a library has these kernels: each loads it when it is called before anybody has asked for it.

    Args:
        library: its name.
        kernels: their names.
        binding: the C++ that binds them, where no file in the library's folder does.
    """
    for kernel in kernels:
        _offered[kernel] = library
        _load_when_called(kernel)
    if binding:
        if library in _loaded:
            raise RuntimeError(f"opsmith: the {library} library was loaded before its kernels were declared")
        _bindings.setdefault(library, {})["_".join(kernels)] = binding


def follow(
    loaded: Callable[[Path], None] | None = None, wanted: Callable[[bool], list[Library]] | None = None
) -> None:
    """Have somebody told of every library of kernels that is loaded, or asked what is to be built with one.

    Args:
        loaded: is given the library's path.
        wanted: is told whether gradients are wanted; what it names is built in the same run, as it will be wanted next.
    """
    if loaded is not None:
        _followers.append(loaded)
    if wanted is not None:
        _wanted_beside.append(wanted)


def load(*names: str) -> bool:
    """Load the libraries of these kernels, or all of them: what has to be built first is built in one run.

    >>> load("layer_norm", "gelu") in (True, False)
    True

    Returns:
        False, after one warning in a process, where one of them cannot be had.

    Raises:
        ValueError: no library offers such a kernel; or, of all, nobody has declared those of one; or ``OPSMITH_ISA``
            names a tier that does not exist or that this CPU cannot run.
        BuildError: ``OPSMITH_NATIVE=1`` and a library cannot be built.
    """
    wanted = {_offered[name] for name in names if name in _offered}
    if not wanted.isdisjoint(_refused):
        return False
    if names and all(_offered.get(name) in _loaded for name in names):
        return True
    with _lock:
        if unknown := [name for name in names if name not in _offered]:
            raise ValueError(
                f"opsmith: no library offers {unknown[0]!r}; import opsmith.ops, which declares them"
            )
        wanted = {_offered[name] for name in names} if names else _names()
        gradients = not names or any(name.endswith("_backward") for name in names)
        _load(sorted(wanted - _loaded.keys() - _refused.keys()), gradients)
        return wanted <= _loaded.keys()


def _load(names: Sequence[str], gradients: bool) -> None:
    """Load these libraries, or note why not; what records their calls is built with them where gradients are wanted."""
    if not names:
        return
    wanted = os.environ.get("OPSMITH_NATIVE")
    if wanted == "0":
        _refused.update(dict.fromkeys(_names(), _TURNED_OFF))
        return
    beside = [library for wanted_by in _wanted_beside for library in wanted_by(gradients)]
    if beside or len(names) > 1:
        try:
            return _open(names, beside)
        except BuildError:  # of one of them; the others need not do without
            pass
    for name in names:
        try:
            _open([name])
        except BuildError as error:
            if wanted == "1":
                raise
            if not _refused:
                message = f"{error}\nUntil then opsmith computes in plain PyTorch."
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            _refused[name] = str(error)


def _open(names: Sequence[str], beside: Sequence[Library] = ()) -> None:
    """Build these libraries in one run, with others that will be wanted next, and load them."""
    global _tier
    paths, tier = builder.build_best([*(_library(name, _tier) for name in names), *beside])
    _tier = _tier or tier
    for name, path in zip(names, paths, strict=False):
        _loaded[name] = _opened(name, path, _tier)
        if not triton.INTERPRETED:
            for follower in _followers:
                follower(_loaded[name])


def _opened(name: str, path: Path, tier: str) -> Path:
    try:
        torch.ops.load_library(path)
    except OSError:  # intact, yet not for this process: a home shared with another system, say
        (path,) = builder.build_libraries([_library(name, tier)], force=True)
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise BuildError(f"opsmith: the native kernels were built but do not load: {error}") from error
    return path


def build(tiers: Sequence[str] | None = None, force: bool = False) -> list[Path]:
    """Build all libraries for some tiers ahead of time; by default for the tier that ``load`` would take.

    >>> build()  # doctest: +SKIP
    [PosixPath('.../attention-avx512_bf16-....so'), ...]

    Args:
        tiers: names from ``opsmith.kernels.isa.TIERS``; they need not be supported by this CPU.
        force: build even what the cache already holds.

    Raises:
        ValueError: a tier that does not exist.
        BuildError: there is no compiler, or it reports an error.
    """
    chosen = [isa.tier()] if tiers is None else tiers
    return builder.build_libraries(
        [_library(name, tier) for tier in chosen for name in sorted(_names())], force=force
    )


def status() -> Status:
    """What there is of the native kernels: tier, compiler, libraries, cache.

    Raises:
        ValueError: ``OPSMITH_ISA`` names a tier that does not exist or that this CPU cannot run.
    """
    best = isa.tier()
    tier = _tier or best
    found = compiler.find_compiler()
    libraries = {name: _loaded.get(name) or builder.find(_library(name, tier)) for name in sorted(_names())}
    reason = next(iter(_refused.values()), None)
    if reason is None and os.environ.get("OPSMITH_NATIVE") == "0":
        reason = _TURNED_OFF
    if reason is None and found is None and None in libraries.values():
        reason = builder.no_compiler()
    stores = {cache.configured(), cache.fallback()}
    return Status(
        tier=tier,
        forced=bool(os.environ.get("OPSMITH_ISA")),
        compiler=f"{' '.join(found.command)} ({found.version})" if found else None,
        cache=cache.configured().path,
        libraries=libraries,
        loaded=tuple(sorted(_loaded)),
        bytes=sum(store.size() for store in stores),
        reason=reason,
    )


def content() -> str:
    """What names the kernels of this machine, whichever of them are built by now; "none" where there can be none."""
    if os.environ.get("OPSMITH_NATIVE") == "0":
        return "none"
    return _content(SOURCES, _tier or isa.tier(), compiler.find_compiler())


@functools.lru_cache(maxsize=8)
def _content(sources: Path, tier: str, built_by: compiler.Compiler | None) -> str:
    wanted = [_library(name, tier) for name in sorted(_names())]
    if built_by is None and not any(map(builder.find, wanted)):
        return "none"
    keys = [built_by.identity if built_by else "", *map(builder.content, wanted)]
    return f"{tier}-{compiler.fingerprint(keys)[:20]}"


def clean() -> int:
    """Remove everything built, except what a build under way uses, and return the bytes freed."""
    return cache.configured().clean() + cache.fallback().clean()


def _names() -> set[str]:
    return set(_folders(SOURCES))


def _folders(sources: Path) -> dict[str, Path]:
    folders = {source.parent for source in sources.glob("*/cpu*/*.cpp")}
    return {folder.parent.name + folder.name.removeprefix("cpu"): folder for folder in folders}


def _library(name: str, tier: str | None) -> Library:
    if name not in _offered.values():  # without its bindings it would be another library, or none
        raise ValueError(f"opsmith: no kernel of {name!r} is declared; import opsmith.ops first")
    folders = [*HEADERS, SOURCES]
    own = sorted(_folders(SOURCES)[name].glob("*.cpp"))
    bindings = _bindings.get(name, {}).items()
    own += (compiler.generated(f"binding_{kernel}.cpp", text) for kernel, text in bindings)
    return Library(name, _sources(own, folders), include_dirs=folders, tier=tier)


def _sources(own: Sequence[Path], folders: Sequence[Path]) -> list[Path]:
    """A library's own sources, and the others whose headers these include, or those in turn."""
    found = list(own)
    for source in found:  # which grows meanwhile
        beside = (header.with_suffix(".cpp") for header in sorted(compiler.headers(source, folders)))
        found += [unit for unit in beside if unit.exists() and unit not in found]
    return found


_LIBRARY = torch.library.Library("opsmith", "IMPL")


def _load_when_called(kernel: str) -> None:
    """Until its library is loaded, let a kernel of ours load it and call again."""
    calling = threading.local()

    def first(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(t, Tensor) and not t.is_cpu for t in (*args, *kwargs.values())):
            raise NotImplementedError(f"opsmith::{kernel} has no kernel for the device of these tensors")
        if not load(kernel):
            raise NotImplementedError(f"opsmith::{kernel} has no kernel here (see `opsmith doctor`)")
        if getattr(calling, "again", False):
            raise NotImplementedError(
                f"opsmith::{kernel} is not in the library {_offered[kernel]}, which was to have it; bind it in "
                f"{_folders(SOURCES)[_offered[kernel]]} with opsmith::offer, or declare(..., bound=True)"
            )
        calling.again = True
        try:
            return getattr(torch.ops.opsmith, kernel).default(*args, **kwargs)
        finally:
            calling.again = False

    # Of all kernels that a device may have, this one is taken where it has no other.
    _LIBRARY.impl(kernel, first, "CompositeExplicitAutograd")
