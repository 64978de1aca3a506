"""The files of a project for Ascend NPUs: msopgen's tree around the kernel of `lower.py`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from opsmith.authoring.formula.shapes import ANY, Shape, strides_of
from opsmith.authoring.lower.plan import FULL, ROW
from opsmith.authoring.new import render
from opsmith.authoring.new.generate import Project
from opsmith.authoring.prototype import PrototypeError
from opsmith_ascend import SHARED
from opsmith_ascend.project.lower import (
    BYTES,
    COLUMNS,
    FUNCTIONS,
    INSTRUCTIONS,
    NUMBER,
    ROWS,
    TILE,
    Unsupported,
    Vectors,
)

_TEMPLATES = Path(__file__).parent / "templates"
COPIED = [*sorted(SHARED.glob("formula*.h")), SHARED / "tiling.h"]
_DT = {"float32": "DT_FLOAT", "bfloat16": "DT_BF16", "float16": "DT_FLOAT16", "bool": "DT_BOOL"}
_ROW_BYTES = 1024  # of a value of each row: 256 floats
_OF_STATISTIC = {"RowSum": 2, "RowMax": 2, "RowMin": 2, "RowMoments": 4, "RowOnline": 3}  # values of each row


class Ascend(Vectors):
    """What the templates of kernels/ascendc show."""

    def __init__(self, project: Project) -> None:
        self.p = project
        self.name, self.op = project.name, project.prototype.op
        # The stem in camel case: what the tiling's names begin with, as msopgen's do.
        self.camel = "".join(part.capitalize() for part in self.name.split("_"))
        try:
            super().__init__(project.forward, project.kernel_columns, _known_names())
        except Unsupported as why:
            raise PrototypeError(f"{project.prototype.op}: no Ascend C kernel: {why}") from None
        self.read = self.rows.read
        self.tile_inputs, self.column_inputs, self.row_inputs, self.number_inputs = (
            [n for n in self.read if self.forms[n] == form] for form in (TILE, COLUMNS, ROWS, NUMBER)
        )
        room = {TILE: "elements", COLUMNS: "columns", ROWS: "kMostRows", FULL: "elements", ROW: "kMostRows"}
        extents = {o.name: o.extent for o in sorted(self.plan.outputs, key=lambda o: o.extent)}
        inputs = {n: self.forms[n] for n in (*self.tile_inputs, *self.column_inputs, *self.row_inputs)}
        # The local memory of each tensor's queue, in elements.
        self.rooms = [(n, room[form]) for n, form in (inputs | extents).items()]
        self.outputs = [o.name for o in self.plan.outputs]
        self.tensors = [*self.read, *self.outputs]
        self.attributes = list(self.plan.attributes)
        self.combinations = self._combinations()
        self.walks = [phase for phase in self.phases if phase.body]  # over tiles
        self.scratch_tile = any(s in ("RowMoments", "RowOnline") for s in self.statistics.values())
        self.blocks = self.across or self.scratch_tile  # whether numbers of rows meet tiles
        # What statistics and numbers of rows compute in, in floats.
        rooms = {"lanes": "t_.tileRows * kLanes"} if self.statistics else {}
        rooms |= {"blocks": "RoundedUp(t_.tileRows, kBlock) * kBlock"} if self.blocks else {}
        self.scratch = ({"tile": "elements"} if self.scratch_tile else {}) | rooms

    # Types and formats

    @cached_property
    def sizes(self) -> dict[str, str]:
        """For each tensor, the parameter of the tiling that holds its element's bytes: one for each kind of dtype."""
        found: dict[tuple[str, ...], str] = {}
        keys = {n: tuple(c[n] for c in self.p.kernel_columns) for n in self.tensors}
        count = len(set(keys.values()))
        return {n: found.setdefault(k, f"bytes_{n}" if count > 1 else "bytes") for n, k in keys.items()}

    @cached_property
    def size_owners(self) -> dict[str, str]:
        """The first tensor of each of these parameters."""
        owners: dict[str, str] = {}
        for tensor, parameter in self.sizes.items():
            owners.setdefault(parameter, tensor)
        return owners

    @cached_property
    def least(self) -> str:
        """The bytes of the smallest elements, as C++."""
        return functools.reduce(lambda text, name: f"Min({text}, {name})", self.size_owners)

    def _combinations(self) -> list[tuple[dict[str, str], dict[str, str]]]:
        """The dtypes and formats of the tensors in each combination.

        Raises:
            PrototypeError: a format in which the formula's rows do not lie as rows.
        """
        prototype, found = self.p.prototype, []
        for i, types in enumerate(prototype.columns()):
            column = dict(zip((t.name for t in prototype.tensors), types, strict=True))
            if column not in self.p.columns:
                continue
            formats = {t.name: t.format[i % len(t.format)] for t in prototype.tensors}
            other = sorted({f for f in formats.values() if f != "ND"})
            if other and (not self.flat or len(set(formats.values())) > 1 or self.p.product):
                raise PrototypeError(
                    f"{prototype.op}: format {other[0]} does not keep the elements of a row together, so only formulas "
                    "of one element at a time are computed in it, with all tensors in one format; use ND"
                )
            if self.p.formula.product is not None:
                column["product"] = column[str(self.p.formula.product.args[0].value)]
            both = ({n: column[n] for n in self.tensors}, {n: formats.get(n, "ND") for n in self.tensors})
            if both not in found:
                found.append(both)
        return found

    def data_types(self, name: str) -> str:
        """As the operator's definition lists them."""
        return ", ".join(f"ge::{_DT[types[name]]}" for types, _ in self.combinations)

    def format_names(self, name: str) -> str:
        """The same for formats."""
        return ", ".join(f"ge::FORMAT_{formats[name]}" for _, formats in self.combinations)

    # Local memory

    @cached_property
    def terms(self) -> list[tuple[str, str, str]]:
        """What takes local memory: (per what, of what, an expression for its bytes)."""
        terms = []
        wide = "float32 of {}, where it is narrower"
        for name in self.read:
            per = {TILE: "element", COLUMNS: "column", ROWS: "fixed"}.get(self.forms[name])
            if per:
                times = f"{self.depth[name]} * " if self.depth[name] > 1 else ""
                many = "256 * " if per == "fixed" else ""
                of = f"{name}, {_many(self.depth[name], 'buffer')}"
                terms.append((per, of, f"{many}{times}{self.sizes[name]}"))
                terms.append((per, wide.format(name), f"{many}{self._widened(name)}"))
        for o in self.plan.outputs:
            per, many = ("element", "") if o.extent == FULL else ("fixed", "256 * ")
            terms.append((per, f"{o.name}, 2 buffers", f"{many}2 * {self.sizes[o.name]}"))
            terms.append((per, wide.format(o.name), f"{many}{self._widened(o.name)}"))
        if self.slots:
            of = f"{_many(self.slots, 'value')} between instructions"
            terms.append(("element", of, f"{self.slots} * 4"))
        if self.scratch_tile:
            terms.append(("element", "a tile for the statistics", "4"))
        if self.conditions:
            terms.append(("element", f"{_many(self.conditions, 'condition')}, in bits", f"{self.conditions}"))
        if self.plan.rotation:
            terms.append(("column", "where a rotation finds its elements, and signs", "8"))
        if self.statistics:
            terms.append(("row", "64 lanes to fold into", "256"))
        if self.blocks:
            terms.append(("row", "its number, spread over a data block", "32"))
        values = self.row_values + sum(_OF_STATISTIC[s] for s in self.statistics.values())
        if values:
            terms.append(("fixed", f"{values} values of 256 rows", f"{values} * {_ROW_BYTES}"))
        return terms

    def _widened(self, name: str) -> str:
        size = self.sizes[name]
        types = {c[name] for c in self.p.kernel_columns}
        return "6" if types == {"bool"} else f"({size} < 4 ? 4 : 0)"

    def total(self, per: str) -> str:
        """The sum of the terms of a kind, as C++."""
        return " + ".join(e for p, _, e in self.terms if p == per) or "0"

    def sums(self) -> list[str]:
        """The sum of bytes, line by line, for the comment."""
        heads = {"element": "each element of a tile", "column": "each column", "row": "each row of a tile"}
        heads["fixed"] = "and once"
        lines = []
        for per, head in heads.items():
            mine = [(of, e) for p, of, e in self.terms if p == per]
            if mine:
                lines.append(f"  {head}")
                lines += [f"    {of:<48} {e}" for of, e in mine]
        return lines

    def examples(self) -> list[str]:
        """What the sum gives for each combination of types, and the tile that follows from it."""
        lines = []
        for c in self.p.kernel_columns:
            values = {parameter: BYTES[c[owner]] for parameter, owner in self.size_owners.items()}
            each = {per: _evaluate(self.total(per), values) for per in ("element", "column", "row", "fixed")}
            room = 196608 - each["fixed"] - 64 * each["element"] - 256
            types = list(dict.fromkeys(c[n] for n in self.tensors))
            if self.flat:
                text = f"{room} / {each['element']} = {room // each['element'] // 64 * 64} elements"
            else:
                row = 128 * each["element"] + each["row"]
                fit = min((room - 128 * each["column"]) // row, 255)
                left = f"({room} - 128 x {each['column']})" if each["column"] else str(room)
                text = f"rows of 128: {left} / (128 x {each['element']} + {each['row']}) = {fit}"
                text += " rows" if fit < 255 else ", and an instruction goes down 255 rows"
            lines.append(f"  {' and '.join(types)}: {text}")
        return lines

    # The kernel

    def parameters(self, kind: str = "GM_ADDR") -> str:
        return ", ".join(f"{kind} {n}" for n in self.tensors)

    def place(self, name: str) -> str | None:
        """The row of an input, where it is not that of the whole."""
        place = self.rows.place(name)
        return None if place == "row" or self.flat else re.sub(r"\bcount_", "t_.count_", f"({place})")

    def advance(self, name: str) -> tuple[str, bool]:
        """The count of rows after which an input's place jumps, and whether it moves with each row until then."""
        run, behind = (strides_of(self.plan.inputs[name], self.plan.space) or [])[-1]
        return self.rows.names[2, 1 + len(behind or run)], not behind

    def set_of(self, names: Sequence[str], among: Sequence[str]) -> str:
        """The inputs of a walk, as a set of bits."""
        return " | ".join(f"Reads::{n}" for n in names if n in among) or "0"

    def uses(self, lines: Sequence[str], name: str) -> bool:
        """Whether statements use a name."""
        return any(re.search(rf"\b{name}\b", line) for line in lines)

    # The host

    def shape_of(self, name: str) -> Shape:
        shapes = {**self.p.kernel_inputs, **self.p.formula.shapes}
        return shapes[name]

    def input_like(self, name: str) -> str | None:
        """An input with the shape of an output."""
        return next((n for n in self.read if self.p.kernel_inputs[n] == self.shape_of(name)), None)

    def dims(self, name: str) -> list[str]:
        """Statements that append an output's sizes, each from an input that has it."""
        lines = []
        for d in self.shape_of(name):
            if isinstance(d, int):
                lines.append(f"shape->AppendDim({d});")
                continue
            owner = next(n for n in self.read if d in self.p.kernel_inputs[n])
            i, where = self.read.index(owner), self.p.kernel_inputs[owner]
            get = f"context->GetInputShape({i})"
            if d == ANY:
                lines.append(f"for (size_t d = 0; d + {len(where) - 1} < {get}->GetDimNum(); ++d) {{")
                lines += [f"  shape->AppendDim({get}->GetDim(d));", "}"]
            else:
                behind = len(where) - where.index(d)
                lines.append(f"shape->AppendDim({get}->GetDim({get}->GetDimNum() - {behind}));")
        return lines

    def type_of(self, name: str) -> str:
        """An expression for an output's dtype."""
        for i, n in enumerate(self.read):
            if all(c[n] == c[name] for c in self.p.kernel_columns):
                return f"context->GetInputDataType({i})"
        types = {c[name] for c in self.p.kernel_columns}
        if len(types) > 1:
            raise PrototypeError(
                f"{self.p.prototype.op}: output {name} has the type of no input in all combinations"
            )
        return f"ge::{_DT[types.pop()]}"

    def told(self, name: str, what: str) -> str:
        """The Shape or the Desc of a tensor in a tiling context."""
        if name in self.read:
            return f"context->GetInput{what}({self.read.index(name)})"
        return f"context->GetOutput{what}({self.outputs.index(name)})"

    def attribute_kind(self, name: str) -> tuple[str, str, str]:
        """An attribute's type in C++, its method in the definition, and its default."""
        value = self.plan.attributes[name]
        if isinstance(value, bool):
            return "bool", "Bool", str(value).lower()
        if isinstance(value, int):
            return "int64_t", "Int", str(value)
        return "float", "Float", "" if value is None else f"{value!r}f"

    # Python

    def python_sizes(self) -> list[str]:
        """The tuple that emulation gives the tiling."""
        whole = self.rows.whole
        if self.flat:
            first = [f"{whole}.numel()"]
        else:
            first = [f"{whole}.numel() // max({whole}.shape[-1], 1)", f"{whole}.shape[-1]"]
            for near, far in self.rows.counts.values():
                begin = "" if far is None else f"-{far}"
                first.append(f"max(math.prod({whole}.shape[{begin}:{-(near - 1)}]), 1)")
        sizes = [f"{owner}.element_size()" for owner in self.size_owners.values()]
        return [*first, *self.attributes, *sizes]

    # PyTorch

    @property
    def bound(self) -> bool:
        """Whether PyTorch hands over such tensors: those of other formats come from CANN's graphs."""
        return all(f == "ND" for _, formats in self.combinations for f in formats.values())

    def binding_parameters(self) -> str:
        """Of the function that the dispatcher calls: inputs, attributes, outputs."""
        kinds = {"float": "double", "int64_t": "int64_t", "bool": "bool"}
        return ", ".join(
            [
                *(f"const at::Tensor& {n}" for n in self.read),
                *(f"{kinds[self.attribute_kind(n)[0]]} {n}" for n in self.attributes),
                *(f"at::Tensor {n}" for n in self.outputs),
            ]
        )

    def binding_arguments(self) -> str:
        """Of CANN's function for the operator."""
        return ", ".join(
            [*(f"{n}_.get()" for n in self.read), *self.attributes, *(f"{n}_.get()" for n in self.outputs)]
        )


@functools.cache
def _known_names() -> frozenset[str]:
    """Types, functions and macros of what is written: a tensor of such a name would hide them."""
    files = [*COPIED, *sorted(_TEMPLATES.glob("*.cpp.j2"))]
    code = " ".join(re.sub(r"//.*", "", file.read_text()) for file in files)
    words = set(re.findall(r"[A-Za-z_]\w+", code)) | {"bfloat16_t", "half"}
    return frozenset(w for w in words if w != w.lower() or w.endswith("_t") or w == "half") | INSTRUCTIONS


def _many(count: int, of: str) -> str:
    return f"{count} {of}{'s' * (count > 1)}"


def _evaluate(expression: str, values: Mapping[str, int]) -> int:
    """The value of one of our own sums of products; a condition is of the form (bytes < 4 ? 4 : 0)."""
    text = re.sub(r"\((\w+) < 4 \? 4 : 0\)", lambda m: "4" if values[m[1]] < 4 else "0", expression)
    total = 0
    for term in text.split(" + "):
        product = 1
        for factor in term.split(" * "):
            product *= values[factor] if factor in values else int(factor)
        total += product
    return total


def write(p: Project) -> dict[str, str]:
    """msopgen's tree: what an operator package of CANN is built from, and how PyTorch calls it."""
    a = Ascend(p)
    text = "\n".join(line for phase in a.phases for line in (*phase.rows, *phase.body))
    facts = {
        "a": a,
        "walks": a.walks,
        "inputs": [*a.tile_inputs, *a.column_inputs],
        "functions": bool(a.plan.rotation) or any(f"{f}(" in text.replace("<", "(") for f in FUNCTIONS),
        "least": a.least,
        "parameters": ", ".join(
            [*(f"{n}: torch.Tensor" for n in a.tensors), *(f"{n}: float" for n in a.attributes)]
        ),
    }
    files = {
        "README.md": "README.md",
        "CMakeLists.txt": "CMakeLists.txt",
        "CMakePresets.json": "CMakePresets.json",
        "build.sh": "build.sh",
        f"op_host/{p.name}.cpp": "host.cpp",
        "op_host/CMakeLists.txt": "host_CMakeLists.txt",
        f"op_kernel/{p.name}.cpp": "kernel.cpp",
        f"op_kernel/{p.name}_tiling.h": "tiling.h",
        "op_kernel/CMakeLists.txt": "kernel_CMakeLists.txt",
        "launch.py": "launch.py",
    }
    if a.bound:
        files["framework/pytorch/binding.cpp"] = "binding.cpp"
        files["framework/pytorch/build.py"] = "build.py"
        files["test_on_board.py"] = "test_on_board.py"
    made = {file: render(template, p, _TEMPLATES, **facts) for file, template in files.items()}
    return made | {f"op_kernel/{file.name}": file.read_text() for file in COPIED}
