"""A project folder at run time: its operators in the dispatcher, its kernels built when they are first called.

    kernels(__file__, NAME, ...)   what a project's operator.py calls: defines the operators, builds nothing
    load(folder)                   imports a project, which registers its card

Code of a project runs when somebody names its folder or imports it, and never else.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from opsmith import backends
from opsmith.call.binding import declarations, project as project_binding
from opsmith.call.fast import direct
from opsmith.call.signature import Scalar, Signature
from opsmith.kernels import build, compiler, isa, libraries, triton
from opsmith.operator import Operator

_OWN = {"cpu": "*.cpp", "triton": "*.py", "cuda": "*.cu"}
_RESERVED = ("std", "torch", "opsmith", "at", "c10", "aten")


def _patterns() -> dict[str, str]:
    """Back ends, and where the file of their kernels is, in their folder."""
    return _OWN | {one.name: one.kernels for one in backends.installed().values() if one.kernels}


def kernels(
    file: str,
    name: str,
    *,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    attributes: Mapping[str, Scalar] | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    gradients: Sequence[str] = (),
) -> Kernels:
    """Define an operator's entries in PyTorch's dispatcher, for the kernels in the folder of this file.

    >>> KERNELS = kernels(__file__, "scaled", inputs={"x": "... N", "s": "N"}, outputs={"y": "... N"})
    ... # doctest: +SKIP

    Args:
        file: `__file__` of the project's operator.py.
        name: of the operator, in lower case: the dispatcher's namespace, and what the kernels' files are called.
        inputs: tensors and their sizes: symbols or numbers, `...` in front for any leading dimensions.
        outputs: the same.
        attributes: names and defaults; None for a number that has none.
        dtypes: combinations; one word stands for all tensors, else one word for each, outputs last.
        gradients: inputs whose gradient the kernel `backward` writes.

    Raises:
        ValueError: what is no name, size or dtype; or a name that the dispatcher knows already.
    """
    signature = Signature.of(name, inputs, outputs, attributes or {}, dtypes, gradients)
    taken = any(op.startswith(f"{name}::") for op in torch._C._dispatch_get_all_op_names())
    if taken or name in _RESERVED:
        raise ValueError(
            f"{name}: PyTorch's dispatcher has operators of that name already; choose another name"
        )
    return Kernels(Path(file).resolve().parent, signature)


class Kernels:
    """The kernels of one operator: what there are, which can run here, and their entries in the dispatcher."""

    def __init__(self, folder: Path, signature: Signature):
        self.folder = folder
        self.signature = signature
        self.name = signature.name
        self._library = torch.library.Library(self.name, "FRAGMENT")
        twins = (
            [s.replace("(", "_cuda(", 1) for s in signature.schemas()] if self.source("cuda").exists() else []
        )
        for schema in (*signature.schemas(), *twins):
            defined = self._library.define(schema)
            # They only write into outputs they are given, so under fake tensors there is nothing to do.
            torch.library.register_fake(
                f"{self.name}::{defined.split('::')[-1]}", lambda *args, **kwargs: None, lib=self._library
            )
        self._loaded = functools.cache(self._load)
        self._taking = functools.cache(self._choose)  # so that no call but the first looks at the disk
        # How operator.py contradicts itself, so that no kernel may run.
        self.misdeclared: Callable[[], str] = str
        self.stand_ins: dict[str, Callable[..., Any]] = {}  # what answers for a back end: an emulation

    def source(self, backend: str) -> Path:
        """The file with the kernels of a back end: named like the operator, or the only one of its kind there."""
        folder = self.folder / "kernels" / backend
        pattern = _patterns()[backend]
        others = sorted(folder.glob(pattern))
        return others[0] if len(others) == 1 else folder / pattern.replace("*", self.name)

    def backends(self) -> tuple[str, ...]:
        """Those with a file of kernels, or with a library that was built from one."""
        return tuple(b for b in _patterns() if self.source(b).exists() or self.prebuilt(b))

    def lost(self) -> list[str]:
        """Those with a folder and no file of kernels in it, and the CPU where there are none at all."""
        there = self.backends()
        lost = [b for b in _patterns() if (self.folder / "kernels" / b).is_dir() and b not in there]
        return lost or ([] if there else ["cpu"])

    def op(self, backend: str, name: str = "forward") -> Callable[..., Any]:
        """The dispatcher's entry of a back end: forward or, where the operator has gradients, backward."""
        if backend in self.stand_ins and name == "forward":
            return self.stand_ins[backend]
        entry = getattr(getattr(torch.ops, self.name), f"{name}_cuda" if backend == "cuda" else name)
        return entry.default  # type: ignore[no-any-return]

    @triton.constant
    def offers(self, backend: str) -> bool | str:
        """True once the kernels of a back end are built and loaded, else the reason why they are not."""
        return self._loaded(backend)

    @triton.constant
    def backend(self, device: torch.device) -> str | None:
        """The back end that takes tensors of this device, None where none can: the same for all of a process."""
        return self._taking(device.type)

    def _choose(self, device: str) -> str | None:
        other = backends.taking(device)
        wanted = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}.get(device, (other.name,) if other else ())
        if device == "cpu" and self._triton_has_the_cpu():
            wanted = ("triton",)
        return next((b for b in wanted if b in self.backends() and self.offers(b) is True), None)

    @triton.constant
    def ready(self, device: torch.device) -> bool | str:
        """True when kernels take tensors of this device, else the reason why not."""
        if self.backend(device) is not None:
            return True
        reasons = [f"{b}: {self.offers(b)}" for b in self.backends() if self.offers(b) is not True]
        return "; ".join(reasons) or f"{self.name} has no kernels for {device.type}"

    def _triton_has_the_cpu(self) -> bool:
        return triton.DEVICE == "cpu" and self.source("triton").exists()

    def _load(self, backend: str) -> bool | str:
        if backend not in self.backends():
            return f"{self.name} has no kernels for {backend}"
        if backend == "triton":
            return self.misdeclared() or self._load_triton()
        if backend not in backends.OWN:
            return self.misdeclared() or backends.installed()[backend].load(self)
        if backend == "cuda" and not torch.cuda.is_available():
            return "there is no GPU here"
        if backend == "cpu" and self._triton_has_the_cpu():
            return "TRITON_INTERPRET=1 gives the CPU to Triton's interpreter"
        try:
            library = self.prebuilt(backend) or self.build(backend)
            torch.ops.load_library(library)
            direct.begin(library)
        except (build.BuildError, OSError) as error:
            said = str(error).partition("\n")[0]
            warnings.warn(
                f"{said}\nUntil then {self.name} computes in plain PyTorch.", RuntimeWarning, stacklevel=2
            )
            return str(error)
        return True

    def _load_triton(self) -> bool | str:
        if (there := triton.installed()) is not True:
            return there
        if triton.DEVICE == "cuda" and not torch.cuda.is_available():
            return "there is no GPU here"
        module = imported(self.source("triton"), f"opsmith_triton_{self.name}")
        for op, function in module.KERNELS.items():
            self._library.impl(op, function, triton.DEVICE.upper())
        return True

    def prebuilt(self, backend: str) -> Path | None:
        """The library that an installed package carries: of the best tier that this CPU runs."""
        tiers = isa.supported()[::-1] if backend == "cpu" else ("cuda",)
        native = backend in ("cpu", "cuda")
        found = (self.folder / "lib" / f"{self.name}-{tier}.so" for tier in tiers if native)
        return next((path for path in found if path.is_file()), None)

    def build(self, backend: str, *, tier: str | None = None, watch: compiler.Watch | None = None) -> Path:
        """The library of a back end's kernels: from the cache where their content is there, else built.

        Args:
            backend: "cpu" or "cuda".
            tier: of the CPU, by default the best one of this machine.
            watch: is told of every step of the compiler.

        Raises:
            BuildError: there is no compiler, or it reports an error.
        """
        if why := self.misdeclared():
            raise build.BuildError(f"opsmith: {why}")
        folder = self.source(backend).parent
        name, sources = self.name, sorted(folder.glob("*.cpp")) + sorted(folder.glob("*.cu"))
        if backend == "cpu":
            sources.append(compiler.generated(f"binding_{name}.cpp", project_binding(self.signature)))
        if backend == "cuda":
            name, tier = f"{name}-cuda", "portable"  # of the code around the kernels
        library = build.Library(name, sources, include_dirs=[folder, *libraries.HEADERS], tier=tier)
        try:
            if tier is None:
                return build.build_best([library], watch=watch)[0][0]
            return build.build_libraries([library], watch=watch)[0]
        except build.BuildError as error:
            if "linking failed" not in str(error):
                raise
            # Where C++ has other parameters than operator.py declares, the linker alone complains.
            declared = "; ".join(declarations(self.signature).values())
            why = f"{error}; operator.py declares, in namespace {self.name}: {declared}"
            raise build.BuildError(why, error.output) from error


