"""What the compiler found in a model, proved, rolled back and missed, for people and for machines."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from opsmith.compiler.modules.latent.site import LatentReport
from opsmith.compiler.modules.quantize import QuantizedLayer
from opsmith.compiler.program.sites import GraphReport, SiteReport
from opsmith.ops import mla_attention, mla_preprocess

_LATENT = (mla_preprocess.__name__, mla_attention.__name__)  # what a layer that keeps latent rows is made of


@dataclass
class Report:
    """The reports of all graphs of a model."""

    graphs: list[GraphReport]
    quantized: list[QuantizedLayer] = field(default_factory=list)
    latent: list[LatentReport] = field(default_factory=list)
    # Calls that ran the original attention, by reason.
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def sites(self) -> list[SiteReport]:
        """Every site found."""
        return [s for g in self.graphs for s in g.sites]

    @property
    def found(self) -> dict[str, int]:
        """How many sites of each operator were kept; graphs of one model at other sizes count once."""
        most: Counter[str] = Counter()
        for graph in self.graphs:
            most |= Counter(s.operator for s in graph.kept)  # of two counts the larger
        latent = sum(layer.status == "kept" for layer in self.latent)
        return dict(most) | dict.fromkeys(_LATENT if latent else (), latent)

    @property
    def misses(self) -> list[str]:
        """What looked like an operator and is not one: which node differed, and how."""
        return list(dict.fromkeys(str(m) for g in self.graphs for m in g.misses))

    @property
    def rolled_back(self) -> list[str]:
        """Sites whose result was not accurate enough, with error and bound."""
        return [f"{s.name} {s.where}: {s.why}" for s in self.sites if s.status != "kept"] + [
            f"mla {layer.name}: {layer.why}" for layer in self.latent if layer.status == "rolled back"
        ]

    @property
    def overruled(self) -> list[str]:
        """Sites where the fastest implementation was not accurate enough and another one runs."""
        return [f"{s.name} {s.where}: {s.why}" for s in self.sites if s.status == "kept" and s.why]

    def _latent_lines(self) -> list[str]:
        kept = [layer for layer in self.latent if layer.status == "kept"]
        lines = [f"latent attention: {len(kept)} layers, each like {kept[0]}"] if kept else []
        if any(layer.lost for layer in kept):
            worst = max(kept, key=lambda layer: layer.lost)
            lines.append(f"rounding took {worst.lost:.2g} of the results of {worst.name}, the most of all")
        lines += [f"latent attention: {layer.name}: {layer.why}" for layer in kept if layer.why]
        return lines + [f"original attention in {n} calls: {why}" for why, n in self.fallbacks.items()]

    @property
    def quantized_lines(self) -> list[str]:
        """Which layers compute with rounded weights, what that took, and which do not."""
        packed = [layer for layer in self.quantized if layer.status == "packed"]
        lines = []
        if packed:
            worst = max(packed, key=lambda layer: layer.relative_error)
            count = f"{len(packed)} linear layers to {worst.format}"
            lines.append(f"quantized: {count}; the most was lost in {worst}")
        if groups := {layer.joined: None for layer in packed if layer.joined}:
            first = ", ".join(next(iter(groups)))
            lines.append(f"joined: {len(groups)} groups of layers of one input, as {first}")
        if released := sum(layer.released for layer in self.quantized):
            weights = f"{released / 2**20:.1f} MiB of weights"
            lines.append(f"given back to the system: {weights}; restore is not possible")
        return lines + [f"not quantized: {layer}" for layer in self.quantized if layer.status != "packed"]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "found": self.found,
            "misses": self.misses,
            "rolled_back": self.rolled_back,
            "overruled": self.overruled,
            **asdict(self),
        }

    def __str__(self) -> str:
        lines = ["found: " + (", ".join(f"{n} {k}" for k, n in self.found.items()) or "no operator of ours")]
        lines += self._latent_lines()
        lines += self.quantized_lines
        lines += [f"rolled back: {line}" for line in self.rolled_back]
        lines += [f"not the fastest: {line}" for line in self.overruled]
        lines += [f"left as it was: a graph of {g.nodes} operations: {g.left}" for g in self.graphs if g.left]
        lines += [f"near miss: {line}" for line in self.misses]
        return "\n".join(lines)
