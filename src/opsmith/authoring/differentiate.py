"""Gradients of a project's operator: its kernel for them, and autograd of the reference for what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from opsmith.authoring.function import Call

__all__ = ["differentiated"]


def differentiated(call: Call) -> type[torch.autograd.Function]:
    """Forward and backward of an operator: both its kernels, and autograd of the reference for what these leave out."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, backend: str, attributes: list[Any], *tensors: torch.Tensor) -> Any:
            dtypes = call.dtypes(tensors)
            assert dtypes is not None
            ctx.save_for_backward(*tensors)
            ctx.backend, ctx.attributes = backend, attributes
            return call.run(backend, tensors, attributes, dtypes, call.sizes(tensors))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            tensors = ctx.saved_tensors
            wanted = [n for (n, _), w in zip(call.inputs, ctx.needs_input_grad[2:], strict=True) if w]
            grads: dict[str, torch.Tensor] = {}
            for (name, _), t in zip(call.inputs, tensors, strict=True):
                if name in wanted and name in call.kernels.gradients:
                    grads[name] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            if grads:
                flat = [t if t.is_contiguous() else t.contiguous() for t in (*slopes, *tensors)]
                outs = {f"d{name}": t for name, t in grads.items()}
                call.kernels.ops(ctx.backend)[1](*flat, *ctx.attributes, **outs)
            rest = [n for n in wanted if n not in grads]
            if rest:
                grads |= _through_reference(call, tensors, ctx.attributes, slopes, rest)
            return (None, None, *(grads.get(name) for name, _ in call.inputs))

    Function.__name__ = call.name
    return Function


def _through_reference(
    call: Call,
    tensors: Sequence[torch.Tensor],
    attributes: Sequence[Any],
    slopes: Sequence[Any],
    names: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Gradients by autograd of the reference, which is computed once more."""
    with torch.enable_grad():
        leaves = [
            t.detach().requires_grad_(name in names)
            for (name, _), t in zip(call.inputs, tensors, strict=True)
        ]
        results = call.inner(*leaves, *attributes)
        results = results if isinstance(results, tuple) else (results,)
        asked = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(results, asked, slopes, allow_unused=True)
    return {
        n: g for n, g in zip([n for n, _ in call.inputs if n in names], found, strict=True) if g is not None
    }
