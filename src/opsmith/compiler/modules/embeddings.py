"""Embeddings in int8: they read the rows of a packed weight, which a tied output layer multiplies by.

A row of a table is a row of the output layer's weight, and `int8` has a scale for each row. So one packed weight serves
both, and the model's own can go back to the system.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.compiler.modules.linear_layers import embeddings, layer_of
from opsmith.compiler.modules.quantize import Packing, Standing
from opsmith.compiler.modules.stand_in import QuantizedLayer
from opsmith.ops.packed_linear.weight import rows_of

_FORMATS = ("int8", "int8_dynamic")  # with a scale for each row, and one layout
_SHOWN = 64  # rows that are held to the table's


class Rows(Standing):
    """A packed weight as the table of an embedding, whose rows its class multiplies by a number."""

    factor: float

    @classmethod
    def of(cls, packed: Any, factor: float) -> Rows:
        """The rows of a packed weight, in its memory."""
        rows = cls(packed.in_features, packed.out_features, False, format=packed.format, device="meta")
        rows.weight, rows.scale, rows.factor = packed.weight, packed.scale, factor
        return rows

    def compute(self, input: Tensor) -> Tensor:
        """The rows of these numbers times the factor, in the dtype of the table that they stand for."""
        rows = self.read(input).to(self.owner.weight.dtype)
        return rows if self.factor == 1 else rows * self.factor

    def read(self, ids: Tensor) -> Tensor:
        """The rows of these numbers, in float32."""
        return rows_of(self.packed, ids, self.format, self.in_features, self.group_size)


def embed(packing: Packing, model: nn.Module, skip: Sequence[str]) -> None:
    """Let every embedding read the rows of a packed weight: its output layer's where the two are tied, or its own."""
    for name, module in embeddings(model):
        record = QuantizedLayer(name, "int8", "left")
        packing.layers.append(record)
        factor = factor_of(module)
        pattern = next((p for p in skip if fnmatchcase(name, p)), None)
        if pattern is not None:
            record.why = f"its name matches {pattern!r} of quantize_skip"
        elif "forward" in vars(module):
            record.why = "its forward is replaced already"
        elif factor is None:
            record.why = f"its class, {type(module).__name__}, gives something else than rows times a number"
        else:
            tied = packing.of(module.weight)
            shared = tied is not None and tied.format in _FORMATS
            try:
                own = None if shared else Standing.from_linear(layer_of(module.weight), format="int8")
                packed: Any = own or tied
                rows = Rows.of(packed, factor)
                _check(rows, module.weight)
            except (TypeError, ValueError) as error:
                record.why = str(error)
                continue
            assert packed.error is not None
            record.status, record.nbytes = "packed", 0 if shared else packed.nbytes
            record.rows_of = tied.record.name if tied is not None and shared else name
            record.take(packed.error)
            packing.add(name, rows, module, record)


@torch.no_grad()
def factor_of(module: nn.Embedding) -> float | None:
    """What a module multiplies the rows of its table by, by its results; None where it does something else."""
    if module.max_norm is not None:
        return None
    weight = module.weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    generator, ids = torch.Generator().manual_seed(0), torch.arange(4, device=device)
    table = torch.randn(len(ids), weight.shape[1], generator=generator).to(device, weight.dtype)
    try:
        tables = (torch.ones_like(table), table)
        one, some = (torch.func.functional_call(module, {"weight": t}, ids) for t in tables)
        factor = float(one.flatten()[0])
        exact = some.dtype == table.dtype and some.equal(table * factor)
    except Exception:  # whatever it wants, it is not numbers of rows
        return None
    return factor if exact else None


@torch.no_grad()
def _check(rows: Rows, table: Tensor) -> None:
    """Hold some rows, the last one among them, to what rounding may take from them.

    Raises:
        ValueError: where one is another row.
    """
    n = len(table)
    ids = torch.linspace(0, n - 1, min(n, _SHOWN), device=table.device).round().long()
    assert rows.scale is not None
    # Half a step, and what the scale itself is rounded by.
    wrong = (rows.read(ids).double() - table[ids].double()).abs() > 0.5001 * rows.scale[ids, None]
    if bool(wrong.any()):
        raise ValueError("rows read from the packed weight are not the table's")
