"""What kernels share can be used by one kernel together: no two headers define the same name."""

import subprocess
from pathlib import Path

import pytest

from opsmith.kernels import compiler, isa, libraries


@pytest.mark.parametrize("tier", isa.supported())
def test_all_headers_can_be_included_together(tier: str, tmp_path: Path) -> None:
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("there is no C++ compiler")
    headers = [
        header.relative_to(folder)
        for folder, pattern in ((libraries.SHARED, "**/*.h"), (libraries.SHARED.parent, "schedules/*.h"))
        for header in sorted(folder.glob(pattern))
        if "binding" not in str(header) and "cuda" not in header.name
    ]
    assert len(headers) > 15
    source = tmp_path / "all.cpp"
    source.write_text("".join(f'#include "{header}"\n' for header in headers))
    folders = [f"-I{folder}" for folder in libraries.HEADERS]
    flags = ["-std=c++20", *isa.FLAGS[tier], *folders]
    subprocess.run([*found.command, *flags, "-fsyntax-only", "-w", str(source)], check=True)
