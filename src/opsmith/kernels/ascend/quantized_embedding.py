"""The gather of int8 rows on an NPU: `quantized_embedding.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch
from opsmith.kernels.ascend.span import span

__all__ = ["launch"]


def launch(
    ids: torch.Tensor,
    table: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    prefetch: int = 0,
    next_ids: torch.Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.quantized_embedding` makes, which has looked at the ids; nothing is prefetched here.

    Raises:
        ValueError: an id is outside the table.
    """
    rows, columns = table.shape
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise ValueError(f"quantized_embedding: ids must lie in [0, {rows})")
    ids = ids.contiguous()
    if columns > 1 and table.stride(1) != 1:
        table = table.contiguous()
    y = torch.empty((*ids.shape, columns), dtype=dtype, device=table.device)
    steps = (table.stride(0), scale.stride(0))
    inputs = {"ids": ids, "table": span(table), "scale": span(scale)}
    sizes = (ids.numel(), columns, *steps, y.element_size())
    return Launch("quantized_embedding", inputs, {"y": y}, sizes, y)
