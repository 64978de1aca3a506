"""The Ascend C kernel of a plan: vector instructions over whole tiles of rows, through double-buffered queues.

A value is a number, one float for each row of a tile, a row of columns that all rows share, or a tile. A row that fits
into local memory is read once; a longer one in parts, once for each pass. float32 inside, rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.lower.ascendc_code import COLUMNS, NUMBER, ROWS, TILE, Code, Phase, Unsupported
from opsmith.authoring.lower.emit import Emitter, float_text
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Plan, Statistic
from opsmith.authoring.lower.rows import Rows

__all__ = ["Vectors"]

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
        size = {"float32": 4, "bfloat16": 2, "float16": 2, "bool": 1}
        names = [*self.rows.read, *(o.name for o in self.plan.outputs)]
        return any(len({size[c[n]] for n in names}) > 1 for c in self.columns)

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
