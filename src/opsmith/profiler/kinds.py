"""Which class a PyTorch operator belongs to, by its name; ours by their cards."""

from __future__ import annotations

import functools

from opsmith.operator import Kind, Operator, registry
from opsmith.profiler.data import (
    ACTIVATION,
    ATTENTION,
    COPIES,
    EMBEDDING,
    FRAMEWORK,
    LOSS,
    MATMUL,
    NORM,
    OTHER,
    ROPE,
    SOFTMAX,
)

OF_KIND = {
    Kind.MATMUL: MATMUL,
    Kind.ATTENTION: ATTENTION,
    Kind.NORM: NORM,
    Kind.ROPE: ROPE,
    Kind.EMBEDDING: EMBEDDING,
    Kind.SOFTMAX: SOFTMAX,
    Kind.ACTIVATION: ACTIVATION,
    Kind.CACHE: COPIES,
    Kind.LOSS: LOSS,
    Kind.MLA: ATTENTION,
}


def _words(text: str) -> set[str]:
    return set(text.split())


# Names without their namespace and without a trailing "_" or "_backward".
_NAMES = {
    MATMUL: "linear matmul mm bmm addmm baddbmm addbmm addmv mv dot vdot ger addr _addmm_activation "
    "_linear_pointwise _mkl_linear mkldnn_linear _int_mm _weight_int8pack_mm _weight_int4pack_mm_for_cpu "
    "_weight_int4pack_mm _grouped_mm _scaled_mm convolution _convolution conv1d conv2d mkldnn_convolution",
    ATTENTION: "scaled_dot_product_attention _scaled_dot_product_attention_math "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _flash_attention_forward "
    "_flash_attention _efficient_attention_forward _efficient_attention",
    NORM: "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm "
    "native_batch_norm",
    EMBEDDING: "embedding embedding_bag embedding_dense embedding_renorm",
    SOFTMAX: "softmax _softmax _safe_softmax log_softmax _log_softmax _softmax_data _log_softmax_data _masked_softmax",
    ACTIVATION: "gelu silu relu sigmoid tanh elu leaky_relu hardtanh hardswish mish softplus glu relu6 celu "
    "selu threshold logit log_sigmoid prelu",
    COPIES: "copy clone _to_copy cat stack index_put _index_put_impl index_copy scatter scatter_add index_add "
    "slice_scatter select_scatter repeat repeat_interleave constant_pad_nd gather index index_select "
    "masked_select nonzero roll flip tril triu fill zero zeros ones full arange zeros_like ones_like "
    "full_like pad lift_fresh_copy new_zeros new_ones new_full expand_copy concat "
    "concatenate pixel_shuffle linspace scalar_tensor _pad_circular",
    LOSS: "cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward nll_loss2d_forward mse_loss l1_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits kl_div multinomial argmax argmin topk sort argsort "
    "exponential uniform normal random bernoulli smooth_l1_loss huber_loss searchsorted bucketize one_hot",
    OTHER: "add sub rsub mul div pow rsqrt sqrt square mean sum prod max min amax amin abs neg exp exp2 expm1 log "
    "log2 log1p sin cos erf where masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor "
    "bitwise_and bitwise_or bitwise_not bitwise_xor any all clamp clamp_min clamp_max dropout native_dropout "
    "alpha_dropout feature_dropout cumsum cumprod logsumexp reciprocal sign floor ceil round trunc remainder "
    "fmod floor_divide true_divide maximum minimum isnan isinf isfinite isin addcmul addcdiv lerp var std "
    "var_mean std_mean norm linalg_vector_norm _foreach_add _foreach_mul _foreach_sqrt _foreach_div "
    "_foreach_addcdiv _foreach_addcmul _foreach_lerp _foreach_norm _foreach_sub _foreach_neg "
    "_foreach_zero _fused_adamw _fused_adam _fused_sgd _amp_foreach_non_finite_check_and_unscale atan2 "
    "complex view_as_complex polar real imag einsum outer count_nonzero equal bincount histc "
    "_foreach_pow _foreach_copy bitwise_left_shift bitwise_right_shift __and__ __or__ __lshift__ __rshift__ "
    "__xor__ __ior__ __iand__ norm_except_dim _weight_norm diff trace cdist",
}
# Views and questions: they move no data, and what they take is the framework's own.
_VIEWS = _words(
    "view slice select transpose t permute expand unsqueeze squeeze narrow chunk split split_with_sizes unbind "
    "as_strided alias detach lift_fresh lift _unsafe_view _reshape_alias unflatten movedim moveaxis swapaxes empty "
    "empty_like empty_strided new_empty resize set item _local_scalar_dense is_nonzero result_type "
    "resolve_conj resolve_neg view_as expand_as mT T numpy_T diagonal real view_as_real is_same_size "
    "to contiguous reshape flatten type_as size stride sym_size broadcast_tensors unfold "
    "_has_compatible_shallow_copy_type requires_grad output_nr _version _nested_tensor_from_mask "
    "_is_any_true _is_all_true can_cast promote_types ravel meshgrid hsplit tensor_split unsafe_chunk "
    "unsafe_split broadcast_to retain_grad new_empty_strided empty_quantized"
)
# Composites that may or may not copy: what they are made of says which.
_TRANSPARENT = _words(
    "to contiguous reshape flatten type_as einsum dropout float half bfloat16 double long int "
    "Tensor_split unsafe_split pad meshgrid concat concatenate outer matrix_H bool tensordot inner chain_matmul"
)
_KIND_OF = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_KIND_OF |= dict.fromkeys(_VIEWS, FRAMEWORK)


def bare(name: str) -> str:
    """`aten::add_` as `add`, `aten::_softmax_backward_data` as `_softmax`."""
    short = name.rsplit("::", 1)[-1]
    for end in ("_backward_data", "_backward"):
        short = short.removesuffix(end)
    return short.rstrip("_") if not short.endswith("__") else short


def kind_of(name: str) -> str | None:
    """The class of an operator by its name; None for one that nothing is known of."""
    if "::" not in name:
        return None
    card = card_of(name)
    return OF_KIND[card.kind] if card is not None else _KIND_OF.get(bare(name))


def transparent(name: str) -> bool:
    """True for a composite that is what its parts are: a reshape that copies is a copy."""
    return bare(name) in _TRANSPARENT


def moves_nothing(name: str) -> bool:
    """True for views and questions about tensors."""
    return bare(name) in _VIEWS


def card_of(name: str) -> Operator | None:
    """The card of a dispatcher operator: of ours by the card's schemas, of a project's by its namespace."""
    if name.startswith(("aten::", "autograd::")):
        return None
    return _cards(tuple(registry())).get(name if name.startswith("opsmith::") else name.partition("::")[0])


@functools.lru_cache(maxsize=2)
def _cards(names: tuple[str, ...]) -> dict[str, Operator]:
    cards = registry()
    mine = {
        f"opsmith::{schema.split('(', 1)[0].split('::')[-1]}": card
        for card in cards.values()
        for schema in card.schemas
    }
    return {**cards, **mine}
