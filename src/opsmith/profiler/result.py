"""A profile: what was found of a model, and the ways to look at it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from opsmith.compiler.plan import checked, read
from opsmith.files import written
from opsmith.profiler.data import SCHEMA, Findings
from opsmith.profiler.report.diff import Diff, compare
from opsmith.profiler.report.html import page
from opsmith.profiler.report.text import text


@dataclass
class Profile(Findings):
    """What `opsmith.profile` found: `.table()`, `.to_json()`, `.to_html()`, `.to_chrome_trace()`, `.diff(other)`."""

    def table(self, width: int = 150) -> str:
        """The report as text."""
        return text(self, width)

    def __str__(self) -> str:
        return self.table()

    def to_json(self, path: str | Path | None = None) -> str:
        """The profile as JSON with its schema version, written to `path` where one is given."""
        return written("profile", json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one self-contained page, written to `path` where one is given."""
        return written("profile", page(self), path)

    def to_chrome_trace(self, path: str | Path | None = None) -> str:
        """The timeline for chrome://tracing and Perfetto, written to `path` where one is given.

        One repetition of each phase, one after the other, every event with class, layer, phase, shape and cost.
        """
        naming: dict[str, Any] = {"ph": "M", "pid": 1}
        events = [naming | {"name": "process_name", "args": {"name": self.model}}]
        offset = 0.0
        for thread, phase in enumerate(self.phases, 1):
            events.append(naming | {"tid": thread, "name": "thread_name", "args": {"name": phase.name}})
            for event in phase.events:
                about = {"class": event.kind, "layer": event.layer, "phase": phase.name, "shape": event.shape}
                cost = {"GFLOP": event.flops / 1e9, "MB": event.bytes / 1e6}
                when = {"ts": (offset + event.start) * 1e6, "dur": event.seconds * 1e6}
                what = {"name": event.name, "cat": event.kind, "args": about | cost}
                events.append({"ph": "X", "pid": 1, "tid": thread, **what, **when})
            offset += phase.wall
        return written("profile", json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a saved profile; one of another schema, or no profile at all, is one clear error."""
        data = read(path, "profile")
        if not isinstance(data, dict) or "phases" not in data:
            raise ValueError(f"profile: {path} is no profile; `opsmith profile --json FILE` writes one")
        return checked(data, data.get("schema"), SCHEMA, _PROFILE, f"profile: {path}", "profile again")

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema of what `to_json` writes: https://json-schema.org/draft/2020-12."""
        found = _PROFILE.json_schema()
        return {**found, "properties": {"schema": {"const": SCHEMA}, **found["properties"]}}

    def diff(self, before: Profile) -> Diff:
        """What changed since `before`, by class, phase by phase."""
        return compare(before, self)


_PROFILE = TypeAdapter(Profile)
