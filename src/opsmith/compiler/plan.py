"""The plan: every site with its implementation at every shape, and why. A person reads it, edits it, pins it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from opsmith.files import written

SCHEMA = 1
_HEADS = 3  # sets of sizes that a table names, of those at which the same runs
T = TypeVar("T")


@dataclass
class PlanStep:
    """One site at one set of sizes."""

    site: str
    operator: str
    signature: str
    implementation: str
    reason: str
    microseconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    slot: int | None = None


@dataclass
class ShapePlan:
    """The program at one set of sizes."""

    sizes: str
    steps: list[PlanStep]
    buffer_bytes: int
    used: bool  # False where eager was faster as a whole, and runs
    note: str
    source: str = ""
    training: bool = False  # with gradients the public functions run, at all sizes as was measured at these

    def head(self) -> str:
        """The line above its steps."""
        if self.training:
            return f"{self.sizes or 'fixed sizes'}, training  ({self.note}; other sizes as these)"
        return f"{self.sizes or 'fixed sizes'}  ({self.buffer_bytes / 1e6:.1f} MB of buffers; {self.note})"


@dataclass
class Plan:
    """What `opsmith.optimize` decided, by graph and by sizes. Prints as a table; saves as JSON."""

    shapes: list[ShapePlan] = field(default_factory=list)
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    latent: list[str] = field(default_factory=list)  # what became of multi-head latent attention
    packed: list[str] = field(default_factory=list)  # which weights are packed

    def choices(self) -> dict[str, str]:
        """Implementation by call signature: what a later run takes over."""
        return {step.signature: step.implementation for shape in self.shapes for step in shape.steps}

    def to_json(self) -> str:
        """The plan as JSON, with its schema version."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def save(self, path: str | Path) -> Path:
        """Write the JSON file."""
        written("plan", self.to_json(), path)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan; one of another schema, or no plan at all, is one clear error."""
        data = read(path, "plan")
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        return checked(data, found, SCHEMA, _PLAN, f"plan: {path}", "make the plan again")

    def diff(self, other: Plan) -> list[str]:
        """One line for each call whose implementation differs, or that only one plan has."""
        mine, theirs = self.choices(), other.choices()
        lines = [f"{k}: {mine[k]} -> {theirs[k]}" for k in mine if k in theirs and mine[k] != theirs[k]]
        lines += [f"{k}: {v} -> (absent)" for k, v in mine.items() if k not in theirs]
        return lines + [f"{k}: (absent) -> {v}" for k, v in theirs.items() if k not in mine]

    @property
    def source(self) -> str:
        """The programs, as runnable Python over bound implementations."""
        return "\n".join(f"# {s.sizes or 'fixed sizes'}: {s.note}\n{s.source}" for s in self.shapes)

    def table(self) -> str:
        """The plan as text: equal steps together, and sizes at which the same runs."""
        lines = [*self.packed, *self.latent]
        alike: dict[Any, list[ShapePlan]] = {}
        for shape in self.shapes:
            runs = Counter((step.operator, step.implementation) for step in shape.steps)
            alike.setdefault((frozenset(runs.items()), shape.used, shape.training), []).append(shape)
        for shapes in alike.values():
            lines += [shape.head() for shape in shapes[:_HEADS]]
            if more := shapes[_HEADS:]:
                lines.append(f"and at {len(more)} other sets of sizes, to {more[-1].sizes or 'fixed sizes'}")
            groups: dict[tuple[str, str, str], list[PlanStep]] = {}
            for step in shapes[0].steps:
                groups.setdefault((step.operator, step.implementation, step.signature), []).append(step)
            for (operator, implementation, _), steps in groups.items():
                measured = sorted(steps[0].microseconds.items(), key=lambda i: i[1])
                times = "  [" + ", ".join(f"{n} {t:.0f} us" for n, t in measured) + "]" if measured else ""
                head = f"{len(steps):3d} x {operator:<12} {implementation:<8}"
                lines.append(f"  {head} {steps[0].reason}{times}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


_PLAN = TypeAdapter(Plan)


def read(path: str | Path, what: str) -> Any:
    """The JSON of a file; a file that has none is one clear error."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{what}: can't read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}: {path} is not JSON: {error}") from error


def checked(data: Any, found: Any, schema: int, form: TypeAdapter[T], where: str, again: str) -> T:
    """What JSON of a schema holds, in its form; JSON of another schema `found`, or damaged, is one clear error."""
    if found != schema:
        raise ValueError(f"{where} has schema {found!r:.64}, this version reads {schema}; {again}")
    try:
        return form.validate_python({k: v for k, v in data.items() if k != "schema"})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(p) for p in first["loc"])
        raise ValueError(f"{where} is damaged: {place[:200]}: {first['msg']}; {again}") from None
