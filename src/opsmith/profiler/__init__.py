"""The profiler: collect, attribute, roofline, advise, report; one file per stage."""

from opsmith.profiler.api import profile
from opsmith.profiler.data import SCHEMA, Advice, Chain, Event, Phase, Row
from opsmith.profiler.result import Profile

__all__ = ["SCHEMA", "Advice", "Chain", "Event", "Phase", "Profile", "Row", "profile"]
