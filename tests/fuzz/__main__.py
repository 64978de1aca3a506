"""Random cases in numbers: `make fuzz CASES=100000`.

    python -m tests.fuzz operators --cases 100000      operators, on the kernels of the best tier or of OPSMITH_ISA
    python -m tests.fuzz models files states --seed 7  others, from a seed

Each fuzzer takes its turn with so many cases from a seed of its own, until all have had theirs. What fails is made
small, and kept in `.hypothesis` to be tried first the next time; a fuzzer that has failed three times has had enough.
`build/fuzz-KIND.json` says what was done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import secrets
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

# As conftest.py has them: Inductor compiles C++ for seconds, and threads that wait would starve the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPSMITH_INDUCTOR", "0")

from hypothesis.database import DirectoryBasedExampleDatabase

from opsmith import measure
from opsmith.kernels import isa

ROOT = Path(__file__).parents[2]
KINDS = ("operators", "models", "files", "states")
TURN = 200  # cases
ENOUGH = 3  # failures of one fuzzer


def failures_of(error: BaseException) -> list[str]:
    """What Hypothesis found, one entry each, with the least case."""
    several = getattr(error, "exceptions", (error,))
    return [
        "\n".join(
            [f"{type(one).__name__}: {str(one)[:1000]}", *(n[:4000] for n in getattr(one, "__notes__", ()))]
        ).replace(f"{ROOT}/", "")
        for one in several
    ]


def fuzz(kind: str, cases: int, minutes: float, seed: int) -> dict[str, Any]:
    """Run the fuzzers of a kind in turns, for so many cases in all or so many minutes; what was done, as JSON."""
    fuzzers = importlib.import_module(f"tests.fuzz.{kind}").fuzzers()
    kept = ROOT / ".hypothesis" / "fuzz"  # a folder each: all have the same function's key
    failures: dict[str, list[str]] = {fuzzer.name: [] for fuzzer in fuzzers}
    started, turn = time.monotonic(), 0
    each = -(-cases // len(fuzzers))

    def over() -> bool:
        return time.monotonic() - started > 60 * minutes

    while left := [f for f in fuzzers if f.seen < each and len(failures[f.name]) < ENOUGH]:
        for fuzzer in left:
            if over():
                break
            try:
                # What failed in this run is not tried again in it, and is not found to fail three times.
                database = (
                    None if failures[fuzzer.name] else DirectoryBasedExampleDatabase(kept / fuzzer.name)
                )
                fuzzer.run(min(TURN, each - fuzzer.seen), seed + turn, database=database)
            except Exception as error:
                failures[fuzzer.name] += failures_of(error)
                print(f"{fuzzer.name}, seed {seed + turn}:", *failures_of(error), sep="\n  ", flush=True)
        turn += 1
        print(f"{kind}: {sum(f.seen for f in fuzzers)} cases, {time.monotonic() - started:.0f} s", flush=True)
        if over():
            break
    machine = measure.describe()
    return {
        "kind": kind,
        "taken": date.today().isoformat(),
        "commit": machine.commit,
        "tier": isa.tier(),
        "seeds": [seed, seed + turn - 1],
        "cases": sum(fuzzer.seen for fuzzer in fuzzers),
        "seconds": round(time.monotonic() - started, 1),
        "by_fuzzer": {fuzzer.name: fuzzer.seen for fuzzer in fuzzers},
        "failures": {name: found for name, found in failures.items() if found},
        "machine": machine.to_json(),
    }


def main() -> int:
    """Run what is named; 1 where anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--cases", type=int, default=10_000, help="of each kind")
    parser.add_argument("--minutes", type=float, default=60.0, help="that a kind may take")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the first turn; chosen at random, and said"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build", help="the folder of the results")
    chosen = parser.parse_args()
    if unknown := [kind for kind in chosen.kinds if kind not in KINDS]:
        parser.error(f"expected some of {', '.join(KINDS)}, got {unknown[0]}")
    failed = False
    with tempfile.TemporaryDirectory() as tuning:
        os.environ["OPSMITH_TUNING"] = tuning
        for kind in chosen.kinds:
            seed = secrets.randbelow(1 << 31) if chosen.seed is None else chosen.seed
            print(f"{kind}: seed {seed}", flush=True)
            done = fuzz(kind, chosen.cases, chosen.minutes, seed)
            name = f"fuzz-{kind}-{done['tier']}" if kind in ("operators", "states") else f"fuzz-{kind}"
            chosen.json.mkdir(parents=True, exist_ok=True)
            (chosen.json / f"{name}.json").write_text(json.dumps(done, indent=1) + "\n")
            failed = failed or bool(done["failures"])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
