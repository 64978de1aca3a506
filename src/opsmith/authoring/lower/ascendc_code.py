"""The statements of an Ascend C kernel: one vector instruction, or function of formula_functions.h, for each node."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.lower.emit import float_text
from opsmith.authoring.lower.plan import Output

if TYPE_CHECKING:
    from opsmith.authoring.lower.ascendc import Vectors

__all__ = ["COLUMNS", "FUNCTIONS", "NUMBER", "ROWS", "TILE", "Code", "Phase", "Unsupported"]

NUMBER, ROWS, COLUMNS, TILE = "number", "rows", "columns", "tile"
_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "max": "Max", "min": "Min"}
_ACROSS = {"add": "Plus", "sub": "Minus", "mul": "Times", "div": "Over", "max": "Larger", "min": "Lesser"}
_WITH_NUMBER = {"add": "Adds", "mul": "Muls", "max": "Maxs", "min": "Mins"}
_UNARY = {"exp": "Exp", "log": "Ln", "sqrt": "Sqrt", "abs": "Abs", "relu": "Relu"}
_COMPARE = {"lt": "LT", "le": "LE", "gt": "GT", "ge": "GE", "eq": "EQ", "ne": "NE"}
# Functions of formula_functions.h, and how many values they compute in beside their result.
_FUNCTIONS = {
    "rsqrt": ("ReciprocalRoot", 1), "sigmoid": ("Sigmoid", 1), "silu": ("Silu", 1), "tanh": ("Tanh", 4),
    "erf": ("Erf", 2), "gelu": ("Gelu", 3), "gelu_tanh": ("GeluTanh", 1),
}  # fmt: skip
_TYPES = {"float32": "float", "bfloat16": "bfloat16_t", "float16": "half"}
# What kernels use of that file.
FUNCTIONS = (*(f for f, _ in _FUNCTIONS.values()), "NumberOver", "OverNumber", "RoundedTo")


class Unsupported(ValueError):
    """What this back end computes no kernel for, and why."""


@dataclass
class Phase:
    """One walk over the tiles of a few rows: a statistic is gathered, or results are written."""

    name: str
    rows: list[str] = field(default_factory=list)  # statements before its tiles
    body: list[str] = field(default_factory=list)  # for each tile
    reads: list[str] = field(default_factory=list)  # inputs, in tiles


class Code:
    """Writes the statements of one phase: values of rows before its tiles, those of tiles in slots, used again."""

    def __init__(self, kernel: Vectors, phase: Phase, roots: Sequence[Node]) -> None:
        self.k, self.phase = kernel, phase
        self.values: dict[int, str] = {}
        self.bits: dict[tuple[int, str], str] = {}
        self.left: Counter[int] = Counter()
        self.free: list[str] = []
        self.made = 0
        seen: set[int] = set()
        for root in roots:
            self.left[id(root)] += 1
            self._count(root, seen)

    def _count(self, node: Node, seen: set[int]) -> None:
        if id(node) in seen or self.k.form(node) not in (TILE, COLUMNS):
            return
        seen.add(id(node))
        for a in node.args:
            # What a condition compares may be looked at again in another form: it is kept.
            self.left[id(a)] += 1000 if node.truth else 1
            self._count(a, seen)

    def finished(self) -> Phase:
        """The phase, with its inputs as locals in front."""
        self.k.slots = max(self.k.slots, self.made)
        self.k.conditions = max(self.k.conditions, len(self.bits))
        self.phase.reads = [n for n in self.k.rows.read if n in self.phase.reads]
        self.phase.body[:0] = [
            *(f"const Floats {n} = {n}_.Value();" for n in self.phase.reads),
            *_memory(self.phase.body, "v", "values_"),
            *_memory(self.phase.body, "r", "rows_"),
        ]
        self.phase.rows[:0] = _memory(self.phase.rows, "r", "rows_")
        return self.phase

    # Slots

    def slot(self) -> str:
        """Memory for a tile of values."""
        if self.free:
            return self.free.pop()
        self.made += 1
        return f"v_{self.made}"

    def result(self, node: Node) -> str:
        """A slot for a result: that of an argument that lies alike and is needed no more, where there is one."""
        for a in node.args:
            mine = self.values.get(id(a), "").startswith("v_")
            if mine and self.k.form(a) == self.k.form(node) and self.left[id(a)] == node.args.count(a):
                return self.values.pop(id(a))
        return self.slot()

    def done(self, nodes: Sequence[Node]) -> None:
        """These have been read once more."""
        for node in nodes:
            self.left[id(node)] -= 1
            if self.left[id(node)] == 0 and self.values.get(id(node), "").startswith("v_"):
                self.free.append(self.values.pop(id(node)))

    # Values of rows

    def row(self, node: Node) -> str:
        """One float for each row, computed before the tiles of this phase or of an earlier one."""
        if id(node) not in self.k.row_texts:
            made = self._answer(node) if node.reduces else self._make_row(node)
            self.k.row_texts[id(node)] = made
        return self.k.row_texts[id(node)]

    def _answer(self, node: Node) -> str:
        name, answer, kind = self.k.answers[id(node)]
        if answer == "var" or (answer == "mean" and kind == "Sum"):
            to, of = self.k.row_value(), "squares" if answer == "var" else "sum"
            self.phase.rows.append(f"Muls({to}, {name}.{of}(), 1.0f / static_cast<float>(t_.size), rows);")
            return to
        return f"{name}.{answer}()"

    def _make_row(self, node: Node) -> str:
        to, lines = self.k.row_value(), self.phase.rows
        if node.kind == "input":
            lines.append(f"Adds({to}, {node.value}_.Value(), 0.0f, rows);")
            return to
        if node.kind == "where":
            self._where(node, to, ROWS)
            return to
        forms = [self.k.form(a) for a in node.args]
        args = [self.row(a) if f == ROWS else None for a, f in zip(node.args, forms, strict=True)]
        if not any(args):  # numbers of tensors: of one row, spread over all
            args[0] = self._as(node.args[0], ROWS, [])
        temporary = [self.k.row_value() for _ in range(_temporaries(node))]
        lines += _instructions(self.k, node, to, args, temporary, "rows")
        return to

    # Values of tiles and columns

    def use(self, node: Node, form: str, temporary: list[str]) -> str:
        """The memory of a value in a form that has at least its elements; a slot that it takes is added to the list."""
        if self.k.form(node) == form:
            return self.value(node)
        return self._as(node, form, temporary)

    def _as(self, node: Node, form: str, temporary: list[str]) -> str:
        mine = self.k.form(node)
        if form == ROWS:
            if mine == ROWS:
                return self.row(node)
            to = self.k.row_value()
            self.phase.rows.append(f"Duplicate({to}, {self.k.number(node)}, rows);")
            return to
        to, n = self.slot(), _count(form)
        temporary.append(to)
        if mine == NUMBER:
            self.phase.body.append(f"Duplicate({to}, {self.k.number(node)}, {n});")
        else:
            side = self.operand(node)
            self.phase.body.append(f"Duplicate({to}, 0.0f, {n});")
            self.phase.body.append(f"Apply<Plus>({to}, Whole({to}, tile), {side}, tile);")
        return to

    def operand(self, node: Node) -> str:
        """A value as one side of an instruction over a tile."""
        form = self.k.form(node)
        if form == ROWS:
            self.k.across = True
            return f"PerRow({self.row(node)}, scratch.blocks, tile)"
        return f"Columns({self.value(node)})" if form == COLUMNS else f"Whole({self.value(node)}, tile)"

    def value(self, node: Node, to: str | None = None) -> str:
        """A tile, or columns."""
        if id(node) in self.values:
            return self.values[id(node)]
        if node.kind == "input":
            self.phase.reads.append(str(node.value))
            return str(node.value)
        made = self._make(node, to)
        self.values[id(node)] = made
        return made

    def into(self, o: Output) -> None:
        """Compute an output where it is written from."""
        node, to = o.node, o.name
        again = (
            self.left[id(node)] > 1
        )  # then it must be whole: instructions over tiles read the gaps between rows too
        whole = all(self.k.form(a) in (TILE, NUMBER) for a in node.args) and not node.kind.startswith(
            "rotate"
        )
        if node.args and self.k.form(node) == TILE and id(node) not in self.values and (whole or not again):
            self.value(node, to)
            return
        temporary: list[str] = []
        self.phase.body.append(f"Adds({to}, {self.use(node, TILE, temporary)}, 0.0f, n);")
        self.free += temporary
        self.done([node])

    def _make(self, node: Node, to: str | None) -> str:
        form, temporary = self.k.form(node), list[str]()
        lines, forms = self.phase.body, [self.k.form(a) for a in node.args]
        if node.kind == "where":
            to = to or self.slot()
            self._where(node, to, form)
        elif node.kind.startswith("rotate"):
            x = self.use(node.args[0], TILE, temporary)
            to = to or self.slot()
            lines.append(f"rotation_({to}, {x}, tile);")
        elif form == TILE and NUMBER not in forms and set(forms) != {TILE}:
            sides = ", ".join(self.operand(a) for a in node.args)
            to = to or self.result(node)
            lines.append(f"Apply<{_ACROSS[node.kind]}>({to}, {sides}, tile);")
        else:
            args = [None if f == NUMBER else self.value(a) for a, f in zip(node.args, forms, strict=True)]
            inside = [self.slot() for _ in range(_temporaries(node))]
            to = to or self.result(node)
            lines += _instructions(self.k, node, to, args, inside, _count(form))
            temporary += inside
        self.free += temporary
        self.done(node.args)
        return to

    def _where(self, node: Node, to: str, form: str) -> None:
        temporary: list[str] = []
        lines = self.phase.rows if form == ROWS else self.phase.body
        condition, yes, no = node.args
        bits, n = self._bits(condition, form), _count(form)
        a = self._as(yes, form, temporary) if form == ROWS else self.use(yes, form, temporary)
        if self.k.form(no) == NUMBER:
            b, mode = self.k.number(no), "VSEL_TENSOR_SCALAR_MODE"
        else:
            b = self._as(no, form, temporary) if form == ROWS else self.use(no, form, temporary)
            mode = "VSEL_TENSOR_TENSOR_MODE"
        lines.append(f"Select({to}, {bits}, {a}, {b}, SELMODE::{mode}, {n});")
        self.free += temporary

    def _bits(self, condition: Node, form: str) -> str:
        """One bit for each element: whether the condition holds. Instructions that compare read whole repeats."""
        if (id(condition), form) in self.bits:
            return self.bits[id(condition), form]
        lines, temporary = self.phase.rows if form == ROWS else self.phase.body, list[str]()
        n = f"RoundedUp({_count(form)}, kLanes)"
        self.bits[id(condition), form] = bits = f"bits_[{len(self.bits)}].Get<uint8_t>()"
        if condition.kind in _COMPARE:
            (x, y), how = condition.args, _COMPARE[condition.kind]
            if self.k.form(x) == NUMBER:
                x, y, how = y, x, {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(how, how)
        else:
            x, y, how = condition, None, "NE"
        a = self._readable(x, form, temporary)
        if y is None or self.k.form(y) == NUMBER:
            number = "0.0f" if y is None else self.k.number(y)
            lines.append(f"CompareScalar({bits}, {a}, {number}, CMPMODE::{how}, {n});")
        else:
            b = self._readable(y, form, temporary)
            lines.append(f"Compare({bits}, {a}, {b}, CMPMODE::{how}, {n});")
        self.free += temporary
        return bits

    def _readable(self, node: Node, form: str, temporary: list[str]) -> str:
        """A value in memory that was written beyond its end too."""
        if form == ROWS:
            return self._as(node, ROWS, temporary)
        text = self.use(node, form, temporary)
        if text.startswith("v_"):
            return text
        temporary.append(self.slot())
        self.phase.body.append(f"Adds({temporary[-1]}, {text}, 0.0f, {_count(form)});")
        return temporary[-1]


def _memory(lines: Sequence[str], name: str, member: str) -> list[str]:
    """Locals for the memory that some statements use."""
    used = sorted({int(n) for line in lines for n in re.findall(rf"\b{name}_(\d+)\b", line)})
    return [f"const Floats {name}_{n} = {member}[{n - 1}].Get();" for n in used]


def _count(form: str) -> str:
    return {ROWS: "rows", COLUMNS: "tile.size"}.get(form, "n")


def _temporaries(node: Node) -> int:
    """How many values an instruction computes in, beside its result."""
    if node.kind == "div":
        a, b = node.args
        if b.kind == "constant" and math.frexp(float(b.value or 0))[0] == 0.5:
            return 0  # the reciprocal is exact
        return int(a.number or b.number or "input" in (a.kind, b.kind))
    return 1 if node.kind == "cast" else _FUNCTIONS.get(node.kind, ("", 0))[1]


def _instructions(
    k: Vectors, node: Node, to: str, args: Sequence[str | None], temporary: Sequence[str], n: str
) -> list[str]:
    """What computes a node over n elements that lie together; an argument that is a number has no text."""
    kind = node.kind
    if kind in _BINARY and len(node.args) == 2:
        a, b = args
        x, y = node.args
        if a and b:
            return [f"{_BINARY[kind]}({to}, {a}, {b}, {n});"]
        if a and kind == "sub":
            return [f"Adds({to}, {a}, {k.number(y, '-')}, {n});"]
        if a and kind == "div":
            if not temporary:
                return [f"Muls({to}, {a}, {float_text(1 / float(y.value or 1))}f, {n});"]
            return [f"OverNumber({to}, {a}, {k.number(y)}, {temporary[0]}, {n});"]
        number = k.number(y if a else x)
        if kind == "sub":
            return [f"Muls({to}, {b}, -1.0f, {n});", f"Adds({to}, {to}, {number}, {n});"]
        if kind == "div":
            return [f"NumberOver({to}, {number}, {b}, {temporary[0]}, {n});"]
        return [f"{_WITH_NUMBER[kind]}({to}, {a or b}, {number}, {n});"]
    (a,) = args
    if kind == "neg":
        return [f"Muls({to}, {a}, -1.0f, {n});"]
    if kind == "cast" and node.value == "float32":
        return [f"Adds({to}, {a}, 0.0f, {n});"]
    if kind == "cast":
        return [f"RoundedTo<{_TYPES[str(node.value)]}>({to}, {a}, {temporary[0]}, {n});"]
    if kind in _UNARY:
        return [f"{_UNARY[kind]}({to}, {a}, {n});"]
    if kind in _FUNCTIONS:
        return [f"{_FUNCTIONS[kind][0]}({', '.join([to, str(a), *temporary, n])});"]
    raise Unsupported(f"{kind} is not computed by Ascend kernels")
