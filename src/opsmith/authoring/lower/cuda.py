"""The CUDA kernel of a plan: a row to the threads of a block, its launch, and its binding; float32 inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.formula.shapes import Shape
from opsmith.authoring.lower.kernel import CppKernel, dtype_names, indented, wide_type
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output


class CudaKernel(CppKernel):
    """It takes pointers; its launcher the views."""

    types: ClassVar = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half", "bool": "bool"}
    wide = "wide"
    finish = "{0} = together({0});"
    parameters = ("void* stream",)
    arguments = ("static_cast<cudaStream_t>(stream)",)

    def text(self) -> str:
        """The kernel, and the function that launches it for the dtypes that it finds."""
        arguments = [f"const {self.type_of[n]}* {n}" for n in self.rows.read]
        arguments += [
            f"{'float' if o.extent == COLUMN else self.type_of[o.name]}* {o.name}" for o in self.plan.outputs
        ]
        arguments += ["int64_t rows", "int64_t size", *(f"int64_t {c}" for c in self.rows.counts)]
        head = f"__global__ void {self.name}_kernel({', '.join([*arguments, *self.numbers])}) {{"
        kernel = [self.template, head, *indented(self._body()), "}", ""]
        return self.whole_text([*kernel, *self._launcher()])

    def declaration(self) -> str:
        """The launcher, as NAME.h says it."""
        return f"{self.entry().replace('View', 'opsmith::View')};"

    def binding(self, shapes: Mapping[str, Shape]) -> str:
        """The function that PyTorch calls: checks, the stream, the launcher, its errors."""
        outputs = [o.name for o in self.plan.outputs]
        names = [*self.plan.inputs, *outputs]
        given = [f"const Tensor& {n}" for n in self.plan.inputs]
        given += [f"{wide_type(v)} {n}" for n, v in self.plan.attributes.items()]
        given += [f"const {'Optional' if n in self.optional else 'Tensor'}& {n}" for n in outputs]
        lines = [f"void {self.name}_op({', '.join(given)}) {{", "  opsmith::Call call(kName);"]
        for n in names:
            sizes = ", ".join(f'"{d}"' for d in shapes[n])
            lines.append(f'  call.tensor("{n}", {n}, {{{sizes}}});')
        lines.append(f"  call.dtypes({{{', '.join(f'dtype_of({n})' for n in names)}}},")
        combinations = f",\n{' ' * 15}".join(dtype_names(c, names) for c in self.columns)
        lines.append(f"              {{{combinations}}});")
        views = [f"view_of({n})" for n in self.plan.inputs]
        views += [*self.plan.attributes, *(f"view_of({n})" for n in outputs)]
        lines += [f"  const opsmith::Launch launch(kName, {names[0]});"]
        lines += [f"  {self.name}({', '.join([*views, 'launch.stream()'])});", "  launch.check();", "}"]
        return "\n".join(lines)

    def _body(self) -> list[str]:
        plan = self.plan
        if not plan.rowwise:
            return [
                "const int64_t threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;",
                "const int64_t first = blockIdx.x * threads + thread, stride = gridDim.x * threads;",
                "for (int64_t at = first; at < size; at += stride) {",
                *indented(self._write()),
                "}",
            ]
        inside = ["const int64_t half = size / 2;"] if plan.rotation else []
        for n in self.rows.read:
            place = self.place(n, "" if plan.extent(n) == ROW else " * size")
            inside.append(f"const {self.type_of[n]}* const {n}_row = {n}{place};")
        inside += [
            f"{self.type_of[o.name]}* const {o.name}_row = {o.name} + row{' * size' if o.extent == FULL else ''};"
            for o in plan.outputs
            if o.extent != COLUMN
        ]
        inside += [f"float* const {o.name}_row = {o.name} + blockIdx.x * size;" for o in self.sums]
        for i, stage in enumerate(plan.stages):
            inside += self.gather(i, stage)
        inside += self.rows_out()
        inside += self.loop(self._write())
        first = "int64_t(blockIdx.x) * blockDim.y + threadIdx.y"
        step = "int64_t(gridDim.x) * blockDim.y"
        return [f"for (int64_t row = {first}; row < rows; row += {step}) {{", *indented(inside), "}"]

    def loop(self, body: Sequence[str]) -> list[str]:
        if not body:
            return []
        end = "half" if self.plan.rotation else "size"
        return [f"for (int64_t at = threadIdx.x; at < {end}; at += blockDim.x) {{", *indented(body), "}"]

    def add(self, statistic: str, text: str, node: Node) -> str:
        return f"{statistic}.add({text});"

    def store_row(self, o: Output, text: str) -> str:
        wanted = f" && {o.name}" if o.optional else ""
        return f"if (threadIdx.x == 0{wanted}) put({o.name}_row, {text});"

    def _write(self) -> list[str]:
        outputs = [o for o in self.plan.outputs if o.extent != ROW]
        emitter = self.begin([o.node for o in outputs])
        stores = []
        for o in outputs:
            for p in self.places:
                at, text = self.at(p), emitter.text(o.node, p)
                target = f"{o.name}_row" if self.plan.rowwise else o.name
                store = (
                    f"{target}[{at}] += {text};" if o.extent == COLUMN else f"put({target} + {at}, {text});"
                )
                stores.append(f"if ({o.name}) {store}" if o.optional else store)
        return [*self.before, *self.body, *stores]

    def load_lane(self, name: str, place: int) -> str:
        if (name, place) not in self.loaded:
            kept = self.loaded[name, place] = f"v_{name}{f'_{place + 1}' if self.plan.rotation else ''}"
            source = f"{name}_row[{self.at(place)}]" if self.plan.rowwise else f"{name}[at]"
            self.body.append(f"const {self.element(kept, name, source)};")
        return self.loaded[name, place]

    def _launcher(self) -> list[str]:
        plan, whole = self.plan, self.rows.whole
        given = [f"{n}.as<{self.type_of[n]}>()" for n in self.rows.read]
        given += [
            f"{o.name}_sums.parts()" if o.extent == COLUMN else f"{o.name}.as<{self.type_of[o.name]}>()"
            for o in plan.outputs
        ]
        parameters = [*(f"const View& {n}" for n in self.tensors), *self.numbers, "cudaStream_t stream"]
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
        body += [f"{o.name}_sums.write<{self.type_of[o.name]}>({o.name}.data);" for o in self.sums]
        return [self.template, f"void {self.name}_of({', '.join(parameters)}) {{", *indented(body), "}"]
