"""What PyTorch's operators cost, from the shapes they were called with: operations, and the least bytes moved.

The cards of `opsmith.ops` answer for the operators that the compiler recognizes; this is for all others. Everything
counts once: an operand that is broadcast with stride 0 is read once, an attention mask that is causal halves the
products, and keys that several query heads share are read once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.operator import Cost
from opsmith.profiler.kinds import bare


@dataclass(frozen=True)
class Spec:
    """A tensor as an event knows it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of memory behind it, what is broadcast counted once."""
        if not self.numel:
            return 0
        held = math.prod(n for n, step in zip(self.shape, self.stride, strict=False) if step)
        return held * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{'×'.join(map(str, self.shape)) or 'scalar'}"


def spec(tensor: torch.Tensor) -> Spec:
    """The shape, strides and dtype of a tensor."""
    return Spec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def dense(shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """A contiguous tensor of this shape."""
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return Spec(tuple(shape), tuple(stride), dtype)


Inputs = Sequence[Any]  # Spec, lists of Spec, numbers, None
Formula = Callable[[Inputs], Cost]


def cost_of(name: str, inputs: Inputs) -> Cost | None:
    """The cost of a call of a PyTorch operator, or None where no formula fits.

    >>> x, w = dense((8, 16), torch.float32), dense((32, 16), torch.float32)
    >>> cost_of("aten::linear", [x, w, None]).flops
    8192.0
    """
    short = name.rsplit("::", 1)[-1].rstrip("_")
    formula = _FORMULAS.get(short) or _FORMULAS.get(bare(name) if "backward" not in name else "")
    if formula is None:
        return None
    try:
        return formula(inputs)
    except (IndexError, ValueError, AttributeError, TypeError):
        return None  # called in a way that the formula does not know: no number is better than a wrong one


def tensors(inputs: Inputs) -> list[Spec]:
    """All tensors among the inputs, those in lists too."""
    found: list[Spec] = []
    for value in inputs:
        if isinstance(value, Spec):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [v for v in value if isinstance(v, Spec)]
    return found


def pairs(queries: int, keys: int, causal: bool) -> int:
    """How many (query, key) pairs attention computes; causal aligned to the beginning, as PyTorch does.

    >>> pairs(4, 4, True)
    10
    """
    growing = min(queries, keys) if causal else 0  # queries, each of which sees one key more than the last
    return growing * (growing + 1) // 2 + keys * (queries - growing)


def attention(q: Spec, k: Spec, v: Spec, mask: Spec | None, causal: bool) -> Cost:
    """`softmax(q k^T) v`: two products over the pairs that are computed; every tensor moved once."""
    *batch, length, width = q.shape
    keys, wide = k.shape[-2], v.shape[-1]
    counted = math.prod(batch) * pairs(length, keys, causal)
    out = math.prod(batch) * length * wide * q.dtype.itemsize
    moved = q.nbytes + k.nbytes + v.nbytes + out + (mask.nbytes if mask is not None else 0)
    return Cost(2.0 * counted * (width + wide), float(moved))


def _product(a: Spec, b: Spec, extra: Spec | None = None) -> Cost:
    """a [..., M, K] times b [..., K, N], as `torch.matmul` broadcasts."""
    left = a.shape if len(a.shape) > 1 else (1, *a.shape)
    right = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    (m, k), (other, n) = left[-2:], right[-2:]
    if k != other:
        raise ValueError("not a product")
    batch = math.prod(torch.broadcast_shapes(left[:-2], right[:-2]))
    out = batch * m * n * a.dtype.itemsize
    more = extra.nbytes if extra is not None else 0
    return Cost(2.0 * batch * m * n * k, float(a.nbytes + b.nbytes + out + more))


def _integers(i: Inputs) -> Cost:
    """Of int8, with a result in int32."""
    found = _product(i[0], i[1])
    return Cost(found.flops, found.min_bytes + 3.0 * i[0].shape[0] * i[1].shape[1], found.flops)


def _linear(i: Inputs) -> Cost:
    x, w, b = i[0], i[1], i[2] if len(i) > 2 else None
    n, k = w.shape
    if k != x.shape[-1]:  # a packed weight may hide its shape
        raise ValueError("not a product")
    rows = x.numel // k if k else 0
    moved = x.nbytes + w.nbytes + rows * n * x.dtype.itemsize + (b.nbytes if isinstance(b, Spec) else 0)
    return Cost(2.0 * rows * n * k, float(moved))


def _sdpa(i: Inputs, mask: int, causal: int) -> Cost:
    """With the places of the mask and of the causal rule among the arguments."""
    given = i[mask] if len(i) > mask and isinstance(i[mask], Spec) else None
    return attention(i[0], i[1], i[2], given, bool(i[causal]) if len(i) > causal else False)


def _flash_cpu_backward(i: Inputs) -> Cost:
    """Scores again, then one product each for dv, dp, dq and dk."""
    q, k, v = i[1], i[2], i[3]
    forward = attention(q, k, v, None, bool(i[7]) if len(i) > 7 else False)
    return Cost(2.5 * forward.flops, float(2 * (q.nbytes + k.nbytes + v.nbytes) + 2 * i[0].nbytes))


def _broadcast(specs: Sequence[Spec]) -> int:
    """The elements of what these broadcast to."""
    return math.prod(torch.broadcast_shapes(*(s.shape for s in specs)))


def _read(*specs: Spec) -> float:
    return float(sum(s.nbytes for s in specs))


def _embedding(i: Inputs) -> Cost:
    table, ids = i[0], i[1]
    rows = ids.numel * table.shape[1] * table.dtype.itemsize
    return Cost(0.0, float(2 * rows + ids.nbytes))


def _embedding_backward(i: Inputs) -> Cost:
    grad, ids = i[0], i[1]
    rows = i[2] if isinstance(i[2], int) else ids.numel  # events do not always tell how many the table has
    return Cost(float(grad.numel), _read(grad, ids) + rows * grad.shape[-1] * grad.dtype.itemsize)


def _elementwise(i: Inputs) -> Cost:
    """Every operand read once, a result of their common shape written."""
    parts = tensors(i)
    if not parts:
        return Cost(0.0, 0.0)
    out = _broadcast(parts)
    return Cost(float(out), _read(*parts) + out * _promoted(parts).itemsize)


def _comparison(i: Inputs) -> Cost:
    parts = tensors(i)
    out = _broadcast(parts)
    return Cost(float(out), _read(*parts) + out)


def _promoted(parts: Sequence[Spec]) -> torch.dtype:
    """The dtype of a result: what has dimensions decides before scalars do."""
    wide = [p.dtype for p in parts if p.shape] or [p.dtype for p in parts]
    return functools.reduce(torch.promote_types, wide)


def _twice(i: Inputs) -> Cost:
    """Read, and written in its shape."""
    return Cost(0.0, float(i[0].nbytes + i[0].numel * i[0].dtype.itemsize))


def _rows(flops: float, times: float) -> Formula:
    """Of a tensor passed over `times` times, with `flops` an element; what else is given is read once."""

    def formula(i: Inputs) -> Cost:
        first, *rest = tensors(i)
        small = sum(s.nbytes for s in rest if s.numel < first.numel)
        return Cost(flops * first.numel, times * first.numel * first.dtype.itemsize + small)

    return formula


def _to_copy(i: Inputs) -> Cost:
    source = i[0]
    code = next((v for v in i[1:2] if isinstance(v, int) and not isinstance(v, bool)), None)
    size = _SIZES.get(code, source.dtype.itemsize) if code is not None else source.dtype.itemsize
    return Cost(0.0, float(source.nbytes + source.numel * size))


def _put(i: Inputs) -> Cost:
    """The values read and written at their places; the places read."""
    target, *rest = tensors(i)
    values = rest[-1].numel * target.dtype.itemsize if rest else target.nbytes
    return Cost(0.0, float(2 * values + sum(r.nbytes for r in rest[:-1])))


def _gathered(i: Inputs) -> Cost:
    """A result of the index's shape (times the axes that are not indexed), read and written, and the index."""
    source, *index = tensors(i)
    if not index:
        raise ValueError("no index")
    if index[0].dtype == torch.bool:
        raise ValueError("how many are kept is not in the shapes")
    picked = _broadcast(index) * math.prod(source.shape[len(index) :])
    return Cost(0.0, float(2 * picked * source.dtype.itemsize + sum(n.nbytes for n in index)))


