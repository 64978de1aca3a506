"""What became of one graph: its sites, what came close, and whether it could be studied at all."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from opsmith.compiler.find.recognize import Miss


@dataclass
class SiteReport:
    """What became of one site."""

    name: str
    operator: str
    pattern: str
    where: str
    composite: bool
    status: str = "kept"  # or "rolled back"
    error: float = 0.0
    bound: float = 0.0
    why: str = ""


@dataclass
class GraphReport:
    """What was found in one graph, and what was proven of it."""

    sites: list[SiteReport] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    nodes: int = 0
    left: str = ""  # why the graph runs as it was captured, where it could not be studied

    @property
    def kept(self) -> list[SiteReport]:
        """The sites that no proof has rolled back."""
        return [s for s in self.sites if s.status == "kept"]


def warn_left(report: GraphReport) -> None:
    """Say that a graph is not optimized: a fault of ours, and not of the model's."""
    warnings.warn(
        f"opsmith: a graph of {report.nodes} operations runs as it was, since it could not be studied: {report.left}",
        stacklevel=2,
    )
