"""Lowers Triton kernels for Ascend NPUs, in an environment of its own, and says kernel by kernel how far each came.

The kernels, and the variants of them that the cards' samples ask for, are those that `opsmith build` compiles for
GPUs: one process of this environment records what would be launched, then one of the environment that has
`triton-ascend` takes each variant through the stages (`stages.py`). Neither an NPU nor CANN takes part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import opsmith
import opsmith_ascend
from opsmith.authoring.project import answer_of
from opsmith.kernels.compiler import BuildError

__all__ = ["Lowered", "environment", "lower", "report", "table"]

VARIABLE = "OPSMITH_ASCEND_PYTHON"
FOLDER = ".venv-ascend"
_FOLDERS = [
    Path(module.__file__ or "").resolve().parents[1] for module in (opsmith, opsmith_ascend)
]  # imported from
_CHECKOUT = _FOLDERS[0].parent
DISCLAIMER = (
    "A lowering by triton-ascend: nothing ran on an NPU, and CANN, which compiles Linalg, took no part."
)
_MODULE = "opsmith_ascend.lowering.stages"
_STAGES = ("triton", "ttir", "linalg")  # as that module names them, which needs another Triton to be imported


@dataclass(frozen=True)
class Lowered:
    """What came of one kernel: how many of its variants reached each stage, and why the first one stopped."""

    kernel: str  # module.function
    variants: int
    reached: dict[str, int]  # stage to variants that passed it
    stage: str | None  # that refused the first one that was refused
    reason: str | None
    where: str | None  # file:line of the kernel

    @property
    def lowers(self) -> bool:
        """Whether every variant that was tried reached Linalg."""
        return self.stage is None


def environment() -> Path:
    """The Python of the environment with `triton-ascend`.

    Raises:
        BuildError: there is none; the message says how to make one.
    """
    named = os.environ.get(VARIABLE)
    for path in (
        [Path(named)] if named else [base / FOLDER / "bin" / "python" for base in (_CHECKOUT, Path())]
    ):
        if path.is_file():
            return path.absolute()
    missing = f"{VARIABLE} names {named}, which is no file" if named else f"there is no {FOLDER} here"
    raise BuildError(
        f"opsmith: lowering needs an environment of its own with triton-ascend (it takes over the name triton), and "
        f"{missing}: run `make ascend-lower` in a checkout, or set {VARIABLE} to a Python 3.10 or 3.11 that has "
        f"torch, pybind11 and triton-ascend==3.2.0",
        "",
    )


def lower(folder: Path | None = None) -> list[Lowered]:
    """Lower the Triton kernels of a project, or those of the library where no folder is given.

    Raises:
        BuildError: there is no environment, or nothing could be recorded or lowered.
    """
    python = environment()
    variants = _recorded(folder)
    answers = _answers(python, variants)
    found: dict[str, list[dict[str, Any]]] = {}
    for variant, answer in zip(variants, answers, strict=True):
        where = variant["module"].removeprefix("opsmith.").replace(".triton", "").split(".")
        where = where[where[0] in ("ops", "kernels") :]
        found.setdefault(".".join([*dict.fromkeys(where), variant["kernel"]]), []).append(answer)
    return [_lowered(kernel, all_) for kernel, all_ in sorted(found.items())]


def _lowered(kernel: str, answers: list[dict[str, Any]]) -> Lowered:
    def passed(i: int) -> int:
        return sum(a["stage"] is None or _STAGES.index(a["stage"]) > i for a in answers)

    first: dict[str, Any] = next((a for a in answers if a["stage"]), {})
    reached = {stage: passed(i) for i, stage in enumerate(_STAGES)}
    return Lowered(kernel, len(answers), reached, first.get("stage"), first.get("reason"), first.get("where"))


def _recorded(folder: Path | None) -> list[dict[str, Any]]:
    """What the samples' calls would launch, recorded in a process of this environment."""
    found, said = answer_of("opsmith_ascend.lowering.record", *([str(folder.resolve())] if folder else []))
    if not found:
        tail = "\n".join(said.strip().splitlines()[-6:])
        raise BuildError(f"opsmith: no launch of a Triton kernel was recorded:\n{tail}", said)
    return list(found)


def _answers(python: Path, variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One answer for each variant; a process that dies at one is started again behind it."""
    variables = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONHOME")}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, _FOLDERS))
    answers: list[dict[str, Any]] = []
    while len(answers) < len(variants):
        done = subprocess.run(
            [str(python), "-m", _MODULE],
            input="".join(json.dumps(v) + "\n" for v in variants[len(answers) :]),
            capture_output=True,
            text=True,
            check=False,
            env=variables,
            cwd=sys.prefix,
        )
        head, *lines = done.stdout.splitlines() or [""]
        if "triton" not in head:
            tail = "\n".join(done.stderr.strip().splitlines()[-6:])
            raise BuildError(f"opsmith: {python} could not lower anything:\n{tail}", done.stderr)
        answers += [json.loads(line) for line in lines]
        if len(answers) < len(variants):
            said = done.stderr.strip().splitlines()
            answers.append(
                {
                    "stage": "triton",
                    "reason": f"the compiler died with status {done.returncode}: {said[-1] if said else ''}",
                    "where": variants[len(answers)]["file"],
                }
            )
    return answers


def table(results: list[Lowered]) -> str:
    """Kernel × stage × result as Markdown, with the reason of each refusal; then a line that says what it is."""
    rows = ["| kernel | Triton IR | optimized | Linalg | refused |", "|---|---|---|---|---|"]
    for one in results:
        counts = " | ".join(
            "yes" if n == one.variants else f"{n} of {one.variants}" for n in one.reached.values()
        )
        rows.append(f"| `{one.kernel}` | {counts} | {_why(one)} |")
    return "\n".join([*rows, "", _verdict(results)])


def _why(one: Lowered) -> str:
    if one.where is None:
        return ""
    file, _, line = one.where.rpartition(":")
    name = "/".join(Path(file).parts[-2:]) if file.endswith("/triton.py") else Path(file).name
    return f"{one.reason} ({name}:{line})".replace("|", "\\|")


def _verdict(results: list[Lowered]) -> str:
    good = sum(one.lowers for one in results)
    return (
        f"{good} of {len(results)} kernels lower to Linalg in every variant that was tried. {DISCLAIMER}"
        if results
        else "no Triton kernel was launched by any sample"
    )


def report(results: list[Lowered]) -> dict[str, Any]:
    """The same for machines."""
    return {
        "evidence": "lowering",
        "note": DISCLAIMER,
        "kernels": [{**asdict(one), "lowers": one.lowers} for one in results],
    }
