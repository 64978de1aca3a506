"""Packed layers as compressed-tensors lays them into a folder: how one is written there, and read.

Four and eight bits lie in words where a layer's inputs stay as they are, int8 by rows where they are rounded too, and
floats of 8 bits as they are, of 4 bits in pairs. Formats of GGUF files that have one float16 for each group are such
words as well.

Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops import PackedLinear
from opsmith.ops.packed_linear.formats import BLOCK, FORMATS, GROUPS
from opsmith.ops.packed_linear.weight import unpack_integers, unpack_pairs

ENDS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_HALVES = 32  # numbers that share a float16 in the only format of 8 bits by groups
_ZEROS = "its 8 bits have zeros (symmetric is false), where 8 bits around zero are known"

Parts = dict[str, Tensor]  # a layer's tensors, by the ends of their names
Scheme = dict[str, Any]


def to_words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [n, k], uint8, of 4 or 8 bits as int32 words of rows, the first in the lowest bits."""
    numbers = F.pad(numbers, (0, -numbers.shape[1] % (32 // bits)))
    if bits == 4:
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return numbers.contiguous().view(torch.int32)


def from_words(words: Tensor, bits: Any, k: int | None = None) -> Tensor:
    """The numbers [n, k] in words of rows, by default all that there are.

    Raises:
        ValueError: for what are no words, or others than of 4 or 8 bits.
    """
    if bits not in (4, 8):
        raise ValueError(f"it has {bits} bits, where 4 and 8 are known")
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ValueError(f"words must be int32 in rows and columns, got {words.dtype} {list(words.shape)}")
    numbers = words.contiguous().view(torch.uint8)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)
    return numbers[:, :k]


def write(layer: PackedLinear, rows: slice = slice(None)) -> tuple[Scheme | None, Parts]:
    """How some of a layer's rows are held, and the tensors that hold them; plain ones, of bf16, have no scheme.

    Raises:
        ValueError: compressed-tensors has no form of them with the same values.
    """
    k, format = layer.in_features, layer.format
    if format == "bf16":
        return None, {"weight": unpack_pairs(layer.weight, k)[rows]}
    if layer.outer is not None:
        raise ValueError(
            f"{format} has scales of two levels, of which compressed-tensors has no form; the .gguf file is the "
            "model's checkpoint, which opsmith.load starts from"
        )
    assert layer.scale is not None
    q = unpack_integers(layer.weight, format, layer.scale.shape[-1], k)[rows]
    scale = layer.scale[..., rows].t() if layer.group_size else layer.scale[rows, None]
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    if format == "fp8":
        if layer.group_size:
            blocks = scale[::BLOCK]
            if not blocks.repeat_interleave(BLOCK, 0)[: len(q)].equal(scale):
                raise ValueError(
                    f"its gate and up share blocks of scales; each has rows of no multiple of {BLOCK}"
                )
            scale = blocks
            weights |= {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
        weights |= {"type": "float"}
        parts = {"weight": q.contiguous().view(torch.float8_e4m3fn), "weight_scale": scale}
        return _scheme("float-quantized", weights), parts
    if format == "mxfp4":
        if k % layer.group_size:
            raise ValueError(f"rows of {k} numbers, where mxfp4 has whole groups of {layer.group_size}")
        weights |= {"num_bits": 4, "type": "float", "strategy": "group", "group_size": layer.group_size}
        weights["scale_dtype"] = "torch.uint8"
        parts = {"weight_packed": to_words(q, 4).view(torch.uint8), "weight_scale": scale}
        return _scheme("mxfp4-pack-quantized", weights), parts
    if format == "int8_dynamic":
        inputs = weights | {"strategy": "token", "dynamic": True}
        parts = {"weight": (q ^ 128).view(torch.int8), "weight_scale": scale}
        return _scheme("int-quantized", weights, inputs), parts
    bits = weights["num_bits"] = FORMATS[format].bits
    place = None if layer.order is None else layer.order.argsort()  # of each number
    q = q if place is None else q[:, place]
    parts = {"weight_packed": to_words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(q.shape)}
    if layer.group_size:
        weights |= {"strategy": "group", "group_size": layer.group_size}
    if layer.zero is not None:
        zero = layer.zero[:, rows].view(torch.uint8)
        if int(zero.max()) > 15:
            raise ValueError(f"it has a zero of {int(zero.max())}, where compressed-tensors has 15 at most")
        weights["symmetric"] = False
        parts["weight_zero_point"] = to_words(zero, bits).t()
    if place is not None:
        weights["actorder"] = "group"
        parts["weight_g_idx"] = (place // layer.group_size).int()
    return _scheme("pack-quantized", weights), parts


def _scheme(format: str, weights: Scheme, inputs: Scheme | None = None) -> Scheme:
    return {"format": format, "weights": weights, "input_activations": inputs, "output_activations": None}


def scheme_of(how: dict[str, Any], path: str) -> Scheme:
    """What a configuration says of a layer: of the groups of layers, the one that has its name, or else its class.

    Raises:
        ValueError: none has, or there are no groups.
    """
    groups = how.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"config_groups must be groups of layers by name, got {str(groups)[:64]}")
    found: list[tuple[str, Scheme]] = [(t, g) for g in groups.values() for t in g.get("targets") or ()]
    named = [g for t, g in found if t == path or (t.startswith("re:") and re.match(t[3:], path))]
    for group in (*named, *(g for t, g in found if t == "Linear")):
        return group
    raise ValueError(f"none of {len(groups)} groups of layers is for it")


def read(parts: Parts, scheme: Scheme) -> PackedLinear:
    """A layer of its tensors; these say themselves in which form they are."""
    weights, inputs = scheme.get("weights") or {}, scheme.get("input_activations")
    scale = parts["weight_scale"]
    if scale.dtype == torch.uint8:
        return PackedLinear.from_float4(parts["weight_packed"], scale)
    if scale.dtype == torch.float8_e4m3fn:
        raise ValueError("its scales are float8 (nvfp4), where floats of 4 bits have powers of two (mxfp4)")
    whole, zero = parts.get("weight"), parts.get("weight_zero_point")
    # Symmetric layers may have zeros too, all of them 0.
    if whole is not None and zero is not None and bool(zero.float().any()):
        raise ValueError(_ZEROS)
    # The inputs of these stay as they are, whatever rounds them.
    if whole is not None and whole.dtype == torch.float8_e4m3fn:
        block = scheme.get("weight_block_size") or weights.get("block_structure") or (BLOCK, BLOCK)
        if tuple(block) != (BLOCK, BLOCK):  # whose scales may be as many
            raise ValueError(f"its blocks are {block}, where {BLOCK} by {BLOCK} are known")
        return PackedLinear.from_float8(whole, scale.float())
    if inputs is not None and not inputs.get("dynamic"):
        raise ValueError("its inputs are rounded by scales of the checkpoint, where dynamic ones are known")
    if "weight_packed" not in parts:
        return PackedLinear.from_int8(parts["weight"], scale.float().flatten(), dynamic=inputs is not None)
    bits, group = weights.get("num_bits"), weights.get("group_size")
    n, k = (int(size) for size in parts["weight_shape"])
    q = from_words(parts["weight_packed"], bits, k)
    zeros = None if zero is None else from_words(zero.t(), bits, n)
    if bits == 4:
        return four_bits(q, scale.t(), zeros, group, parts.get("weight_g_idx"))
    return eight_bits(q, scale, zeros, group, parts.get("weight_g_idx"), inputs is not None)


def four_bits(
    q: Tensor, scale: Tensor, zero: Tensor | None, group: Any, groups: Tensor | None
) -> PackedLinear:
    """Four bits by groups; where each row has one scale (no size, or -1), in any order, as groups that share it."""
    if group in (None, -1) and scale.shape[0] == 1:
        group, groups, count = GROUPS[-1], None, -(-q.shape[1] // GROUPS[-1])
        scale, zero = scale.expand(count, -1), None if zero is None else zero.expand(count, -1)
    zero = None if zero is None else zero.to(torch.int8)
    return PackedLinear.from_int4(q, scale, zero, group_size=int(group or 0), groups=groups)


def eight_bits(
    q: Tensor, scale: Tensor, zero: Tensor | None, group: Any, groups: Tensor | None, dynamic: bool = False
) -> PackedLinear:
    """Eight bits around zero: with a scale for each row (no size, or -1), or by groups, as blocks of q8_0."""
    if zero is not None and bool((zero != 128).any()):
        raise ValueError(_ZEROS)
    n, k = q.shape
    group = int(group) if group and group > 0 else k
    if groups is not None and not groups.equal(torch.arange(k, dtype=groups.dtype) // group):
        raise ValueError("its 8 bits are in the order of activations, where 4 bits in it are known")
    if scale.shape[1] == 1:
        return PackedLinear.from_int8((q ^ 128).view(torch.int8), scale.float().flatten(), dynamic=dynamic)
    half = scale.half()
    if group not in GROUPS or k % group or not half.to(scale.dtype).equal(scale):
        raise ValueError(
            f"its 8 bits have {scale.dtype} scales for groups of {group} of {k} numbers, where scales that "
            f"float16 holds are known, for whole groups of {', '.join(map(str, GROUPS))}"
        )
    half = half.repeat_interleave(group // _HALVES, 1).contiguous()
    blocks = (half[..., None].view(torch.uint8), (q ^ 128).view(n, -1, _HALVES))
    return PackedLinear.from_blocks(torch.cat(blocks, 2).flatten(1), format="q8_0")
