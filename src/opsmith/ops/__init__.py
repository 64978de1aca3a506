"""The operator library: `opsmith.ops.NAME(...)`, one file per operator (family)."""

from opsmith.ops.attention import attention
from opsmith.ops.attention.varlen import attention_varlen
from opsmith.ops.cross_entropy import cross_entropy
from opsmith.ops.cross_entropy.linear import linear_cross_entropy
from opsmith.ops.embedding import embedding
from opsmith.ops.embedding.module import QuantizedEmbedding
from opsmith.ops.embedding.quantized import quantized_embedding
from opsmith.ops.experts import experts
from opsmith.ops.gated import gelu_mul, silu_mul
from opsmith.ops.gelu import bias_gelu, gelu
from opsmith.ops.layer_norm import layer_norm
from opsmith.ops.linear import linear
from opsmith.ops.linear.rope import linear_rope
from opsmith.ops.mla.attention import mla_attention
from opsmith.ops.mla.cache import MLACache
from opsmith.ops.mla.epilogues import mla_kv_epilogue, mla_q_epilogue
from opsmith.ops.mla.preprocess import mla_preprocess
from opsmith.ops.mla.weights import MLAWeights
from opsmith.ops.moe_route import moe_route
from opsmith.ops.packed_linear import packed_linear
from opsmith.ops.packed_linear.module import PackedExperts, PackedLinear
from opsmith.ops.paged_attention import paged_attention
from opsmith.ops.paged_attention.cache import reshape_and_cache
from opsmith.ops.rms_norm import rms_norm
from opsmith.ops.rms_norm.quant import rms_norm_quant
from opsmith.ops.rope import rope, rope_qk
from opsmith.ops.rope.int8 import rope_int8
from opsmith.ops.rope.table import rope_table
from opsmith.ops.softmax import softmax

__all__ = [
    "MLACache",
    "MLAWeights",
    "PackedExperts",
    "PackedLinear",
    "QuantizedEmbedding",
    "attention",
    "attention_varlen",
    "bias_gelu",
    "cross_entropy",
    "embedding",
    "experts",
    "gelu",
    "gelu_mul",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_rope",
    "mla_attention",
    "mla_kv_epilogue",
    "mla_preprocess",
    "mla_q_epilogue",
    "moe_route",
    "packed_linear",
    "paged_attention",
    "quantized_embedding",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_quant",
    "rope",
    "rope_int8",
    "rope_qk",
    "rope_table",
    "silu_mul",
    "softmax",
]
