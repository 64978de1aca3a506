"""What the compiler found in a model, proved, rolled back and missed, for people and for machines.

Printed, a report is thirty lines at most, whatever the model: alike sites are one line. `details()` is all of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from opsmith.compiler.modules.latent.site import LatentReport
from opsmith.compiler.modules.stand_in import QuantizedLayer, formats
from opsmith.compiler.program.sites import GraphReport, SiteReport
from opsmith.ops import paged_attention


def _rounded(packed: list[QuantizedLayer]) -> list[str]:
    """How many layers of each format, and what rounding took from those that lost the most."""
    worst = max(packed, key=lambda layer: layer.lost)
    mean = sum(layer.lost for layer in packed) / len(packed)
    what = "weight" if worst.result_error is None else "results on the calibration text"
    lines = [
        f"quantized: {formats(packed, 'to')}; rounding "
        f"took {100 * worst.lost:.2g} % of the {what} of {worst.name}, the most, {100 * mean:.2g} % on average"
    ]
    if any(layer.format == "int4" for layer in packed):
        lines.append(
            "four bits change what a model predicts: how much, opsmith.evaluate(model, text, against=original) "
            "measures on a text of yours"
        )
    return lines


@dataclass
class Report:
    """The reports of all graphs of a model."""

    graphs: list[GraphReport]
    quantized: list[QuantizedLayer] = field(default_factory=list)
    latent: list[LatentReport] = field(default_factory=list)
    # Calls not served from blocks of keys and values, by reason.
    fallbacks: dict[str, int] = field(default_factory=dict)
    slower: list[str] = field(default_factory=list)  # at which sizes eager runs as a whole, and why
    advice: list[str] = field(default_factory=list)  # what its session would do next
    paged: int = 0  # layers of attention that are served from pages
    mixtures: list[str] = field(default_factory=list)  # of experts: who computes them
    breaks: list[str] = field(default_factory=list)  # the lines at which PyTorch ends a graph, and why

    @property
    def sites(self) -> list[SiteReport]:
        """Every site found."""
        return [s for g in self.graphs for s in g.sites]

    @property
    def found(self) -> dict[str, int]:
        """How many calls of each operator were kept; graphs of one model at other sizes count once."""
        most = self._counted(lambda graph: (s.operator for s in graph.kept for _ in range(s.layers)))
        latent = Counter(name for layer in self.latent for name in layer.operators)
        paged = {paged_attention.__name__: self.paged} if self.paged else {}
        return most | dict(latent) | paged

    @property
    def together(self) -> dict[str, int]:
        """How many products are of several layers that keep their own weights; graphs of one model count once."""
        return self._counted(lambda graph: (s.pattern for s in graph.kept if s.layers > 1))

    def _counted(self, calls: Callable[[GraphReport], Iterable[str]]) -> dict[str, int]:
        """Of graphs of one part, which are there for other sizes, the most; of all parts together."""
        most: dict[int, Counter[str]] = defaultdict(Counter)
        for graph in self.graphs:
            most[graph.part] |= Counter(calls(graph))
        return dict(sum(most.values(), Counter()))

    @property
    def misses(self) -> list[str]:
        """What looked like an operator and is not one: which node differed, and how."""
        return list(dict.fromkeys(str(m) for g in self.graphs for m in g.misses))

    @property
    def rolled_back(self) -> list[str]:
        """Sites whose result was not accurate enough, with error and bound."""
        return [line for _, line in self._told("rolled back")]

    @property
    def overruled(self) -> list[str]:
        """Sites where the fastest implementation was not accurate enough and another one runs."""
        return [line for _, line in self._told("kept")]

    def _told(self, status: str) -> list[tuple[str, str]]:
        """Why sites have a status, with their operator; why latent attention is kept, `_latent_lines` says."""
        sites = (s for s in self.sites if s.status == status and s.why)
        lines = [(s.operator, f"{s.name} {s.where}: {s.why}") for s in sites]
        latent = (layer for layer in self.latent if layer.status == status != "kept")
        return lines + [("mla", f"mla {layer.name}: {layer.why}") for layer in latent]

    def _latent_lines(self) -> list[str]:
        kept = [layer for layer in self.latent if layer.status == "kept"]
        lines = [f"latent attention: {len(kept)} layers, each like {kept[0]}"] if kept else []
        if any(layer.lost for layer in kept):
            worst = max(kept, key=lambda layer: layer.lost)
            lines.append(f"rounding took {worst.lost:.2g} of the results of {worst.name}, the most of all")
        lines += [f"latent attention: {layer.name}: {layer.why}" for layer in kept if layer.why]
        what = "original attention" if self.latent else "the model's own cache"
        return lines + [f"{what} in {n} calls: {why}" for why, n in self.fallbacks.items()]

    @property
    def quantized_lines(self) -> list[str]:
        """Which layers compute with rounded weights, and what that took."""
        packed = [layer for layer in self.quantized if layer.status == "packed" and not layer.rows_of]
        kept = [layer for layer in self.quantized if layer.status == "kept"]
        lines = [f"kept as the model has them: {formats(kept, 'of')}"] if kept else []
        if packed:
            lines += _rounded(packed)
        lines += self.mixtures
        if groups := {layer.joined: None for layer in (*packed, *kept) if layer.joined}:
            first = ", ".join(next(iter(groups)))
            what = f"group{'s' * (len(groups) > 1)} of layers of one input"
            lines.append(f"joined: {len(groups)} {what}, as {first}")
        for table in (layer for layer in self.quantized if layer.rows_of):
            whose = "of its own" if table.rows_of == table.name else f"of {table.rows_of}"
            lines.append(
                f"embedding: {table.name} reads the rows {whose}, relative error {table.relative_error:.2g}"
            )
        if released := sum(layer.released for layer in self.quantized):
            weights = f"{released / 2**20:.1f} MiB of weights"
            lines.append(f"given back to the system: {weights}; restore is not possible")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "found": self.found,
            "together": self.together,
            "misses": self.misses,
            "rolled_back": self.rolled_back,
            "overruled": self.overruled,
            **asdict(self),
        }

    def details(self) -> str:
        """All that is known, a line each: every site with its error and bound, every near miss, every layer left alone.

        >>> print(model.opsmith.report.details())
        """
        lines = [*self._summary(), *self._latent_lines(), *self.quantized_lines]
        lines += [f"not quantized: {layer}" for layer in self.quantized if not layer.of_few_bits]
        for graph in self.graphs:
            lines += [f"graph of {graph.nodes} operations: {graph.left or f'{len(graph.sites)} sites'}"]
            lines += [f"  {site}" for site in graph.sites]
        lines += [f"the graph breaks at {line}" for line in self.breaks]
        lines += [f"near miss: {line}" for line in self.misses]
        return "\n".join([*lines, *self.slower, *self.hints()])

    def _summary(self) -> list[str]:
        lines = ["found: " + (", ".join(f"{n} {k}" for k, n in self.found.items()) or "no operator of ours")]
        lines += [f"as one product: {n} times {what}" for what, n in self.together.items()]
        if kept := [s for s in self.sites if s.status == "kept" and s.bound]:
            alike = sum(bool(s.like) for s in kept)
            worst = max(kept, key=lambda s: s.error / s.bound)
            lines.append(
                f"proved: {len(kept) - alike} sites in float64, {alike} as near to eager as one of these; "
                f"the most is {worst.error / worst.bound:.2f} of the bound ({worst.name} {worst.where})"
            )
        return lines

    def hints(self) -> list[str]:
        """What to do next, a line each."""
        faults = [graph for graph in self.graphs if graph.fault]
        said = {
            "rolled back sites run as the model wrote them: nothing is lost but speed": self.rolled_back,
            "a near miss that was meant to be the operator becomes one if written as expected": self.misses,
            "nothing is found across a break of the graph: docs/guide/faq.md says what breaks it": self.breaks,
            "a graph that could not be studied is a fault of opsmith: please report it with its line": faults,
        }
        return [f"next: {line}" for line in (*self.advice, *(line for line in said if said[line]))]

    def __str__(self) -> str:
        lines = self._summary()
        lines += _few("", ((line.partition(":")[0], line) for line in self._latent_lines()))
        lines += self.quantized_lines
        lines += _few("not quantized: ", ((q.why, str(q)) for q in self.quantized if not q.of_few_bits))
        lines += _few("rolled back: ", self._told("rolled back"))
        lines += _few("left as it was: ", self._told("left"))
        lines += _few("not the fastest: ", self._told("kept"))
        lines += _few("left as it was: ", ((g.left, f"{g.what}: {g.left}") for g in self.graphs if g.left))
        lines += _few("the graph breaks at ", ((line.partition(": ")[2], line) for line in self.breaks))
        lines += _few("", ((line, line) for line in self.slower))
        seen = {str(m): (m.operator, m.where) for g in self.graphs for m in g.misses}
        lines += _few("near miss: ", ((key, line) for line, key in seen.items()))
        hints = self.hints()
        if len(lines) + len(hints) > LINES:
            lines[LINES - len(hints) - 1 :] = [f"more: {_DETAILS}"]
        return "\n".join([*lines, *hints])


LINES = 30  # of a report as it prints, at most
_KINDS = 3  # of one sort of line that it shows
_DETAILS = "print(model.opsmith.report.details())"


def _few(what: str, items: Iterable[tuple[Hashable, str]]) -> list[str]:
    """Lines of one sort: the first of each kind, with how many are like it; of many kinds the commonest."""
    kinds: dict[Hashable, list[str]] = {}
    for kind, line in items:
        kinds.setdefault(kind, []).append(line)
    shown = sorted(kinds.values(), key=len, reverse=True)
    lines = [f"{what}{shorten(k[0])}" + f" (and {len(k) - 1} more)" * bool(k[1:]) for k in shown[:_KINDS]]
    if rest := sum(map(len, shown[_KINDS:])):
        lines.append(f"{what}{rest} of other kinds: {_DETAILS}")
    return lines


def shorten(line: str, most: int = 300) -> str:
    """A line of so many letters at most."""
    return line if len(line) <= most else f"{line[: most - 3]}..."