def load(folder: str | Path) -> ModuleType:
    """Import the operator.py of a project folder, which registers its card; the same folder is imported once.

    >>> load("examples/rope_custom").CARD.name  # doctest: +SKIP
    'rope_custom'

    Raises:
        ValueError: the folder has no operator.py, or its name is taken.
    """
    return _load_folder(Path(folder).expanduser().resolve())


@functools.cache
def _load_folder(folder: Path) -> ModuleType:
    file = folder / "operator.py"
    if not file.is_file():
        there = "name its folder" if folder.exists() else "it is missing"
        why = "it has no operator.py" if folder.is_dir() else there
        beside = ", ".join(sorted(one.parent.name for one in folder.parent.glob("*/operator.py"))[:8])
        near = f"; projects beside it: {beside}" if beside else ""
        raise ValueError(f"{folder} is no project: {why}{near}; `opsmith new` writes one")
    for module in list(sys.modules.values()):  # imported as a package already
        if getattr(module, "__file__", None) == str(file):
            return module
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    return imported(file, f"opsmith_project_{folder.name}_{digest}")


def imported(file: Path, name: str) -> ModuleType:
    """A file of Python, as the module of this name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def answer_of(module: str, *words: str, triton_interprets: bool = False) -> tuple[Any, str]:
    """What a program of ours prints last, as JSON, or None; and what it said else.

    It runs in a process of its own, where Triton is its interpreter or is not.
    """
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    variables |= {"TRITON_INTERPRET": "1"} if triton_interprets else {}
    variables.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does today, without its warning
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        capture_output=True,
        text=True,
        check=False,
        env=variables,
        cwd=sys.prefix,  # not a project's folder, whose operator.py would hide Python's own
    )
    try:
        return json.loads(done.stdout.strip().splitlines()[-1]), done.stderr
    except (ValueError, IndexError):
        return None, done.stderr or f"status {done.returncode}, and nothing was said"


def cards_of(module: ModuleType) -> list[Operator]:
    """The cards that a project's module defines."""
    return [value for value in vars(module).values() if isinstance(value, Operator)]


def kernels_of(module: ModuleType) -> list[Kernels]:
    """The kernels that it declares."""
    return [value for value in vars(module).values() if isinstance(value, Kernels)]
