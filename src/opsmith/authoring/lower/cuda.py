"""The CUDA kernel of a plan: a row to the threads of a block, its launch, and its binding; float32 inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.formula.shapes import Shape
from opsmith.authoring.lower.emit import Emitter, float_text
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output, Plan, Statistic
from opsmith.authoring.lower.rows import Rows

__all__ = ["binding", "declaration", "function"]

_TYPES = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half", "bool": "bool"}
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "boolean"}


def function(plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> str:
    """The kernel, and the function that launches it for the dtypes that it finds."""
    return _Function(plan, name, columns, comment).text()


def declaration(plan: Plan, name: str) -> str:
    """The launcher, as NAME.h says it."""
    views = [f"opsmith::View {n}" for n in plan.inputs]
    numbers = [f"{_wide(v)} {n}" for n, v in plan.attributes.items()]
    outputs = [f"opsmith::View {o.name}" for o in plan.outputs]
    return f"void {name}({', '.join([*views, *numbers, *outputs, 'void* stream'])});"


def binding(plan: Plan, name: str, columns: Sequence[Mapping[str, str]], shapes: Mapping[str, Shape]) -> str:
    """The function that PyTorch calls: checks, the stream, the launcher, its errors."""
    optional = {o.name for o in plan.outputs if o.optional}
    outs = [f"const {'Optional' if o.name in optional else 'Tensor'}& {o.name}" for o in plan.outputs]
    numbers = [f"{_wide(v)} {n}" for n, v in plan.attributes.items()]
    names = [*plan.inputs, *(o.name for o in plan.outputs)]
    lines = [
        f"void {name}_op({', '.join([*(f'const Tensor& {n}' for n in plan.inputs), *numbers, *outs])}) {{"
    ]
    lines.append("  opsmith::Call call(kName);")
    for n in names:
        sizes = ", ".join(f'"{d}"' for d in shapes[n])
        lines.append(f'  call.tensor("{n}", {n}, {{{sizes}}});')
    lines.append(f"  call.dtypes({{{', '.join(f'dtype_of({n})' for n in names)}}},")
    combinations = ["{" + ", ".join(f"DType::{_DTYPES[c[n]]}" for n in names) + "}" for c in columns]
    lines.append(f"              {{{(',' + chr(10) + ' ' * 15).join(combinations)}}});")
    given = [
        *(f"view_of({n})" for n in plan.inputs),
        *plan.attributes,
        *(f"view_of({o.name})" for o in plan.outputs),
    ]
    lines += [f"  const opsmith::Launch launch(kName, {next(iter(plan.inputs))});"]
    lines += [f"  {name}({', '.join([*given, 'launch.stream()'])});", "  launch.check();", "}"]
    return "\n".join(lines)


class _Function:
    def __init__(self, plan: Plan, name: str, columns: Sequence[Mapping[str, str]], comment: str) -> None:
        self.plan, self.name, self.columns, self.comment = plan, name, columns, comment
        self.rows = Rows(plan)
        self.tensors = [*self.rows.read, *(o.name for o in plan.outputs)]
        found: dict[tuple[str, ...], str] = {}
        keys = {n: tuple(c[n] for c in columns) for n in self.tensors}
        self.types = {
            n: "bool" if set(k) == {"bool"} else found.setdefault(k, f"T{len(found)}")
            for n, k in keys.items()
        }
        self.letters = list(found.values())
        self.sums = [o for o in plan.outputs if o.extent == COLUMN]
        self.known: dict[int, str] = {}
        self.row_inputs: set[str] = set()
        self.named = 0

    def text(self) -> str:
        arguments = [f"const {self.types[n]}* {n}" for n in self.rows.read]
        arguments += [f"{self._written(o)}* {o.name}" for o in self.plan.outputs]
        arguments += ["int64_t rows", "int64_t size", *(f"int64_t {c}" for c in self.rows.counts)]
        arguments += [f"{_narrow(v)} {n}" for n, v in self.plan.attributes.items()]
        template = f"template <{', '.join(f'class {t}' for t in self.letters)}>"
        kernel = [
            f"// {self.comment}",
            template,
            f"__global__ void {self.name}_kernel({', '.join(arguments)}) {{",
        ]
        kernel += [*_indented(self._body()), "}", ""]
        entry = declaration(self.plan, self.name).rstrip(";").replace("opsmith::", "") + " {"
        return "\n".join(
            [
                "namespace {",
                "",
                *kernel,
                *self._launcher(template),
                "",
                "}  // namespace",
                "",
                entry,
                *_indented(self._choices()),
                "}",
            ]
        )

    def _written(self, o: Output) -> str:
        return "float" if o.extent == COLUMN else self.types[o.name]

    def _body(self) -> list[str]:
        plan = self.plan
        if not plan.rowwise:
            lines = [
                "const int64_t threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;"
            ]
            lines += ["const int64_t first = blockIdx.x * threads + thread, stride = gridDim.x * threads;"]
            return [
                *lines,
                "for (int64_t at = first; at < size; at += stride) {",
                *_indented(self._write()),
                "}",
            ]
        inside = ["const int64_t half = size / 2;"] if plan.rotation else []
        inside += [self._pointer(n) for n in self.rows.read]
        inside += [
            f"{self.types[o.name]}* const {o.name}_row = {o.name} + row{' * size' if o.extent == FULL else ''};"
            for o in plan.outputs
            if o.extent != COLUMN
        ]
        inside += [f"float* const {o.name}_row = {o.name} + blockIdx.x * size;" for o in self.sums]
        for i, stage in enumerate(plan.stages):
            inside += self._gather(i, stage)
        inside += self._rows_out()
        inside += self._loop(self._write())
        first = "int64_t(blockIdx.x) * blockDim.y + threadIdx.y"
        step = "int64_t(gridDim.x) * blockDim.y"
        return [f"for (int64_t row = {first}; row < rows; row += {step}) {{", *_indented(inside), "}"]

    def _pointer(self, name: str) -> str:
        place = self.rows.place(name)
        if place is not None:
            width = "" if self.plan.extent(name) == ROW else " * size"
            place = f" + ({place}){width}" if " " in place and width else f" + {place}{width}"
        return f"const {self.types[name]}* const {name}_row = {name}{place or ''};"

    def _loop(self, body: Sequence[str]) -> list[str]:
        if not body:
            return []
        end = "half" if self.plan.rotation else "size"
        return [f"for (int64_t at = threadIdx.x; at < {end}; at += blockDim.x) {{", *_indented(body), "}"]

    def _places(self) -> tuple[int, ...]:
        return (0, 1) if self.plan.rotation else (0,)

    def _gather(self, index: int, stage: Sequence[Statistic]) -> list[str]:
        names = [f"r_{chr(97 + index)}{j + 1 if len(stage) > 1 else ''}" for j in range(len(stage))]
        body, before = self._block()
        emitter = self._emitter([s.arg for s in stage], body, before)
        adds = [
            f"{n}.add({emitter.text(s.arg, p)});"
            for n, s in zip(names, stage, strict=True)
            for p in self._places()
        ]
        lines = [f"{s.kind} {n};" for n, s in zip(names, stage, strict=True)]
        lines += [*before, *self._loop([*body, *adds])]
        for n, s in zip(names, stage, strict=True):
            lines.append(f"{n} = together({n});")
            for answer, node in s.answers.items():
                call = (
                    {"var": "variance", "mean": "mean"}[answer]
                    if s.kind == "Moments"
                    else answer
                    if s.kind == "Online"
                    else "value"
                )
                self.named += 1
                self.known[id(node)] = f"r_{answer}_{self.named}"
                mean = " / float(size)" if answer == "mean" and s.kind == "Sum" else ""
                lines.append(f"const float r_{answer}_{self.named} = {n}.{call}(){mean};")
        return lines

    def _rows_out(self) -> list[str]:
        rows = [o for o in self.plan.outputs if o.extent == ROW]
        if not rows:
            return []
        body, before = self._block()
        emitter = self._emitter([o.node for o in rows], body, before)
        stores = [
            f"if (threadIdx.x == 0{f' && {o.name}' if o.optional else ''}) put({o.name}_row, {emitter.text(o.node)});"
            for o in rows
        ]
        return [*before, *body, *stores]

    def _write(self) -> list[str]:
        outputs = [o for o in self.plan.outputs if o.extent != ROW]
        body, before = self._block()
        emitter = self._emitter([o.node for o in outputs], body, before)
        stores = []
        for o in outputs:
            for p in self._places():
                at, text = self._at(p), emitter.text(o.node, p)
                target = f"{o.name}_row" if self.plan.rowwise else o.name
                store = (
                    f"{target}[{at}] += {text};" if o.extent == COLUMN else f"put({target} + {at}, {text});"
                )
                stores.append(f"if ({o.name}) {store}" if o.optional else store)
        return [*before, *body, *stores]

    def _at(self, place: int) -> str:
        if self.plan.rotation == "rotate_interleaved":
            return f"2 * at + {place}" if place else "2 * at"
        return "half + at" if place else "at"

    def _block(self) -> tuple[list[str], list[str]]:
        self.loaded: dict[tuple[str, int], str] = {}
        return [], []

    def _emitter(self, roots: Sequence[Node], body: list[str], before: list[str]) -> Emitter:
        def leaf(node: Node, place: int) -> str | None:
            if id(node) in self.known:
                return self.known[id(node)]
            if node.kind == "attribute":
                return str(node.value)
            if node.kind == "size":
                return "float(size)"
            if node.kind == "input":
                return self._load(str(node.value), place, body, before)
            return None

        def define(text: str, node: Node, place: int) -> str:
            if text.isidentifier():
                return text
            self.named += 1
            body.append(f"const {'bool' if node.truth else 'float'} v_{self.named} = {text};")
            return f"v_{self.named}"

        def rotate(kind: str, text: str, place: int) -> tuple[str, int]:
            return (text, 9) if place else (f"-{text}", 6)

        emitter = Emitter(leaf, _call, define, lambda v: f"{float_text(v)}f", rotate)
        emitter.count([(r, p if r.shape is not None else 0) for r in roots for p in self._places()])
        return emitter

    def _load(self, name: str, place: int, body: list[str], before: list[str]) -> str:
        boolean = self.types[name] == "bool"
        if self.plan.extent(name) == ROW:
            if name not in self.row_inputs:
                self.row_inputs.add(name)
                value = f"bool r_{name} = *{name}_row" if boolean else f"float r_{name} = wide(*{name}_row)"
                before.append(f"const {value};")
            return f"r_{name}"
        if (name, place) not in self.loaded:
            kept = f"v_{name}{f'_{place + 1}' if self.plan.rotation else ''}"
            source = f"{name}_row[{self._at(place)}]" if self.plan.rowwise else f"{name}[at]"
            body.append(
                f"const {'bool' if boolean else 'float'} {kept} = {source if boolean else f'wide({source})'};"
            )
            self.loaded[name, place] = kept
        return self.loaded[name, place]

    def _launcher(self, template: str) -> list[str]:
        plan, whole = self.plan, self.rows.whole
        given = [f"{n}.as<{self.types[n]}>()" for n in self.rows.read]
        given += [
            f"{o.name}_sums.parts()" if o.extent == COLUMN else f"{o.name}.as<{self.types[o.name]}>()"
            for o in plan.outputs
        ]
        parameters = [f"const View& {n}" for n in self.tensors] + [
            f"{_narrow(v)} {n}" for n, v in plan.attributes.items()
        ]
        lines = [template, f"void {self.name}_of({', '.join([*parameters, 'cudaStream_t stream'])}) {{"]
        if plan.rowwise:
            body = [
                f"const int64_t size = {whole}.sizes[{whole}.dim - 1], rows = sizes_between({whole}, 2, {whole}.dim);"
            ]
        else:
            body = [
                "// Rows do not matter: those of the tile are of threads.",
                f"const int64_t size = sizes_between({whole}, 1, {whole}.dim), rows = (size + 255) / 256;",
            ]
        counts = [
            f"sizes_between({whole}, {first}, {last or f'{whole}.dim'})"
            for first, last in self.rows.counts.values()
        ]
        reduces = "true" if plan.stages or self.sums else "false"
        width = "size / 2" if plan.rotation else "size" if plan.rowwise else "256"
        most = ", 512" if self.sums else ""
        if not self.sums:
            body.append("if (rows == 0 || size == 0) return;")
        body.append(f"const Tile tile(rows, {width}, {reduces}{most});")
        for o in self.sums:
            body.append(f"const ColumnSums {o.name}_sums({o.name}.defined(), tile.blocks.x, size, stream);")
        call = ", ".join([*given, "rows", "size", *counts, *plan.attributes])
        launch = f"{self.name}_kernel<<<tile.blocks, tile.threads, 0, stream>>>({call});"
        body.append(f"if (rows > 0 && size > 0) {launch}" if self.sums else launch)
        body += [f"{o.name}_sums.write<{self.types[o.name]}>({o.name}.data);" for o in self.sums]
        return [*lines, *_indented(body), "}"]

    def _choices(self) -> list[str]:
        optional = {o.name for o in self.plan.outputs if o.optional}
        first = {
            t: next(n for n in self.tensors if self.types[n] == t and n not in optional) for t in self.letters
        }
        arguments = [*self.tensors]
        arguments += [n if isinstance(v, bool) else f"float({n})" for n, v in self.plan.attributes.items()]
        call = ", ".join([*arguments, "static_cast<cudaStream_t>(stream)"])
        lines = []
        for key in dict.fromkeys(tuple(c[first[t]] for t in self.letters) for c in self.columns):
            test = " && ".join(
                f"{first[t]}.dtype == DType::{_DTYPES[k]}" for t, k in zip(self.letters, key, strict=True)
            )
            types = ", ".join(_TYPES[k] for k in key)
            lines.append(f"if ({test}) return {self.name}_of<{types}>({call});")
        return lines


def _call(node: Node, texts: list[str]) -> str:
    if node.kind == "cast":
        return f"cast_to<{_TYPES[str(node.value)]}>({texts[0]})"
    if node.kind == "where":
        return f"({texts[0]} ? {texts[1]} : {texts[2]})"
    if node.kind in ("max", "min"):
        return f"{'larger' if node.kind == 'max' else 'smaller'}({', '.join(texts)})"
    return f"{node.kind}_of({', '.join(texts)})"


def _wide(default: float | int | bool | None) -> str:
    return "bool" if isinstance(default, bool) else "int64_t" if isinstance(default, int) else "double"


def _narrow(default: float | int | bool | None) -> str:
    return "bool" if isinstance(default, bool) else "float"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" if line else line for line in lines]
