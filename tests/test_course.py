"""Each lesson of the course is a program, and runs from top to bottom; so do the pages of the guide that say so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from opsmith.kernels import triton
from opsmith.kernels.compiler import find_compiler

COURSE = Path(__file__).parents[1] / "docs" / "course"
LESSONS = sorted(COURSE.glob("[0-9]*.md"))
GUIDE = [
    COURSE.parent / f"guide/{page}.md"
    for page in ("faq", "migrating", "new-model", "optimize-an-operator", "training")
]

pytestmark = pytest.mark.skipif(
    not find_compiler() or triton.INTERPRETED, reason="there is no compiler, or the interpreter has the CPU"
)


def code_of(page: str) -> str:
    """The Python of a page, each line where the page has it, so that an error names the page's line."""
    code, inside = [], False
    for line in page.splitlines():
        begins = line == "```python"
        inside = (inside or begins) and line != "```"
        code.append(line if inside and not begins else "")
    return "\n".join(code)


def words_of(line: str) -> list[str]:
    """The line's words, every number a `#`: last digits, and the order of what is found, differ between machines."""
    return sorted(re.sub(r"\d[\d.,]*(?:e[-+]?\d+)?", "#", line).replace(",", " ").split())


@pytest.mark.parametrize("lesson", [*LESSONS, *GUIDE], ids=lambda page: page.stem)
def test_a_lesson_runs(lesson: Path, tmp_path: Path) -> None:
    for needed in {"new-model": ["transformers"], "training": ["transformers", "accelerate"]}.get(
        lesson.stem, []
    ):
        pytest.importorskip(needed)
    program = tmp_path / f"{lesson.stem}.py"
    program.write_text(code_of(lesson.read_text()))
    done = subprocess.run(
        [sys.executable, program],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    if lesson in LESSONS:
        printed = [words_of(line) for line in done.stdout.splitlines()]
        shown = re.findall(r"```text\n(.*?)```", lesson.read_text(), re.DOTALL)
        missing = [line for block in shown for line in block.splitlines() if words_of(line) not in printed]
        assert missing == []


def test_the_overview_names_every_lesson() -> None:
    named = re.findall(r"\| \[\d\. [^\]]+\]\(([^)]+)\)", (COURSE / "index.md").read_text())
    assert named == [lesson.name for lesson in LESSONS]
