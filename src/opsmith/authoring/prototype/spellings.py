"""The words of a prototype: types, groups of types and formats as msopgen spells them, and the names that are taken."""

from __future__ import annotations

import keyword

# The values of opsmith.operator.Kind, which would import PyTorch.
KINDS = ("matmul", "attention", "norm", "rope", "embedding", "softmax", "activation", "cache", "loss", "mla")

# The names under which msopgen knows a type, and ours.
TYPES: dict[str, str] = {
    **dict.fromkeys(("float", "float32", "fp32"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("double", "float64"), "float64"),
    **{name: name for name in ("int2", "int4", "int8", "int16", "int32", "int64", "bool")},
    **{name: name for name in ("uint1", "uint8", "uint16", "uint32", "uint64")},
    **{name: name for name in ("qint8", "qint16", "qint32", "quint8", "quint16")},
    **{name: name for name in ("complex32", "complex64", "complex128", "string", "resource")},
}
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_REAL = (*_FLOATS, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_QUANTIZED = ("qint8", "qint16", "qint32", "quint8", "quint16")
GROUPS: dict[str, tuple[str, ...]] = {
    "realnumbertype": _REAL,
    "numbertype": (*_REAL, *_QUANTIZED, "complex64", "complex128"),
    "basictype": (*_REAL, *_QUANTIZED, "complex64", "complex128", "bool"),
    "all": (*_REAL, *_QUANTIZED, "complex64", "complex128", "bool", "string", "resource"),
    "indexnumbertype": ("int32", "int64"),
    "quantizedtype": _QUANTIZED,
}
FORMATS = (
    "ND", "NCHW", "NHWC", "HWCN", "NC1HWC0", "FRACTAL_Z", "FRACTAL_NZ", "NC1HWC0_C04", "NDHWC", "NCDHW",
    "NDC1HWC0", "FRACTAL_Z_3D", "FRACTAL_Z_C04", "CHWN", "NCL", "NHCW",
)  # fmt: skip

# Names that mean something else in Python, C++, Triton or CUDA, or in what is generated.
_CPP = """alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t compl
const const_cast consteval constexpr constinit co_await co_return co_yield decltype default delete
do double dynamic_cast enum explicit export extern false float friend goto inline int long mutable
namespace new noexcept not_eq nullptr operator or_eq private protected public register
reinterpret_cast requires short signed sizeof static static_assert static_cast struct switch
template this thread_local throw true typedef typeid typename union unsigned using virtual void
volatile wchar_t xor xor_eq main linux unix"""
_OURS = """out row rows size lanes at begin end place torch triton tl opsmith std function project reference
cost samples workloads before make forward backward launch self product View Vec Pair Full Part Both
W ROWS BLOCK block grid stream threads partial range print len float int bool str dict list tuple set type min
max sum abs exp log sqrt tanh erf load store put"""
RESERVED = frozenset((*keyword.kwlist, *keyword.softkwlist, *_CPP.split(), *_OURS.split()))
# Namespaces of PyTorch's dispatcher, once all of PyTorch is imported.
_DISPATCHER = """aten c10 c10d c10d_functional debug_mode_ops debugprims export flex_lib fsdp higher_order inductor
inductor_prims mkl mkldnn mkldnn_prepacked onednn onnx onnx_symbolic opsmith prim prims profiler quantization quantized
quantized_decomposed rngprims sparse static_runtime streams symm_mem test torch tr_c10d"""
NAMESPACES = frozenset(_DISPATCHER.split())
