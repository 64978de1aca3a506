"""Compiles what a project has for each back end, and shows a compiler's complaint at the author's own line."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from opsmith import backends
from opsmith.authoring.project import Kernels, answer_of, kernels_of, load
from opsmith.kernels import nvcc
from opsmith.kernels.compiler import BuildError, Watch

_WHERE = r"^[^\n]*?(?P<file>{folder}[^:\n]*):(?P<line>\d+):\d+:[^\n]*required from[^\n]*$"


def projects_kernels(folder: str | Path) -> list[Kernels]:
    """The kernels that a project's operator.py declares.

    Raises:
        ValueError: the folder is no project, or declares none.
    """
    found = kernels_of(load(folder))
    if not found:
        raise ValueError(
            f"{folder}: operator.py declares no kernels (project.kernels(...)), so there is nothing to build"
        )
    return found


def tool_missing(backend: str) -> str:
    """Why nothing here can compile kernels for GPUs, and the next step; "" where it can, or of another back end."""
    if backend == "triton" and find_spec("triton") is None:
        return (
            "Triton kernels cannot be compiled: triton is not installed. Install it: pip install"
            ' "opsmith[gpu]"; the other back ends need none of it'
        )
    try:
        if backend == "cuda":
            nvcc.require()
    except BuildError as error:
        return str(error).removeprefix("opsmith: ")
    return ""


def compile_backend(kernels: Kernels, backend: str, watch: Watch | None = None) -> str:
    """Compile one back end's kernels and say what came of it.

    Raises:
        BuildError: with the first error, at its line in the author's file.
    """
    if why := kernels.misdeclared():
        raise BuildError(f"opsmith: {why}")
    if backend == "triton":
        return _triton(kernels)
    try:
        if backend not in backends.OWN:
            return backends.installed()[backend].compile(kernels)
        made = kernels.build(backend, watch=watch)
    except BuildError as error:
        raise _at_the_authors_line(error, kernels.folder) from error
    if backend == "cuda":
        import torch

        for_gpus = f"for {', '.join(f'sm_{name}' for name in nvcc.ARCHITECTURES)} and newer"
        if torch.version.cuda is None:
            return f"compiles {for_gpus}; this PyTorch has no CUDA, so nothing can load it here ({made})"
        return f"{made}, {for_gpus}"
    return str(made)


def _at_the_authors_line(error: BuildError, folder: Path) -> BuildError:
    """An error that arose in a header of ours, with the line of the project that asked for what is there."""
    before = error.output.partition("error: ")[0].rpartition("\nFAILED")[2]
    asked = list(re.finditer(_WHERE.format(folder=re.escape(str(folder))), before, re.MULTILINE))
    if not asked or str(folder) in str(error).partition("error")[0].splitlines()[0]:
        return error
    nearest = asked[0]
    return BuildError(f"{error}\nasked for by {nearest['file']}:{nearest['line']}", error.output)


def _triton(kernels: Kernels) -> str:
    """Compile the Triton kernels for GPUs, in a process of its own: the operators' calls become compilations there."""
    if why := tool_missing("triton"):
        raise BuildError(f"opsmith: {why}")
    found, said = answer_of("opsmith.authoring.project.triton_check", str(kernels.folder), kernels.name)
    if found is None:
        tail = "\n".join(said.strip().splitlines()[-6:])
        raise BuildError(f"opsmith: the Triton kernels of {kernels.name} were not compiled:\n{tail}", said)
    if found["wrong"]:
        raise BuildError(f"opsmith: {found['wrong'][0]}", "\n".join(found["wrong"]))
    return f"{found['compiled']} variants of {found['kernels']} kernels compile for {', '.join(found['targets'])}"
