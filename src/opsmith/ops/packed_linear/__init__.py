"""The linear layer on a packed weight: bfloat16, int8 or int4, streamed once for few rows and tiled for many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import check_device, check_dtype, check_float, check_is_tensor, check_like, short
from opsmith.call.dispatch import compiling, native, needs_grad
from opsmith.call.layouts import nbytes
from opsmith.call.run import Call, declare
from opsmith.call.signature import Input, Number, Output, Signature
from opsmith.kernels.triton import DEVICE
from opsmith.operator import Cost, Kind, Make, Sample, Supports
from opsmith.ops.linear import PACKED, product_cost
from opsmith.ops.packed_linear.formats import BLOCK, CHOSEN, FORMATS, GROUPS, SUPER, Scales
from opsmith.ops.packed_linear.weight import Packed, dequantize, empty, packed_shape, quantize

_OP = "packed_linear"
LEAST = 1e-30  # a row of activations below this is rounded to zeros, as its inverse may be no float32

SIGNATURE = Signature(
    "packed_linear",
    (
        # A scale of one dimension has no groups; only bfloat16's weight, which is another kernel's, has three.
        *(Input("x", "... K"), Input("weight", "P Q D", torch.uint8), Input("scale", "G N", torch.float32)),
        *(Input("zero", "G N", torch.int8, True), Input("bias", "N", optional=True)),
        Input("outer", "L S N", torch.float16, True),
        *(Number("bits", int), Number("group_size", int), Number("scales", int)),
    ),
    (Output("y", "... N"),),
)


def packed_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    format: str,
    group_size: int = 0,
    outer: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply by a weight that was packed once.

    `y = x @ w.T + bias` with `w = weight` (bf16), `(weight - 128) scale` (int8), or `(weight - zero) scale` by groups
    along K (int4; zero is 8 where there is none), or a float of 8 bits times its scale (fp8), or one of 4 bits times
    `2^(scale - 127)` (mxfp4). GGUF's formats are by groups too, with the very values of a file; in q5_k and q4_k
    `w = weight scale outer[0] - zero outer[1]`. "int8_dynamic" rounds each row of x to int8 too: `s = max|x| / 127`,
    `y = s (round(x / s) @ w.T) + bias`.

    >>> layer = PackedLinear.from_linear(torch.nn.Linear(64, 48), format="int8")
    >>> packed_linear(torch.randn(2, 9, 64), layer.weight, layer.scale, format="int8").shape
    torch.Size([2, 9, 48])

    `PackedLinear.from_linear` makes weight, scale and zero of an ordinary layer. A row of x that holds NaN or an
    infinity gives NaN.

    Args:
        x: [..., K], float32, bfloat16 or float16.
        weight: packed [N, K], see `opsmith.ops.packed_linear.weight`: bfloat16 or uint8.
        scale: [N] float32; int4: [groups, N] bfloat16; fp8: [N] or [groups, N] float32; mxfp4: [groups, N]
            uint8; GGUF's: [groups, N] float16, or int8 under `outer`; bf16: None.
        zero: [groups, N] int8, of an asymmetric int4 weight; of q5_k and q4_k what is taken off, under `outer[1]`.
        bias: [N], in x's dtype.
        format: "bf16", "int8", "int8_dynamic", "int4", "fp8", "mxfp4", or GGUF's "q8_0", "q6_k", "q5_0", "q5_k",
            "q4_0", "q4_k".
        group_size: numbers along K that share a scale: of int4 32, 64 or 128; of fp8 128 or 0; of mxfp4 and GGUF's 32,
            or 16 of q6_k.
        outer: of q6_k [1, ceil(K / 256), N], of q5_k and q4_k [2, ...], float16: what multiplies scale, and zero.
        out: [..., N] in x's dtype to write into.

    Raises:
        TypeError, ValueError: for a wrong format, dtype, shape or device.

    Source: Jacob et al., "Quantization and Training of Neural Networks", 2018; Frantar et al., "GPTQ", 2023;
    Rouhani et al., "Microscaling Data Formats for Deep Learning", 2023 (mxfp4).
    """
    if format == "bf16" and scale is None and zero is None and group_size == 0 and not compiling():
        return _PAIRS.fast.call(x, weight, bias, None, 0, out)  # type: ignore[no-any-return]
    bits, scales = _CODES.get(format, (repr(format), 0))
    call = _CALL.compiled if compiling() else _CALL.fast.call
    return call(x, weight, scale, zero, bias, outer, bits, group_size, scales, out)  # type: ignore[no-any-return]


