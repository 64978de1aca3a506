"""The Triton kernel of a plan: tiles of rows, reduced in registers, masked at their ends; float32 inside."""

from __future__ import annotations

from collections.abc import Sequence

from opsmith.authoring.formula import names_in
from opsmith.authoring.formula.nodes import Node
from opsmith.authoring.lower.emit import Text
from opsmith.authoring.lower.kernel import Kernel, python_type
from opsmith.authoring.lower.plan import COLUMN, ROW, Output, Statistic

_FUNCTIONS = {name: f"tl.{name}" for name in ("exp", "log", "sqrt", "erf", "abs", "where")}
_FUNCTIONS |= {"max": "larger", "min": "smaller"}
_HELPERS = [
    *("larger", "smaller", "row_extreme", "rsqrt", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh"),
    *("silu_slope", "gelu_slope", "gelu_tanh_slope", "parts_of", "add_parts"),
]
_TYPES = {"float32": "tl.float32", "bfloat16": "tl.bfloat16", "float16": "tl.float16"}


def helpers(texts: Sequence[str]) -> list[str]:
    """The functions of kernels/triton/formula.py that a file needs."""
    return sorted(h for h in _HELPERS if any(f"{h}(" in t.replace(f"_{h}(", "") for t in texts))


class TritonKernel(Kernel):
    """A tile's loads and statistics stay in registers from pass to pass."""

    def text(self) -> str:
        body = self._body()
        plan = self.plan
        words = names_in(" ".join(body))
        numbers = [n for n in plan.attributes if n in words]
        flags = [f"HAS_{n}" for n in self.optional]
        parameters = [*self.tensors, "rows", "size", *self.rows.counts, *numbers]
        constants = ["ROWS", "BLOCK", *flags]
        lines = ["@triton.jit", f"def _{self.name}("]
        lines += [f"    {p}," for p in parameters] + [f"    {c}: tl.constexpr," for c in constants]
        lines += [
            "):",
            f'    """{self.comment}"""',
            *(f"    {line}" if line else "" for line in body),
            "",
            "",
        ]
        return "\n".join([*lines, *self._launch(numbers, flags)])

    def _body(self) -> list[str]:
        rotation = {
            "rotate_half": [
                "half = size // 2",
                "twin = tl.where(at < half, at + half, at - half)",
                "sign = tl.where(at < half, -1.0, 1.0)",
            ],
            "rotate_interleaved": ["twin = at ^ 1", "sign = tl.where(at % 2 == 0, -1.0, 1.0)"],
        }.get(self.plan.rotation or "", [])
        at = "at = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]"
        inside: list[str] = []
        for stage in self.plan.stages:
            inside += self._gather(stage)
        inside += self._write()
        row = "tl.arange(0, ROWS).to(tl.int64)[:, None]"
        if not self.sums:
            first = f"row = tl.program_id(0).to(tl.int64) * ROWS + {row}"
            return [first, at, "mask = (row < rows) & (at < size)", *rotation, *inside]
        lines = [at, *rotation]
        lines += [f"{o.name}_sum = tl.zeros((1, BLOCK), tl.float32)" for o in self.sums]
        lines += ["for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):"]
        lines += [
            f"    row = first + {row}",
            "    mask = (row < rows) & (at < size)",
            *(f"    {line}" for line in inside),
        ]
        for o in self.sums:
            place = f"{o.name} + tl.program_id(0).to(tl.int64) * size + at"
            lines += [f"if HAS_{o.name}:", f"    tl.store({place}, {o.name}_sum, mask=at < size)"]
        return lines

    def _gather(self, stage: Sequence[Statistic]) -> list[str]:
        emitter = self.begin([s.arg for s in stage])
        for s in stage:
            text = self._short(emitter.text(s.arg), 50)
            if s.kind == "Moments":
                mean = self._answer(s, "mean", f"{_total(text)} / size")
                self.body.append(f"off = tl.where(mask, {_bracketed(text)} - {mean}, 0.0)")
                self._answer(s, "var", "tl.sum(off * off, 1)[:, None] / size")
            elif s.kind == "Online":
                top = self._answer(s, "max", _extreme("max", text))
                self.body.append(f"power = tl.where(mask, tl.exp({_bracketed(text)} - {top}), 0.0)")
                self._answer(s, "sum", "tl.sum(power, 1)[:, None]")
            else:
                for answer in [a for a in ("mean", "max", "sum", "min") if a in s.answers]:
                    total = _total(text) if s.kind == "Sum" else _extreme(answer, text)
                    self._answer(s, answer, f"{total} / size" if answer == "mean" else total)
        return self.body

    def _answer(self, s: Statistic, answer: str, text: str) -> str:
        self.named += 1
        self.body.append(f"r_{answer}_{self.named} = {text}")
        if answer in s.answers:
            self.known[id(s.answers[answer])] = f"r_{answer}_{self.named}"
        return f"r_{answer}_{self.named}"

    def _short(self, text: str, limit: int) -> str:
        """A long expression gets a name."""
        return text if len(text) <= limit else self._named(text)

    def _write(self) -> list[str]:
        emitter = self.begin([o.node for o in self.plan.outputs])
        stores: list[str] = []
        for o in self.plan.outputs:
            text = self._short(emitter.text(o.node), 38)
            store = self._store(o, text)
            stores += [f"if HAS_{o.name}:", f"    {store}"] if o.optional else [store]
        return [*self.body, *stores]

    def _store(self, o: Output, text: str) -> str:
        if o.extent == COLUMN:
            return f"{o.name}_sum += tl.sum(tl.where(mask, {text}, 0.0), 0)[None, :]"
        if o.extent == ROW:
            return f"tl.store({o.name} + row, rounded({text}, {o.name}), mask=row < rows)"
        if not self.plan.lane(o.node):
            text = f"{_bracketed(text)} + tl.zeros((ROWS, BLOCK), tl.float32)"
        return f"tl.store({o.name} + row * size + at, rounded({text}, {o.name}), mask=mask)"

    def define(self, text: str, node: Node, place: int) -> str:
        return self._named(text)

    def _named(self, text: str) -> str:
        self.named += 1
        self.body.append(f"v_{self.named} = {text}")
        return f"v_{self.named}"

    def call(self, node: Node, texts: list[str]) -> str:
        if node.kind == "cast":
            return f"{_bracketed(texts[0])}.to({_TYPES[str(node.value)]}).to(tl.float32)"
        if node.kind == "relu":
            return f"larger({texts[0]}, 0.0)"
        return f"{_FUNCTIONS.get(node.kind, node.kind)}({', '.join(texts)})"

    def rotate(self, kind: str, text: str, place: int) -> Text:
        return f"{'-' if place else ''}sign * {text}", 5

    def load(self, name: str, place: int) -> str:
        if self.plan.extent(name) == ROW:
            place = 0
        if (name, place) not in self.loaded:
            row = (self.rows.place(name) or "").replace(" / ", " // ")
            if self.plan.extent(name) == ROW:
                where, mask = f"{name} + {row or '0 * row'}", "row < rows"
            else:
                start = f"{name} + {_bracketed(row)} * size + " if row else f"{name} + "
                where, mask = start + ("twin" if place else "at"), "mask" if row else "at < size"
            value = f"tl.load({where}, mask={mask}, other=0.0)"
            value += " != 0" if name in self.plan.truths else ".to(tl.float32)"
            kept = f"r_{name}" if self.plan.extent(name) == ROW else f"v_{name}{'_twin' if place else ''}"
            self.body.append(f"{kept} = {value}")
            self.loaded[name, place] = kept
        return self.loaded[name, place]

    def _launch(self, numbers: Sequence[str], flags: Sequence[str]) -> list[str]:
        plan, whole = self.plan, self.rows.whole
        inputs = [f"{n}: torch.Tensor" for n in plan.inputs]
        inputs += [f"{n}: {python_type(v)}" for n, v in plan.attributes.items()]
        outputs = [f"{o.name}: torch.Tensor{' | None = None' if o.optional else ''}" for o in plan.outputs]
        lines = [
            f"def {self.name}(",
            *(f"    {i}," for i in inputs),
            "    *,",
            *(f"    {o}," for o in outputs),
            ") -> None:",
        ]
        body = [f"size = {whole}.shape[-1]", f"rows = {whole}.numel() // max(size, 1)"]
        if not plan.rowwise:
            body = ["# Rows do not matter: one long row.", f"rows, size = 1, {whole}.numel()"]
        if plan.stages:
            body += [
                "block = block_of(size, 1 << 20)  # a row in registers",
                "width = max(1, min(8, 2048 // block))",
            ]
        else:
            body += ["block = block_of(size, 1024)", "width = max(1, 1024 // block)"]
        grid0 = "triton.cdiv(rows, width)"
        if self.sums:
            body += [f"programs = min({grid0}, 4 * processors({whole})) if size else 0"]
            grid0 = "programs"
            for o in self.sums:
                body += [f"{o.name}_parts = parts_of({o.name}, programs)"]
        grid = f"({grid0}, {'1 if size else 0' if plan.stages else 'triton.cdiv(size, block)'})"
        given = [f"{t}_parts" if any(o.name == t for o in self.sums) else t for t in self.tensors]
        counts = [f"max({self._count(key)}, 1)" for key in self.rows.counts.values()]
        body += ["launch(", f"    _{self.name},", f"    {grid},"]
        body += [f"    {a}," for a in (*given, "rows", "size", *counts, *numbers)]
        body += ["    ROWS=width,", "    BLOCK=block,"]
        body += [f"    HAS_{n}={n} is not None," for n in self.optional]
        body += ["    num_warps=warps_of(width * block),", ")"]
        body += [f"add_parts({o.name}, {o.name}_parts)" for o in self.sums]
        return [*lines, *(f"    {line}" for line in body)]

    def _count(self, key: tuple[int, int | None]) -> str:
        first, last = key
        begin = "" if last is None else f"-{last}"
        if last == first:
            return f"{self.rows.whole}.shape[-{first}]"
        return f"math.prod({self.rows.whole}.shape[{begin}:-{first - 1}])"


def _total(text: str) -> str:
    return f"tl.sum(tl.where(mask, {text}, 0.0), 1)[:, None]"


def _extreme(kind: str, text: str) -> str:
    return f"row_extreme({text}, mask, {1.0 if kind == 'max' else -1.0})[:, None]"


def _bracketed(text: str) -> str:
    return text if text.isidentifier() or (text.endswith(")") and text.startswith("(")) else f"({text})"
