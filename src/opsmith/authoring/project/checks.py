"""Holds a project to its card: every check, its Triton kernels by the interpreter where there is no GPU, and those of
back ends beyond the core's own emulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from opsmith.authoring.project import Kernels, cards_of, load
from opsmith.authoring.project.emulated import findings
from opsmith.backends import installed
from opsmith.call.arguments import short
from opsmith.kernels import triton
from opsmith.proof.conduct import conduct
from opsmith.proof.verify import Finding, verify

__all__ = ["emulated", "interpreted", "needs_interpreter", "verify_project"]

_QUICK = "--quick"
_INTERPRETED = "interpreted"  # how their implementation is called in a report


def verify_project(folder: str | Path) -> Iterator[Finding]:
    """Yield a finding for every check of a project's operators, in every dtype of their cards.

    >>> all(finding.ok for finding in verify_project("examples/rope_custom"))  # doctest: +SKIP
    True
    """
    for card in cards_of(load(folder)):
        for dtype in card.dtypes:
            yield from verify(card, [dtype])
        yield from conduct(card, card.dtypes[0])
    if needs_interpreter(folder):
        yield from interpreted(folder)
    yield from emulated(folder)


def emulated(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> Iterator[Finding]:
    """Yield the findings of a project's kernels for devices that back ends emulate."""
    module = load(folder)
    for kernels in (value for value in vars(module).values() if isinstance(value, Kernels)):
        for name in kernels.backends():
            if name in installed() and not triton.INTERPRETED:
                for card in cards_of(module):
                    if card.name == kernels.name:
                        yield from findings(
                            installed()[name], kernels, card, dtypes or card.dtypes, quick=quick
                        )


def needs_interpreter(folder: str | Path) -> bool:
    """True where a project has Triton kernels and this machine has no GPU to run them."""
    found = [value for value in vars(load(folder)).values() if isinstance(value, Kernels)]
    here = triton.installed() is True and not triton.INTERPRETED and not torch.cuda.is_available()
    return here and any(kernels.source("triton").exists() for kernels in found)


def interpreted(
    folder: str | Path, dtypes: Sequence[torch.dtype] = (), *, quick: bool = False
) -> list[Finding]:
    """The findings of a project's Triton kernels in Triton's interpreter: in a process where these have the CPU."""
    command = [
        sys.executable,
        "-m",
        "opsmith.authoring.project.checks",
        str(Path(folder).resolve()),
        *map(short, dtypes),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=sys.prefix,  # not a project's folder, whose operator.py would hide Python's own
    )
    try:
        return [Finding(**one) for one in json.loads(done.stdout.strip().splitlines()[-1])]
    except (ValueError, IndexError):
        tail = " ".join(done.stderr.strip().splitlines()[-2:])
        raise RuntimeError(
            f"{folder}: verification in Triton's interpreter ended without a result: {tail}"
        ) from None


def main(folder: str, *words: str) -> None:
    """The part of `interpreted` that runs in the other process."""
    found = []
    names = [word for word in words if word != _QUICK]
    for card in cards_of(load(folder)):
        dtypes = [dtype for dtype in card.dtypes if not names or short(dtype) in names]
        for dtype in dtypes:
            found += list(verify(card, [dtype]))
        found += [] if _QUICK in words else list(conduct(card, dtypes[0]))
    mine = [f for f in found if f.implementation not in ("native", "eager") and f.check != "gradcheck"]
    print(
        json.dumps([asdict(replace(f, implementation=f"{f.implementation}, {_INTERPRETED}")) for f in mine])
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
