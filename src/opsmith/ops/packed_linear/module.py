"""PackedLinear: a linear layer whose weight is bfloat16, int8 or int4, packed once in the order in which it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.call.arguments import check_count, short
from opsmith.call.dispatch import compiling, is_sharded
from opsmith.call.layouts import in_huge_pages
from opsmith.ops.packed_linear import packed_linear
from opsmith.ops.packed_linear.formats import BLOCK, CHOSEN, FORMATS, GROUPS
from opsmith.ops.packed_linear.gguf import BLOCKS, KEPT
from opsmith.ops.packed_linear.inputs import Inputs
from opsmith.ops.packed_linear.weight import (
    Packed,
    dequantize,
    empty,
    keep_blocks,
    pack_integers,
    quantize,
    rows_of,
)
from opsmith.ops.rounding import KeepsDtypes, RoundingError

_NAME = "PackedLinear"
_STATE = ("weight", "scale", "zero", "outer")


class PackedLinear(KeepsDtypes):
    """A linear layer on a packed weight: half, a quarter or an eighth of float32's memory, and of its time to read.

    `y = x @ w.T + bias`, in x's dtype; see `packed_linear` for w in each format. No gradient for the weight.

    >>> layer = PackedLinear.from_linear(torch.nn.Linear(64, 48), format="int4", group_size=32)
    >>> layer(torch.randn(2, 64)).shape
    torch.Size([2, 48])

    Args:
        in_features, out_features: K and N.
        bias: whether there is one.
        format: "bf16"; "int8", a scale for each output; "int8_dynamic", which rounds the rows of the input too; "int4";
            "fp8", floats of 8 bits (e4m3); "mxfp4", floats of 4 bits (e2m1); or one of GGUF's: "q8_0", "q6_k",
            "q5_0", "q5_k", "q4_0", "q4_k".
        group_size: of int4, the numbers along K that share a scale: 32, 64 or 128; of fp8, 0 for a scale of each
            row, else it is one for each block of 128 rows by 128.
        symmetric: of int4, whether 0 lies in the middle of the range, or each group has its own zero.
        dtype: of the bias.
        device: of everything.

    The buffers `weight`, `scale`, `zero`, `outer`, `order` and `bias` are the state; their layout is the same on every
    machine. Where there is an `order` of the inputs, as `from_int4` makes it, the weight's columns are in it.

    Raises:
        TypeError, ValueError: for a format or sizes that make no sense.
    """

    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None
    outer: Tensor | None
    order: Tensor | None
    bias: Tensor | None
    error: RoundingError | None  # set by `from_linear`; None for a module whose state was loaded
    kept = (*_STATE, "order")  # what the module is cast to is the bias's dtype

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str,
        group_size: int = 128,
        symmetric: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_options(format, group_size, symmetric)
        self.in_features = check_count(_NAME, "in_features", in_features)
        self.out_features = check_count(_NAME, "out_features", out_features)
        self.format = format
        self.group_size = group_size if format == "int4" else FORMATS[format].group
        if format == "fp8":
            self.group_size = BLOCK if group_size else 0
        self.symmetric = symmetric or format != "int4"
        self.error = None
        buffers = empty(format, out_features, in_features, self.group_size, self.symmetric, device)
        for name, t in zip(_STATE, buffers, strict=True):
            self.register_buffer(name, t)
        self.register_buffer("order", None)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(
        cls,
        layer: nn.Linear,
        *,
        format: str,
        group_size: int = 128,
        symmetric: bool = True,
        release: bool = False,
        inputs: Inputs | None = None,
    ) -> PackedLinear:
        """Pack the weight of a linear layer, some rows at a time.

        int8: `scale = max|row| / 127`, so a weight is off by at most half its row's scale. int4: sixteen steps for each
        group of K; a weight is off by at most one of them, or, rounded for the layer's inputs, by so much that results
        change least. What was lost in total is in `.error`.

        >>> PackedLinear.from_linear(torch.nn.Linear(64, 48), format="int8").error.relative < 0.01
        True

        Args:
            layer: an `nn.Linear`; any floating-point dtype.
            format, group_size, symmetric: as for the class.
            release: give the layer's own weight back to the system; the layer can't be used afterwards.
            inputs: of int4, what the layer's inputs are like (`opsmith.ops.packed_linear.inputs.Inputs`).

        Raises:
            TypeError, ValueError: for what is no linear layer, a wrong format, and a weight that is not finite.
        """
        if not isinstance(layer, nn.Linear):
            raise TypeError(f"{_NAME}: expected a torch.nn.Linear, got {type(layer).__name__}")
        _check_options(format, group_size, symmetric)
        weight = layer.weight.detach()
        if not weight.is_floating_point():
            raise TypeError(f"{_NAME}: the weight must be floating-point, got {short(weight.dtype)}")
        n, k = weight.shape
        if inputs is not None and (format != "int4" or inputs.sum.shape != (k, k)):
            raise ValueError(
                f"{_NAME}: inputs are for int4 and must be of {k} numbers, "
                f"got {format} and {len(inputs.sum)}; leave them out, or make Inputs({k})"
            )
        how: dict[str, Any] = {"format": format, "group_size": group_size, "symmetric": symmetric}
        made = cls(k, n, layer.bias is not None, **how, dtype=weight.dtype, device=weight.device)
        made.error = quantize(weight, format, made.group_size, made.packed, inputs)
        if made.bias is not None:
            made.bias.copy_(layer.bias.detach())
        made.train(layer.training)
        if release:
            layer.weight.data = weight.new_empty(0)
        return made

    @classmethod
    def from_blocks(cls, rows: Tensor, *, format: str) -> PackedLinear:
        """A layer without a bias of the blocks that a GGUF file holds; `.dequantize()` gives the file's values exactly.

        >>> PackedLinear.from_blocks(torch.zeros(48, 2 * 34, dtype=torch.uint8), format="q8_0").in_features
        64

        Rows are uint8 [N, bytes], whole blocks as they lie in the file. q3_k and iq4_xs are kept as q6_k, iq4_nl as
        q8_0, which hold the same values. Others, and a scale that is not finite, raise
        ValueError.
        """
        if format not in BLOCKS:
            raise ValueError(f"{_NAME}: format of blocks must be one of {', '.join(BLOCKS)}, got {format!r}")
        numbers, size = BLOCKS[format]
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] % size:
            raise ValueError(
                f"{_NAME}: {format} rows must be uint8 [N, a multiple of {size}], "
                f"got {short(rows.dtype)} {tuple(rows.shape)}"
            )
        k = rows.shape[1] // size * numbers
        made = cls(k, rows.shape[0], False, format=KEPT.get(format, format), device=rows.device)
        keep_blocks(rows, format, made.packed)
        return made

    @classmethod
    def from_int4(
        cls,
        numbers: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        *,
        group_size: int,
        groups: Tensor | None = None,
    ) -> PackedLinear:
        """A layer without a bias of numbers from 0 to 15 that somebody else rounded: `w = (number - zero) scale`.

        >>> PackedLinear.from_int4(torch.zeros(48, 64).byte(), torch.ones(2, 48).half(), group_size=32).in_features
        64

        Numbers are uint8 [N, K]; scales bfloat16 or float16 [ceil(K / group_size), N], zeros, by default 8, int8 like
        them. Others raise TypeError or ValueError. `groups` [K] says which scale each number of a row has, where that
        is not the next one after `group_size` of them: GPTQ takes the numbers in the order of activations.
        """
        n, k = _numbers(numbers, torch.uint8)
        made = cls(
            k, n, False, format="int4", group_size=group_size, symmetric=zero is None, device=numbers.device
        )
        _scales("scale", scale, (-(-k // group_size), n), torch.float16, torch.bfloat16)
        if numbers.numel() and int(numbers.max()) > 15:
            raise ValueError(f"{_NAME}: numbers must be at most 15, got {int(numbers.max())}")
        if zero is not None:
            _scales("zero", zero, (-(-k // group_size), n), torch.int8)
            made.zero = zero.contiguous()
        made.scale = scale.contiguous()
        if groups is not None and not groups.equal(in_order := torch.arange(k).to(groups) // group_size):
            order = groups.argsort(stable=True)
            if not groups[order].equal(in_order):
                raise ValueError(f"{_NAME}: groups must have {group_size} of {k} numbers each")
            numbers, made.order = numbers[:, order], order
        made.weight.copy_(pack_integers(numbers, "int4"))
        return made

    @classmethod
    def from_int8(cls, numbers: Tensor, scale: Tensor, *, dynamic: bool = False) -> PackedLinear:
        """A layer without a bias of int8 numbers [N, K] that somebody else rounded, and float32 scales [N].

        >>> PackedLinear.from_int8(torch.zeros(48, 64).to(torch.int8), torch.ones(48)).format
        'int8'

        With `dynamic` the rows of the input are rounded too. Others raise TypeError or ValueError.
        """
        n, k = _numbers(numbers, torch.int8)
        format = "int8_dynamic" if dynamic else "int8"
        made = cls(k, n, False, format=format, device=numbers.device)
        _scales("scale", scale, (n,), torch.float32)
        made.scale = scale.contiguous()
        made.weight.copy_(pack_integers(numbers.contiguous().view(torch.uint8) ^ 128, format))
        return made

    @classmethod
    def from_float8(cls, weight: Tensor, scale: Tensor) -> PackedLinear:
        """A layer without a bias of a float8 weight and its scales, as DeepSeek-V3 was published: `w = weight scale`.

        >>> PackedLinear.from_float8(torch.zeros(200, 300).to(torch.float8_e4m3fn), torch.ones(2, 3)).format
        'fp8'

        The weight is float8_e4m3fn [N, K]; scales are float32, one for each block of 128 by 128, or [N] or [N, 1].
        Others, and what is not finite, raise TypeError or ValueError.
        """
        n, k = _numbers(weight, torch.float8_e4m3fn)
        blocks = (-(-n // BLOCK), -(-k // BLOCK))
        by_row = scale.shape in ((n,), (n, 1)) and scale.shape != blocks
        if scale.dtype != torch.float32 or not (by_row or scale.shape == blocks):
            raise ValueError(
                f"{_NAME}: scale must be float32 {list(blocks)}, [{n}] or [{n}, 1], "
                f"got {short(scale.dtype)} {list(scale.shape)}"
            )
        bytes_ = weight.contiguous().view(torch.uint8)
        if not bool(scale.isfinite().all()) or bool((bytes_ & 127 == 127).any()):
            raise ValueError(
                f"{_NAME}: a float8 weight and its scales must be finite, got NaN or an infinity"
            )
        made = cls(k, n, False, format="fp8", group_size=0 if by_row else BLOCK, device=weight.device)
        assert made.scale is not None
        made.scale.copy_(scale.flatten() if by_row else scale.repeat_interleave(BLOCK, 0)[:n].t())
        made.weight.copy_(pack_integers(bytes_, "fp8"))
        return made

    @classmethod
    def from_float4(cls, weight: Tensor, scale: Tensor) -> PackedLinear:
        """A layer without a bias of mxfp4, as GPT-OSS was published: `w = weight 2^(scale - 127)`.

        >>> PackedLinear.from_float4(torch.zeros(48, 32).byte(), torch.zeros(48, 2).byte()).format
        'mxfp4'

        The weight is uint8 [N, K / 2], floats of four bits (e2m1), the first of two in the lower half; scales are uint8
        [N, K / 32]. Others, and a scale of 255, which is no number, raise TypeError or ValueError.
        """
        n, half = _numbers(weight, torch.uint8)
        _scales("scale", scale, (n, half // 16), torch.uint8)
        if half % 16:
            raise ValueError(f"{_NAME}: rows of mxfp4 must be whole groups of 16 bytes, got {half}")
        if bool((scale == 255).any()):
            raise ValueError(f"{_NAME}: every scale must be finite, got 255, which stands for NaN")
        made = cls(2 * half, n, False, format="mxfp4", device=weight.device)
        assert made.scale is not None
        made.scale.copy_(scale.t())
        made.weight.copy_(pack_integers(torch.stack((weight & 15, weight >> 4), 2).flatten(1), "mxfp4"))
        return made

    def forward(self, input: Tensor) -> Tensor:
        """`input @ w.T + bias`.

        Args:
            input: [..., in_features], float32, bfloat16 or float16.

        Raises:
            TypeError, ValueError: for a wrong dtype, shape or device.
        """
        held: Any = self._buffers  # asking the module itself for a buffer takes five times as long
        weight, bias = held["weight"], held["bias"]
        try:
            fits = input.shape[-1] == self.in_features
        except (AttributeError, IndexError, TypeError):  # no tensor, or a number
            fits = False
        if not fits:  # a packed weight may be padded: its shape alone does not say how many columns it has
            got = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise (ValueError if isinstance(input, Tensor) else TypeError)(
                f"packed_linear: input must be a tensor [..., {self.in_features}], got {got}"
            )
        if bias is not None and bias.dtype is not input.dtype and input.is_floating_point():
            bias = bias.to(input.dtype)
        if (order := held["order"]) is not None:
            if not compiling() and is_sharded(input):
                spread: Any = input
                alike = order if is_sharded(order) else spread.from_local(order, spread.device_mesh)
                # Where K is spread, PyTorch gathers it: as it was, it is refused.
                input = spread.index_select(-1, alike).redistribute(placements=spread.placements)
            else:
                input = input.index_select(-1, order)
        return packed_linear(
            input,
            weight,
            held["scale"],
            held["zero"],
            bias,
            format=self.format,
            group_size=self.group_size,
            outer=held["outer"],
        )

    @property
    def packed(self) -> Packed:
        """The packed weight: its numbers, scales, zeros, and what these are multiplied by."""
        return self.weight, self.scale, self.zero, self.outer

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, its scales and zeros: what a call reads."""
        return sum(t.nbytes for t in self.packed if t is not None)

    @property
    def bits(self) -> int:
        """Bits of one weight, scales aside."""
        return FORMATS[self.format].bits

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the packed one stands for."""
        weight = dequantize(
            *self.packed, format=self.format, k=self.in_features, group_size=self.group_size, dtype=dtype
        )
        return weight if self.order is None else weight[:, self.order.argsort()]

    def extra_repr(self) -> str:
        groups = f", group_size={self.group_size}" if self.format in CHOSEN else ""
        groups += f", symmetric={self.symmetric}" if self.format == "int4" else ""
        groups += ", ordered" * (self.order is not None)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, format={self.format!r}{groups}"
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # Scales that are columns of several layers' are saved as this layer's own: safetensors takes no others.
        for name in self._buffers if not keep_vars else ():
            if (held := destination.get(prefix + name)) is not None:
                destination[prefix + name] = held.contiguous()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.error = None


class PackedExperts(PackedLinear):
    """The weights of E experts, each packed as a `PackedLinear` of one format: its buffers have E in front.

    >>> layers = (PackedLinear.from_linear(torch.nn.Linear(64, 48, bias=False), format="q8_0") for _ in range(4))
    >>> weights = PackedExperts.of(layers, 4)
    >>> weights.weight.shape, weights[3].dequantize().shape
    (torch.Size([4, 48, 64]), torch.Size([48, 64]))

    It is what `experts` takes as `gate_up` or `down`; called it cannot be.
    """

    @classmethod
    def of(cls, layers: Iterable[PackedLinear], count: int) -> PackedExperts:
        """Put so many layers side by side, alike and without biases; of an iterator's no two are in memory at once.

        Others, and another number of them, raise TypeError or ValueError. `.error` is the worst of theirs.
        """
        made: Any = None
        number = -1
        for number, layer in enumerate(layers):
            if not isinstance(layer, PackedLinear):
                raise TypeError(f"PackedExperts: expected packed layers, got {type(layer).__name__}")
            if layer.order is not None:
                raise ValueError(f"PackedExperts: layer {number} has columns in the order of activations")
            if made is None:
                made = _empty(cls, layer)
                for name in _STATE:
                    if (t := layer._buffers[name]) is not None:
                        made._buffers[name] = in_huge_pages(t.new_empty(count, *t.shape))
            if number >= count or layer.bias is not None or layer.extra_repr() != made.extra_repr():
                raise ValueError(
                    f"PackedExperts: expected {count} layers of {made.extra_repr()}, got ({layer.extra_repr()}) "
                    f"at {number}"
                )
            for name in _STATE:
                if made._buffers[name] is not None:
                    made._buffers[name][number].copy_(layer._buffers[name])
            made.error = max(filter(None, (made.error, layer.error)), key=lambda e: e.relative, default=None)
        if number + 1 != count or not count:
            raise ValueError(f"PackedExperts: expected {count} layers, one at least, got {number + 1}")
        return made  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, expert: int) -> PackedLinear:
        """An expert's layer, on the memory of all."""
        one = _empty(PackedLinear, self)
        one._buffers.update({n: None if (t := self._buffers[n]) is None else t[expert] for n in _STATE})
        return one

    def __iter__(self) -> Iterator[PackedLinear]:
        return (self[expert] for expert in range(len(self)))

    def forward(self, input: Tensor) -> Tensor:
        raise TypeError("PackedExperts: give it to opsmith.ops.experts, as gate_up or down")

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [E, N, K] that the packed ones stand for."""
        return torch.stack([layer.dequantize(dtype) for layer in self])


def _empty(cls: type[PackedLinear], like: PackedLinear) -> PackedLinear:
    group = like.group_size if like.format in CHOSEN else 128
    how: dict[str, Any] = {"format": like.format, "group_size": group, "symmetric": like.symmetric}
    return cls(like.in_features, like.out_features, False, **how, device="meta")


class PackedEmbedding(nn.Module):
    """An embedding that reads the rows of a packed weight: an output layer's, where the two are tied.

    `y = w[ids] factor`, rounded to `dtype` before the product, as an `nn.Embedding` of that dtype rounds.

    >>> table = PackedLinear.from_linear(torch.nn.Linear(64, 1000, bias=False), format="q8_0")
    >>> PackedEmbedding(table)(torch.tensor([[3, 5]])).shape
    torch.Size([1, 2, 64])

    Args:
        packed: the weight [N, K] of bytes or nibbles, one row for each id.
        factor: what rows are multiplied by, as Gemma's are.
        dtype: of the result.

    Raises:
        ValueError: for a format of pairs, bf16, and for columns in an order of their own.
    """

    like: Tensor

    def __init__(
        self, packed: PackedLinear, *, factor: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        if packed.format == "bf16" or packed.order is not None:
            what = "bf16" if packed.order is None else "a weight whose inputs are ordered"
            raise ValueError(f"PackedEmbedding: rows of {what} cannot be read alone; keep the nn.Embedding")
        self.table, self.factor = packed, factor
        # `.to` and `.half()` change it.
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.like.dtype

    def forward(self, input: Tensor) -> Tensor:
        """The rows [..., K] of ids [...].

        Raises:
            IndexError: for an id that has no row.
        """
        table = self.table
        rows = rows_of(table.packed, input, table.format, table.in_features, table.group_size).to(self.dtype)
        return rows if self.factor == 1 else rows * self.factor

    def extra_repr(self) -> str:
        return f"factor={self.factor}, dtype={self.dtype}"


def _numbers(numbers: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    if numbers.dtype != dtype or numbers.dim() != 2:
        got = f"{short(numbers.dtype)} {list(numbers.shape)}"
        raise TypeError(f"{_NAME}: numbers must be {short(dtype)} [N, K], got {got}")
    return numbers.shape[0], numbers.shape[1]


def _scales(name: str, t: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if t.shape != shape or t.dtype not in dtypes:
        wanted = f"{' or '.join(map(short, dtypes))} {list(shape)}"
        raise ValueError(f"{_NAME}: {name} must be {wanted}, got {short(t.dtype)} {list(t.shape)}")
    if t.is_floating_point() and not bool(t.isfinite().all()):
        raise ValueError(f"{_NAME}: every {name} must be finite, got NaN or an infinity")


def _check_options(format: Any, group_size: Any, symmetric: Any) -> None:
    if format not in FORMATS:
        raise ValueError(f"{_NAME}: format must be one of {', '.join(FORMATS)}, got {format!r}")
    groups = (*GROUPS, 0) if format == "fp8" else GROUPS
    if isinstance(group_size, bool) or group_size not in groups:
        raise ValueError(f"{_NAME}: group_size must be one of {groups}, got {group_size!r}")
    if not isinstance(symmetric, bool):
        raise TypeError(f"{_NAME}: symmetric must be True or False, got {symmetric!r}")
