"""The timeline in Chrome's trace format, for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from opsmith.profiler.data import Findings


def chrome(profile: Findings) -> str:
    """One repetition of each phase, one after the other, every event with class, layer, phase, shape and cost."""
    naming: dict[str, Any] = {"ph": "M", "pid": 1}
    events = [naming | {"name": "process_name", "args": {"name": profile.model}}]
    offset = 0.0
    for thread, phase in enumerate(profile.phases, 1):
        events.append(naming | {"tid": thread, "name": "thread_name", "args": {"name": phase.name}})
        for event in phase.events:
            about = {"class": event.kind, "layer": event.layer, "phase": phase.name, "shape": event.shape}
            cost = {"GFLOP": event.flops / 1e9, "MB": event.bytes / 1e6}
            when = {"ts": (offset + event.start) * 1e6, "dur": event.seconds * 1e6}
            what = {"name": event.name, "cat": event.kind, "args": about | cost}
            events.append({"ph": "X", "pid": 1, "tid": thread, **what, **when})
        offset += phase.wall
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