def _gather(i: Inputs) -> Cost:
    index = tensors(i)[1]
    return Cost(0.0, float(2 * index.numel * i[0].dtype.itemsize + index.nbytes))


def _foreach(i: Inputs) -> Cost:
    """Lists of tensors, elementwise: everything read, the first list written."""
    first = [s for s in i[0] if isinstance(s, Spec)]
    return Cost(float(sum(s.numel for s in first)), _read(*tensors(i), *first))


# The bytes of ScalarType's numbers, as events record them.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 9: 8, 10: 16, 11: 1, 15: 2}

_OF_NAMES: dict[str, Formula] = {
    "linear _linear_pointwise mkldnn_linear": _linear,
    "mm bmm matmul mv": lambda i: _product(i[0], i[1]),
    "addmm baddbmm addmv _addmm_activation": lambda i: _product(i[1], i[2], i[0]),
    "dot": lambda i: Cost(2.0 * i[0].numel, float(i[0].nbytes + i[1].nbytes)),
    "_int_mm": _integers,
    "_grouped_mm": lambda i: Cost(
        2.0 * i[0].numel * i[1].shape[-1],
        float(i[0].nbytes + i[1].nbytes + i[0].shape[0] * i[1].shape[-1] * i[0].dtype.itemsize),
    ),
    "scaled_dot_product_attention _scaled_dot_product_attention_math": lambda i: _sdpa(i, 3, 5),
    "_scaled_dot_product_flash_attention_for_cpu": lambda i: _sdpa(i, 5, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_cpu_backward,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "layer_norm native_layer_norm": _rows(8.0, 2.0),
    "native_layer_norm_backward": _rows(16.0, 3.0),
    "rms_norm _fused_rms_norm": _rows(4.0, 2.0),
    "_fused_rms_norm_backward": _rows(8.0, 3.0),
    "softmax _softmax _safe_softmax log_softmax _log_softmax": _rows(5.0, 2.0),
    "_softmax_backward_data _log_softmax_backward_data": _rows(4.0, 3.0),
    "cross_entropy_loss nll_loss nll_loss_nd": lambda i: Cost(float(i[0].numel), _read(i[0], i[1])),
    "nll_loss_forward": lambda i: Cost(
        float(i[1].numel), float(i[1].numel * (i[0].dtype.itemsize + i[1].dtype.itemsize))
    ),
    "nll_loss_backward": lambda i: Cost(0.0, _read(i[1])),
    "clone contiguous tril triu roll flip constant_pad_nd": _twice,
    "copy": lambda i: Cost(0.0, _read(i[0], i[1])),
    "_to_copy": _to_copy,
    "fill zero": lambda i: Cost(0.0, _read(i[0])),
    "cat stack": lambda i: Cost(0.0, 2.0 * sum(s.numel * s.dtype.itemsize for s in tensors(i[:1]))),
    "index_put _index_put_impl index_copy index_add scatter scatter_add slice_scatter": _put,
    "gather": _gather,
    "index_select": lambda i: Cost(0.0, float(2 * i[0].nbytes * i[2].numel // max(i[0].shape[i[1]], 1))),
    "index": _gathered,
    "sum mean prod max min amax amin any all argmax argmin var std var_mean std_mean norm cumsum logsumexp "
    "linalg_vector_norm histc bincount diff topk sort argsort nonzero count_nonzero isin equal multinomial": (
        lambda i: Cost(float(i[0].numel), _read(i[0]))
    ),
    "eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite": _comparison,
    "add sub rsub mul div pow rsqrt sqrt square abs neg exp exp2 expm1 log log2 log1p sin cos erf where "
    "masked_fill bitwise_and bitwise_or bitwise_not bitwise_xor clamp clamp_min clamp_max native_dropout "
    "reciprocal sign floor ceil round trunc remainder floor_divide maximum minimum addcmul addcdiv lerp gelu "
    "silu relu sigmoid tanh elu leaky_relu hardtanh hardswish mish softplus gelu_backward silu_backward "
    "threshold_backward tanh_backward sigmoid_backward native_dropout_backward fill_diagonal complex polar "
    "mse_loss l1_loss uniform normal exponential bernoulli random": _elementwise,
    "_foreach_add _foreach_mul _foreach_sqrt _foreach_div _foreach_addcdiv _foreach_addcmul _foreach_lerp "
    "_foreach_sub _foreach_neg _foreach_zero _foreach_norm _foreach_pow _foreach_copy": _foreach,
    # What has no tensor to look at costs what it makes, which the event does not tell: next to nothing, in practice.
    "zeros ones full arange zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor "
    "lift_fresh_copy linspace": lambda i: Cost(0.0, _read(i[0]) if i and isinstance(i[0], Spec) else 0.0),
}
_FORMULAS = {name: formula for names, formula in _OF_NAMES.items() for name in names.split()}
