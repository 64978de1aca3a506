"""What a project computes, from its prototype: formula, shapes, dtypes, and the kernels that come of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from opsmith.authoring import formula as language
from opsmith.authoring.formula import gradient
from opsmith.authoring.formula.nodes import Formula, Node
from opsmith.authoring.formula.shapes import ANY, Shape, strides_of
from opsmith.authoring.lower.cpu import CpuKernel
from opsmith.authoring.lower.cuda import CudaKernel
from opsmith.authoring.lower.plan import COLUMN, FULL, ROW, Output, Plan, plan
from opsmith.authoring.lower.triton import TritonKernel
from opsmith.authoring.prototype import Prototype, PrototypeError

__all__ = ["Contents"]

_NATIVE = ("float32", "bfloat16", "float16", "bool")


@dataclass(frozen=True)
class Contents:
    """What a project computes, and the text of its kernels."""

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
            given = {t.name: self._stand_in() for t in p.output_desc}
        if isinstance(given, str):
            given = {p.output_desc[0].name: given}
        for t in p.input_desc:
            if t.param_type != "required":
                raise PrototypeError(
                    f"{p.op}: input {t.name} is {t.param_type}; a formula needs every input: make it required, "
                    "or write two operators"
                )
        used = {a for a in self.attributes if any(a in language.names_in(text) for text in given.values())}
        parsed = language.parse(
            given,
            self.shapes,
            {t.name: t.symbols() for t in p.output_desc},
            # Those without a default first, as Python wants parameters.
            {k: v for k, v in sorted(self.attributes.items(), key=lambda kv: kv[1] is not None) if k in used},
            frozenset(t.name for t in p.input_desc if set(t.type) == {"bool"}),
        )
        return parsed

    def _stand_in(self) -> str:
        """What the kernels of an operator without a formula compute until their author has written them."""
        truths = [t.name for t in self.prototype.input_desc if set(t.type) == {"bool"}]
        numbers = [n for n, v in self.attributes.items() if not isinstance(v, bool)]
        text = " + ".join([*(n for n in self.shapes if n not in truths), *numbers])
        for name in truths:
            text = f"where({name}, {text}, 0)"
        return text

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

    @cached_property
    def left_out(self) -> list[str]:
        """Attributes that the formula does not use."""
        return [a.name for a in self.prototype.attr if a.name not in self.formula.attributes]

    @cached_property
    def columns(self) -> list[dict[str, str]]:
        """The dtype combinations that kernels are generated for.

        Raises:
            PrototypeError: there is none.
        """
        names = [t.name for t in self.prototype.tensors]
        every = [dict(zip(names, c, strict=True)) for c in self.prototype.columns()]
        fit = [c for c in every if all(t in _NATIVE for t in c.values())]
        fit = [c for c in fit if any(t != "bool" for t in c.values()) and not self._mixes_bool(c)]
        unique = [c for i, c in enumerate(fit) if c not in fit[:i]]
        if not unique:
            raise PrototypeError(
                f"{self.prototype.op}: no combination of types is one that kernels are generated for; "
                f"allowed: {', '.join(_NATIVE)} (bool for conditions)"
            )
        return unique

    def _mixes_bool(self, column: Mapping[str, str]) -> bool:
        truths = self.formula.truths
        return any((column[n] == "bool") != (n in truths) for n in column)

    @cached_property
    def dropped_types(self) -> list[str]:
        """Types of the prototype that no kernel takes."""
        types = {t for c in self.prototype.columns() for t in c}
        return sorted(types - {t for c in self.columns for t in c.values()})

    @cached_property
    def product(self) -> bool:
        """Whether a matmul comes first, which the library computes: the kernels start from its result."""
        return self.formula.product is not None

    @cached_property
    def kernel_inputs(self) -> dict[str, Shape]:
        """The tensors that the kernels take."""
        used = {str(n.value) for n in self.formula.nodes if n.kind == "input"}
        rest = {n: s for n, s in self.formula.inputs.items() if n in used}
        if self.formula.product is None or self.formula.product.shape is None:
            return rest
        return {"product": self.formula.product.shape, **rest}

    @cached_property
    def kernel_columns(self) -> list[dict[str, str]]:
        """Their dtypes, with those of the outputs."""
        outputs = [t.name for t in self.prototype.output_desc]
        result = []
        for c in self.columns:
            column = {n: c[n] for n in (*self.kernel_inputs, *outputs) if n != "product"}
            if self.formula.product is not None:
                first, second = (c[str(a.value)] for a in self.formula.product.args)
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
        """The kernel of the formula."""
        return plan(self.formula, inputs=self.kernel_inputs)

    @cached_property
    def backward(self) -> Plan | str:
        """The kernel of its gradients, or why autograd of the reference has to do."""
        formula, found = self.formula, self._derived
        if isinstance(found, str):
            if not self.by_hand:
                return found
            stand_in = {name: self._stand_in() for name in formula.outputs}
            formula = language.parse(
                stand_in, formula.inputs, formula.shapes, formula.attributes, formula.truths
            )
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
    def backward_columns(self) -> list[dict[str, str]]:
        """The dtypes of the backward kernel's tensors."""
        return [
            {
                **{f"d{n}": c[n] for n in self.formula.outputs},
                **{n: c[n] for n in self.kernel_inputs},
                **{f"d{n}": c[n] for n in self.gradients},
            }
            for c in self.kernel_columns
        ]

    @cached_property
    def kernels(self) -> list[tuple[Plan, str, list[dict[str, str]], str]]:
        """The kernels of the project: plan, name, dtypes, comment."""
        found = [(self.forward, "forward", self.kernel_columns, self.equation)]
        if not isinstance(self.backward, str):
            derived = "" if "backward" in self.to_write else ", derived from the formula"
            text = f"The gradients of {', '.join(self.gradients)}{derived}."
            found.append((self.backward, "backward", self.backward_columns, text))
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
