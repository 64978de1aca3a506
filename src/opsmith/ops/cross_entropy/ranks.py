"""Classes that are spread over ranks: of each row they exchange its pivot, its sum and its target's logit."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from opsmith.call.layouts import as_rows

STATE = 6  # float32 numbers a row between two parts of its logits; see cpu/cross_entropy.h
_PIVOT, _TOTAL, _REST, _VALUES, _VALUES_REST, _Z_TARGET = range(STATE)


class Ranks(NamedTuple):
    """Who has the classes of which this rank has those from `first` on."""

    first: int
    classes: int  # of all ranks
    group: Any  # a process group

    def begin(self, state: Tensor) -> None:
        """A row of which nothing has been read: the part of another rank may be its first."""
        state.zero_()
        state[_PIVOT] = torch.finfo(state.dtype).min

    def join(self, state: Tensor, smoothed: bool) -> None:
        """What each rank knows of the rows becomes what all know: 12 bytes a row, 16 with label smoothing."""
        import torch.distributed as dist  # which one process does not need

        if not state.numel():
            return
        pivot = state[_PIVOT].clone()
        dist.all_reduce(pivot, dist.ReduceOp.MAX, group=self.group)
        total = (state[_TOTAL] + state[_REST]) * torch.exp(state[_PIVOT] - pivot)
        values = [state[_VALUES] + state[_VALUES_REST]] if smoothed else []
        sums = torch.stack([total, state[_Z_TARGET], *values])
        dist.all_reduce(sums, group=self.group)
        state.zero_()
        state[_PIVOT], state[_TOTAL], state[_Z_TARGET] = pivot, sums[0], sums[1]
        if smoothed:
            state[_VALUES] = sums[2]

    def forward(
        self, logits: Tensor, target: Tensor, *options: Any, loss: Tensor, stats: Tensor | None = None
    ) -> None:
        """`cross_entropy` of this rank's logits."""
        ignore_index, label_smoothing, *_ = options
        state = torch.empty(STATE, target.numel(), dtype=torch.float32, device=logits.device)
        self.begin(state)
        if logits.numel():
            torch.ops.opsmith.cross_entropy_part.default(
                *(as_rows(logits), target, ignore_index, label_smoothing, self.first, self.classes),
                state=state,
            )
        self.join(state, label_smoothing != 0)
        torch.ops.opsmith.cross_entropy_finish.default(
            state, target, *options, self.classes, loss=loss, stats=stats
        )

    def backward(self, *given: Any, **made: Tensor) -> None:
        """The gradient of these logits."""
        torch.ops.opsmith.cross_entropy_backward.default(*given[:-2], self.first, self.classes, **made)
