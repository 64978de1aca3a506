"""The CPU kernel of a plan: C++ over raw pointers, on the lanes of formula.h.

Elementwise formulas are one pass in pieces; reductions take one pass a level, over a row that is in cache from then on;
rotations see an element and its twin at once. All arithmetic is in float; results are rounded when they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.formula.shapes import Shape
from opsmith.authoring.lower.emit import Emitter, float_text
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output, Plan, Statistic
from opsmith.authoring.lower.rows import Rows

__all__ = ["CPP_TYPES", "function"]

CPP_TYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "float16", "bool": "bool"}
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "boolean"}
_RENAMED = {"max": "larger", "min": "smaller", "where": "where"}


def function(plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> str:
    """A template that computes, and the function `name` that chooses its types. `columns` map tensors to dtypes."""
    return _Function(plan, name, columns, comment).text()


class _Function:
    def __init__(self, plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> None:
        self.plan, self.name, self.columns, self.comment = plan, name, columns, comment
        self.tensors = [*plan.inputs, *(o.name for o in plan.outputs)]
        self.types = self._types()
        letters = list(dict.fromkeys(self.types.values()))
        self.letters = [t for t in letters if t != "bool"]
        self.precision = self.letters[0] if len(self.letters) == 1 else f"Finest<{', '.join(self.letters)}>"
        column_sums = any(o.extent == COLUMN for o in plan.outputs)
        # Pair by pair where all tensors have one type, else vector by vector: pairs of other types have another order.
        pairs = len(letters) == 1 and plan.rotation != "rotate_interleaved"
        pairs = pairs and not (
            column_sums and plan.rotation
        )  # whose columns are not in the order of their row
        self.walk = ("for_pairs<paired_block>" if column_sums else "for_pairs") if pairs else "for_lanes"
        self.summed = letters[0] if pairs else "float"  # the type in whose order columns are summed
        self.pieces = not plan.rowwise
        self.rows = Rows(plan)

    def _types(self) -> dict[str, str]:
        """Tensors that have one dtype in every column share a template parameter."""
        found: dict[tuple[str, ...], str] = {}
        types = {}
        for name in self.tensors:
            key = tuple(c[name] for c in self.columns)
            if set(key) == {"bool"}:
                types[name] = "bool"
            else:
                types[name] = found.setdefault(key, f"T{len(found)}")
        return types if len(found) > 1 else {n: "T" if t == "T0" else t for n, t in types.items()}

    def text(self) -> str:
        plan = self.plan
        tensors = [f"const View& {n}" for n in self.plan.inputs]
        numbers = [f"{_number_type(v)} {n}" for n, v in self.plan.attributes.items()]
        outputs = [f"const View& {o.name}" for o in self.plan.outputs]
        names = [*self.plan.inputs, *self.plan.attributes, *(o.name for o in self.plan.outputs)]
        lines = [f"// {self.comment}", f"template <{', '.join(f'class {t}' for t in self.letters)}>"]
        lines += [
            f"void {self.name}_of({', '.join([*tensors, *numbers, *outputs])}) {{",
            *_indented(self._body()),
            "}",
            "",
        ]
        parameters = [f"View {n}" for n in plan.inputs]
        parameters += [f"{_wide_type(v)} {n}" for n, v in plan.attributes.items()]
        parameters += [f"View {o.name}" for o in plan.outputs]
        entry = [f"void {self.name}({', '.join(parameters)}) {{", *_indented(self._choices(names)), "}"]
        return "\n".join(["namespace {", "", *lines, "}  // namespace", "", *entry])

    def _choices(self, names: Sequence[str]) -> list[str]:
        lines = []
        arguments = ", ".join(
            f"float({n})"
            if n in self.plan.attributes and not isinstance(self.plan.attributes[n], bool)
            else n
            for n in names
        )
        first = {
            t: next(n for n in self.tensors if self.types[n] == t and not self._optional(n))
            for t in self.letters
        }
        seen = set()
        for column in self.columns:
            key = tuple(column[first[t]] for t in self.letters)
            if key in seen:
                continue
            seen.add(key)
            test = " && ".join(
                f"{first[t]}.dtype == DType::{_DTYPES[column[first[t]]]}" for t in self.letters
            )
            lines.append(
                f"if ({test}) return {self.name}_of<{', '.join(CPP_TYPES[k] for k in key)}>({arguments});"
            )
        return lines

    def _optional(self, name: str) -> bool:
        return any(o.name == name and o.optional for o in self.plan.outputs)

    def _body(self) -> list[str]:
        whole = self.rows.whole
        lines = []
        if self.pieces:
            lines.append(f"const Walk walk(sizes_between({whole}, 1, {whole}.dim));")
            count = "walk.total"
        else:
            lines += [f"const int64_t size = size_of({whole}), rows = rows_of({whole});"]
            count = "rows * size"
        for key, (first, last) in self.rows.counts.items():
            lines.append(f"const int64_t {key} = sizes_between({whole}, {first}, {last or f'{whole}.dim'});")
        full = [o for o in self.plan.outputs if o.extent == FULL]
        if full:
            tensors = len(full) + sum(s == self.plan.space for _, s in self._read())
            lines.append(
                f"const bool past_cache = "
                f"outlives_cache({count} * int64_t(sizeof({self.types[full[0].name]})), {tensors});"
            )
        columns = [o for o in self.plan.outputs if o.extent == COLUMN]
        loop = ["for (int64_t row = begin; row < end; ++row) {", *_indented(self._row()), "}"]
        if full:
            loop.append("if (past_cache) stream_fence();")
        inside = [*self._shared_pointers(), *loop]
        if not columns:
            dealt = "walk.count, walk.grain()" if self.pieces else "rows, row_grain(size, Walk::task)"
            lines.append(f"parallel_rows({dealt}, [&](int64_t begin, int64_t end) {{")
            return [*lines, *_indented(inside), "});"]
        lines.append(f"ColumnSums<{len(columns)}> sums(rows, size, row_grain(size, Walk::task));")
        lines.append("sums.over_rows([&](int64_t begin, int64_t end, const auto& to) {")
        totals = [
            f"float* const {o.name}_row = {o.name}.defined() ? to[{i}] : nullptr;"
            for i, o in enumerate(columns)
        ]
        lines += [*_indented([*totals, *inside]), "});"]
        for i, o in enumerate(columns):
            lines.append(f"if ({o.name}.defined()) sums.template write<{self.summed}>({i}, {o.name});")
        return lines

    def _pointer(self, name: str, shape: Shape, writes: bool) -> tuple[str, bool]:
        """The declaration of a tensor's row pointer, and whether it is the same for all rows."""
        kind = self.types[name]
        width = "Walk::piece" if self.pieces else "size" if shape[-1] != 1 or self.plan.space[-1] == 1 else ""
        place = "row" if writes else self.rows.place(name)
        data = f"{name}.as<{kind}>()"
        if place is not None:
            place = f"({place})" if " " in place and width else place
            data += f" + {place}{' * ' + width if width else ''}"
        if writes and self._optional(name):
            data = f"{name}.defined() ? {data} : nullptr"
        return f"{'' if writes else 'const '}{kind}* const {name}_row = {data};", place is None

    def _shared_pointers(self) -> list[str]:
        return [text for n, s in self._read() for text, shared in [self._pointer(n, s, False)] if shared]

    def _read(self) -> list[tuple[str, Shape]]:
        """The inputs that the kernel looks at."""
        return [(n, self.plan.inputs[n]) for n in self.rows.read]

    def _row(self) -> list[str]:
        plan = self.plan
        lines = []
        if self.pieces:
            lines.append("const int64_t size = walk.size(row);")
        if plan.rotation:
            lines.append("const int64_t half = size / 2;")
        lines += [t for n, s in self._read() for t, shared in [self._pointer(n, s, False)] if not shared]
        for o in plan.outputs:
            if o.extent != COLUMN:
                shape = plan.space if o.extent == FULL else (*plan.space[:-1], 1)
                lines.append(self._pointer(o.name, shape, True)[0])
        self.known: dict[int, str] = {}  # values that are known once a pass is over
        self.row_inputs: set[str] = set()
        self.named = 0
        for i, stage in enumerate(plan.stages):
            lines += self._gather(i, stage)
        lines += self._rows_out()
        lines += self._write()
        return lines

    def _gather(self, index: int, stage: Sequence[Statistic]) -> list[str]:
        lines, names = [], []
        for j, s in enumerate(stage):
            name = f"r_{chr(97 + index)}{j + 1 if len(stage) > 1 else ''}"
            names.append(name)
            kind = f"Online<{self.precision}>" if s.kind == "Online" else s.kind
            lines.append(f"{kind} {name};")
        before, emitter, body = self._block([s.arg for s in stage])
        places = self._places(s.arg for s in stage)
        adds = []
        for name, s in zip(names, stage, strict=True):
            adds += [f"{name}.add({self._lane(emitter.text(s.arg, p), s.arg)}, lanes);" for p in places]
        lines += [*before(), *self._loop([*body, *adds], len(places) > 1, "&")]
        for name, s in zip(names, stage, strict=True):
            for answer, node in s.answers.items():
                value = f"r_{answer}"
                if value in self.known.values():
                    self.named += 1
                    value += str(self.named)
                self.known[id(node)] = value
                lines.append(f"const float {value} = {_answer(name, s.kind, answer)};")
        return lines

    def _lane(self, text: str, node: Node) -> str:
        """What is one number for the row, as lanes."""
        return text if self.plan.lane(node) or self.plan.space[-1] == 1 else f"lanes_of({text}, lanes)"

    def _places(self, nodes: object) -> tuple[int, ...]:
        return (0, 1) if self.plan.rotation else (0,)

    def _rows_out(self) -> list[str]:
        rows = [o for o in self.plan.outputs if o.extent == ROW]
        if not rows:
            return []
        before, emitter, body = self._block([o.node for o in rows])
        lines = []
        for o in rows:
            value = emitter.text(o.node)
            store = f"*{o.name}_row = from_float<{self.types[o.name]}>({value});"
            lines.append(f"if ({o.name}_row) {store}" if o.optional else store)
        return [*before(), *body, *lines]

    def _write(self) -> list[str]:
        outputs = [o for o in self.plan.outputs if o.extent != ROW]
        if not outputs:
            return []
        before, emitter, body = self._block([o.node for o in outputs])
        stores: list[str] = []
        for o in outputs:
            texts = [self._lane(emitter.text(o.node, p), o.node) for p in self._places([o.node])]
            stores += [f"if ({o.name}_row) {s}" if o.optional else s for s in self._stores(o, texts)]
        full = [o for o in outputs if o.extent == FULL]
        lines = before()
        if full:
            rows = [f"{o.name}_row" for o in full]
            checks = [f"can_stream_both({r})" for r in rows]
            if self.plan.rotation == "rotate_half":
                checks += [f"can_stream_both({r} + half)" for r in rows]
            lines.append(f"const bool streaming = past_cache && {' && '.join(checks)};")
        return [*lines, *self._loop([*body, *stores], bool(self.plan.rotation), "=")]

    def _stores(self, o: Output, texts: Sequence[str]) -> list[str]:
        if o.extent == COLUMN:
            if self.plan.rotation == "rotate_interleaved":
                raise ValueError("sums over rows of interleaved pairs are not generated")
            places = ("at", "half + at")
            return [f"add_to({o.name}_row + {p}, {t}, lanes);" for p, t in zip(places, texts, strict=False)]
        if self.plan.rotation == "rotate_interleaved":
            return [f"put_pairs({o.name}_row + 2 * at, {texts[0]}, {texts[1]}, lanes, streaming);"]
        places = ("at", "half + at")
        return [
            f"write({o.name}_row, {p}, {t}, lanes, streaming);" for p, t in zip(places, texts, strict=False)
        ]

    def _loop(self, body: Sequence[str], twins: bool, capture: str) -> list[str]:
        size = "half" if twins else "size"
        return [f"{self.walk}({size}, [{capture}](int64_t at, auto lanes) {{", *_indented(body), "});"]

    def _block(self, roots: Sequence[Node]) -> tuple[Callable[[], list[str]], Emitter, list[str]]:
        """An emitter for one loop: what it needs of the row first, its statements, and itself."""
        row_lines: list[str] = []
        body: list[str] = []
        made = iter(range(1, 1000))

        def leaf(node: Node, place: int) -> str | None:
            if id(node) in self.known:
                return self.known[id(node)]
            if node.kind == "attribute":
                return str(node.value)
            if node.kind == "size":
                return "float(size)"
            if node.kind == "input":
                return self._load(str(node.value), place, row_lines, body)
            if node.shape is not None and not self.plan.lane(node) and node.args:
                emitter = Emitter(row_leaf, self._call, define_row, _literal)
                emitter.count([(node, 0)])
                self.known[id(node)] = define_row(emitter.text(node), node, 0)
                return self.known[id(node)]
            return None

        def row_leaf(node: Node, place: int) -> str | None:
            return leaf(node, place) if id(node) in self.known or not node.args else None

        def define_row(text: str, node: Node, place: int) -> str:
            if text.isidentifier():
                return text
            self.named += 1
            row_lines.append(f"const {'bool' if node.truth else 'float'} r_{self.named} = {text};")
            return f"r_{self.named}"

        def define(text: str, node: Node, place: int) -> str:
            if text.isidentifier():
                return text
            name = f"v_{next(made)}"
            body.append(f"const auto {name} = {text};")
            return name

        def rotate(kind: str, text: str, place: int) -> tuple[str, int]:
            return (f"-{text}", 6) if place == 0 else (text, 9)

        places = self._places(roots)
        emitter = Emitter(leaf, self._call, define, _literal, rotate)
        self.loaded: dict[str, str] = {}
        emitter.count([(r, p if r.shape is not None else 0) for r in roots for p in places])
        return (lambda: list(row_lines)), emitter, body

    def _load(self, name: str, place: int, row_lines: list[str], body: list[str]) -> str:
        boolean = self.types[name] == "bool"
        if self.plan.extent(name) == ROW:
            if name not in self.row_inputs:
                self.row_inputs.add(name)
                value = f"*{name}_row" if boolean else f"to_float(*{name}_row)"
                row_lines.append(f"const {'bool' if boolean else 'float'} r_{name} = {value};")
            return f"r_{name}"
        shared = self.rows.place(name) != "row"
        read = "truth" if boolean else "load" if shared else "read"
        if self.plan.rotation == "rotate_interleaved":
            if name not in self.loaded:
                self.loaded[name] = f"v_{name}"
                body.append(f"Vec v_{name}_1, v_{name}_2;")
                body.append(
                    f"{'load' if shared else 'read'}_pairs({name}_row + 2 * at, lanes, v_{name}_1, v_{name}_2);"
                )
            return f"v_{name}_{place + 1}"
        at = "half + at" if place else "at"
        key = f"{name} {place}"
        if key not in self.loaded:
            suffix = f"_{place + 1}" if self.plan.rotation else ""
            self.loaded[key] = f"v_{name}{suffix}"
            body.append(f"const auto v_{name}{suffix} = {read}({name}_row + {at}, lanes);")
        return self.loaded[key]

    def _call(self, node: Node, texts: list[str]) -> str:
        if node.kind == "cast":
            return f"cast_to<{CPP_TYPES[str(node.value)]}>({texts[0]})"
        if node.number and node.kind in ("sqrt", "exp", "log", "tanh"):
            return f"std::{node.kind}({texts[0]})"
        if node.kind in _RENAMED:
            return f"{_RENAMED[node.kind]}({', '.join(texts)})"
        return f"{node.kind}_of<{self.precision}>({', '.join(texts)})"


def _answer(name: str, kind: str, answer: str) -> str:
    """What a statistic says, when its pass is over."""
    if kind == "Moments":
        return f"{name}.{'variance' if answer == 'var' else answer}()"
    if kind == "Online":
        return f"{name}.{answer}()"
    return f"{name}.value(){' / float(size)' if answer == 'mean' else ''}"


def _literal(value: float) -> str:
    return f"{float_text(value)}f"


def _number_type(default: float | int | bool | None) -> str:
    return "bool" if isinstance(default, bool) else "float"


def _wide_type(default: float | int | bool | None) -> str:
    return "bool" if isinstance(default, bool) else "int64_t" if isinstance(default, int) else "double"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if line else line for line in lines]
