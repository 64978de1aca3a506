"""The CPU kernel of a plan: C++ over raw pointers, on the lanes of formula.h.

Elementwise formulas are one pass in pieces; reductions take one pass a level, over a row that is in cache from then on;
rotations see an element and its twin at once. All arithmetic is in float; results are rounded when they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.lower.emit import Emitter
from opsmith.authoring.lower.kernel import CppKernel, indented
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output, Plan


class CpuKernel(CppKernel):
    """Its walks take lanes; what is one number for a row is computed in front of them."""

    types: ClassVar = {"float32": "float", "bfloat16": "bfloat16", "float16": "float16", "bool": "bool"}
    wide = "to_float"

    def __init__(self, plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> None:
        super().__init__(plan, name, columns, comment)
        finest = self.letters[0] if len(self.letters) == 1 else f"Finest<{', '.join(self.letters)}>"
        self.precision = f"<{finest}>"
        # Pair by pair where all tensors have one type, else vector by vector: pairs of other types have another order.
        pairs = len(set(self.type_of.values())) == 1 and plan.rotation != "rotate_interleaved"
        pairs = pairs and not (self.sums and plan.rotation)  # whose columns are not in the order of their row
        self.walk = ("for_pairs<paired_block>" if self.sums else "for_pairs") if pairs else "for_lanes"
        self.summed = self.letters[0] if pairs else "float"  # the type in whose order columns are summed
        self.pieces = not plan.rowwise

    def text(self) -> str:
        """The template and the function."""
        parameters = [*(f"const View& {n}" for n in self.tensors), *self.numbers]
        head = f"void {self.name}_of({', '.join(parameters)}) {{"
        return self.whole_text([self.template, head, *indented(self._body()), "}"])

    def _body(self) -> list[str]:
        whole = self.rows.whole
        if self.pieces:
            lines = [f"const Walk walk(sizes_between({whole}, 1, {whole}.dim));"]
        else:
            lines = [f"const int64_t size = size_of({whole}), rows = rows_of({whole});"]
        for key, (first, last) in self.rows.counts.items():
            lines.append(f"const int64_t {key} = sizes_between({whole}, {first}, {last or f'{whole}.dim'});")
        full = [o for o in self.plan.outputs if o.extent == FULL]
        if full:
            tensors = len(full) + sum(self.plan.inputs[n] == self.plan.space for n in self.rows.read)
            count = "walk.total" if self.pieces else "rows * size"
            lines.append(
                f"const bool past_cache = "
                f"outlives_cache({count} * int64_t(sizeof({self.type_of[full[0].name]})), {tensors});"
            )
        pointers = {n: self._pointer(n, self.plan.extent(n), self.rows.place(n)) for n in self.rows.read}
        inside = [text for n, text in pointers.items() if self.rows.place(n) is None]
        row = [text for n, text in pointers.items() if self.rows.place(n) is not None]
        inside += ["for (int64_t row = begin; row < end; ++row) {", *indented(self._row(row)), "}"]
        if full:
            inside.append("if (past_cache) stream_fence();")
        if not self.sums:
            dealt = "walk.count, walk.grain()" if self.pieces else "rows, row_grain(size, Walk::task)"
            lines.append(f"parallel_rows({dealt}, [&](int64_t begin, int64_t end) {{")
            return [*lines, *indented(inside), "});"]
        lines.append(f"ColumnSums<{len(self.sums)}> sums(rows, size, row_grain(size, Walk::task));")
        lines.append("sums.over_rows([&](int64_t begin, int64_t end, const auto& to) {")
        totals = [
            f"float* const {o.name}_row = {o.name}.defined() ? to[{i}] : nullptr;"
            for i, o in enumerate(self.sums)
        ]
        lines += [*indented([*totals, *inside]), "});"]
        for i, o in enumerate(self.sums):
            lines.append(f"if ({o.name}.defined()) sums.template write<{self.summed}>({i}, {o.name});")
        return lines

    def _pointer(self, name: str, extent: str, place: str | None, *, written: bool = False) -> str:
        """The declaration of a tensor's row pointer."""
        kind = self.type_of[name]
        width = " * Walk::piece" if self.pieces else "" if extent == ROW else " * size"
        data = f"{name}.as<{kind}>(){f' + {place}{width}' if written else self.place(name, width)}"
        if name in self.optional:
            data = f"{name}.defined() ? {data} : nullptr"
        return f"{'' if written else 'const '}{kind}* const {name}_row = {data};"

    def _row(self, pointers: Sequence[str]) -> list[str]:
        plan = self.plan
        lines = ["const int64_t size = walk.size(row);"] if self.pieces else []
        lines += ["const int64_t half = size / 2;"] if plan.rotation else []
        lines += pointers
        lines += [
            self._pointer(o.name, o.extent, "row", written=True) for o in plan.outputs if o.extent != COLUMN
        ]
        for i, stage in enumerate(plan.stages):
            lines += self.gather(i, stage)
        return [*lines, *self.rows_out(), *self._write()]

    def add(self, statistic: str, text: str, node: Node) -> str:
        return f"{statistic}.add({self._lane(text, node)}, lanes);"

    def store_row(self, o: Output, text: str) -> str:
        store = f"*{o.name}_row = from_float<{self.type_of[o.name]}>({text});"
        return f"if ({o.name}_row) {store}" if o.optional else store

    def statistic(self, kind: str) -> str:
        return f"Online{self.precision}" if kind == "Online" else kind

    def _lane(self, text: str, node: Node) -> str:
        """What is one number for the row, as lanes."""
        return text if self.plan.lane(node) or self.plan.space[-1] == 1 else f"lanes_of({text}, lanes)"

    def _write(self) -> list[str]:
        outputs = [o for o in self.plan.outputs if o.extent != ROW]
        if not outputs:
            return []
        emitter = self.begin([o.node for o in outputs])
        stores: list[str] = []
        for o in outputs:
            texts = [self._lane(emitter.text(o.node, p), o.node) for p in self.places]
            stores += [f"if ({o.name}_row) {s}" if o.optional else s for s in self._stores(o, texts)]
        lines = self.before
        if rows := [f"{o.name}_row" for o in outputs if o.extent == FULL]:
            checks = [f"can_stream_both({r})" for r in rows]
            if self.plan.rotation == "rotate_half":
                checks += [f"can_stream_both({r} + half)" for r in rows]
            lines.append(f"const bool streaming = past_cache && {' && '.join(checks)};")
        return [*lines, *self.loop([*self.body, *stores], "=")]

    def _stores(self, o: Output, texts: Sequence[str]) -> list[str]:
        if self.plan.rotation == "rotate_interleaved":
            if o.extent == COLUMN:
                raise ValueError("sums over rows of interleaved pairs are not generated")
            return [f"put_pairs({o.name}_row + 2 * at, {texts[0]}, {texts[1]}, lanes, streaming);"]
        if o.extent == COLUMN:
            return [f"add_to({o.name}_row + {self.at(p)}, {t}, lanes);" for p, t in enumerate(texts)]
        return [f"write({o.name}_row, {self.at(p)}, {t}, lanes, streaming);" for p, t in enumerate(texts)]

    def loop(self, body: Sequence[str], capture: str = "&") -> list[str]:
        size = "half" if self.plan.rotation else "size"
        return [f"{self.walk}({size}, [{capture}](int64_t at, auto lanes) {{", *indented(body), "});"]

    def leaf(self, node: Node, place: int) -> str | None:
        if id(node) not in self.known and node.shape is not None and not self.plan.lane(node) and node.args:
            emitter = Emitter(self._row_leaf, self.call, self._define_row, self.number)
            emitter.count([node])
            text = emitter.text(node)
            self.known[id(node)] = text if text.isidentifier() else self._define_row(text, node, 0)
        return super().leaf(node, place)

    def _row_leaf(self, node: Node, place: int) -> str | None:
        return self.leaf(node, place) if id(node) in self.known or not node.args else None

    def _define_row(self, text: str, node: Node, place: int) -> str:
        self.named += 1
        self.before.append(f"const {'bool' if node.truth else 'float'} r_{self.named} = {text};")
        return f"r_{self.named}"

    def load_lane(self, name: str, place: int) -> str:
        shared = self.rows.place(name) != "row"
        if self.plan.rotation == "rotate_interleaved":
            if (name, 0) not in self.loaded:
                self.loaded[name, 0] = name
                self.body.append(f"Vec v_{name}_1, v_{name}_2;")
                load = "load_pairs" if shared else "read_pairs"
                self.body.append(f"{load}({name}_row + 2 * at, lanes, v_{name}_1, v_{name}_2);")
            return f"v_{name}_{place + 1}"
        if (name, place) not in self.loaded:
            kept = self.loaded[name, place] = f"v_{name}{f'_{place + 1}' if self.plan.rotation else ''}"
            load = "truth" if self.type_of[name] == "bool" else "load" if shared else "read"
            self.body.append(f"const auto {kept} = {load}({name}_row + {self.at(place)}, lanes);")
        return self.loaded[name, place]

    def call(self, node: Node, texts: list[str]) -> str:
        if node.number and node.kind in ("sqrt", "exp", "log", "tanh"):
            return f"std::{node.kind}({texts[0]})"
        return super().call(node, texts)
