"""Build a C++ program that calls opsmith's kernels, and run it: it needs no Python from then on.

Example: python examples/cpp/build.py
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import torch
import typer

import opsmith.ops  # noqa: F401  declares the kernels
from opsmith.kernels import libraries
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import registry

HERE = Path(__file__).resolve().parent


def main(folder: Annotated[Path, typer.Option(help="Where the program goes.")] = Path("build/cpp")) -> None:
    """Write the schemas that the program defines, compile it, and run it on the library of MLA's kernels."""
    compiler = find_compiler()
    if compiler is None or not libraries.load("mla_preprocess"):
        raise SystemExit("the example needs opsmith's kernels and a C++ compiler: see opsmith doctor")
    library = libraries.status().libraries["mla"]
    (schema,) = registry()["mla_preprocess"].schemas
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schemas.h").write_text(f'#pragma once\n#define OPSMITH_MLA_PREPROCESS "{schema}"\n')
    program, torchs = folder / "mla_preprocess", Path(torch.__file__).parent
    flags = ["-std=c++20", "-O2", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{folder}"]
    flags += [f"-isystem{torchs}/include", f"-L{torchs}/lib", f"-Wl,-rpath,{torchs}/lib"]
    links = ["-Wl,--no-as-needed", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl"]
    source = HERE / "mla_preprocess.cpp"
    subprocess.run([*compiler.command, *flags, source, "-o", program, *links], check=True)
    raise SystemExit(subprocess.run([program, str(library)], check=False).returncode)


if __name__ == "__main__":
    typer.run(main)
