"""The Ascend C kernel of a plan: vector instructions over whole tiles of rows, through double-buffered queues.

A value is a number, one float for each row of a tile, a row of columns that all rows share, or a tile. A row that fits
into local memory is read once; a longer one in parts, once for each pass. float32 inside, rounded once. Each node is
one vector instruction, or a function of formula_functions.h.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.lower.emit import Emitter, float_text
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output, Plan, Statistic
from opsmith.authoring.lower.rows import Rows

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
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}  # of an element
_TYPES = {"float32": "float", "bfloat16": "bfloat16_t", "float16": "half"}
# What kernels use of that file, and which instructions statements call that are in no template.
FUNCTIONS = (*(f for f, _ in _FUNCTIONS.values()), "NumberOver", "OverNumber", "RoundedTo")
INSTRUCTIONS = frozenset([*_BINARY.values(), *_WITH_NUMBER.values(), *_UNARY.values()])

# What stands around the tensors in what is written here.
_WORDS = """
half formula tile pipe tiling workspace platform data kernel first column part n scratch reads run t cores
blocks tiles elements bytes element columns fixed room math whole dims attributes context local shape most
executor check type_of place m sizes loaded resident ge gert ops optiling at bits width number os path cann
npu package libraries values rotation every
"""
_SPELLED = re.compile(r"(bytes|number)_|.*_$|k[A-Z]")
_TAKEN = frozenset(_WORDS.split())
MOST_BUFFERS = 8  # of input queues: each takes one of the eight events between two pipes


class Unsupported(ValueError):
    """What this back end computes no kernel for, and why."""


@dataclass
class Phase:
    """One walk over the tiles of a few rows: a statistic is gathered, or results are written."""

    name: str
    rows: list[str] = field(default_factory=list)  # statements before its tiles
    body: list[str] = field(default_factory=list)  # for each tile
    reads: list[str] = field(default_factory=list)  # inputs, in tiles


class Vectors:
    """The pieces of a kernel, for the templates: phases, tensors, and what they take of local memory."""

    def __init__(self, plan: Plan, columns: Sequence[Mapping[str, str]], taken: Collection[str] = ()) -> None:
        self.plan, self.rows = plan, Rows(plan)
        self.flat = not plan.rowwise
        names = [*plan.inputs, *plan.attributes, *(o.name for o in plan.outputs)]
        if known := [n for n in names if n in _TAKEN or n in taken or _SPELLED.match(n)]:
            raise Unsupported(f"{known[0]!r} means something in an Ascend C kernel; name it otherwise")
        if any(o.extent == COLUMN for o in plan.outputs):
            raise Unsupported("sums over rows are not computed by Ascend kernels")
        tensors = [*self.rows.read, *(o.name for o in plan.outputs)]
        if len({n.upper() for n in tensors}) < len(tensors):
            raise Unsupported("names that differ in case alone are one name to CANN (DTYPE_X); rename one")
        self.columns = columns
        self.forms = {n: self._form_of_input(n) for n in self.rows.read}
        self.depth = self._buffers()
        self.numbers: dict[str, str] = {}  # fields of the tiling that the host computes
        self.row_values = 0
        self.statistics: dict[str, str] = {}
        self.slots = self.conditions = 0
        self.across = False
        self.answers: dict[
            int, tuple[str, str, str]
        ] = {}  # reductions: which statistic, its answer, its kind
        self.row_texts: dict[int, str] = {}  # values of rows that are computed
        self._forms: dict[int, str] = {}
        self.phases = [self._gather(i, s) for i, s in enumerate(plan.stages)]
        self.phases.append(self._write())

    def _form_of_input(self, name: str) -> str:
        if self.flat:
            return TILE
        if self.plan.extent(name) == ROW:
            place = self.rows.place(name)
            if place not in (None, "row"):
                raise Unsupported(
                    f"{name} has one number for several rows, which is not laid out for vectors; give it every row's"
                )
            return NUMBER if place is None else ROWS
        return COLUMNS if self.rows.place(name) is None else TILE

    def _buffers(self) -> dict[str, int]:
        """How many buffers each input queue has: two for what comes tile by tile, where there are events for them."""
        tiles = [n for n, f in self.forms.items() if f in (TILE, ROWS)]
        others = [n for n, f in self.forms.items() if f == COLUMNS]
        most = MOST_BUFFERS - (
            self.types_differ() and not self.flat
        )  # an event is left for what is cleared first
        both = 2 * len(tiles) + len(others) <= most
        if len(tiles) + len(others) > most:
            raise Unsupported(
                f"{len(tiles) + len(others)} inputs; a core has events for the queues of {most}"
            )
        return {**dict.fromkeys(tiles, 2 if both else 1), **dict.fromkeys(others, 1)}

    def types_differ(self) -> bool:
        """Whether a combination of dtypes has elements of different sizes."""
        names = [*self.rows.read, *(o.name for o in self.plan.outputs)]
        return any(len({BYTES[c[n]] for n in names}) > 1 for c in self.columns)

    # Forms

    def form(self, node: Node) -> str:
        """How a node's value lies: NUMBER, ROWS, COLUMNS or TILE."""
        if id(node) not in self._forms:
            self._forms[id(node)] = self._form(node)
        return self._forms[id(node)]

    def _form(self, node: Node) -> str:
        if node.number:
            return NUMBER
        if node.kind == "input":
            return self.forms[str(node.value)]
        if self.flat:
            return TILE
        forms = {self.form(a) for a in node.args}
        if node.reduces or (self.plan.space[-1] != 1 and node.shape is not None and node.shape[-1] == 1):
            return ROWS
        return COLUMNS if forms <= {COLUMNS, NUMBER} and not node.kind.startswith("rotate") else TILE

    # Numbers, which the host computes

    def number(self, node: Node, sign: str = "") -> str:
        """The text of a number in the kernel, or of its negative."""
        if node.kind == "constant":
            value = float(node.value or 0.0)
            return f"{float_text(-value if sign else value)}f"
        if node.kind == "input":
            return f"{sign}{node.value}_"
        if node.kind == "attribute":
            return f"{sign}t_.{node.value}"
        text = self._host(node)
        name = next((n for n, t in self.numbers.items() if t == text), f"number_{len(self.numbers) + 1}")
        self.numbers[name] = text
        return f"{sign}t_.{name}"

    def _host(self, node: Node) -> str:
        def leaf(n: Node, place: int) -> str | None:
            return {"attribute": str(n.value), "size": "static_cast<float>(size)"}.get(n.kind)

        def call(n: Node, texts: list[str]) -> str:
            if n.kind not in ("sqrt", "exp", "log", "tanh"):
                raise Unsupported(f"{n.kind} of numbers alone is not computed")
            return f"std::{n.kind}({texts[0]})"

        return Emitter(leaf, call, lambda text, n, place: text, lambda v: f"{float_text(v)}f").text(node)

    # Phases

    def _gather(self, index: int, stage: Sequence[Statistic]) -> Phase:
        phase = Phase(f"Gather{chr(65 + index)}")
        code = Code(self, phase, [s.arg for s in stage])
        for j, s in enumerate(stage):
            name = f"r_{chr(97 + index)}{j + 1 if len(stage) > 1 else ''}_"
            self.statistics[name] = f"Row{s.kind}"
            phase.rows.append(f"{name}.Begin();")
            phase.body.append(f"{name}.Add({code.use(s.arg, TILE, [])}, scratch, tile);")
            for answer, node in s.answers.items():
                self.answers[id(node)] = (name, answer, s.kind)
        return code.finished()

    def _write(self) -> Phase:
        phase = Phase("Write")
        full = [o for o in self.plan.outputs if o.extent == FULL]
        code = Code(self, phase, [o.node for o in full])
        for o in self.plan.outputs:
            if o.extent == ROW:
                value = code.row(o.node)
                phase.rows.append(f"Adds({o.name}_.Open(), {value}, 0.0f, rows);")
                phase.rows += [f"{o.name}_.Close(Line(rows));", f"{o.name}_.Store(row, Line(rows));"]
        phase.body += [f"const Floats {o.name} = {o.name}_.Open();" for o in full]
        for o in full:
            code.into(o)
        phase.body += [f"{o.name}_.Close(tile);" for o in full]
        phase.body += [f"{o.name}_.Store(at, tile);" for o in full]
        return code.finished()

    def row_value(self) -> str:
        """Memory for one more value of each row."""
        self.row_values += 1
        return f"r_{self.row_values}"


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
            args[0] = self.use(node.args[0], ROWS, [])
        temporary = [self.k.row_value() for _ in range(_temporaries(node))]
        lines += _instructions(self.k, node, to, args, temporary, "rows")
        return to

    # Values of tiles and columns

    def use(self, node: Node, form: str, temporary: list[str]) -> str:
        """The memory of a value in a form that has at least its elements; a slot that it takes is added to the list."""
        mine = self.k.form(node)
        if mine == form:
            return self.row(node) if form == ROWS else self.value(node)
        if form == ROWS:
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
        # Then it must be whole: instructions over tiles read the gaps between rows too.
        again = self.left[id(node)] > 1
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
        a = self.use(yes, form, temporary)
        if self.k.form(no) == NUMBER:
            b, mode = self.k.number(no), "VSEL_TENSOR_SCALAR_MODE"
        else:
            b = self.use(no, form, temporary)
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
        text = self.use(node, form, temporary)
        if form == ROWS or text.startswith("v_"):
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