_CODES = {format: (of.bits, int(of.scales)) for format, of in FORMATS.items()}


# Formats by what the operator is told of them; of two that are packed alike, the first. Of files' its group too.
_NAMES = {code: format for format, code in reversed(_CODES.items())}
_FILES = {
    (*_CODES[format], of.group, of.minima): format
    for format, of in reversed(FORMATS.items())
    if of.scales in (Scales.HALF, Scales.NESTED)
}
# Dynamo of PyTorch 2.11 compares no enumerations.
_DYNAMIC, _HALF, _NESTED, _FLOAT8, _FLOAT4 = map(int, list(Scales)[1:])
_WIDE = {_HALF: torch.float16, _NESTED: torch.int8, _FLOAT8: torch.float32, _FLOAT4: torch.uint8}


def format_of(bits: int, scales: int, group_size: int, zero: Tensor | None) -> str:
    """The name of a format by what the operator is told of it."""
    return _FILES.get((bits, scales, group_size, zero is not None)) or _NAMES[bits, scales]


def definition(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    outer: Tensor | None,
    bits: int,
    group_size: int,
    scales: int,
) -> Tensor:
    """The definition, in plain PyTorch: dequantized and multiplied in float32 at least, rounded once."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    k, format = x.shape[-1], format_of(bits, scales, group_size, zero)
    w = dequantize(weight, scale, zero, outer, format=format, k=k, group_size=group_size, dtype=wide)
    if scales == _DYNAMIC:
        # In float32 whatever the dtype of the rest, so that there is one answer to what x is rounded to.
        numbers = x.float()
        most = numbers.abs().amax(-1, keepdim=True) if k else numbers.new_zeros((*x.shape[:-1], 1))
        inverse = torch.where(most > LEAST, torch.full_like(most, 127) / most, 0)  # `127 / most` rounds twice
        y = F.linear((numbers * inverse).round().to(wide), w) * (most / 127).to(wide)
    else:
        y = F.linear(x.to(wide), w)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


class _Flat(Call):
    """Rows of any dimensions are given as they are, so that a graph shows the result that a layer writes."""

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return t if t is not None and of.name == "x" and t.is_contiguous() else super().taken(of, t)

    def taken_result(self, of: Any, t: Tensor) -> Tensor:
        return t if t.is_contiguous() else super().taken_result(of, t)


class _Packed(_Flat):
    """Weights of each format have shapes of their own; bfloat16's are for the kernel of `linear`."""

    def check(self, values: Sequence[Any]) -> None:
        x, weight, scale, zero, bias, outer, bits, group_size, scales = values
        check_float(_OP, x)
        if isinstance(bits, str):
            raise ValueError(f"{_OP}: format must be one of {', '.join(FORMATS)}, got {bits}")
        format = format_of(bits, scales, group_size, zero)
        of = FORMATS[format]
        for name, t in (("weight", weight), ("scale", scale), ("zero", zero), ("outer", outer)):
            if name == "weight" or t is not None:
                check_is_tensor(_OP, t, name)
                check_device(_OP, t, x, name)
        groups = CHOSEN.get(format, (of.group,))
        if group_size not in groups:
            wanted = f"{groups} for {format}" if any(groups) else f"{GROUPS} for int4 and 0 otherwise"
            raise ValueError(f"{_OP}: group_size must be one of {wanted}, got {group_size!r}")
        if format == "bf16" and not (scale is None and zero is None):
            raise ValueError(f"{_OP}: a bf16 weight has no scale and no zero; leave them out")
        if format != "bf16" and scale is None:
            raise ValueError(
                f"{_OP}: an {format} weight needs its scale; PackedLinear.from_linear makes both"
            )
        if zero is not None and format != "int4" and not of.minima:
            raise ValueError(f"{_OP}: an {format} weight has no zero; leave it out")
        nested = scales == _NESTED
        if (outer is not None) is not nested:
            raise ValueError(
                f"{_OP}: an {format} weight {'needs its' if nested else 'has no'} outer scales; "
                + ("PackedLinear makes them" if nested else "leave them out")
            )
        k = x.shape[-1]
        n = weight.shape[1] if scale is None and weight.dim() == 3 else 0
        if scale is not None:
            n = scale.shape[-1] if scale.dim() else 0
            groups = (-(-k // group_size), n) if group_size else (n,)
            wide = _WIDE.get(scales, torch.bfloat16 if group_size else torch.float32)
            also = (torch.float16,) if format == "int4" else ()  # as others have it
            _expect("scale", scale, groups, (wide, *also, torch.float64), format)
            if zero is not None:
                _expect("zero", zero, groups, (torch.int8,), format)
            if outer is not None:
                blocks = (1 + (zero is not None), -(-k // SUPER), n)
                _expect("outer", outer, blocks, (torch.float16, torch.float64), format)
        numbers = (torch.bfloat16, torch.float64) if format == "bf16" else (torch.uint8,)
        _expect("weight", weight, packed_shape(format, n, k), numbers, format)
        if bias is not None:
            check_like(_OP, bias, x, "bias", (n,), "the number of the weight's rows")
            check_dtype(_OP, bias, x, "bias")
        if scales == _DYNAMIC and needs_grad(x, bias):
            raise ValueError(
                f"{_OP}: rounding the activations has no gradient; run under torch.no_grad(), or use format='int8'"
            )

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        x, weight, scale, *_ = values
        n = weight.shape[1] if scale is None else scale.shape[-1]
        return [(self.signature.results[0], [*x.shape[:-1], n], x.dtype)]

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        x, weight, scale, *_, outer, bits, _, scales = values
        if torch.float64 in (t.dtype for t in (weight, scale, outer) if t is not None):
            return "the kernels take weights as they are packed, not in float64"
        if scales > _DYNAMIC and (not x.is_cpu or DEVICE == "cpu"):
            return (
                "the kernel for GPUs takes int8 and int4; a file's formats are unpacked for it at each call"
            )
        return native(x, "linear_packed" if bits == 16 else _OP)

    def native(self, backend: str, values: Sequence[Any], out: Any = None) -> Any:
        x, weight, _, _, bias, _, bits, *_ = values
        if bits == 16:
            return _PAIRS.native(backend, (x, weight, bias, None, 0), out)
        return super().native(backend, values, out)

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        if t is None or of.name not in ("weight", "scale", "zero", "outer"):
            return super().taken(of, t)
        # Scales may be columns of a larger tensor.
        rows = of.name != "weight" and t.stride()[-1] == 1 and (t.dim() == 1 or t.stride()[-2] >= t.shape[-1])
        return t if rows else t.contiguous()


class _Pairs(_Flat):
    """A weight of bfloat16."""

    def traced(self, *given: Any) -> Any:
        x, weight, bias, _, _, out = given
        return _CALL.traced(x, weight, None, None, bias, None, 16, 0, 0, out)


_CALL = _Packed(
    SIGNATURE,
    packed_linear,
    definition,
    converted={"bits": lambda format: _CODES[format][0], "scales": lambda format: _CODES[format][1]},
)
_PAIRS = _Pairs(PACKED, packed_linear, definition)


def _expect(
    name: str, t: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], format: str
) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(
            f"{_OP}: {name} must have shape {shape} for x's last dimension and format={format!r}, "
            f"got {tuple(t.shape)}; PackedLinear.from_linear packs it"
        )
    if t.dtype not in dtypes:
        raise TypeError(
            f"{_OP}: {name} must be {short(dtypes[0])} for format={format!r}, got {short(t.dtype)}"
        )


def _promised(x: Tensor, *tensors: Tensor | None, **options: Any) -> bool:
    """Finite calls: a number that is not makes its whole row of results NaN."""
    given = (x, *tensors, options.get("outer"))
    return all(bool(t.isfinite().all()) for t in given if t is not None)


def _cost(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    format: str,
    outer: Tensor | None = None,
    **options: Any,
) -> Cost:
    k = x.shape[-1]
    results = (x.numel() // k if k else 0) * (weight.shape[1] if scale is None else scale.shape[-1])
    products = 2.0 * results * k
    moved = nbytes(x, weight, scale, zero, bias, outer) + results * x.element_size()
    return Cost(products + results * (bias is not None), moved, products if format == "int8_dynamic" else 0.0)


def _made(weight: Tensor, format: str, group: int = 0, symmetric: bool = True) -> Packed:
    n, k = weight.shape
    to = empty(format, n, k, group, symmetric, weight.device)
    quantize(weight, format, group, to)
    return to


def _samples(make: Make) -> Iterator[Sample]:
    for format in FORMATS:
        group = {"int4": 64, "fp8": BLOCK}.get(format, FORMATS[format].group)

        def sample(
            name: str,
            x: Tensor,
            n: int,
            *bias: Tensor,
            format: str = format,
            group: int = group,
            symmetric: bool = True,
        ) -> Sample:
            weight = make(n, x.shape[-1], scale=x.shape[-1] ** -0.5)
            *w, outer = _made(weight, format, group, symmetric)
            options: dict[str, Any] = {"format": format, "group_size": group}
            options |= {} if outer is None else {"outer": outer}
            return Sample(f"{format} {name}", (x, *w, *bias), options)

        sizes = (1, 200, 37), (3, 65, 33), (7, 130, 48), (17, 384, 100), (70, 1100, 65), (97, 773, 170)
        for rows, k, n in sizes:
            yield sample(f"{rows}x{k}x{n}", make(rows, k), n, make(n))
        yield sample("vector, no bias", make(72), 33)
        yield sample("strided", make(72, 6).t(), 40, make(40, 2)[:, 0])
        yield sample("two dimensions", make(2, 3, 72), 40)
        yield sample("empty", make(0, 72), 40)
        x = make(5, 72)
        x[:, ::17] *= 100
        x[2] = 0
        yield sample("outliers and a row of zeros", x, 40)
        if format == "fp8":
            yield sample("a scale of each row", make(3, 300), 50, make(50), group=0)
        for group in GROUPS if format == "int4" else ():
            for rows in (4, 100):
                name = f"asymmetric {group}, {rows} rows"
                yield sample(name, make(rows, 300), 50, make(50), group=group, symmetric=False)


def _workloads(make: Make) -> Iterator[Sample]:
    for format in FORMATS:
        group = {"int4": 128, "fp8": BLOCK}.get(format, FORMATS[format].group)
        options = {"format": format, "group_size": group}
        *w, outer = _made(make(11008, 4096, scale=0.02), format, group)
        for rows in (1, 4, 16, 512):
            yield Sample(f"{format} {rows}x4096x11008", (make(rows, 4096), *w), options | {"outer": outer})
        *w, outer = _made(make(1536, 384, scale=0.05), format, group)
        yield Sample(f"{format} 1x384x1536", (make(1, 384), *w), options | {"outer": outer})


CARD = _CALL.card(
    kind=Kind.MATMUL,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    domain=_promised,
    # No model writes this as plain PyTorch, so there is nothing to recognize: PackedLinear is put in.
    entries=dict.fromkeys(("packed_linear", "linear_packed"), product_cost),
    schemas=(*declare(SIGNATURE), *declare(PACKED, "linear")),
    differentiable=False,
    source="Jacob et al., 2018; Frantar et al., 2023",
)
