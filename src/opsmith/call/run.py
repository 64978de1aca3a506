"""How a call of a public function becomes a call of its kernel: the one path of all operators with a signature.

    def layer_norm(x, weight=None, bias=None, eps=1e-5, *, residual=None, out=None):
        return (_CALL.compiled if compiling() else _CALL.fast.call)(x, residual, weight, bias, eps, out)

    def definition(x, residual, weight, bias, eps): ...

    _CALL = Call(SIGNATURE, layer_norm, definition)

`fast.call` is one call into C++ (fast/direct.py): it makes the results, calls the kernel and has autograd's node record
it. What it does not take as it is, and what the kernel's binding refuses, it hands to `traced`, the general way in
Python: the checks and their messages, `out=`, views and copies, other devices, gradients of a Function, and the
definition in plain PyTorch where no kernel can run. torch.compile goes that way alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.call import binding, dispatch, layouts
from opsmith.call.checks import check_arguments, check_outputs
from opsmith.call.fast import direct, nodes
from opsmith.call.forms import in_order
from opsmith.call.signature import Constant, Input, Made, Output, Rows, Saved, Signature, Sizes, Slope
from opsmith.kernels import libraries
from opsmith.operator import Implementation, Operator, Supports, register

Results = list[Tensor]


def declare(
    signature: Signature, library: str = "", backward: str = "", *, bound: bool = False
) -> tuple[str, ...]:
    """Say which libraries have the kernels, by default one of the kernel's name; the schemas, for the card.

    Args:
        signature: of the kernels.
        library: that of the forward.
        backward: that of the backward, by default the same.
        bound: whether the signature is all that their memory safety needs, so that their C++ bindings are generated.
    """
    library = library or signature.name
    kernels = {signature.name: library}
    if signature.gradient is not None:
        kernels.setdefault(signature.gradient.kernel, backward or library)
    for kernel, its in kernels.items():
        libraries.offer(its, kernel, binding=binding.rows(signature, kernel) if bound else "")
    direct.declare(signature)
    if signature.gradient is not None:
        nodes.declare(signature)
    return signature.schemas()


class Call:
    """One operator: how a call becomes a call of a kernel."""

    learns = True  # whether anything has a gradient, by a kernel or by the definition
    whole: Any = None  # the call as one operator of PyTorch's

    def __init__(
        self,
        signature: Signature,
        public: Callable[..., Any],
        definition: Callable[..., Any],
        *,
        eager: Callable[..., Any] | None = None,
        converted: Mapping[str, Any] = MappingProxyType({}),
        op: str = "",
        most_rows: int = 0,
    ) -> None:
        """Of an operator of the library.

        Args:
            signature: of its kernel.
            public: the function that users call. What the kernel needs not, but this does not leave out, is needed.
            definition: what it computes, in plain PyTorch, of the kernel's arguments in their order and those beside.
            eager: of the same, what PyTorch runs where no kernel can; by default the definition.
            converted: arguments of the kernel that `public` has in another form: a function of its parameters, by their
                names, or a constant. What is optional, and that it has not at all, is None.
            op: its name, by default the public function's.
            most_rows: that `fast` takes; 0 for any.
        """
        self.signature, self.public, self.op = signature, public, op or public.__name__
        self.defined, self.definition = definition, eager or definition
        self.given = (*(one.name for one in signature.arguments), *signature.beside)
        parameters = inspect.signature(public).parameters
        self.needed = tuple(
            one.name
            for one in signature.tensors
            if one.optional
            and one.name in parameters
            and parameters[one.name].default is inspect.Parameter.empty
        )
        tensors: tuple[Input | Output, ...] = (*signature.tensors, *signature.results)
        optional = {one.name for one in tensors if one.optional}
        self.converted = {**dict.fromkeys(optional - parameters.keys()), **converted}
        self.saved, self.likes = self._saved()
        self.function = _differentiated(self)
        self.fast = direct.Ready(signature, self.traced, most_rows)

    @functools.cached_property
    def reference(self) -> Callable[..., Any]:
        """The definition as the public function is called."""
        return self.form(lambda values: self.defined(*values))

    @functools.cached_property
    def eager(self) -> Callable[..., Any]:
        """What PyTorch runs, as the public function is called."""
        if self.definition is self.defined:
            return self.reference
        return self.form(lambda values: self.definition(*values))

    @functools.cached_property
    def unchecked(self) -> Callable[..., Any]:
        """The kernel without checks and autograd, as the public function is called."""
        return self.form(functools.partial(self.native, "opsmith"), out=True)

    def form(self, to: Callable[..., Any], *, out: bool = False) -> Callable[..., Any]:
        """A function of the public one's parameters, which gives them to another one as the kernel takes them."""
        return in_order(self.public, self.given, self.converted, to, out=out)

    def implementations(self, **more: Any) -> list[Implementation]:
        """The kernel on a CPU, the one on a GPU, and eager PyTorch; `more` is said of the kernels."""
        takes_out = "out" in inspect.signature(self.public).parameters
        ours = dispatch.kernels(self.unchecked, self.form(self.supported), takes_out=takes_out, **more)
        return [*ours, Implementation("eager", self.eager)]

    def card(self, **more: Any) -> Operator:
        """The operator's card, registered: `more` is what does not follow from here, or is otherwise."""
        own = {
            "name": self.op,
            "function": self.public,
            "reference": self.reference,
            "differentiable": self.learns,
            "onto": tuple(one.onto for one in self.signature.results),
        }
        if "implementations" not in more:
            own["implementations"] = self.implementations()
        if not self.signature.beside:
            self.whole = _as_operator(self)
        return register(Operator(**{**own, **more}))

    def _saved(self) -> tuple[dict[str, str | None], list[str]]:
        """The tensors that a backward needs, what stands for each that is not there; those whose shape does."""
        signature = self.signature
        tensors = [one.name for one in signature.tensors]
        if signature.gradient is None or (set(tensors) - set(signature.gradients) and signature.columns):
            return dict.fromkeys(tensors), []  # autograd of the definition reads them all
        found = {
            one.of: one.instead
            for one in signature.gradient.given
            if isinstance(one, Saved) and one.of not in {number.name for number in signature.numbers}
        }
        lying = [one.like for one in signature.results]
        likes = [one.of for one in signature.gradient.made if one.of not in lying]
        return found, [name for name in likes if name not in {*found, *found.values()}]

    def traced(self, *given: Any) -> Any:
        """The general way: of the kernel's arguments in their order, those beside, and `out`."""
        values, out = given[:-1], given[-1]
        if not dispatch.compiling() and any(map(dispatch.is_sharded, values)):
            return self.spread(values, out)
        self.check(values)
        if out is not None:
            self.check_out(values, out)
        tensors = [t for t in values if isinstance(t, Tensor)]
        training = self.learns and dispatch.needs_grad(*tensors)
        # What is exported keeps of a Function its forward alone: the definition is differentiated where it may learn.
        backend = None if training and dispatch.exporting() else self.backend(values, training)
        if backend is None:
            return self.store(self.plain(values), out)
        if training:
            return self.store(self.recorded(backend, values), out)
        return self.native(backend, values, out)

    def compiled(self, *given: Any) -> Any:
        """What torch.compile reads: one operator where nothing has a gradient, for Dynamo takes 40 ms to read `traced`.

        PyTorch takes the operator apart, by calling `traced` with tensors that have no numbers. A string is a wrong
        option, for which `traced` has the words. Outside torch.compile this is `traced`.
        """
        values, out = given[:-1], given[-1]
        tensors = [t for t in values if isinstance(t, Tensor)]
        read = out is not None or any(isinstance(v, str) for v in values) or dispatch.needs_grad(*tensors)
        if self.whole is None or not dispatch.compiling() or read:
            return self.traced(*given)
        results = self.whole(*values)
        return results[0] if len(results) == 1 else tuple(results)

    def spread(self, values: Sequence[Any], out: Any) -> Any:
        """A call whose tensors are spread over ranks."""
        from opsmith.call import sharding  # it imports torch.distributed, which has been imported by then

        return sharding.run(self, values, out)

    def sizes(self, values: Sequence[Any]) -> Mapping[str, Sizes]:
        """Words for the sizes of each tensor, where equal ones are spread over ranks alike."""
        tensors: tuple[Input | Output, ...] = (*self.signature.tensors, *self.signature.results)
        return {one.name: one.sizes for one in tensors}

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        """Those along which results are independent: rows, where tensors are rows and vectors."""
        return () if self.signature.strided or self.signature.contiguous else ("...",)

    def check(self, values: Sequence[Any]) -> None:
        check_arguments(self.op, self.signature, values[: len(self.signature.arguments)], self.needed)

    def explain(self, values: Sequence[Any]) -> None:
        """Raise what says more of a call that the kernel refused, if there is something."""

    def plain(self, values: Sequence[Any]) -> Any:
        """What PyTorch runs; in the dtype of its arguments under autocast too, as the kernels do."""
        with dispatch.uncast(values[0]):
            return self.definition(*values)

    def recorded(self, backend: Any, values: Sequence[Any]) -> Any:
        """A call whose gradients are wanted."""
        return dispatch.recorded(self.function, backend, *values)

    def native(self, backend: Any, values: Sequence[Any], out: Any = None) -> Any:
        """The kernel alone, without autograd."""
        results, _ = self.run(backend, values, out)
        result = results[0] if len(results) == 1 else tuple(results)
        return self.store(result, out)

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        """Whose kernels take these tensors; None where the definition has to."""
        gradient = self.signature.gradient
        if training and gradient is None and not self.signature.columns:
            return None
        more = (gradient.kernel,) if training and gradient else ()
        return "opsmith" if self.supported(values, *more) is True else None

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        """True where the kernel, and `more` kernels, take these tensors, else the reason why not."""
        return dispatch.native(values[0], self.signature.name, *more)

    def kernel(self, backend: str, backward: bool = False) -> Callable[..., Any]:
        """The kernel, or that of the gradients, as it is called soonest."""
        name = self.signature.name
        if backward:
            assert self.signature.gradient is not None
            name = self.signature.gradient.kernel
        return direct.of(getattr(torch.ops.opsmith, name).default)

    def gradients(
        self, backend: str, known: dict[str, Any], slopes: Sequence[Tensor], wanted: set[str]
    ) -> dict[str, Tensor]:
        """The gradients that the kernel writes, by input; `known` are its arguments and what was kept."""
        arriving = {one.name: slope for one, slope in zip(self.signature.results, slopes, strict=False)}
        # What is not kept lies as its result does.
        lying = {one.like: one.name for one in self.signature.results}
        written: dict[str, Tensor | None] = {}
        found: dict[str, Tensor] = {}
        for p in self.signature.backward:
            source = p.source
            if isinstance(source, Made):
                like = known[source.of] if source.of in known else arriving[lying[source.of]]
                ours = wanted.intersection((source.of, *source.shared))
                if like is not None and (ours or source.always or not source.optional):
                    made = self.made_gradient(source.of, like, known)
                    written[p.name] = self.taken_result(p.of, made)
                    found |= dict.fromkeys((source.of, *source.shared), made)
        numbers = {one.name for one in self.signature.numbers}
        given: list[Any] = []
        for p in self.signature.backward:
            source = p.source
            if isinstance(source, Constant):
                # Unless the call said otherwise, in what stands beside its arguments.
                other = source.name in known and source.name not in numbers
                given.append(known[source.name] if other else source.value)
            elif isinstance(source, Slope):
                given.append(self.taken(p.of, arriving.get(source.of)))
            elif isinstance(source, Saved):
                value = known[source.of]
                given.append(self.taken(p.of, value) if isinstance(value, Tensor) else value)
        if wanted.intersection(found):
            self.kernel(backend, backward=True)(*given, **written)
        return found

    def made_gradient(self, name: str, like: Tensor, known: dict[str, Any]) -> Tensor:
        """Memory for the gradient of an input."""
        return self.fresh(like)

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        """The results of a call: their declaration, shape and dtype."""
        by_name = self.named(values)
        found = []
        for one, dtype in zip(self.signature.results, self.result_dtypes(values), strict=True):
            replaced = one.unless and by_name[one.unless] is not None
            if one.optional or replaced or (one.when and by_name[one.when] is None):
                continue
            if one.like:
                found.append((one, [*by_name[one.like].shape], by_name[one.like].dtype))
                continue
            shape: list[int] = []
            for of, leading, at in self.signature.pieces(one):
                if of < 0:
                    shape.append(at)
                    continue
                whole = values[of].shape
                if not whole:  # a number, which is a row
                    continue
                shape += whole[: len(whole) - at] if leading else [whole[len(whole) - at]]
            if one.halved_without and by_name[one.halved_without] is None:
                shape[-1] //= 2
            found.append((one, shape, dtype))
        return found

    def result_dtypes(self, values: Sequence[Any]) -> Sequence[torch.dtype]:
        """The dtype of each result that the signature has."""
        known = self.named(values)
        return [
            one.dtype
            if isinstance(one.dtype, torch.dtype)
            else (known[one.dtype] if isinstance(one.dtype, str) else values[0]).dtype
            for one in self.signature.results
        ]

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """What a call was given, by name."""
        return dict(zip(self.given, values, strict=True))

    def run(
        self, backend: str, values: Sequence[Any], out: Any = None, keep: bool = False
    ) -> tuple[Results, dict[str, Any]]:
        """Call the kernel: into `out` where it can write there, else into new memory.

        Returns:
            The results; and by name, with what was kept for the backward where that is wanted, all that there is.
        """
        x = values[0]
        made = self.made(values)
        outs = out if isinstance(out, tuple) else () if out is None else (out,)
        if not all(self.writable(t) for t in outs):
            outs = ()
        if outs and not dispatch.compiling():
            torch.autograd.graph.increment_version(outs)
        known = self.named(values)
        written, results = {}, []
        for i, (one, shape, dtype) in enumerate(made):
            y = outs[i] if outs else self.fresh(known[one.like] if one.like else x, shape, dtype)
            results.append(y)
            known[one.name] = y
            written[one.name] = self.taken_result(one, y)
        for one in self.signature.results:  # what nobody needs, where the call gives memory for it
            if one.optional and known.get(one.name) is not None:
                written[one.name] = known[one.name]
        if keep:
            rows = x.numel() // x.shape[-1] if x.dim() and x.shape[-1] else x.shape[:-1].numel()
            shapes = {Rows.EACH: (rows,), Rows.PAIR: (2, rows), Rows.TWO_EACH: (*x.shape[:-1], 2)}
            for kept in self.signature.kept:
                known[kept.name] = torch.empty(shapes[kept.rows], dtype=torch.float32, device=x.device)
                written[kept.name] = known[kept.name]
        given = [
            self.taken(one, v) if isinstance(v, Tensor) else v
            for one, v in zip(self.signature.arguments, values, strict=False)
        ]
        try:
            self.kernel(backend)(*given, **written)
        except RuntimeError:
            if not dispatch.compiling():
                self.explain(values)
            raise
        return results, known

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        """A tensor as the kernel reads it."""
        if t is None:
            return None
        if self.signature.contiguous:
            return t if t.is_contiguous() else t.contiguous()
        if self.signature.strided:
            return layouts.dense_rows(t)
        if isinstance(of, Input | Output) and (of.sizes[:1] == ("...",) or len(of.sizes) == 2):
            return layouts.as_rows(t) if t.dim() else t
        return layouts.dense(t)

    def taken_result(self, of: Any, t: Tensor) -> Tensor:
        """A result as the kernel writes it."""
        as_it_is = self.signature.contiguous or self.signature.strided
        if as_it_is or not t.dim() or of.sizes[:1] != ("...",):
            return t
        return layouts.out_rows(t)

    def writable(self, t: Tensor) -> bool:
        """Whether the kernel can write into this tensor."""
        if self.signature.strided:
            return layouts.is_dense(t)
        return t.is_contiguous() if self.signature.contiguous else layouts.writable(t)

    def fresh(
        self, like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """New contiguous memory, of another shape and dtype where they are given."""
        same = shape is None or list(like.shape) == list(shape)
        if (dtype is None or dtype is like.dtype) and same:
            return layouts.fresh(like)
        y = torch.empty(like.shape if shape is None else shape, dtype=dtype or like.dtype, device=like.device)
        return layouts.in_huge_pages(y)

    def check_out(self, values: Sequence[Any], out: Any) -> None:
        """Refuse an `out` that is not like the results, or that shares memory with what is read."""
        read = {name: v for name, v in self.named(values).items() if isinstance(v, Tensor)}
        when = next((one.when for one in self.signature.results if one.when), None)
        names = ", ".join(one.called or one.name for one in self.signature.results)
        what = f"one tensor, or a pair ({names}) when {when} is given" if when else ""
        check_outputs(self.op, out, self.made(values), values[0], read, what)

    def store(self, result: Any, out: Any) -> Any:
        """The result, in `out` where one was given."""
        if out is None:
            return result
        mine, theirs = (r if isinstance(r, tuple) else (r,) for r in (result, out))
        for a, b in zip(mine, theirs, strict=True):
            if a is not b:
                b.copy_(a)
        return out


_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
decompositions: dict[Any, Callable[..., Any]] = {}  # of calls as one operator, for make_fx


def _as_operator(call: Call) -> Any:
    """An operator that PyTorch takes apart into what `traced` calls."""

    def function(*values: Any) -> Results:
        results = call.traced(*values, None)
        return list(results) if isinstance(results, tuple) else [results]

    given = [
        f"{'Tensor' if isinstance(one, Input) else one.type.__name__}{'?' * one.optional} {one.name}"
        for one in call.signature.arguments
    ]
    name = f"call_{call.op}"
    _LIBRARY.define(f"{name}({', '.join(given)}) -> Tensor[]")
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    operator = getattr(torch.ops.opsmith, name).default
    decompositions[operator] = function
    return operator


def _differentiated(call: Call) -> type[torch.autograd.Function]:
    """Forward and backward of an operator, for calls that no node in C++ records.

    What the kernel of the gradients does not write comes from autograd of the definition, computed once more.
    """
    tensors = [one.name for one in call.signature.tensors]
    numbers = [one.name for one in call.signature.numbers] + [*call.signature.beside]

    def forward(ctx: Any, backend: str, *values: Any) -> Any:
        results, known = call.run(backend, values, None, keep=True)
        there = (known.get(name, known.get(other or name)) for name, other in call.saved.items())
        ctx.save_for_backward(*there)
        # Of what only says how large a gradient is, a number in its shape is kept, beside what is saved: who counts
        # that (a checkpointed layer) finds as many as where a node in C++ records.
        ctx.likes = [
            None if (t := known[name]) is None else t.new_empty(()).expand(t.shape) for name in call.likes
        ]
        ctx.backend = backend
        ctx.numbers = [known[name] for name in numbers]
        return results[0] if len(results) == 1 else tuple(results)

    @dispatch.once(call.op)
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        known: dict[str, Any] = dict(zip(call.likes, ctx.likes, strict=True))
        for (name, other), t in zip(call.saved.items(), ctx.saved_tensors, strict=True):
            known[name] = t
            if other is not None:
                known[other] = t
        known |= dict(zip(numbers, ctx.numbers, strict=True))
        wanted = {name for name, needed in zip(call.given, ctx.needs_input_grad[1:], strict=True) if needed}
        grads = call.gradients(ctx.backend, known, slopes, wanted)
        rest = [name for name in tensors if name in wanted and name not in grads]
        if rest:
            grads |= _through_definition(call, known, slopes, rest)
        return None, *(grads.get(name) if name in wanted else None for name in call.given)

    # Named after the operator before it is a class: its node, which users see in graphs, is named then.
    name = "_" + call.op.title().replace("_", "")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def _through_definition(
    call: Call, known: dict[str, Any], slopes: Sequence[Any], names: Sequence[str]
) -> dict[str, Tensor]:
    """Gradients by autograd of the definition in plain PyTorch."""
    with torch.enable_grad():
        values = {
            name: t.detach().requires_grad_(name in names) if isinstance(t := known[name], Tensor) else t
            for name in call.given
        }
        results = call.plain([*values.values()])
        results = results if isinstance(results, tuple) else (results,)
        # Of several results, one may depend on none of these inputs: autograd refuses it.
        pairs = [(r, slope) for r, slope in zip(results, slopes, strict=True) if r.requires_grad]
        results, slopes = [r for r, _ in pairs], [slope for _, slope in pairs]
        found = torch.autograd.grad(results, [values[n] for n in names], slopes, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}
