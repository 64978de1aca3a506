"""What the card of a generated project says: the facts that the templates show."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from opsmith.authoring.formula.nodes import ELEMENTWISE, ROTATIONS
from opsmith.authoring.formula.shapes import ANY, Shape
from opsmith.authoring.lower import torch as lower_torch
from opsmith.authoring.lower.kernel import python_type
from opsmith.authoring.lower.plan import FULL
from opsmith.authoring.new.contents import Contents
from opsmith.authoring.prototype import PrototypeError

__all__ = ["Project"]

# Sizes for samples: the last axis, then the others from right to left.
_LAST = (1, 7, 33, 130, 384)
_LAST_EVEN = (2, 6, 34, 130, 384)
_LAST_OF_ROWS = (2, 7, 33, 130, 384)  # a row of one element has no statistics
_OTHERS = ((1, 17, 9, 6, 5), (1, 2, 1, 3, 2), (1, 1, 2, 1, 3), (1, 1, 1, 2, 1))


class Project(Contents):
    """Everything that a generated project says, from its prototype."""

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
        """An input that has an output's dtype in every combination, where the combinations are mixed."""
        if not self.mixed:
            return {}
        result = {}
        for o in self.formula.outputs:
            same = [n for n in self.formula.inputs if all(c[n] == c[o] for c in self.columns)]
            if not same:
                raise PrototypeError(
                    f"{self.prototype.op}: output {o} has the type of no input in all combinations; give it one"
                )
            result[o] = same[0]
        return result

    @cached_property
    def mixed(self) -> bool:
        """Whether a combination has more than one floating-point type."""
        return any(len({t for t in c.values() if t != "bool"}) > 1 for c in self.columns)

    @cached_property
    def even(self) -> list[str]:
        """Symbols whose size must be even."""
        rotated = [n.shape[-1] for n in self.formula.nodes if n.kind in ROTATIONS and n.shape]
        return list(dict.fromkeys(d for d in rotated if isinstance(d, str)))

    def words(self, column: Mapping[str, str]) -> str:
        """A combination of dtypes as operator.py writes it: one word where that says all."""
        types = list(column.values())
        return types[0] if len(set(types)) == 1 else " ".join(types)

    def sizes(self, shape: Shape) -> str:
        """`B H L D`"""
        return " ".join(map(str, shape))

    @cached_property
    def reference_lines(self) -> list[str]:
        """The body of `reference`."""
        if self.prototype.formula is None:
            return [f"return {str(self.reference).partition(':')[2]}({self.arguments})"]
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
            sizes[symbol] = (
                f"({size},)"
                if symbol == "lead" and i % 2 == 0
                else f"(2, {size})"
                if symbol == "lead"
                else str(size)
            )
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
        result = []
        for sizes in (large, one):
            result.append(", ".join(f"({sizes[s]},)" if s == "lead" else sizes[s] for s in self.symbols))
        return list(dict.fromkeys(result))

    def make_text(self, name: str) -> str:
        """How a sample makes an input."""
        dims = ", ".join("*lead" if d == ANY else str(d) for d in self.shapes[name])
        if name in self.formula.truths:
            return f"make.mask({dims})"
        return f"make({dims}).abs() + 0.1" if name in self._positive else f"make({dims})"

    @cached_property
    def _positive(self) -> set[str]:
        """Inputs that are divided by, or whose root or logarithm is taken."""
        found = set()
        for node in self.formula.nodes:
            if node.kind in ("log", "sqrt", "rsqrt") and node.args[0].kind == "input":
                found.add(str(node.args[0].value))
            if node.kind == "div" and node.args[1].kind == "input":
                found.add(str(node.args[1].value))
        return found

    @cached_property
    def example_attributes(self) -> dict[str, float]:
        """Values for attributes without a default."""
        return {n: 0.5 for n, v in self.formula.attributes.items() if v is None}

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
        count = 0.0
        seen: set[int] = set()
        for o in self.forward.outputs:
            for node in o.node.walk(seen):
                if node.reduces or (node.kind in ELEMENTWISE and self.forward.lane(node)):
                    count += _FLOPS.get(node.kind, 1.0)
        return f"{max(count, 1.0):.1f}"

    @cached_property
    def whole(self) -> str:
        """An expression for the number of elements of the whole."""
        if self.product:
            a, b = self.formula.product.args  # type: ignore[union-attr]
            return f"{a.value}.numel() // {a.value}.shape[-1] * {b.value}.shape[-1]" if a.shape else ""
        for name, shape in self.formula.inputs.items():
            if shape == self.forward.space:
                return f"{name}.numel()"
        return f"torch.broadcast_shapes({', '.join(f'{n}.shape' for n in self.formula.inputs)}).numel()"

    @cached_property
    def written(self) -> str:
        """An expression for the bytes of the outputs."""
        terms = []
        for o in self.forward.outputs:
            like = self.like.get(o.name, next(n for n in self.formula.inputs if n not in self.formula.truths))
            rows = "elements" if o.extent == FULL else f"elements // {self._width()}"
            terms.append(f"{rows} * {like}.element_size()")
        return " + ".join(terms)

    def _width(self) -> str:
        name = next(n for n, s in self.formula.inputs.items() if s[-1] == self.forward.space[-1])
        return f"max({name}.shape[-1], 1)"

    @cached_property
    def pattern(self) -> str | None:
        """The example shapes by which the compiler recognizes the reference in a model; None where it could not."""
        if (
            self.prototype.formula is None
            or len(self.formula.outputs) > 1
            or any(isinstance(v, bool | int) for v in self.formula.attributes.values())
        ):
            return None
        parts = []
        for name, shape in self.shapes.items():
            dims = ", ".join(f'"{"B" if d == ANY else d}"' if isinstance(d, str) else str(d) for d in shape)
            parts.append(f'"{name}": ({dims}{"," if len(shape) == 1 else ""})')
        parts += [
            f'"{n}": {1.25e-3 if v is not None and v < 0.1 else 1.25}'
            for n, v in self.formula.attributes.items()
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


_FLOPS = {
    "exp": 10.0,
    "log": 10.0,
    "tanh": 12.0,
    "erf": 14.0,
    "sigmoid": 12.0,
    "silu": 13.0,
    "gelu": 16.0,
    "gelu_tanh": 16.0,
}
