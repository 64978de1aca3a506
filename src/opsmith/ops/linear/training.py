"""The linear layer where autograd records, on a CPU: in float32, and in 16 bits where no unit multiplies these.

Our kernels are as exact as MKL, which is what PyTorch calls. oneDNN multiplies faster, but adds up all of K in one
chain, and in a whole model's gradients the errors of three such products add up to more than twice those of MKL.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opsmith.call.dispatch import once
from opsmith.call.fast import direct
from opsmith.call.layouts import as_rows, dense, fresh
from opsmith.ops.linear.onednn import our_product
from opsmith.ops.nonzero_rows import among_zeros, nonzero_rows

ROWS = 8  # of x, at most, for which there are kernels that take a weight as it is
_TANH = 2  # the kernel's number of the GELU with tanh
_LOOK = 1 << 22  # multiplications of a product, from which on a look for rows of zeros costs little beside it


class LinearFunction(torch.autograd.Function):
    """x @ weight.T + bias + residual, or the GELU of this number of that (without a residual), if it is not 0."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: int
    ) -> Tensor:
        y = fresh(x, torch.Size((*x.shape[:-1], weight.shape[0])))
        before = fresh(y) if gelu else None
        by = weight if 1 in weight.stride() else weight.contiguous()
        added = None if residual is None else as_rows(residual)
        rows = {"y": as_rows(y), "before": None if before is None else as_rows(before)}
        direct.of(torch.ops.opsmith.linear_unpacked.default)(as_rows(x), by, dense(bias), added, gelu, **rows)
        ctx.save_for_backward(x, weight, before)
        ctx.tanh = gelu == _TANH
        return y

    @staticmethod
    @once("linear")
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        need_x, need_w, need_b, need_r, _ = ctx.needs_input_grad
        dz, taken, z = as_rows(dy), as_rows(x), None if before is None else as_rows(before)
        m = dz.shape[0]
        rows = nonzero_rows(dz) if dz.numel() * taken.shape[1] > _LOOK else None
        few = rows is not None
        if rows is not None:
            dz, taken = dz.index_select(0, rows), taken.index_select(0, rows)
            z = None if z is None else z.index_select(0, rows)
        if z is not None:
            # Its memory is ours, unless there may be a second backward.
            again = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
            given, dz = dz, fresh(z) if again and rows is None else z
            direct.of(torch.ops.opsmith.gelu_backward.default)(given, z, None, ctx.tanh, dx=dz)
        dx = dw = db = None
        few_rows = not torch.compiler.is_compiling() and dz.shape[0] <= ROWS and weight.stride(1) == 1
        if need_x:
            dx = dz.new_empty(dz.shape[0], weight.shape[1]) if few_rows else our_product(dz, weight.t())
        if few_rows:
            dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_w else None
            db = dy.new_empty(weight.shape[:1]) if need_b else None
            gradients = {"dx": dx, "dweight": dw, "dbias": db}
            direct.of(torch.ops.opsmith.linear_rows_backward.default)(dz, taken, weight, **gradients)
        elif need_w or need_b:
            # GPT-2's weights: a gradient that lay as their view does would be copied by autograd.
            across = weight.t().is_contiguous() and not weight.is_contiguous()
            one, other = (taken, dz) if across else (dz, taken)
            apart = across or dz.dtype != torch.float32
            db = (dz.sum(0) if apart else dy.new_empty(weight.shape[:1])) if need_b else None
            if dz.dtype == torch.float32:
                dw, beside = dz.new_empty(one.shape[1], other.shape[1]), None if apart else db
                direct.of(torch.ops.opsmith.linear_gradient.default)(
                    one, other, few, dweight=dw, dbias=beside
                )
            else:
                dw = our_product(one.t(), other.t())
            dw = dw.t() if across else dw
        if dx is not None:
            dx = (dx if rows is None else among_zeros(dx, rows, m)).view(x.shape)
        return dx, dw if need_w else None, db, dy if need_r else None, None
