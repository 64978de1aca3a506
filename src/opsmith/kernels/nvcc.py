"""NVIDIA's compiler: where it is, and how it compiles the kernels of a project for GPUs that need not be here."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from opsmith.kernels.compiler import BuildError, Compiler, first_that_runs

# Ampere, which its successors up to 8.9 run too, and Hopper with its own instructions.
ARCHITECTURES = ("80", "90a")
_NEWER = "90"  # in PTX, which newer ones compile when they load it
_TOP = re.compile(r"^#\$ TOP=(.+)$", re.MULTILINE)
FLAGS = (
    *("-std=c++17", "-O3", "-lineinfo", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
    *(f"-gencode=arch=compute_{name},code=sm_{name}" for name in ARCHITECTURES),
    f"-gencode=arch=compute_{_NEWER},code=compute_{_NEWER}",
)


def find() -> Compiler | None:
    """``$NVCC``, or nvcc on PATH, in ``$CUDA_HOME`` or in /usr/local/cuda; None if there is none."""
    folders = filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda"))
    usual = ("nvcc", *(shlex.quote(f"{folder}/bin/nvcc") for folder in folders))
    chosen = os.environ.get("NVCC")
    return first_that_runs((chosen,) if chosen else usual, os.environ.get("PATH", ""), line=-1)


def require() -> Compiler:
    """The same, or an error with the next step.

    Raises:
        BuildError: there is none.
    """
    found = find()
    if found is None:
        chosen = os.environ.get("NVCC")
        missing = "nvcc is not on PATH, in $CUDA_HOME or in /usr/local/cuda"
        problem = f"NVCC={chosen} does not run" if chosen else missing
        raise BuildError(
            f"opsmith: CUDA kernels cannot be built: {problem}. Install NVIDIA's CUDA toolkit, or set NVCC to its nvcc;"
            " the other back ends need none of it"
        )
    return found


@functools.lru_cache(maxsize=8)
def _home(compiler: Compiler) -> Path:
    """The toolkit's folder, by nvcc's own account: what is on PATH may be a script that calls it."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as empty:
        command = [*compiler.command, "--dryrun", "-c", empty.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = _TOP.search(said.stderr + said.stdout)
    return Path(found[1] if found else Path(compiler.command[0]).parents[1]).resolve()


def include(compiler: Compiler) -> Path:
    """Where the toolkit keeps its headers."""
    return _home(compiler) / "include"


def link_flags(compiler: Compiler, torch_libraries: Path) -> list[str]:
    """How a library with kernels is linked: with a CUDA runtime of its own, which needs no version of torch's.

    The current stream is libtorch_cuda's to tell. A PyTorch without CUDA lacks it: what is linked there is complete but
    for that one, and cannot be loaded, as nothing could that runs on a GPU.
    """
    runtime = [
        *(f"-L{_home(compiler) / name}" for name in ("lib64", "lib")),
        "-lcudart_static",
        "-ldl",
        "-lrt",
        "-lpthread",
    ]
    if (torch_libraries / "libtorch_cuda.so").exists():
        return [*runtime, f"-L{torch_libraries}", "-ltorch_cuda"]
    return [*runtime, "-Wl,--unresolved-symbols=ignore-in-object-files"]
