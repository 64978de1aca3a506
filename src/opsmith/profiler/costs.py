"""What is known of PyTorch's operators, by name: their class, and what a call costs, from the shapes it was given.

The cards of `opsmith.ops` answer for the operators that the compiler recognizes; this is for all others. A call is
known by its tensors, which have no memory here, and its numbers. Everything counts once: an operand that is broadcast
with stride 0 is read once, an attention mask that is causal halves the products, and keys that several query heads
share are read once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost
from opsmith.profiler import data

Tensor = torch.Tensor
Inputs = Sequence[Any]  # tensors without memory, lists of them, numbers, None
Formula = Callable[[Inputs], Cost]


def cost_of(name: str, inputs: Inputs) -> Cost | None:
    """The cost of a call of a PyTorch operator, or None where no formula fits.

    >>> x, w = torch.empty(8, 16, device="meta"), torch.empty(32, 16, device="meta")
    >>> cost_of("aten::linear", [x, w, None]).flops
    8192.0
    """
    short = name.rsplit("::", 1)[-1].rstrip("_")
    formula = _FORMULAS.get(short) or _FORMULAS.get(bare(name) if "backward" not in name else "")
    if formula is None:
        return None
    try:
        return formula(inputs)
    except (IndexError, ValueError, AttributeError, TypeError, RuntimeError):
        return None  # called in a way that the formula does not know: no number is better than a wrong one


def class_of(name: str) -> str | None:
    """The class of a PyTorch operator; None for one that nothing is known of."""
    return _CLASSES.get(bare(name))


def transparent(name: str) -> bool:
    """True for a composite that is what its parts are: a reshape that copies is a copy."""
    return bare(name) in _TRANSPARENT


def moves_nothing(name: str) -> bool:
    """True for views and questions about tensors."""
    return class_of(name) == data.FRAMEWORK


def bare(name: str) -> str:
    """`aten::add_` as `add`, `aten::_softmax_backward_data` as `_softmax`."""
    short = name.rsplit("::", 1)[-1]
    for end in ("_backward_data", "_backward"):
        short = short.removesuffix(end)
    return short.rstrip("_") if not short.endswith("__") else short


def tensors(inputs: Inputs) -> list[Tensor]:
    """All tensors among the inputs, those in lists too."""
    lists = (value if isinstance(value, list | tuple) else (value,) for value in inputs)
    return [value for values in lists for value in values if isinstance(value, Tensor)]


def sizes(t: Tensor) -> str:
    """A shape as a person reads it: `8×16`."""
    return "×".join(map(str, t.shape)) or "scalar"


def pairs(queries: int, keys: int, causal: bool) -> int:
    """How many (query, key) pairs attention computes; causal aligned to the beginning, as PyTorch does.

    >>> pairs(4, 4, True)
    10
    """
    growing = min(queries, keys) if causal else 0  # queries, each of which sees one key more than the last
    return growing * (growing + 1) // 2 + keys * (queries - growing)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Cost:
    """`softmax(q k^T) v`: two products over the pairs that are computed; every tensor moved once."""
    *batch, length, width = q.shape
    keys, wide = k.shape[-2], v.shape[-1]
    counted = math.prod(batch) * pairs(length, keys, causal)
    out = math.prod(batch) * length * wide * q.itemsize
    return Cost(2.0 * counted * (width + wide), nbytes(q, k, v, mask) + out)


def _sdpa(i: Inputs, mask: int, causal: int) -> Cost:
    """With the places of the mask and of the causal rule among the arguments."""
    return attention(
        i[0], i[1], i[2], i[mask] if len(i) > mask else None, len(i) > causal and bool(i[causal])
    )


def _flash_cpu_backward(i: Inputs) -> Cost:
    """Scores again, then one product each for dv, dp, dq and dk."""
    q, k, v = i[1], i[2], i[3]
    forward = attention(q, k, v, None, len(i) > 7 and bool(i[7]))
    return Cost(2.5 * forward.flops, 2 * nbytes(q, k, v, i[0]))


def _product(a: Tensor, b: Tensor, more: Any = None) -> Cost:
    """a [..., M, K] times b [..., K, N], as `torch.matmul` broadcasts; `more` is added to it."""
    out = torch.matmul(a, b)
    return Cost(2.0 * out.numel() * a.shape[-1], nbytes(a, b, more, out))


def _int_mm(i: Inputs) -> Cost:
    out = torch._int_mm(i[0], i[1])
    flops = 2.0 * out.numel() * i[0].shape[-1]
    return Cost(flops, nbytes(i[0], i[1], out), flops)


def _grouped_mm(i: Inputs) -> Cost:
    a, b = i[0], i[1]
    out = a.shape[0] * b.shape[-1] * a.itemsize
    return Cost(2.0 * a.numel() * b.shape[-1], nbytes(a, b) + out)


def _embedding(i: Inputs) -> Cost:
    table, ids = i[0], i[1]
    return Cost(0.0, 2 * ids.numel() * table.shape[1] * table.itemsize + nbytes(ids))


def _embedding_backward(i: Inputs) -> Cost:
    grad, ids = i[0], i[1]
    rows = i[2] if isinstance(i[2], int) else ids.numel()  # events do not always tell how many the table has
    return Cost(float(grad.numel()), nbytes(grad, ids) + rows * grad.shape[-1] * grad.itemsize)


def _elements(given: Sequence[Tensor]) -> int:
    """How many there are of what these broadcast to."""
    return math.prod(torch.broadcast_shapes(*(t.shape for t in given)))


def _elementwise(i: Inputs, itemsize: int | None = None) -> Cost:
    """Every operand read once, a result of their common shape written: of so many bytes, or in their common dtype."""
    parts = tensors(i)
    if not parts:
        return Cost(0.0, 0.0)
    # The dtype of a result: what has dimensions decides before scalars do.
    wide = [p.dtype for p in parts if p.dim()] or [p.dtype for p in parts]
    out = _elements(parts)
    itemsize = itemsize or functools.reduce(torch.promote_types, wide).itemsize
    return Cost(float(out), nbytes(*parts) + out * itemsize)


def _reduction(i: Inputs) -> Cost:
    return Cost(float(i[0].numel()), nbytes(i[0]))


def _foreach(i: Inputs) -> Cost:
    """Lists of tensors, elementwise: everything read, the first list written."""
    first = tensors(i[:1])
    return Cost(float(sum(t.numel() for t in first)), nbytes(*tensors(i), *first))


def _rows(flops: float, times: float) -> Formula:
    """Of a tensor passed over `times` times, with `flops` an element; what else is given is read once."""

    def formula(i: Inputs) -> Cost:
        first, *rest = tensors(i)
        small = sum(t.nbytes for t in rest if t.numel() < first.numel())
        return Cost(flops * first.numel(), times * first.nbytes + small)

    return formula


def _put(i: Inputs) -> Cost:
    """The values read and written at their places; the places read."""
    target, *rest = tensors(i)
    values = rest[-1].numel() * target.itemsize if rest else nbytes(target)
    return Cost(0.0, 2 * values + nbytes(*rest[:-1]))


def _gathered(i: Inputs) -> Cost:
    """A result of the index's shape (times the axes that are not indexed), read and written, and the index."""
    source, *index = tensors(i)
    if not index:
        raise ValueError("no index")
    if index[0].dtype == torch.bool:
        raise ValueError("how many are kept is not in the shapes")
    picked = _elements(index) * math.prod(source.shape[len(index) :])
    return Cost(0.0, 2 * picked * source.itemsize + nbytes(*index))


