"""What a project computes and what its card says of it, from its prototype: the facts that the templates show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from opsmith.authoring import formula as language
from opsmith.authoring.formula import gradient
from opsmith.authoring.formula.nodes import ELEMENTWISE, ROTATIONS, Formula, Node, walk
from opsmith.authoring.formula.shapes import ANY, Shape, broadcast, shown, strides_of
from opsmith.authoring.lower import torch as lower_torch
from opsmith.authoring.lower.cpu import CpuKernel
from opsmith.authoring.lower.cuda import CudaKernel
from opsmith.authoring.lower.kernel import python_type
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output, Plan, plan
from opsmith.authoring.lower.triton import TritonKernel
from opsmith.authoring.prototype import Prototype, PrototypeError

_NATIVE = ("float32", "bfloat16", "float16", "bool")
# Sizes for samples: the last axis, then the others from right to left.
_LAST = (1, 7, 33, 130, 384)
_LAST_EVEN = (2, 6, 34, 130, 384)
_LAST_OF_ROWS = (2, 7, 33, 130, 384)  # a row of one element has no statistics
_OTHERS = ((1, 17, 9, 6, 5), (1, 2, 1, 3, 2), (1, 1, 2, 1, 3), (1, 1, 1, 2, 1))


@dataclass(frozen=True)
class Project:
    """Everything that a generated project says: formula, shapes, dtypes, the text of its kernels, its card."""

    prototype: Prototype
    backends: Sequence[str]
    reference: str | None = None  # module:function, where there is no formula
    by_hand: bool = False  # a kernel of the gradients that the author writes, where none can be derived

    @cached_property
    def name(self) -> str:
        return self.prototype.name

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Of the inputs; without any in the prototype, all are alike, of any number of dimensions."""
        return {t.name: t.symbols() or (ANY, "N") for t in self.prototype.input_desc}

    @cached_property
    def attributes(self) -> dict[str, float | int | bool | None]:
        """Those that are numbers or flags; None where the caller must give one."""
        return {a.name: a.default() for a in self.prototype.attr if a.type in ("float", "int", "bool")}

    @cached_property
    def formula(self) -> Formula:
        """What is computed.

        Raises:
            FormulaError, PrototypeError: it cannot be read, or the kernels cannot compute it.
        """
        p = self.prototype
        given = p.formula
        if given is None and self.reference is None:
            raise PrototypeError(
                f'{p.op} has no formula; add one, such as "formula": {{"{p.output_desc[0].name}": "..."}}, '
                "or name a function that computes the same: --reference module:function"
            )
        if given is None:
            given = self._stand_ins({t.name: t.symbols() for t in p.output_desc})
        if isinstance(given, str):
            given = {p.output_desc[0].name: given}
        for t in p.input_desc:
            if t.param_type != "required":
                raise PrototypeError(
                    f"{p.op}: input {t.name} is {t.param_type}; kernels need every input: make it required, "
                    "or write two operators"
                )
        used = {a.name for a in p.attr if any(a.name in language.names_in(text) for text in given.values())}
        for a in p.attr:
            if a.name in used - self.attributes.keys():
                raise PrototypeError(
                    f"{p.op}: attribute {a.name} is a {a.type}; formulas read float, int, bool"
                )
        return language.parse(
            given,
            self.shapes,
            {t.name: t.symbols() for t in p.output_desc},
            # Those without a default first, as Python wants parameters.
            dict(sorted(self.attributes.items(), key=lambda kv: kv[1] is not None)),
            frozenset(t.name for t in p.input_desc if set(t.type) == {"bool"}),
        )

    def _stand_ins(self, outputs: Mapping[str, Shape | None]) -> dict[str, str]:
        """What the kernels compute of each output until their author has written them."""
        truths = [t.name for t in self.prototype.input_desc if set(t.type) == {"bool"}]
        numbers = [n for n, v in self.attributes.items() if not isinstance(v, bool)]
        text = " + ".join([*(n for n in self.shapes if n not in truths), *numbers])
        for name in truths:
            text = f"where({name}, {text}, 0)"
        whole: Shape | None
        whole, *shapes = self.shapes.values()
        for shape in shapes:
            whole = whole and broadcast(whole, shape)
        found = {}
        for output, declared in outputs.items():
            declared = whole if declared is None else declared
            if not whole or not declared or declared not in (whole, (*whole[:-1], 1), whole[:-1]):
                given = ", ".join(f"{name} {shown(shape)}" for name, shape in self.shapes.items())
                raise PrototypeError(
                    f"{self.prototype.op}: kernels that are yours to write walk along the rows to which all inputs "
                    "broadcast, and give an element for each of theirs or one for a row; "
                    f"found {given}, and {output} {shown(declared or ())}"
                )
            # Squares, as no gradient of a sum alone is read from an input, whose rows a kernel walks along.
            found[output] = text if declared == whole or whole[-1] == 1 else f"sum(({text}) * ({text}))"
        return found

    @property
    def to_write(self) -> list[str]:
        """The kernels that are the author's to write."""
        found = ["forward"] if self.prototype.formula is None else []
        return [*found, *(["backward"] if self.gradients and isinstance(self._derived, str) else [])]

    @cached_property
    def _derived(self) -> dict[str, Node] | str:
        """The gradients of the kernels' inputs, or why none can be derived."""
        if self.prototype.formula is None:
            return f"nothing is known of {self.reference} but its results"
        try:
            return gradient.gradients(self.formula, list(self.kernel_inputs))
        except gradient.NoDerivative as why:
            return str(why)

    @property
    def differentiable(self) -> bool:
        """Whether any output has a derivative; comparisons have none, and nothing is known of a function."""
        return self._derived != {}

    @cached_property
    def columns(self) -> list[dict[str, str]]:
        """The dtype combinations that kernels are generated for.

        Raises:
            PrototypeError: there is none.
        """
        names = [t.name for t in self.prototype.tensors]
        every = [dict(zip(names, c, strict=True)) for c in self.prototype.columns()]
        fit = [c for c in every if all(t in _NATIVE for t in c.values()) and set(c.values()) != {"bool"}]
        fit = [c for c in fit if {n for n, t in c.items() if t == "bool"} == self.formula.truths & c.keys()]
        unique = [c for i, c in enumerate(fit) if c not in fit[:i]]
        if not unique:
            raise PrototypeError(
                f"{self.prototype.op}: no combination of types is one that kernels are generated for; "
                f"allowed: {', '.join(_NATIVE)} (bool for conditions)"
            )
        return unique

    @cached_property
    def product(self) -> Node | None:
        """The matmul that comes first, if one does, which the library computes: the kernels start from its result."""
        return self.formula.product

    @cached_property
    def kernel_inputs(self) -> dict[str, Shape]:
        """The tensors that the kernels take."""
        used = {str(n.value) for n in self.formula.nodes if n.kind == "input"}
        rest = {n: s for n, s in self.formula.inputs.items() if n in used}
        return {"product": self.product.shape or (), **rest} if self.product else rest

    @cached_property
    def kernel_columns(self) -> list[dict[str, str]]:
        """Their dtypes, with those of the outputs."""
        outputs = [t.name for t in self.prototype.output_desc]
        result = []
        for c in self.columns:
            column = {n: c[n] for n in (*self.kernel_inputs, *outputs) if n != "product"}
            if self.product:
                first, second = (c[str(a.value)] for a in self.product.args)
                if first != second:
                    raise PrototypeError(
                        f"{self.prototype.op}: matmul takes two tensors of one type, not {first} and {second}"
                    )
                column = {"product": first, **column}
            if column not in result:
                result.append(column)
        return result

    @cached_property
    def forward(self) -> Plan:
        return plan(self.formula, inputs=self.kernel_inputs)

    @cached_property
    def backward(self) -> Plan | str:
        """The kernel of its gradients, or why autograd of the reference has to do."""
        formula, found = self.formula, self._derived
        if isinstance(found, str):
            if not self.by_hand:
                return found
            text = self._stand_ins(formula.shapes)
            formula = language.parse(text, formula.inputs, formula.shapes, formula.attributes, formula.truths)
            found = gradient.gradients(formula, list(self.kernel_inputs))
        outputs = [
            Output(f"d{n}", found[n], extent, True)
            for n, s in self.kernel_inputs.items()
            if n in found and n not in formula.truths and (extent := self._extent(s))
        ]
        if not outputs or not any(o.extent == FULL for o in outputs):
            return "no input has the shape of the whole"
        slopes = {f"d{n}": node.shape or () for n, node in self.formula.outputs.items()}
        return plan(formula, outputs, {**slopes, **self.kernel_inputs})

    def _extent(self, shape: Shape) -> str | None:
        """How an input's gradient is gathered; None where only autograd knows."""
        space = self.forward.space
        if shape == space:
            return FULL
        if shape[:-1] == space[:-1] and shape[-1] == 1:
            return ROW
        columns = strides_of(shape, space) == [] and shape[-1] == space[-1]
        return COLUMN if columns and self.forward.rotation != "rotate_interleaved" else None

    @cached_property
    def gradients(self) -> list[str]:
        """Inputs whose gradient a kernel writes."""
        return [] if isinstance(self.backward, str) else [o.name[1:] for o in self.backward.outputs]

    @cached_property
    def kernels(self) -> list[tuple[Plan, str, list[dict[str, str]], str]]:
        """The kernels of the project: plan, name, dtypes, comment."""
        found = [(self.forward, "forward", self.kernel_columns, self.equation)]
        if not isinstance(self.backward, str):
            derived = "" if "backward" in self.to_write else ", derived from the formula"
            text = f"The gradients of {', '.join(self.gradients)}{derived}."
            like = {n: n for n in self.kernel_inputs}
            like |= {f"d{n}": n for n in (*self.formula.outputs, *self.gradients)}
            columns = [{name: c[n] for name, n in like.items()} for c in self.kernel_columns]
            found.append((self.backward, "backward", columns, text))
        return found

    def cpu(self) -> str:
        """kernels/cpu/NAME.cpp, below its includes."""
        return "\n\n".join(CpuKernel(*kernel).text() for kernel in self.kernels)

    def triton(self) -> str:
        """kernels/triton/NAME.py, below its imports."""
        return "\n\n\n".join(TritonKernel(*kernel).text() for kernel in self.kernels)

    def cuda(self) -> str:
        """kernels/cuda/NAME.cu, below its includes."""
        return "\n\n".join(CudaKernel(*kernel).text() for kernel in self.kernels)

    def cuda_declarations(self) -> str:
        """What NAME.h declares."""
        return "\n".join(CudaKernel(*kernel).declaration() for kernel in self.kernels)

    def cuda_bindings(self) -> str:
        """The functions of NAME.cpp."""
        shapes = {**self.kernel_inputs, **self.formula.shapes}
        shapes |= {f"d{n}": shape for n, shape in shapes.items()}
        return "\n\n".join(CudaKernel(*kernel).binding(shapes) for kernel in self.kernels)

    @cached_property
    def equation(self) -> str:
        """The formula in one line."""
        if self.prototype.formula is None:
            return f"{', '.join(self.formula.outputs)} as {self.reference} computes it"
        return "; ".join(f"{n} = {self.formula.text[n]}" for n in self.formula.outputs)

    @cached_property
    def kind(self) -> str:
        """The operator's class, as the prototype says or the formula shows."""
        if self.prototype.kind:
            return self.prototype.kind
        kinds = {n.kind for n in self.formula.nodes}
        for kind, marks in (("matmul", {"matmul"}), ("rope", set(ROTATIONS)), ("softmax", {"softmax"})):
            if kinds & marks:
                return kind
        return "norm" if any(n.reduces for n in self.formula.nodes) else "activation"

    @cached_property
    def like(self) -> dict[str, str]:
        """An input that has an output's dtype in every combination, where one has more than one floating-point type."""
        if all(len({*c.values()} - {"bool"}) == 1 for c in self.columns):
            return {}
        result = {}
        for o in self.formula.outputs:
            same = [n for n in self.formula.inputs if all(c[n] == c[o] for c in self.columns)]
            if not same:
                raise PrototypeError(
                    f"{self.prototype.op}: output {o} has the type of no input in all combinations; "
                    f"give it those of {' or '.join(self.formula.inputs)}"
                )
            result[o] = same[0]
        return result

    @cached_property
    def even(self) -> list[str]:
        """Symbols whose size must be even."""
        rotated = [n.shape[-1] for n in self.formula.nodes if n.kind in ROTATIONS and n.shape]
        return list(dict.fromkeys(d for d in rotated if isinstance(d, str)))

    def words(self, column: Mapping[str, str]) -> str:
        """A combination of dtypes as operator.py writes it: one word where that says all."""
        types = list(column.values())
        return types[0] if len(set(types)) == 1 else " ".join(types)

    @cached_property
    def reference_lines(self) -> list[str]:
        if self.prototype.formula is None:
            return [f"return _definition({self.arguments})"]
        return lower_torch.reference_lines(self.formula, self.like)

    @cached_property
    def inner_lines(self) -> list[str]:
        """The body of `epilogue`, what the kernels compute after the matmul."""
        return lower_torch.reference_lines(self.formula, self.like, after_matmul=True)

    @cached_property
    def symbols(self) -> list[str]:
        """All symbols of the inputs, `...` as `lead`, in the order of the widest input."""
        widest = max(self.shapes.values(), key=lambda s: (ANY in s, len(s)))
        every = [*widest, *(d for s in self.shapes.values() for d in s)]
        return list(dict.fromkeys("lead" if d == ANY else d for d in every if isinstance(d, str)))

    @cached_property
    def last(self) -> str | None:
        """The symbol of the last axis of the whole."""
        last = self.forward.space[-1]
        return last if isinstance(last, str) else None

    def _bound(self, i: int) -> dict[str, str]:
        """Sizes of sample i, by symbol."""
        sizes: dict[str, str] = {}
        others = [s for s in reversed(self.symbols) if s != self.last]
        for place, symbol in enumerate(others):
            size = _OTHERS[min(place, 3)][i]
            if self.product and symbol not in self.forward.space:
                size = (1, 5, 16, 33, 64)[i]  # what is summed over
            if symbol in self.even:
                size = 2 * size
            lead = f"(2, {size})" if i % 2 else f"({size},)"
            sizes[symbol] = lead if symbol == "lead" else str(size)
        if self.last:
            last = _LAST_EVEN if self.last in self.even else _LAST_OF_ROWS if self.forward.stages else _LAST
            sizes[self.last] = str(last[i])
        return {s: sizes[s] for s in self.symbols}

    @cached_property
    def sample_sizes(self) -> list[str]:
        """The tuples over which `samples` loops."""
        return [", ".join(self._bound(i).values()) for i in range(5)]

    @cached_property
    def empty(self) -> str:
        """The same without an element: some symbol in front is 0."""
        sizes = self._bound(1)
        first = next(
            (s for s in self.symbols if s != self.last and s in ("lead", *map(str, self.forward.space))),
            self.symbols[0],
        )
        sizes[first] = "(2, 0)" if first == "lead" else "0"
        return ", ".join(sizes.values())

    @cached_property
    def workload_sizes(self) -> list[str]:
        """Sizes that models use: out of cache, and one row."""
        outer = [s for s in self.symbols if s != self.last]
        whole = ["4096"] if len(outer) == 1 else ["8", "512"] if len(outer) == 2 else ["2", "32", "2048"]
        large = dict(zip(outer, ["1"] * (len(outer) - len(whole)) + whole, strict=False))
        width = "128" if len(outer) > 1 and self.forward.rotation else "4096" if len(outer) < 3 else "256"
        if self.product:
            large = dict.fromkeys(outer, "1024")
            width = "1024"
        large |= {self.last: width} if self.last else {}
        one = {**large, **{s: "1" for s in outer if s in self.forward.space or s == "lead"}}
        texts = ({**sizes, "lead": f"({sizes.get('lead')},)"} for sizes in (large, one))
        return list(dict.fromkeys(", ".join(text[s] for s in self.symbols) for text in texts))

    def make_text(self, name: str) -> str:
        """How a sample makes an input."""
        dims = ", ".join("*lead" if d == ANY else str(d) for d in self.shapes[name])
        if name in self.formula.truths:
            return f"make.mask({dims})"
        return f"make({dims}).abs() + 0.1" if name in self._positive else f"make({dims})"

    @cached_property
    def _positive(self) -> set[str]:
        """Inputs that are divided by, or whose root or logarithm is taken."""
        place = {"log": 0, "sqrt": 0, "rsqrt": 0, "div": 1}  # of the argument
        args = [n.args[place[n.kind]] for n in self.formula.nodes if n.kind in place]
        return {str(arg.value) for arg in args if arg.kind == "input"}

    @cached_property
    def strided(self) -> tuple[str, str] | None:
        """An input of two dimensions or more, and the same values in a layout that is not contiguous."""
        for name, shape in self.shapes.items():
            if len(shape) > 1 and name not in self.formula.truths:
                return name, f"{name}.transpose(-1, -2).contiguous().transpose(-1, -2)"
        return None

    @cached_property
    def flops(self) -> str:
        """For one element, as operator.py writes it."""
        nodes = walk(o.node for o in self.forward.outputs)
        counted = [n for n in nodes if n.reduces or (n.kind in ELEMENTWISE and self.forward.lane(n))]
        return f"{max(sum(_FLOPS.get(n.kind, 1.0) for n in counted), 1.0):.1f}"

    @cached_property
    def whole(self) -> str:
        """An expression for the number of elements of the whole."""
        if self.product:
            a, b = self.product.args
            return f"{a.value}.numel() // {a.value}.shape[-1] * {b.value}.shape[-1]" if a.shape else ""
        for name, shape in self.formula.inputs.items():
            if shape == self.forward.space:
                return f"{name}.numel()"
        return f"torch.broadcast_shapes({', '.join(f'{n}.shape' for n in self.formula.inputs)}).numel()"

    @cached_property
    def written(self) -> str:
        """An expression for the bytes of the outputs."""
        terms = []
        width = next((n for n, s in self.formula.inputs.items() if s[-1] == self.forward.space[-1]), "")
        for o in self.forward.outputs:
            like = self.like.get(o.name, next(n for n in self.formula.inputs if n not in self.formula.truths))
            rows = "elements" if o.extent == FULL else f"elements // max({width}.shape[-1], 1)"
            terms.append(f"{rows} * {like}.element_size()")
        return " + ".join(terms)

    @cached_property
    def pattern(self) -> str | None:
        """The example shapes by which the compiler recognizes the reference in a model; None where it could not."""
        if (
            self.prototype.formula is None
            or len(self.formula.outputs) > 1
            # What is computed of attributes alone stands in no model.
            or any(n.number and n.args and n.kind != "neg" for n in self.formula.nodes)
            or any(isinstance(v, bool | int) for v in self.formula.attributes.values())
        ):
            return None
        parts = []
        for name, shape in self.shapes.items():
            dims = ", ".join(f'"{"B" if d == ANY else d}"' if isinstance(d, str) else str(d) for d in shape)
            parts.append(f'"{name}": ({dims}{"," if len(shape) == 1 else ""})')
        parts += [
            f'"{n}": {(1.25e-3 if v is not None and v < 0.1 else 1.25) * (1 + i / 16):.9g}'  # each its own
            for i, (n, v) in enumerate(self.formula.attributes.items())
        ]
        return f"{{{', '.join(parts)}}}"

    @cached_property
    def pattern_keeps(self) -> str:
        """What of the formula the compiler must not rewrite when it looks for it."""
        kinds = {n.kind for n in self.formula.nodes}
        return ", ".join(f'"{k}"' for k in ("sum", "cast") if k in kinds)

    @cached_property
    def parameters(self) -> str:
        """Of the operator, as Python declares them."""
        numbers = [
            f"{n}: {python_type(v)}" + ("" if v is None else f" = {v!r}")
            for n, v in self.formula.attributes.items()
        ]
        return ", ".join([*(f"{n}: torch.Tensor" for n in self.shapes), *numbers])

    @cached_property
    def arguments(self) -> str:
        """The same names, as a call gives them."""
        return ", ".join([*self.shapes, *self.formula.attributes])


_FLOPS = {"exp": 10.0, "log": 10.0, "tanh": 12.0, "sigmoid": 12.0, "silu": 13.0, "erf": 14.0}
_FLOPS |= dict.fromkeys(("gelu", "gelu_tanh"), 16.0)
