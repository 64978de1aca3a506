"""A wheel of opsmith with its kernels built for every tier of this kind of processor, and the sdist, in dist/.

    python packages/wheel.py            # all tiers: six minutes on two cores
    python packages/wheel.py --tier avx2 --tier avx512

Kernels bind to PyTorch's stable ABI, so those of one wheel serve every Python, and every torch from the one it was
built under. What is for one torch and one Python only (calls that skip PyTorch's dispatcher, nodes of autograd, the
profiler's recorder) is built for the ones that run this. The wheel holds the sources too: a library it does not have
is built where it is installed, as from a checkout. Of Linux it asks what auditwheel finds in the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from opsmith.kernels import isa

HERE = Path(__file__).resolve().parents[1]
WORK = HERE / "build" / "wheel"
TOOLS = HERE / ".venv-wheel" / "bin"
_PARTS = ("src/opsmith", "pyproject.toml", "README.md", "LICENSE")
# In a process of its own, on the copy that is packed: a library is named after its sources' content.
_BUILD = """
import json, sys
import opsmith.ops
from opsmith.call.fast import direct, nodes
from opsmith.kernels import build, libraries
from opsmith.profiler import recorder

wanted = [*direct.not_built_yet(), *nodes.not_built_yet(), recorder.LIBRARY]
built = libraries.build(sys.argv[1:]) + build.build_libraries(wanted)
print(json.dumps(list(map(str, built))))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tier", action="append", choices=isa.TIERS, help="only this one; may be repeated")
    tiers = parser.parse_args().tier or isa.TIERS
    tree = WORK / "opsmith"
    shutil.rmtree(tree, ignore_errors=True)
    kept = subprocess.run(["git", "ls-files", *_PARTS], cwd=HERE, capture_output=True, text=True, check=True)
    for name in kept.stdout.split("\n")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / name, tree / name)
    python = os.fspath(TOOLS / "python")
    pack = [python, "-m", "build", tree, "--outdir"]
    subprocess.run([*pack, HERE / "dist", "--sdist"], check=True)

    environment = {**os.environ, "OPSMITH_CACHE": f"{WORK / 'cache'}", "PYTHONPATH": f"{tree / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, *tiers], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    built = tree / "src/opsmith/kernels/built/libraries"
    built.mkdir(parents=True)
    for library in map(Path, json.loads(done.stdout)):
        shutil.copy(library, built / library.name)
        manifest = library.name + ".json"
        shutil.copy(library.with_name(manifest), built / manifest)

    platform = f"--config-setting=--build-option=--plat-name=linux_{os.uname().machine}"
    subprocess.run([*pack, tree / "dist", "--wheel", platform], check=True)
    (wheel,) = (tree / "dist").iterdir()
    without = ("--exclude=libtorch*", "--exclude=libc10*")  # which the torch that is installed has
    repair = [python, "-m", "auditwheel", "repair", *without, "--wheel-dir", HERE / "dist", wheel]
    path = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    subprocess.run(repair, check=True, env={**os.environ, "PATH": path})


if __name__ == "__main__":
    main()
