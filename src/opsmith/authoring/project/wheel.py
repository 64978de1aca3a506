"""A wheel of a project: its Python, and its kernels built for every tier of this kind of processor.

The libraries bind to PyTorch's stable ABI, so one wheel serves every torch from 2.10 on; no compiler is needed where
it is installed. Its entry point in the group `opsmith.operators` lets `opsmith` find the operators there.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sysconfig
import zipfile
from pathlib import Path

import torch

from opsmith.authoring.project.compile import projects_kernels
from opsmith.kernels import isa
from opsmith.kernels.compiler import Watch
from opsmith.version import VERSION

_SKIPPED = {"tests", "build", "dist", "lib", "__pycache__"}
_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh", ".json", ".md")
_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TORCH = ">=2.10"


def write_wheel(
    folder: str | Path, target: str | Path, watch: Watch | None = None, version: str = "0.1.0"
) -> Path:
    """Build a project's kernels for every tier and pack them into a wheel; returns its path.

    >>> write_wheel("examples/rope_custom", "dist")  # doctest: +SKIP
    PosixPath('dist/rope_custom-0.1.0-py3-none-linux_x86_64.whl')

    Raises:
        ValueError: the folder's name is no name of a Python package.
        BuildError: there is no compiler, or it reports an error.
    """
    folder, target = Path(folder).resolve(), Path(target)
    package = folder.name
    if not _PACKAGE.fullmatch(package):
        raise ValueError(
            f"{folder}: a package is named like its folder, and {package!r} is no name; rename the folder"
        )
    files = {f"{package}/__init__.py": b'"""Operators, built by opsmith."""\n'}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.suffix in _SUFFIXES and not _SKIPPED & set(inside.parts) and not path.is_symlink():
            files[f"{package}/{inside.as_posix()}"] = path.read_bytes()
    names = []
    for kernels in projects_kernels(folder):
        names.append(kernels.name)
        if kernels.source("cpu").exists():
            for tier in isa.TIERS:
                library = kernels.build("cpu", tier=tier, watch=watch)
                files[f"{package}/lib/{kernels.name}-{tier}.so"] = library.read_bytes()
        # Else built at their first call.
        if kernels.source("cuda").exists() and torch.version.cuda is not None:
            library = kernels.build("cuda", watch=watch)
            files[f"{package}/lib/{kernels.name}-cuda.so"] = library.read_bytes()
    platform = re.sub(r"[^A-Za-z0-9]", "_", sysconfig.get_platform())
    stem, tag = f"{package}-{version}", f"py3-none-{platform}"
    files |= _metadata(package, version, tag, names)
    target.mkdir(parents=True, exist_ok=True)
    wheel = target / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        records = []
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            records.append(f"{name},sha256={digest},{len(content)}")
            archive.writestr(_entry(name), content)
        record = f"{stem}.dist-info/RECORD"
        archive.writestr(_entry(record), "\n".join([*records, f"{record},,", ""]))
    return wheel


def _metadata(package: str, version: str, tag: str, names: list[str]) -> dict[str, bytes]:

    info = f"{package}-{version}.dist-info"
    described = (
        f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nSummary: Operators built by opsmith: "
        f"{', '.join(names)}\nRequires-Python: >=3.10\nRequires-Dist: torch{_TORCH}\n"
        f"Requires-Dist: opsmith>={VERSION}\n"
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: opsmith {VERSION}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    points = f"[opsmith.operators]\n{package} = {package}.operator\n"
    texts = {"METADATA": described, "WHEEL": wheel, "entry_points.txt": points}
    return {f"{info}/{name}": text.encode() for name, text in texts.items()}


def _entry(name: str) -> zipfile.ZipInfo:
    """The same bytes for the same content: no times, and modes that an installer keeps."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
