"""The gradients of a kernel with a signature: one Function in Python for all, where no node in C++ records the call.

Its backward calls the kernel of the gradients with what the signature says of each argument. What that kernel does not
compute comes from autograd of the operator's definition in plain PyTorch, which is computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from opsmith.call.signature import Constant, Made, Saved, Signature, Slope

__all__ = ["differentiated", "gradients"]


class Call(Protocol):
    """What is asked of an operator's call: run.py."""

    signature: Signature
    op: str
    given: tuple[str, ...]
    saved: dict[str, str | None]
    likes: list[str]
    definition: Callable[..., Any]

    def run(
        self, backend: str, values: Sequence[Any], out: Any = None, keep: bool = False
    ) -> tuple[list[torch.Tensor], dict[str, Any]]: ...
    def kernel_of_gradients(self, backend: str) -> Callable[..., Any]: ...
    def taken(self, of: Any, t: torch.Tensor | None) -> torch.Tensor | None: ...
    def taken_result(self, of: Any, t: torch.Tensor) -> torch.Tensor: ...
    def gradients(
        self, backend: str, known: dict[str, Any], slopes: Sequence[torch.Tensor], wanted: set[str]
    ) -> dict[str, torch.Tensor]: ...
    def made_gradient(self, name: str, like: torch.Tensor, known: dict[str, Any]) -> torch.Tensor: ...


def differentiated(call: Call) -> type[torch.autograd.Function]:
    """Forward and backward of an operator."""
    tensors = [one.name for one in call.signature.tensors]
    numbers = [one.name for one in call.signature.numbers] + [*call.signature.beside]

    def forward(ctx: Any, backend: str, *values: Any) -> Any:
        results, known = call.run(backend, values, None, keep=True)
        there = (known.get(name, known.get(other or name)) for name, other in call.saved.items())
        # Of what only says how large a gradient is, a number in its shape is kept.
        likes = (
            None if (t := known[name]) is None else t.new_empty(()).expand(t.shape) for name in call.likes
        )
        ctx.save_for_backward(*there, *likes)
        ctx.backend = backend
        ctx.numbers = [known[name] for name in numbers]
        return results[0] if len(results) == 1 else tuple(results)

    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        known: dict[str, Any] = {}
        there = [*call.saved.items(), *((name, None) for name in call.likes)]
        for (name, other), t in zip(there, ctx.saved_tensors, strict=True):
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


def gradients(
    call: Call, backend: str, known: dict[str, Any], slopes: Sequence[torch.Tensor], wanted: set[str]
) -> dict[str, torch.Tensor]:
    """What the kernel of the gradients writes, by input."""
    arriving = {one.name: slope for one, slope in zip(call.signature.results, slopes, strict=False)}
    lying = {one.like: one.name for one in call.signature.results}  # what is not kept lies as its result does
    written: dict[str, torch.Tensor | None] = {}
    found: dict[str, torch.Tensor] = {}
    for p in call.signature.backward:
        source = p.source
        if isinstance(source, Made):
            like = known[source.of] if source.of in known else arriving[lying[source.of]]
            ours = wanted.intersection((source.of, *source.shared))
            if like is not None and (ours or source.always or not source.optional):
                made = call.made_gradient(source.of, like, known)
                written[p.name] = call.taken_result(p.of, made)
                found |= dict.fromkeys((source.of, *source.shared), made)
    numbers = {one.name for one in call.signature.numbers}
    given: list[Any] = []
    for p in call.signature.backward:
        source = p.source
        if isinstance(
            source, Constant
        ):  # unless the call said otherwise, in what stands beside its arguments
            other = source.name in known and source.name not in numbers
            given.append(known[source.name] if other else source.value)
        elif isinstance(source, Slope):
            given.append(call.taken(p.of, arriving.get(source.of)))
        elif isinstance(source, Saved):
            value = known[source.of]
            given.append(call.taken(p.of, value) if isinstance(value, torch.Tensor) else value)
    if wanted & found.keys():
        call.kernel_of_gradients(backend)(*given, **written)
    return found


def _through_definition(
    call: Call, known: dict[str, Any], slopes: Sequence[Any], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Gradients by autograd of the definition in plain PyTorch."""
    with torch.enable_grad():
        values = {name: known[name] for name in call.given}
        leaves = {
            name: t.detach().requires_grad_(name in names)
            for name, t in values.items()
            if isinstance(t, torch.Tensor)
        }
        results = call.definition(*(leaves.get(name, v) for name, v in values.items()))
        results = results if isinstance(results, tuple) else (results,)
        found = torch.autograd.grad(results, [leaves[n] for n in names], slopes, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}
