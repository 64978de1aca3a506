"""The report as one page: no network, no library, what is drawn is SVG and one canvas for the timeline.

Everything a model can name reaches the page through Jinja's escaping, or as JSON in which no tag can end.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment

from opsmith.profiler.data import CLASSES, Bill, Findings, Phase, Row, bill, by_shape
from opsmith.profiler.report.text import HEADS, cells, layer_times, per_token, short_cells, trust

# Colors that stay apart for most color-blind readers, one for each class (after Okabe and Ito).
_PALETTE = """#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #b3a000 #8c564b #7b4173 #888888 #bbbbbb"""
COLORS = {kind: _PALETTE[8 * i : 8 * i + 7] for i, kind in enumerate(CLASSES)}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720.0, 380.0, 60.0, 40.0


def page(profile: Findings) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    shared = (bill, by_shape, cells, layer_times, per_token, short_cells)
    environment.globals |= {function.__name__: function for function in shared}
    environment.globals |= {
        "detail": _detail,
        "hottest_of": lambda layers: max((max(t.values()) for t in layers.values() if t), default=0.0) or 1.0,
        "roofline": _roofline,
    }
    template = environment.from_string((Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        profile=profile,
        trust=trust(profile),
        heads=(*HEADS, "implementation", "written"),
        colors=COLORS,
        data={"colors": list(COLORS.values()), "timelines": [_timeline(p) for p in profile.phases]},
    )


def _detail(row: Row) -> str:
    """What runs an operator and why, what it is made of, and where it comes from."""
    why = [f"runs on {row.implementation}{': ' + row.reason if row.reason else ''}"]
    why += [f"not {name}: {reason}" for name, reason in row.refused.items()]
    if row.pieces:
        why.append("made of " + ", ".join(row.pieces))
    if row.source:
        why.append(f"from {row.source}")
    return "; ".join(why)


def _timeline(phase: Phase) -> dict[str, Any]:
    """Columns of numbers, names once each: 100,000 events are two megabytes."""
    names: dict[str, int] = {}
    return {
        "wall": phase.wall * 1e3,
        "start": [round(e.start * 1e3, 4) for e in phase.events],
        "ms": [round(e.seconds * 1e3, 4) for e in phase.events],
        "kind": [CLASSES.index(e.kind) for e in phase.events],
        "name": [names.setdefault(f"{e.name} {e.shape}".strip(), len(names)) for e in phase.events],
        "names": list(names),
    }


def _roofline(profile: Findings, shown: list[Bill], anchor: str) -> dict[str, Any] | None:
    """Dots at (operations per byte, operations per second), and the roofs over them, on logarithmic axes."""
    dots = [(b, f"{anchor}{i}") for i, b in enumerate(shown) if b.flops > 0 and b.bytes > 0 and b.seconds > 0]
    band = profile.roofs.get("memory")
    if not dots or not band:
        return None
    rates = {n: r for n, r in profile.roofs.items() if n.startswith("matmul")}
    xs, ys = [b.flops / b.bytes for b, *_ in dots], [b.flops / b.seconds for b, *_ in dots]
    x0, x1 = math.floor(math.log10(min(xs))), math.ceil(math.log10(max([*xs, 100.0])))
    top = max([*ys, *rates.values()])
    y0, y1 = math.floor(math.log10(min(ys))), math.ceil(math.log10(top))

    def at_x(value: float) -> float:
        return _LEFT + (math.log10(value) - x0) / max(x1 - x0, 1) * (_WIDTH - _LEFT - 10)

    def at_y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(value) - y0) / max(y1 - y0, 1) * (_HEIGHT - _BOTTOM - 10)

    whole = sum(b.seconds for b, *_ in dots)
    roofs = []
    for name, rate in rates.items():
        ridge = min(max(rate / band, 10.0**x0), 10.0**x1)
        low = max(10.0**x0, 10.0**y0 / band)
        corners = ((low, low * band), (ridge, min(rate, ridge * band)), (10.0**x1, rate))
        line = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in corners)
        roofs.append((name, line, at_y(rate), rate / 1e9))
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "left": _LEFT,
        "bottom": _HEIGHT - _BOTTOM,
        "x": [(at_x(10.0**k), f"{10.0**k:g}") for k in range(x0, x1 + 1)],
        "y": [(at_y(10.0**k), f"{10.0**k / 1e9:g}") for k in range(y0, y1 + 1)],
        "roofs": roofs,
        "dots": [
            {
                "x": at_x(x),
                "y": at_y(y),
                "r": 3 + 22 * math.sqrt(b.seconds / whole),
                "color": COLORS[b.rows[0].kind],
                "anchor": place,
                "kind": b.rows[0].kind,
                "title": f"{b.names[0]} {b.names[1]}: {b.seconds * 1e3:.3f} ms, "
                f"{y / 1e9:.3g} GFLOP/s at {x:.3g} FLOP/B",
            }
            for (b, place), x, y in zip(dots, xs, ys, strict=True)
        ],
    }
