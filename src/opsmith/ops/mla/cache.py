"""MLACache: one compressed row a token, in the four layouts that kernels and other projects keep it in."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from opsmith.call.arguments import check_device, check_number, short
from opsmith.ops.mla.check import check_tensor
from opsmith.ops.pages import write_rows

Mode = Literal["joint", "split", "int8_tiled", "tiled"]
MODES: tuple[str, ...] = get_args(Mode)

_NAME = "MLACache"
_LARGEST_BLOCK = 256
_ROPE_TILE = 16
_TILES = {"int8_tiled": 32, "tiled": 16}  # of the latent row
_SHAPES = {  # of the latent tensor, and of rope's, which lies within it in "joint"
    "joint": ("[B, bs, 1, kv_lora + rope]",),
    "split": ("[B, bs, 1, kv_lora]", "[B, bs, 1, rope]"),
    "int8_tiled": ("[B, kv_lora/32, bs, 32]", "[B, rope/16, bs, 16]"),
    "tiled": ("[B, kv_lora/16, bs, 16]", "[B, rope/16, bs, 16]"),
}


def shapes(
    mode: str, blocks: int, block_size: int, kv_lora: int, rope: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Of the latent tensor and of rope's, which "joint" has none of."""
    tile = _TILES.get(mode)
    if tile is not None:
        latent = (blocks, kv_lora // tile, block_size, tile)
        return latent, (blocks, rope // _ROPE_TILE, block_size, _ROPE_TILE)
    if mode == "joint":
        return (blocks, block_size, 1, kv_lora + rope), None
    return (blocks, block_size, 1, kv_lora), (blocks, block_size, 1, rope)


class MLACache:
    """A paged latent KV cache: `slot = block * block_size + offset` holds `(k_nope, k_rope)` of one token.

    | mode | latent | rope |
    |---|---|---|
    | `"joint"` | `[B, bs, 1, kv_lora + rope]` | within it |
    | `"split"` | `[B, bs, 1, kv_lora]` | `[B, bs, 1, rope]` |
    | `"int8_tiled"` | int8 `[B, kv_lora/32, bs, 32]` | `[B, rope/16, bs, 16]` |
    | `"tiled"` | `[B, kv_lora/16, bs, 16]` | `[B, rope/16, bs, 16]` |

    >>> cache = MLACache.allocate("split", 4, 128, kv_lora=512, rope=64, dtype=torch.bfloat16)
    >>> cache.latent.shape, cache.token_bytes
    (torch.Size([4, 128, 1, 512]), 1152)

    Args:
        mode: one of the four.
        latent, rope: memory that you own, and that is written into. The first dimension may have any stride, so that
            a slice of a larger pool is a cache; the others must be contiguous. Blocks have 1 to 256 tokens.

    Raises:
        TypeError, ValueError: another layout, naming the tensor, the shape expected and the one that came.
    """

    def __init__(self, mode: str, latent: Tensor, rope: Tensor | None = None) -> None:
        if mode not in MODES:
            raise ValueError(f"{_NAME}: mode must be one of {', '.join(MODES)}, got {mode!r}")
        if mode == "joint" and rope is not None:
            raise ValueError(
                f'{_NAME}: in mode "joint" rope lies within latent {_SHAPES[mode][0]}; leave rope out'
            )
        for name, t, shape in zip(("latent", "rope"), (latent, rope), _SHAPES[mode], strict=False):
            if not isinstance(t, Tensor):
                raise TypeError(f"{_NAME}: {name} must be a tensor {shape}, got {type(t).__name__}")
            _check_layout(mode, name, t, shape, latent)
        self.mode, self.latent, self.rope = mode, latent, rope
        # How a "joint" row divides: as allocated, or as the last mla_preprocess had it.
        self.kv_lora = None if mode == "joint" else _width(latent, mode)
        self.ctkv_scale: Tensor | None = None  # of int8 rows, as the last mla_preprocess had them
        self.q_nope_scale: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        mode: str,
        blocks: int,
        block_size: int,
        *,
        kv_lora: int,
        rope: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> MLACache:
        """A cache of zeros.

        >>> MLACache.allocate("int8_tiled", 2, 16, kv_lora=512, rope=64, dtype=torch.bfloat16).latent.dtype
        torch.int8

        Args:
            mode: of the four layouts.
            blocks, block_size: tokens are `blocks * block_size`; a block has 1 to 256.
            kv_lora, rope: elements of a token's two parts; tiles want kv_lora in 32s (int8) or 16s, rope in 16s.
            dtype: of the model; the latent rows of "int8_tiled" are int8.
            device: where it lives.

        Raises:
            ValueError: another mode, or sizes that this mode does not hold.
        """
        sizes = {"blocks": blocks, "block_size": block_size, "kv_lora": kv_lora, "rope": rope}
        for name, size in sizes.items():
            check_number(_NAME, name, size, whole=True)
        if min(blocks, kv_lora, rope) < 0 or not 1 <= block_size <= _LARGEST_BLOCK:
            raise ValueError(
                f"{_NAME}: blocks, kv_lora and rope must not be negative and block_size in [1, {_LARGEST_BLOCK}], got "
                f"{blocks}, {kv_lora}, {rope} and {block_size}"
            )
        tile = _TILES.get(mode)
        if tile is not None and (kv_lora % tile or rope % _ROPE_TILE):
            raise ValueError(
                f'{_NAME}: mode "{mode}" wants kv_lora in multiples of {tile} and rope in multiples of {_ROPE_TILE}, '
                f'got {kv_lora} and {rope}; use "split" or "joint"'
            )
        latent, turned = shapes(mode, blocks, block_size, kv_lora, rope)
        held = torch.int8 if mode == "int8_tiled" else dtype
        made = cls(
            mode,
            torch.zeros(latent, dtype=held, device=device),
            None if turned is None else torch.zeros(turned, dtype=dtype, device=device),
        )
        made.kv_lora = kv_lora
        return made

    @property
    def blocks(self) -> int:
        return self.latent.shape[0]

    @property
    def block_size(self) -> int:
        return self.latent.shape[2 if self.mode in _TILES else 1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the model; of the rope part, in "int8_tiled"."""
        return self.latent.dtype if self.rope is None else self.rope.dtype

    @property
    def device(self) -> torch.device:
        return self.latent.device

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, without the gaps of a strided pool."""
        return self.latent.nbytes + (0 if self.rope is None else self.rope.nbytes)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in one layer."""
        slots = self.blocks * self.block_size
        return self.nbytes // slots if slots else 0

    def rows(self, kv_lora: int) -> tuple[Tensor, Tensor]:
        """Views [B, bs, kv_lora/tile, tile] and [B, bs, rope/tile, tile]; one tile, where the mode has none."""
        if self.mode in _TILES:
            assert self.rope is not None
            return self.latent.transpose(1, 2), self.rope.transpose(1, 2)
        if self.rope is None:
            return self.latent[..., :kv_lora], self.latent[..., kv_lora:]
        return self.latent, self.rope

    def check(self, op: str, kv_lora: int, rope: int, x: Tensor) -> None:
        """Refuse a cache for other sizes, or another input than x, naming its tensor and both shapes."""
        tile = _TILES.get(self.mode)
        if tile is not None:
            for name, width, step in (("kv_lora", kv_lora, tile), ("rope", rope, _ROPE_TILE)):
                if width % step:
                    raise ValueError(
                        f'{op}: cache mode "{self.mode}" wants {name} in multiples of {step}, got {width}'
                    )
        held = ("latent", self.latent), ("rope", self.rope)
        expected = shapes(self.mode, self.blocks, self.block_size, kv_lora, rope)
        for (name, t), shape, words in zip(held, expected, _SHAPES[self.mode], strict=False):
            int8 = (torch.int8,) if self.mode == "int8_tiled" and t is self.latent else ()
            what = f'{words} in mode "{self.mode}"'
            check_tensor(op, f"cache.{name}", t, shape or (), what, x, "the input", *int8)

    def rope_width(self, op: str, kv_lora: int) -> int:
        """How many elements of a row are the rotated ones."""
        if self.rope is not None:
            return _width(self.rope, self.mode)
        width = self.latent.shape[3] - kv_lora
        if width < 0:
            raise ValueError(
                f"{op}: cache.latent must have shape [B, bs, 1, kv_lora + rope] with kv_lora {kv_lora}, got "
                f"{tuple(self.latent.shape)}"
            )
        return width

    def check_scales(
        self, op: str, ctkv_scale: Any, heads: int = 0, q_nope_scale: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The scales of int8 rows and, for so many heads, of queries, as tensors.

        Refused where they are missing, or the cache is not int8.
        """
        int8 = self.mode == "int8_tiled"
        for name, value in (("ctkv_scale", ctkv_scale), ("q_nope_scale", q_nope_scale))[: 2 if heads else 1]:
            if value is not None and not int8:
                raise ValueError(f'{op}: {name} is for cache mode "int8_tiled", this one is "{self.mode}"')
            if value is None and int8:
                raise ValueError(f'{op}: cache mode "int8_tiled" needs {name}')
        latent = _scale(op, "ctkv_scale", ctkv_scale, self.device)
        if latent is not None and latent.numel() != 1:
            raise ValueError(f"{op}: ctkv_scale must be one number, got shape {tuple(latent.shape)}")
        queries = head_scales(op, q_nope_scale, heads, self.device)
        return None if latent is None else latent.reshape(()), queries

    def write(self, slots: Tensor, k_nope: Tensor, k_rope: Tensor) -> None:
        """Put rows [T, kv_lora] and [T, rope] at their slots, none at -1; autograd sees it, where it is recording."""
        self.kv_lora = k_nope.shape[1]
        if self.rope is None:
            written = [(self.latent, torch.cat((k_nope, k_rope), 1))]
        else:
            written = list(zip(self.rows(k_nope.shape[1]), (k_nope, k_rope), strict=True))
        for view, rows in written:
            write_rows(view, slots, rows.unflatten(1, view.shape[2:]))

    def __repr__(self) -> str:
        rope = "" if self.rope is None else f", rope={tuple(self.rope.shape)}"
        return f'MLACache("{self.mode}", latent={tuple(self.latent.shape)}{rope}, {short(self.dtype)})'


def check_cache_type(op: str, cache: Any) -> None:
    if not isinstance(cache, MLACache):
        raise TypeError(
            f"{op}: cache must be an MLACache, got {type(cache).__name__}; wrap memory with MLACache(mode, ...)"
        )


def check_mapping(op: str, slots: Any, tokens: int, cache: MLACache) -> None:
    """Refuse what is not one number for each token; which numbers is for `check_slots`."""
    what, integers = "one slot for each token", (torch.int64, torch.int32)
    check_tensor(op, "slot_mapping", slots, (tokens,), what, cache.latent, "the cache", *integers)


def head_scales(op: str, value: Any, heads: int, device: torch.device) -> Tensor | None:
    """What int8 queries are multiplied with, as a tensor."""
    scale = _scale(op, "q_nope_scale", value, device)
    if scale is not None and scale.numel() != heads:
        raise ValueError(
            f"{op}: q_nope_scale must have shape ({heads},), one for each head, got {tuple(scale.shape)}"
        )
    return None if scale is None else scale.reshape(heads)


def _scale(op: str, name: str, value: Any, device: torch.device) -> Tensor | None:
    if value is None:
        return None
    if isinstance(value, int | float):
        return torch.full((), float(value), device=device)  # no copy to a GPU, which cannot be captured
    try:
        t = torch.as_tensor(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a tensor or a number, got {value!r}") from None
    return (t if t.dtype in (torch.float32, torch.float64) else t.float()).detach().to(device)


def _width(t: Tensor, mode: str) -> int:
    """How many numbers of a token are in one of the tensors."""
    return t.shape[3] * (t.shape[1] if mode in _TILES else 1)


def _check_layout(mode: str, name: str, t: Tensor, shape: str, latent: Tensor) -> None:
    """Refuse one of a cache's tensors, the latent one or that of rope, which is like it."""
    got = tuple(t.shape)
    if t.dim() != 4:
        raise ValueError(f"{_NAME}: {name} must have shape {shape}, got {got}")
    block_size = latent.shape[2 if mode in _TILES else 1]
    if not 1 <= block_size <= _LARGEST_BLOCK:
        raise ValueError(
            f"{_NAME}: blocks must have 1 to {_LARGEST_BLOCK} tokens, latent {got} has {block_size}"
        )
    width = _width(t, mode)
    expected = shapes(mode, latent.shape[0], block_size, width, 0 if t is latent else width)
    if got != expected[0 if t is latent else 1]:
        raise ValueError(
            f'{_NAME}: {name} must have shape {shape} in mode "{mode}" (B = {latent.shape[0]}, bs = {block_size}), '
            f"got {got}"
        )
    if t.numel() and not t[0].is_contiguous():
        raise ValueError(
            f"{_NAME}: {name} may be strided in its first dimension only, got strides {t.stride()} for shape {got}"
        )
    if t.numel() and t.shape[0] > 1 and t.stride(0) < t[0].numel():
        raise ValueError(f"{_NAME}: the blocks of {name} overlap, strides {t.stride()} for shape {got}")
    integer = mode == "int8_tiled" and t is latent
    if (t.dtype != torch.int8) if integer else not t.is_floating_point():
        what = "int8" if integer else "floating-point"
        raise TypeError(f'{_NAME}: {name} must be {what} in mode "{mode}", got {short(t.dtype)}')
    check_device(_NAME, latent, t, "latent", "rope")
    if mode != "int8_tiled" and t.dtype != latent.dtype:
        raise TypeError(f"{_NAME}: rope must be {short(latent.dtype)} like latent, got {short(t.dtype)}")
