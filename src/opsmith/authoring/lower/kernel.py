"""What the kernels of a plan have in common: names for values, what a block reads, passes that gather and write.

A back end says how its language loads, loops, calls and stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.lower.emit import Emitter, Text, float_text
from opsmith.authoring.lower.plan import COLUMN, ROW, Output, Plan, Statistic
from opsmith.authoring.lower.rows import Rows

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "boolean"}
_RENAMED = {"max": "larger", "min": "smaller", "where": "where"}
_ANSWERS = {"Moments": {"var": "variance", "mean": "mean"}, "Online": {"max": "max", "sum": "sum"}}


class Kernel(ABC):
    """One kernel as text; `columns` map its tensors to dtypes."""

    size = "size"  # the elements of a row, in arithmetic
    places: tuple[int, ...] = (0,)  # of the elements that a step computes: one, or one and its twin

    def __init__(self, plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> None:
        self.plan, self.name, self.columns, self.comment = plan, name, columns, comment
        self.rows = Rows(plan)
        self.tensors = [*self.rows.read, *(o.name for o in plan.outputs)]
        self.optional = [o.name for o in plan.outputs if o.optional]
        self.sums = [o for o in plan.outputs if o.extent == COLUMN]
        self.known: dict[int, str] = {}  # values of rows, from the pass on that gives them
        self.loaded: dict[tuple[str, int], str] = {}  # inputs, by name and place
        self.body: list[str] = []  # statements of a block
        self.named = 0

    def begin(self, roots: Sequence[Node]) -> Emitter:
        """An emitter for a new block, which computes these values."""
        self.body = []
        emitter = Emitter(self.leaf, self.call, self.define, self.number, self.rotate)
        emitter.count(roots, self.places)
        return emitter

    def leaf(self, node: Node, place: int) -> str | None:
        """The text of what a block does not compute."""
        if id(node) in self.known:
            return self.known[id(node)]
        if node.kind == "attribute":
            return str(node.value)
        if node.kind == "size":
            return self.size
        return self.load(str(node.value), place) if node.kind == "input" else None

    def number(self, value: float) -> str:
        """A literal."""
        return float_text(value)

    @abstractmethod
    def load(self, name: str, place: int) -> str:
        """An input's element, after the statement that reads it."""

    @abstractmethod
    def call(self, node: Node, texts: list[str]) -> str:
        """A function of values."""

    @abstractmethod
    def define(self, text: str, node: Node, place: int) -> str:
        """A name for a value, after the statement that gives it."""

    @abstractmethod
    def rotate(self, kind: str, text: str, place: int) -> Text:
        """What a rotation makes of an element's twin."""


