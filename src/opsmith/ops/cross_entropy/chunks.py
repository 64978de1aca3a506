"""The logits of an output layer, a chunk of the classes at a time: the products, and what becomes of each chunk.

The operators behind `linear_cross_entropy`, in terms of matrix products and of cross-entropy's kernels. Rows whose
targets are ignored are left out of every product: in training of masked language models five tokens of six, in
fine-tuning the whole prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from opsmith.call.dispatch import native
from opsmith.call.layouts import dense
from opsmith.kernels.triton import INTERPRETED
from opsmith.ops.cross_entropy import REDUCTIONS
from opsmith.ops.cross_entropy.ranks import STATE, Ranks
from opsmith.ops.linear import supports_rows
from opsmith.ops.linear.onednn import EMULATED_DTYPES, ONEDNN_DTYPES, SLOW_DTYPES, mkl_leads, product

_WORTH = 8  # one row of so many must be ignored to be worth a copy of the others
# Of the bytes that all logits would take, the part that may exist at a time, whatever that is for: logits, sums of
# hidden's gradient, and what the libraries take for themselves. But a chunk no narrower than still multiplies well,
# and no larger than cache.
_SHARE = 8
_LIBRARIES = 1 << 20
_NARROWEST = 256
_LEAST_BYTES = 1 << 19
_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
_FEWEST_ROWS = 128  # that are worth reading the whole weight for
_ONEDNN_ROWS = 16
_ONEDNN_CHAIN = 1024  # products that oneDNN may sum in one float32 chain and still be as exact as PyTorch
_FEW_ROWS, _SHORT = 512, 64  # so few rows are summed in chains so short


class _Options(NamedTuple):
    """What cross-entropy's kernels are told, in their order."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: int


class _Gradients(NamedTuple):
    """Memory for the gradients that are wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None  # float32, sums up what chunks and groups of rows give


class _Chunk(NamedTuple):
    first: int
    last: int
    weight: Tensor  # [last - first, K]
    bias: Tensor | None

    @property
    def width(self) -> int:
        return self.last - self.first


class _Layer(NamedTuple):
    """An output layer and what its rows should give."""

    hidden: Tensor  # [rows, K]
    weight: Tensor  # [classes, K]
    target: Tensor  # [rows]
    bias: Tensor | None
    ranks: Ranks | None = None  # who has the other classes, where these are not all

    @property
    def all_classes(self) -> int:
        """How many there are."""
        return self.ranks.classes if self.ranks else self.weight.shape[0]

    @property
    def share(self) -> int:
        """Bytes that may be taken beside the gradients."""
        return self.weight.shape[0] * self.hidden.shape[0] * self.hidden.element_size() // _SHARE - _LIBRARIES

    def row_of_sums(self, dhidden: Tensor | None) -> int:
        """What the float32 sums of hidden's gradient take of that, for each row."""
        sums, k = int(dhidden is not None), self.hidden.shape[1]
        if _onednn_multiplies(self.hidden, self.weight.shape[0]):
            # Each new sum has memory of its own, and so have pieces of hidden.
            sums = 2 * sums + (k > _ONEDNN_CHAIN)
        return 4 * sums * k