# By class: names, without namespace and trailing "_", and their formula. A gradient has its operator's class.
_TABLE: dict[str, dict[str, Formula | None]] = {
    data.MATMUL: {
        "linear _linear_pointwise mkldnn_linear": lambda i: _product(i[0], i[1].t(), *i[2:3]),
        "mm bmm matmul mv": lambda i: _product(i[0], i[1]),
        "addmm baddbmm addmv _addmm_activation": lambda i: _product(i[1], i[2], i[0]),
        "dot": lambda i: Cost(2.0 * i[0].numel(), nbytes(i[0], i[1])),
        "_int_mm": _int_mm,
        "_grouped_mm": _grouped_mm,
        "addbmm vdot ger addr _mkl_linear _weight_int8pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm "
        "_scaled_mm convolution _convolution conv1d conv2d mkldnn_convolution": None,
    },
    data.ATTENTION: {
        "scaled_dot_product_attention _scaled_dot_product_attention_math": lambda i: _sdpa(i, 3, 5),
        "_scaled_dot_product_flash_attention_for_cpu": lambda i: _sdpa(i, 5, 4),
        "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_cpu_backward,
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _flash_attention_forward _flash_attention _efficient_attention_forward "
        "_efficient_attention": None,
    },
    data.NORM: {
        "layer_norm native_layer_norm": _rows(8.0, 2.0),
        "native_layer_norm_backward": _rows(16.0, 3.0),
        "rms_norm _fused_rms_norm": _rows(4.0, 2.0),
        "_fused_rms_norm_backward": _rows(8.0, 3.0),
        "group_norm native_group_norm batch_norm native_batch_norm": None,
    },
    data.EMBEDDING: {
        "embedding": _embedding,
        "embedding_dense_backward": _embedding_backward,
        "embedding_bag embedding_renorm": None,
    },
    data.SOFTMAX: {
        "softmax _softmax _safe_softmax log_softmax _log_softmax": _rows(5.0, 2.0),
        "_softmax_backward_data _log_softmax_backward_data": _rows(4.0, 3.0),
        "_masked_softmax": None,
    },
    data.ACTIVATION: {
        "gelu silu relu sigmoid tanh elu leaky_relu hardtanh hardswish mish softplus gelu_backward silu_backward "
        "threshold_backward tanh_backward sigmoid_backward": _elementwise,
        "glu relu6 celu selu threshold logit log_sigmoid prelu": None,
    },
    data.COPIES: {
        # Read, and written in its shape.
        "clone constant_pad_nd roll flip tril triu": lambda i: Cost(0.0, nbytes(i[0]) + i[0].nbytes),
        "copy": lambda i: Cost(0.0, nbytes(i[0], i[1])),
        "_to_copy": lambda i: Cost(0.0, nbytes(i[0], torch.ops.aten._to_copy(i[0], dtype=i[1]))),
        "cat stack": lambda i: Cost(0.0, 2.0 * sum(t.nbytes for t in tensors(i[:1]))),
        "index_put _index_put_impl index_copy index_add scatter scatter_add slice_scatter": _put,
        "gather": lambda i: Cost(0.0, 2 * tensors(i)[1].numel() * i[0].itemsize + nbytes(tensors(i)[1])),
        "index_select": lambda i: Cost(0.0, 2 * nbytes(i[0]) * i[2].numel() // max(i[0].shape[i[1]], 1)),
        "index": _gathered,
        "nonzero": _reduction,
        # What has no tensor to look at costs what it makes, which the event does not tell: next to nothing.
        "fill zero zeros ones full arange zeros_like ones_like full_like new_zeros new_ones new_full scalar_tensor "
        "lift_fresh_copy linspace": lambda i: Cost(0.0, nbytes(*tensors(i[:1]))),
        "select_scatter repeat repeat_interleave masked_select pad expand_copy concat concatenate pixel_shuffle "
        "_pad_circular": None,
    },
    data.LOSS: {
        "cross_entropy_loss nll_loss nll_loss_nd": lambda i: Cost(float(i[0].numel()), nbytes(i[0], i[1])),
        "nll_loss_forward": lambda i: Cost(
            float(i[1].numel()), float(i[1].numel() * (i[0].itemsize + i[1].itemsize))
        ),
        "nll_loss_backward": lambda i: Cost(0.0, nbytes(i[1])),
        "mse_loss l1_loss uniform normal exponential bernoulli random": _elementwise,
        "argmax argmin topk sort argsort multinomial": _reduction,
        "nll_loss2d_forward binary_cross_entropy binary_cross_entropy_with_logits kl_div smooth_l1_loss huber_loss "
        "searchsorted bucketize one_hot": None,
    },
    data.OTHER: {
        "add sub rsub mul div pow rsqrt sqrt square abs neg exp exp2 expm1 log log2 log1p sin cos erf where "
        "masked_fill bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ __iand__ __ior__ clamp "
        "clamp_min clamp_max native_dropout reciprocal sign floor ceil round trunc remainder floor_divide maximum "
        "minimum addcmul addcdiv lerp native_dropout_backward complex polar fill_diagonal": _elementwise,
        "eq ne lt le gt ge logical_and logical_or logical_not isnan isinf isfinite": lambda i: _elementwise(
            i, 1
        ),
        "sum mean prod max min amax amin any all var std var_mean std_mean norm cumsum logsumexp linalg_vector_norm "
        "histc bincount diff count_nonzero isin equal": _reduction,
        "_foreach_add _foreach_mul _foreach_sqrt _foreach_div _foreach_addcdiv _foreach_addcmul _foreach_lerp "
        "_foreach_sub _foreach_neg _foreach_zero _foreach_norm _foreach_pow _foreach_copy": _foreach,
        "logical_xor dropout alpha_dropout feature_dropout cumprod fmod true_divide _fused_adamw _fused_adam "
        "_fused_sgd _amp_foreach_non_finite_check_and_unscale atan2 view_as_complex imag einsum outer "
        "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ norm_except_dim _weight_norm trace cdist": None,
    },
    # Views and questions: they move no data, and what they take is the framework's own.
    data.FRAMEWORK: {
        "view slice select transpose t permute expand unsqueeze squeeze narrow chunk split split_with_sizes unbind "
        "as_strided alias detach lift_fresh lift _unsafe_view _reshape_alias unflatten movedim moveaxis swapaxes empty "
        "empty_like empty_strided new_empty resize set item _local_scalar_dense is_nonzero result_type resolve_conj "
        "resolve_neg view_as expand_as mT T numpy_T diagonal real view_as_real is_same_size to contiguous reshape "
        "flatten type_as size stride sym_size broadcast_tensors unfold _has_compatible_shallow_copy_type requires_grad "
        "output_nr _version _nested_tensor_from_mask _is_any_true _is_all_true can_cast promote_types ravel meshgrid "
        "hsplit tensor_split unsafe_chunk unsafe_split broadcast_to retain_grad new_empty_strided "
        "empty_quantized": None
    },
}
_FORMULAS: dict[str, Formula | None] = {}
_CLASSES: dict[str, str] = {}
for _class, _rows_of_class in _TABLE.items():
    for _names, _formula in _rows_of_class.items():
        _FORMULAS |= dict.fromkeys(_names.split(), _formula)
        _CLASSES |= dict.fromkeys(map(bare, _names.split()), _class)
# Composites that may or may not copy: what they are made of says which.
_COMPOSITES = (
    "to contiguous reshape flatten type_as einsum dropout float half bfloat16 double long int Tensor_split "
    "unsafe_split pad meshgrid concat concatenate outer matrix_H bool tensordot inner chain_matmul"
)
_TRANSPARENT = set(_COMPOSITES.split())