class CppKernel(Kernel):
    """One in C++: a template of the tensors' types, and the function that chooses them. float inside."""

    size = "float(size)"
    types: ClassVar[Mapping[str, str]]  # of a tensor's elements, by dtype
    wide: str  # the function that makes them float
    precision = ""  # what functions of one element take in angle brackets
    finish = ""  # what is done with a statistic behind its pass
    parameters: tuple[str, ...] = ()  # of the function that chooses types, behind the tensors
    arguments: tuple[str, ...] = ()  # of the template, behind those and the numbers

    def __init__(self, plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> None:
        super().__init__(plan, name, columns, comment)
        self.places = (0, 1) if plan.rotation else (0,)
        self.before: list[str] = []  # statements of the row in front of a block
        self.row_inputs: set[str] = set()
        # Tensors that have one dtype in every combination share a parameter of the template.
        keys = {n: tuple(c[n] for c in columns) for n in self.tensors}
        several = len({k for k in keys.values() if set(k) != {"bool"}}) > 1
        found: dict[tuple[str, ...], str] = {}
        self.type_of = {
            n: "bool" if set(k) == {"bool"} else found.setdefault(k, f"T{len(found)}" if several else "T")
            for n, k in keys.items()
        }
        self.letters = list(found.values())
        self.template = f"template <{', '.join(f'class {t}' for t in self.letters)}>"
        self.numbers = [
            f"{'bool' if isinstance(v, bool) else 'float'} {n}" for n, v in plan.attributes.items()
        ]

    @abstractmethod
    def loop(self, body: Sequence[str]) -> list[str]:
        """A walk along the row, whose statements these are."""

    @abstractmethod
    def add(self, statistic: str, text: str, node: Node) -> str:
        """The statement that adds a value to a statistic."""

    def begin(self, roots: Sequence[Node]) -> Emitter:
        self.before, self.loaded, self.values = [], {}, 0
        return super().begin(roots)

    def number(self, value: float) -> str:
        return f"{float_text(value)}f"

    def define(self, text: str, node: Node, place: int) -> str:
        self.values += 1
        self.body.append(f"const auto v_{self.values} = {text};")
        return f"v_{self.values}"

    def rotate(self, kind: str, text: str, place: int) -> Text:
        return (text, 9) if place else (f"-{text}", 6)

    def call(self, node: Node, texts: list[str]) -> str:
        if node.kind == "cast":
            return f"cast_to<{self.types[str(node.value)]}>({texts[0]})"
        function = _RENAMED.get(node.kind) or f"{node.kind}_of{self.precision}"
        return f"{function}({', '.join(texts)})"

    def load(self, name: str, place: int) -> str:
        if self.plan.extent(name) != ROW:
            return self.load_lane(name, place)
        if name not in self.row_inputs:
            self.row_inputs.add(name)
            self.before.append(f"const {self.element(f'r_{name}', name, f'*{name}_row')};")
        return f"r_{name}"

    @abstractmethod
    def load_lane(self, name: str, place: int) -> str:
        """The same of an input with an element in each column."""

    def element(self, to: str, name: str, source: str) -> str:
        """The declaration of a tensor's element, made float."""
        return (
            f"bool {to} = {source}" if self.type_of[name] == "bool" else f"float {to} = {self.wide}({source})"
        )

    def place(self, name: str, width: str) -> str:
        """Where an input's row begins, behind its first element."""
        place = self.rows.place(name)
        if place is None:
            return ""
        return f" + ({place}){width}" if " " in place and width else f" + {place}{width}"

    def at(self, place: int) -> str:
        """Where an element or its twin is."""
        if self.plan.rotation == "rotate_interleaved":
            return f"2 * at + {place}" if place else "2 * at"
        return "half + at" if place else "at"

    def gather(self, index: int, stage: Sequence[Statistic]) -> list[str]:
        """One pass: its statistics, and what they answer."""
        names = [f"r_{chr(97 + index)}{j + 1 if len(stage) > 1 else ''}" for j in range(len(stage))]
        emitter = self.begin([s.arg for s in stage])
        adds = [
            self.add(name, emitter.text(s.arg, p), s.arg)
            for name, s in zip(names, stage, strict=True)
            for p in self.places
        ]
        lines = [f"{self.statistic(s.kind)} {name};" for name, s in zip(names, stage, strict=True)]
        lines += [*self.before, *self.loop([*self.body, *adds])]
        for name, s in zip(names, stage, strict=True):
            lines += [self.finish.format(name)] if self.finish else []
            for answer, node in s.answers.items():
                value = f"r_{answer}"
                if value in self.known.values() or answer in self.plan.inputs:
                    self.named += 1
                    value += str(self.named)
                self.known[id(node)] = value
                text = f"{name}.{_ANSWERS.get(s.kind, {}).get(answer, 'value')}()"
                whole = answer == "mean" and s.kind == "Sum"
                lines.append(f"const float {value} = {text}{' / float(size)' if whole else ''};")
        return lines

    def statistic(self, kind: str) -> str:
        return kind

    def rows_out(self) -> list[str]:
        outputs = [o for o in self.plan.outputs if o.extent == ROW]
        emitter = self.begin([o.node for o in outputs])
        stores = [self.store_row(o, emitter.text(o.node)) for o in outputs]
        return [*self.before, *self.body, *stores]

    @abstractmethod
    def store_row(self, o: Output, text: str) -> str:
        """The statement that stores the result of a row."""

    def entry(self) -> str:
        """The function that is called, in front of its body."""
        given = [f"View {n}" for n in self.plan.inputs]
        given += [f"{wide_type(v)} {n}" for n, v in self.plan.attributes.items()]
        given += [f"View {o.name}" for o in self.plan.outputs]
        return f"void {self.name}({', '.join([*given, *self.parameters])})"

    def choices(self) -> list[str]:
        """Its body: the instance of the template for each combination of dtypes."""
        of = {t: [n for n in self.tensors if self.type_of[n] == t] for t in self.letters}
        first = {t: min(names, key=self.optional.__contains__) for t, names in of.items()}
        numbers = [n if isinstance(v, bool) else f"float({n})" for n, v in self.plan.attributes.items()]
        arguments = ", ".join([*self.tensors, *numbers, *self.arguments])
        lines = []
        for key in dict.fromkeys(tuple(c[first[t]] for t in self.letters) for c in self.columns):
            tests = []
            for t, k in zip(self.letters, key, strict=True):
                test = f"{first[t]}.dtype == DType::{_DTYPES[k]}"
                tests.append(f"(!{first[t]}.defined() || {test})" if first[t] in self.optional else test)
            test = " && ".join(tests)
            types = ", ".join(self.types[k] for k in key)
            lines.append(f"if ({test}) return {self.name}_of<{types}>({arguments});")
        return lines

    def whole_text(self, lines: Sequence[str]) -> str:
        """The file's part for this kernel: what is its own, then the function that is called."""
        entry = [f"{self.entry()} {{", *indented(self.choices()), "}"]
        return "\n".join(["namespace {", "", f"// {self.comment}", *lines, "", "}  // namespace", "", *entry])


def dtype_names(column: Mapping[str, str], names: Sequence[str]) -> str:
    """A combination of dtypes as C++ writes it."""
    return "{" + ", ".join(f"DType::{_DTYPES[column[n]]}" for n in names) + "}"


def python_type(default: float | int | bool | None) -> str:
    return "bool" if isinstance(default, bool) else "int" if isinstance(default, int) else "float"


def wide_type(default: float | int | bool | None) -> str:
    """The same in C++, as PyTorch hands it over."""
    return {"bool": "bool", "int": "int64_t", "float": "double"}[python_type(default)]


def indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if line else line for line in lines]