class _Logits:
    """hidden @ weight.T + bias in chunks of the classes, each of at most so many bytes, and the rows' targets."""

    def __init__(self, layer: _Layer, most_bytes: int, some: slice = slice(None)):
        hidden, weight = layer.hidden[some], layer.weight
        self.hidden, self.target, self._weight, self._bias = hidden, layer.target[some], weight, layer.bias
        self.rows, self.classes = hidden.shape[0], weight.shape[0]
        self.ranks, self.all_classes = layer.ranks, layer.all_classes
        self.first = layer.ranks.first if layer.ranks else 0  # of all
        self.onednn = _onednn_multiplies(hidden, self.classes)
        row = max(self.rows, 1) * (hidden.element_size() + 4 * _emulated(hidden))
        widest = min(most_bytes, _CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"]) // row
        widest = max(widest, _NARROWEST) // 64 * 64
        if self.onednn:  # which sums a chunk in one chain in the gradient of hidden
            widest = min(widest, _ONEDNN_CHAIN)
            self._parts = [part.contiguous() for part in hidden.split(_ONEDNN_CHAIN, 1)]
        else:
            widest = max(widest, _LEAST_BYTES // row // 64 * 64)
        self.chunks = -(-self.classes // widest)
        self._width = -(-self.classes // max(self.chunks, 1) // 64) * 64 or 64
        self._memory: Tensor | None = None

    def __iter__(self) -> Iterator[_Chunk]:
        for first in range(0, self.classes, self._width):
            last = min(first + self._width, self.classes)
            bias = None if self._bias is None else self._bias[first:last]
            yield _Chunk(first, last, self._weight[first:last], bias)

    def memory(self, chunk: _Chunk) -> Tensor:
        """[rows, width] to write a chunk to, the same for each."""
        if self._memory is None:
            self._memory = self.hidden.new_empty(self.rows * min(self._width, self.classes))
        return self._memory[: self.rows * chunk.width].view(self.rows, chunk.width)

    def multiply(self, chunk: _Chunk, some: slice, out: Tensor | None = None) -> Tensor:
        """The logits of some rows, in `out` too where it is given; they live until the next are asked for."""
        if self.onednn:
            y = self._onednn(chunk, some)
            return y if out is None else out.copy_(y)
        out = self.memory(chunk)[some] if out is None else out
        hidden = self.hidden[some]
        if supports_rows(hidden, chunk.weight) is True:
            torch.ops.opsmith.linear_rows.default(hidden, chunk.weight, dense(chunk.bias), None, 0, y=out)
            return out
        return product(hidden, chunk.weight, chunk.bias, out)

    def _onednn(self, chunk: _Chunk, some: slice) -> Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        # A weight with gaps between its rows would take oneDNN's slowest path.
        first, *more = (part.contiguous() for part in chunk.weight.split(_ONEDNN_CHAIN, 1))
        y: Tensor = linear.default(self._parts[0][some], first, chunk.bias, "none", [], "")
        for x, w in zip(self._parts[1:], more, strict=True):
            y = linear.binary(x[some], y, w, None, "add")
        return y


def _emulated(hidden: Tensor) -> bool:
    """Whether a product has memory of its own beside the result."""
    return hidden.is_cpu and hidden.dtype in EMULATED_DTYPES | SLOW_DTYPES


def _onednn_multiplies(hidden: Tensor, classes: int) -> bool:
    """True where oneDNN beats PyTorch's own choice, MKL: float32 on a CPU, and rows enough for a matrix product.

    A few rows, and sums over a few classes, PyTorch computes in shorter chains of additions, more exactly.
    """
    onednn = torch.float32 in ONEDNN_DTYPES and not mkl_leads()
    if hidden.dtype != torch.float32 or not hidden.is_cpu or not onednn:
        return False
    return hidden.shape[0] >= _ONEDNN_ROWS and hidden.shape[1] > 0 and classes > _ONEDNN_CHAIN


class _Kept(NamedTuple):
    """Memory in which logits outlive their chunk: those of the first `rows` rows."""

    rows: int = 0
    memory: Tensor | None = None  # flat
    stride: int = 0  # numbers of the memory for each class, at least as many as rows
    borrowed: bool = False  # something else will be written there

    def of(self, chunk: _Chunk) -> Tensor:
        """[rows, width]"""
        assert self.memory is not None
        start = chunk.first * self.stride
        return self.memory[start : start + self.rows * chunk.width].view(self.rows, chunk.width)

    def split(self, rows: int) -> list[slice]:
        """All rows, those that are kept apart from those that are not."""
        if self.rows in (0, rows):
            return [slice(0, rows)]
        return [slice(0, self.rows), slice(self.rows, rows)]


class _Counted:
    """The rows whose targets are not ignored, which alone take part where they are few enough."""

    def __init__(self, target: Tensor, ignore_index: int):
        self.rows: Tensor | None = None
        if target.is_cpu:  # a GPU would have to be waited for
            rows = (target != ignore_index).nonzero().squeeze(1)
            if 0 < len(rows) <= len(target) - len(target) / _WORTH:
                self.rows = rows

    def of(self, t: Tensor, dim: int = 0) -> Tensor:
        return t if self.rows is None else t.index_select(dim, self.rows)

    def memory(self, out: Tensor | None, dim: int = 0) -> Tensor | None:
        """Where those rows of an output are written: its own memory, or some that `spread` reads."""
        if out is None or self.rows is None:
            return out
        shape = [*out.shape]
        shape[dim] = len(self.rows)
        return out.new_empty(shape)

    def spread(self, out: Tensor | None, few: Tensor | None, dim: int = 0) -> None:
        """Those rows into their places, and zeros into the others'."""
        if out is not None and few is not None and few is not out and self.rows is not None:
            out.zero_().index_copy_(dim, self.rows, few)


def forward(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *options: float,
    loss: Tensor,
    dhidden: Tensor | None = None,
    dweight: Tensor | None = None,
    dbias: Tensor | None = None,
    stats: Tensor | None = None,
    ranks: Ranks | None = None,
) -> None:
    """The loss; the gradients of `gradient_scale` times that, where they are asked for and it is one number.

    `stats` gets two numbers a row, for a backward that computes the logits again.
    """
    how = _Options(*options)  # type: ignore[arg-type]
    counted = _Counted(target, how.ignore_index)
    layer = _Layer(counted.of(hidden), weight, counted.of(target), bias, ranks)
    few_losses = loss if how.reduction else counted.memory(loss)
    few_stats, few_dhidden = counted.memory(stats, 1), counted.memory(dhidden)
    state = torch.empty(STATE, layer.target.shape[0], dtype=torch.float32, device=hidden.device)
    if dhidden is None and dweight is None and dbias is None:
        _scan(_Logits(layer, layer.share), _Kept(), how, state)
    else:
        to = _Gradients(few_dhidden, dweight, _column_sums(dbias))
        _scan_and_differentiate(layer, how, state, to, gradient_scale(hidden, weight, how.reduction))
        _round(to.bias, dbias)
    torch.ops.opsmith.cross_entropy_finish.default(
        state, layer.target, *how, layer.all_classes, loss=few_losses, stats=few_stats
    )
    counted.spread(loss, few_losses)
    counted.spread(stats, few_stats, 1)
    counted.spread(dhidden, few_dhidden)


def backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    stats: Tensor,
    *options: float,
    dhidden: Tensor | None = None,
    dweight: Tensor | None = None,
    dbias: Tensor | None = None,
    ranks: Ranks | None = None,
) -> None:
    """The gradients, from logits that are computed again."""
    how = _Options(*options)  # type: ignore[arg-type]
    counted = _Counted(target, how.ignore_index)
    layer = _Layer(counted.of(hidden), weight, counted.of(target), bias, ranks)
    to = _Gradients(counted.memory(dhidden), dweight, _column_sums(dbias))
    logits = _Logits(layer, layer.share - layer.hidden.shape[0] * layer.row_of_sums(dhidden))
    dloss = dloss if how.reduction else counted.of(dloss)
    _differentiate(logits, _Kept(), how, dloss, counted.of(stats, 1), to)
    _round(to.bias, dbias)
    counted.spread(dhidden, to.hidden)


def gradient_scale(hidden: Tensor, weight: Tensor, reduction: int) -> Tensor | float:
    """By what the gradients that come with the loss are too large, where float16 would else lose what is small.

    A mean's gradients are at most twice the largest number of the other factor, so that much it leaves room for.
    """
    if (
        hidden.dtype != torch.float16
        or reduction != REDUCTIONS["mean"]
        or not hidden.numel()
        or not weight.numel()
    ):
        return 1.0
    largest = torch.stack([end for t in (hidden, weight) for end in torch.aminmax(t.detach())]).abs().amax()
    room = 2.0**14 / largest.float()
    return torch.exp2(torch.log2(room).floor()).nan_to_num(128.0, 128.0).clamp(0.25, 128.0)


def _column_sums(dbias: Tensor | None) -> Tensor | None:
    return None if dbias is None else torch.zeros_like(dbias, dtype=torch.float32)


def _round(sums: Tensor | None, dbias: Tensor | None) -> None:
    if sums is not None and dbias is not None:
        dbias.copy_(sums)


def _scan(logits: _Logits, kept: _Kept, how: _Options, state: Tensor) -> None:
    """Chunk by chunk, the logits into the six numbers of their row, and where some are kept, there too."""
    if logits.ranks:
        logits.ranks.begin(state)
    for chunk in logits:
        for some in kept.split(logits.rows):
            x = logits.multiply(chunk, some, kept.of(chunk) if 0 < kept.rows == some.stop else None)
            torch.ops.opsmith.cross_entropy_part.default(
                x,
                logits.target[some],
                how.ignore_index,
                how.label_smoothing,
                logits.first + chunk.first,
                logits.all_classes,
                state=state[:, some],
            )
            del x  # before the next chunk takes memory
    if logits.ranks:
        logits.ranks.join(state, how.label_smoothing != 0)


def _scan_and_differentiate(
    layer: _Layer, how: _Options, state: Tensor, to: _Gradients, scale: Tensor | float
) -> None:
    """Both passes over the chunks, of the loss as one number.

    A gradient needs the sums over all of a row's logits, so there are two passes over the chunks, and the logits must
    be somewhere between them. They are where the weight's gradient will be: a chunk of it has K numbers for each
    class, and is written when the logits in its place have been read. Rows beyond K are computed again.
    """
    rows, device = layer.target.shape[0], layer.hidden.device
    stats = torch.empty(2, rows, dtype=torch.float32, device=device)
    losses = torch.empty(rows, dtype=torch.float32, device=device)
    upstream = torch.ones(1, dtype=torch.float32, device=device) * scale
    if how.reduction == REDUCTIONS["mean"]:
        upstream /= (layer.target != how.ignore_index).sum()
    of_each = how._replace(reduction=REDUCTIONS["none"])
    of_sum = how._replace(reduction=REDUCTIONS["sum"])
    for some, logits, kept in _groups(layer, to):
        _scan(logits, kept, how, state[:, some])
        torch.ops.opsmith.cross_entropy_finish.default(
            *(state[:, some], logits.target, *of_each, logits.all_classes),
            loss=losses[some],
            stats=stats[:, some],
        )
        dhidden = None if to.hidden is None else to.hidden[some]
        _differentiate(logits, kept, of_sum, upstream, stats[:, some], to._replace(hidden=dhidden))


def _groups(layer: _Layer, to: _Gradients) -> Iterator[tuple[slice, _Logits, _Kept]]:
    """The rows that go through both passes together, their logits, and where these stay in between.

    The weight's gradient is one sum over all rows. Without it, rows are independent: so many at a time that all
    their logits are within what is allowed.
    """
    rows, classes = layer.hidden.shape[0], layer.weight.shape[0]
    share, sums = layer.share, layer.row_of_sums(to.hidden)
    most = share - rows * sums
    whole = _Logits(layer, most)
    if to.weight is not None and whole.chunks > 1:
        kept = min(rows, layer.weight.shape[1]) if to.weight.is_contiguous() else 0
        if kept == rows:  # a chunk's copy is needed only after the sums
            whole = _Logits(layer, share)
        elif whole.onednn and kept:  # the logits of the other rows and their gradient have two memories
            whole = _Logits(layer, most // 2)
        keep = _Kept(kept, to.weight.view(-1), layer.weight.shape[1], borrowed=True) if kept else _Kept()
        yield slice(0, rows), whole, keep
        return
    # Beside the kept logits lies a chunk of them in float32.
    room = share * 3 // 5 if _emulated(layer.hidden) else share
    at_once = rows if whole.chunks <= 1 else room // (classes * layer.hidden.element_size() + sums)
    # Ranks with fewer classes would have other groups, and exchange other rows.
    if at_once < (rows if layer.ranks else min(rows, _FEWEST_ROWS)):
        yield slice(0, rows), whole, _Kept()
        return
    memory = layer.hidden.new_empty(at_once * classes)
    for first in range(0, max(rows, 1), max(at_once, 1)):
        some = slice(first, min(first + at_once, rows))
        logits = _Logits(layer, room, some)
        yield some, logits, _Kept(logits.rows, memory, logits.rows)


def _differentiate(
    logits: _Logits, kept: _Kept, how: _Options, dloss: Tensor, stats: Tensor, to: _Gradients
) -> None:
    """Chunk by chunk: the logits become their gradient, and that is multiplied into hidden's and the weight's."""
    total = None
    in_place = kept.borrowed and kept.rows == logits.rows
    for chunk in logits:
        d, parts = _again(logits, kept, chunk)
        for some, x in parts:
            torch.ops.opsmith.cross_entropy_backward.default(
                *(dloss, x, logits.target[some], stats[:, some], *how),
                *(logits.first + chunk.first, logits.all_classes),
                dlogits=d[some],
            )
        if to.weight is not None and not in_place:
            _sum_over_rows(d, logits, to.weight[chunk.first : chunk.last])
        if to.bias is not None:
            to.bias[chunk.first : chunk.last] += d.sum(0, dtype=torch.float32)
        if to.hidden is not None:
            total = _add_product(total, d, chunk.weight, to.hidden, logits.onednn)
        del d, parts, x
    if to.hidden is not None and (total is not None or logits.ranks):  # a rank may have no class at all
        to.hidden.zero_() if total is None else to.hidden.copy_(total)
    del total
    if to.weight is not None and in_place:
        for chunk in logits:
            d = logits.memory(chunk).copy_(kept.of(chunk))
            _sum_over_rows(d, logits, to.weight[chunk.first : chunk.last])


def _sum_over_rows(d: Tensor, logits: _Logits, out: Tensor) -> None:
    """out = d.T @ hidden.

    Libraries sum a few rows in one chain. PyTorch has the ignored ones in between, and so shorter chains of the
    others: they are cut here, where the result is small enough to be added to in cache.
    """
    exact = d.dtype == torch.float32
    few = d.is_cpu and exact and logits.classes <= _ONEDNN_CHAIN and logits.rows <= _FEW_ROWS
    if logits.rows == 1:  # the library's product reads what it writes
        torch.mul(d.t(), logits.hidden, out=out)
        return
    wide = logits.rows >= _ONEDNN_ROWS and exact and out.stride(1) == 1
    if wide and native(d, "linear_gradient") is True:
        torch.ops.opsmith.linear_gradient.default(d, logits.hidden, few, dweight=out)
        return
    step = _SHORT if few else max(logits.rows, 1)
    product(d[:step].t(), logits.hidden[:step].t(), y=out)
    for first in range(step, logits.rows, step):
        out.addmm_(d[first : first + step].t(), logits.hidden[first : first + step])


def _again(logits: _Logits, kept: _Kept, chunk: _Chunk) -> tuple[Tensor, list[tuple[slice, Tensor]]]:
    """Memory for a chunk's gradient, and its logits, kept or computed again, with the rows they are of."""
    if not kept.borrowed or kept.rows == logits.rows:
        x = kept.of(chunk) if kept.rows else logits.multiply(chunk, slice(0, logits.rows))
        return x, [(slice(0, logits.rows), x)]
    first, *rest = kept.split(logits.rows)
    return logits.memory(chunk), [
        (first, kept.of(chunk)),
        *((some, logits.multiply(chunk, some)) for some in rest),
    ]


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, memory: Tensor, onednn: bool) -> Tensor:
    """total + a @ b, the total in float32; the product may pass through `memory`."""
    if onednn:
        linear, b = torch.ops.mkldnn._linear_pointwise, b.contiguous().t()
        new: Tensor = (
            linear.default(a, b, None, "none", [], "")
            if total is None
            else linear.binary(a, total, b, None, "add")
        )
        return new
    if a.dtype == torch.float32:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if a.is_cuda:
        part = torch.mm(a, b, out_dtype=torch.float32)
        return part if total is None else total.add_(part)
    product(a, b.t(), y=memory)
    if total is None:
        return memory.float()
    if INTERPRETED:
        return total.add_(memory)
    # PyTorch's add_ would widen the product to float32 in memory first.
    torch.ops.opsmith.add_to_total.default(memory.view(-1), total=total.view(-1))
    return total


# What a chunk passes through. No graph sees these: only the operators above call them.
_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
_LIBRARY.define("add_to_total(Tensor part, *, Tensor(a!) total) -> ()")
_LIBRARY.define(
    "cross_entropy_part(Tensor logits, Tensor target, int ignore_index, float label_smoothing, int first, "
    "int classes, *, Tensor(a!) state) -> ()"
)
_LIBRARY.define(
    "cross_entropy_finish(Tensor state, Tensor target, int ignore_index, float label_smoothing, "
    "float z_loss, int reduction, int classes, *, Tensor(a!) loss, Tensor(b!)? stats=None) -> ()"
)
