"""Which operators of PyTorch can bring a function of the algebra into a term: what need not be tried is not."""

from __future__ import annotations

# Operators that can bring a function into a term: without one of them nearby a template need not be tried.
TRIGGERS = {
    "erf": {"erf", "special_erf", "erfc", "special_erfc", "special_ndtr", "gelu"},
    "exp": {
        "exp",
        "softmax",
        "_softmax",
        "_safe_softmax",
        "log_softmax",
        "cross_entropy_loss",
        "logsumexp",
        "_log_softmax",
        "sigmoid",
        "tanh",
        "silu",
    }
    | {"gelu", "scaled_dot_product_attention", "elu", "expm1"},
    "mean": {"mean", "sum", "var", "std", "var_mean", "layer_norm", "native_layer_norm", "rms_norm"}
    | {"linalg_vector_norm"},
    "matmul": {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "einsum", "scaled_dot_product_attention"},
    "nll": {"cross_entropy_loss", "nll_loss", "nll_loss_nd", "gather"},
    "join": {"cat", "stack", "view_as_real"},
    "gather": {"embedding", "index", "index_select", "matmul", "mm"},
    "larger": {"maximum", "minimum", "clamp", "clamp_min", "clamp_max", "hardtanh", "relu", "relu6", "abs"}
    | {"hardsigmoid", "hardswish", "elu"},
    "where": {"where", "masked_fill", "leaky_relu", "elu"},
}
