"""MLAWeights: what MLA pre-processing multiplies with, in floating point or quantized, from any checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opsmith.call.arguments import Maybe, check_number, short
from opsmith.call.layouts import dense, dense_rows
from opsmith.ops.mla.check import check_tensor
from opsmith.ops.mla.names import either_name
from opsmith.ops.mla.projection import QUANTS, Projection, project, quantize_projection, static_scale
from opsmith.ops.rms_norm.quant import normalize
from opsmith.ops.rounding import KeepsDtypes

_NAME = "MLAWeights"
_STAND_IN_ROWS = 256
_DEEPSEEK = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim")

Sizes = tuple[int, int, int, int, int | None]  # heads, nope, rope, kv_lora, q_lora


class Parts(NamedTuple):
    """The tensors of `MLAWeights` in the order in which kernels take them; every size is read off their shapes."""

    wdqkv: Tensor  # to [ckv | k_pe | q]
    wuq: Tensor  # to the queries of all heads
    wuk: Tensor
    gamma0: Maybe  # of the norm of the input,
    gamma1: Maybe  # of the latent queries,
    gamma2: Tensor  # of the keys
    beta0: Maybe = None
    beta1: Maybe = None
    bias0: Maybe = None
    bias1: Maybe = None
    descale0: Maybe = None
    descale1: Maybe = None
    scale0: Maybe = None
    offset0: Maybe = None
    scale1: Maybe = None
    offset1: Maybe = None
    quant: str | None = None
    interleaved: bool = False

    @property
    def tensors(self) -> tuple[Maybe, ...]:
        return self[:-2]

    @property
    def down(self) -> Projection:
        return Projection(self.wdqkv, self.bias0, self.descale0, self.scale0, self.offset0)

    @property
    def up(self) -> Projection:
        return Projection(self.wuq, self.bias1, self.descale1, self.scale1, self.offset1)

    @property
    def sizes(self) -> Sizes:
        heads, nope, kv_lora = self.wuk.shape
        rope = self.wuq.shape[0] // max(heads, 1) - nope
        q_lora = None if self.gamma1 is None else self.wdqkv.shape[0] - kv_lora - rope
        return heads, nope, rope, kv_lora, q_lora

    @property
    def heads(self) -> int:
        return self.wuk.shape[0]

    @property
    def nope(self) -> int:
        return self.wuk.shape[1]

    @property
    def rope(self) -> int:
        return self.sizes[2]

    @property
    def kv_lora(self) -> int:
        return self.wuk.shape[2]

    @property
    def q_lora(self) -> int | None:
        return self.sizes[4]

    def split(self, a: Tensor) -> tuple[Tensor, ...]:
        """What the down-projection gives: [ckv | k_pe], and the latent queries."""
        keys = self.kv_lora + self.rope
        return a[:, :keys], a[:, keys:]

    def projecting(self, down: Projection, up: Projection, **changes: Any) -> Parts:
        """With other projections, and other changes."""
        for i, p in enumerate((down, up)):
            changes |= {f"{name}{i}": t for name, t in zip(p._fields[1:], p[1:], strict=True)}
        return self._replace(wdqkv=down.weight, wuq=up.weight, **changes)

    def as_rows(self) -> tuple[Maybe, ...]:
        """The tensors as kernels take them: contiguous, though rows of the projections may lie apart (not as one)."""
        weights = [w.view(torch.int8) if w.dtype == torch.uint8 else w for w in self[:2]]
        rows = [dense_rows(w) if w.stride()[0] >= w.shape[1] else w.contiguous() for w in weights]
        return (*rows, *map(dense, self[2:-2]))

    def check(self, op: str, sizes: Sizes, wuv: Any = None) -> None:
        """Refuse tensors of other shapes or dtypes than these sizes and this form of quantization have."""
        heads, nope, rope, kv_lora, q_lora = sizes
        for name, value in zip(("heads", "nope", "rope", "kv_lora"), sizes, strict=False):
            check_number(op, name, value, whole=True)
            if value is not None and value < 1 and name != "rope":
                raise ValueError(f"{op}: {name} must be positive, got {value}")
        if q_lora is not None:
            check_number(op, "q_lora", q_lora, whole=True)
        if rope < 0 or rope % 2 or (q_lora is not None and q_lora < 1):
            raise ValueError(
                f"{op}: rope must be even and not negative, q_lora positive or None, got {rope} and {q_lora}"
            )
        wdqkv = self.wdqkv
        if not isinstance(wdqkv, Tensor) or wdqkv.dim() != 2 or not wdqkv.shape[1]:
            got = tuple(wdqkv.shape) if isinstance(wdqkv, Tensor) else type(wdqkv).__name__
            raise ValueError(f"{op}: wdqkv must be a tensor [kv_lora + rope + q_lora, D], got {got}")
        if isinstance(self.wuk, Tensor) and not self.wuk.is_floating_point():
            raise TypeError(f"{op}: wuk must be floating-point, got {short(self.wuk.dtype)}")
        for name in ("gamma1", "beta1"):
            if q_lora is None and getattr(self, name) is not None:
                raise ValueError(f"{op}: {name} must be None without q_lora: x goes straight through wuq")
        if self.beta0 is not None and self.gamma0 is None:
            raise ValueError(f"{op}: beta0 belongs to the norm of gamma0, which is None: x comes normalized")
        packed, size = self.quant == "weight_int4", wdqkv.shape[1]
        inner = self.wuq.shape[1] if packed else (size if q_lora is None else q_lora)
        if packed and q_lora is not None and not q_lora <= 2 * inner <= -(-q_lora // 64) * 64:
            raise ValueError(
                f"{op}: wuq must have {-(-q_lora // 2)} bytes a row, or the next multiple of 32, for two numbers of "
                f"q_lora each, got {inner}"
            )
        n0, n1 = kv_lora + rope + (q_lora or 0), heads * (nope + rope)
        channels = "one for each output channel"
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "wuk": ((heads, nope, kv_lora), "heads, nope, kv_lora"),
            "wdqkv": ((n0, size), "kv_lora + rope + q_lora, D"),
            "wuq": ((n1, inner), "heads * (nope + rope), q_lora (D, without q_lora)"),
            "gamma2": ((kv_lora,), "kv_lora"),
            "bias0": ((n0,), channels),
            "bias1": ((n1,), channels),
        }
        needed = ["wuk", "wdqkv", "wuq", "gamma2"]
        if q_lora is not None:
            shapes |= dict.fromkeys(("gamma1", "beta1"), ((q_lora,), "q_lora"))
            needed.append("gamma1")
        if not packed:
            shapes |= dict.fromkeys(("gamma0", "beta0"), ((size,), "D"))
            shapes |= {"descale0": ((n0,), channels), "descale1": ((n1,), channels)}
            needed += ["descale0", "descale1"] if self.quant else []
        if wuv is not None:
            v = wuv.shape[1] if isinstance(wuv, Tensor) and wuv.dim() == 3 else 0
            shapes["wuv"] = ((heads, v, kv_lora), "heads, v, kv_lora")
        given = {**self._asdict(), "wuv": wuv}
        for name, (shape, what) in shapes.items():
            if given[name] is not None or name in needed:
                allowed = self._dtypes(name)
                check_tensor(op, name, given[name], shape, what, self.wuk, "wuk", *allowed)

    def _dtypes(self, name: str) -> tuple[torch.dtype, ...]:
        """Those that one of the tensors may have, where it is not wuk's."""
        if name.startswith("descale"):
            return torch.float32, torch.float64
        if name in ("wdqkv", "wuq") and self.quant is not None:
            return (torch.uint8 if self.quant == "weight_int4" else torch.int8,)
        if name.startswith("bias") and self.quant == "per_tensor":
            return (torch.int32,)
        return (self.wuk.dtype, torch.float32) if name.startswith(("gamma", "beta")) else ()


TENSORS = Parts._fields[:-2]


class MLAWeights(KeepsDtypes):
    """The weights of one layer's MLA pre-processing.

    `a = y @ wdqkv.T`, rows ordered `[ckv | k_pe | q]`; `q = norm(q) @ wuq.T`; `q_out = q_nope @ wuk` for each head.

    >>> w = MLAWeights(
    ...     torch.randn(32 + 8 + 24, 64), torch.randn(4 * (16 + 8), 24), torch.randn(4, 16, 32),
    ...     gamma0=torch.ones(64), gamma1=torch.ones(24), gamma2=torch.ones(32),
    ...     heads=4, nope=16, rope=8, kv_lora=32, q_lora=24,
    ... )
    >>> w.quantize("per_token").wdqkv.dtype
    torch.int8

    The tensors are kept as they are given: one that requires gradients gets them. What is an `nn.Parameter` is a
    parameter of this module, everything else a buffer; `state_dict` holds both.

    Args:
        wdqkv: [kv_lora + rope + q_lora, D], the down-projections of keys and values, of the shared key, of queries.
        wuq: [heads * (nope + rope), q_lora], the up-projection of queries.
        wuk: [heads, nope, kv_lora], the up-projection of keys, absorbed into the queries.
        gamma1, gamma2: [q_lora] and [kv_lora], the norms' weights.
        gamma0: [D], the weight of the norm before everything; None: x comes normalized.
        beta0, beta1: [D] and [q_lora], added after these norms.
        bias0, bias1: of wdqkv and wuq, as many numbers as these have rows.
        heads, nope, rope, kv_lora, q_lora: the sizes; q_lora=None: wuq is [heads * (nope + rope), D], applied to the
            normalized x, and gamma1 must be None.
        interleaved: the rope dimensions are pairs of neighbors, as in DeepSeek's checkpoints, and not two halves.
        wuv: [heads, v, kv_lora], the up-projection of values, for `mla_attention`.

    Raises:
        TypeError, ValueError: naming the tensor, the shape expected and the one that came.

    Source: DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", 2024.
    """

    @either_name
    def __init__(
        self,
        wdqkv: Tensor,
        wuq: Tensor,
        wuk: Tensor,
        *,
        gamma1: Tensor | None,
        gamma2: Tensor,
        gamma0: Tensor | None = None,
        beta0: Tensor | None = None,
        beta1: Tensor | None = None,
        bias0: Tensor | None = None,
        bias1: Tensor | None = None,
        heads: int,
        nope: int,
        rope: int,
        kv_lora: int,
        q_lora: int | None,
        interleaved: bool = False,
        wuv: Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, t in (("wdqkv", wdqkv), ("wuq", wuq)):
            if isinstance(t, Tensor) and not t.is_floating_point():
                raise TypeError(
                    f"{_NAME}: {name} must be floating-point, got {short(t.dtype)}; "
                    "MLAWeights.quantized takes quantized weights"
                )
        norms = gamma0, gamma1, gamma2, beta0, beta1
        parts = Parts(wdqkv, wuq, wuk, *norms, bias0, bias1, interleaved=bool(interleaved))
        parts.check(_NAME, (heads, nope, rope, kv_lora, q_lora), wuv)
        self._fill(parts, wuv)

    @classmethod
    @either_name
    def quantized(
        cls,
        wdqkv_int8: Tensor,
        wuq_int8: Tensor,
        wuk: Tensor,
        *,
        descale0: Tensor,
        descale1: Tensor,
        scale0: Tensor | float | None = None,
        offset0: Tensor | float | None = None,
        scale1: Tensor | float | None = None,
        offset1: Tensor | float | None = None,
        bias0: Tensor | None = None,
        bias1: Tensor | None = None,
        gamma1: Tensor | None,
        gamma2: Tensor,
        gamma0: Tensor | None = None,
        beta0: Tensor | None = None,
        beta1: Tensor | None = None,
        heads: int,
        nope: int,
        rope: int,
        kv_lora: int,
        q_lora: int | None,
        interleaved: bool = False,
        wuv: Tensor | None = None,
    ) -> MLAWeights:
        """Weights that are int8 already: per-tensor static where `scale0` is given, else per-token dynamic.

        `a = (int32(q8(y / scale0 + offset0) @ wdqkv_int8.T) + bias0) * descale0`; without scales
        `a = int32(...) * descale0 * s`, `s = max|y| / 127` of each token.

        Args:
            wdqkv_int8, wuq_int8: int8, in the shapes of the class.
            wuk, gamma0 to wuv: as for the class; wuk stays in the dtype of the inputs.
            descale0, descale1: float32, one for each output channel.
            scale0, offset0, scale1, offset1: one number each. The offsets are 0 where they are not given. Without
                q_lora, one quantized x may serve both projections: scale1 and offset1 are then scale0 and offset0.
            bias0, bias1: int32, one for each output channel, added to the sums before they are scaled; per tensor only.

        Raises:
            TypeError, ValueError: naming the tensor, what was expected and what came.
        """
        if q_lora is None and scale1 is None:
            scale1, offset1 = scale0, offset0 if offset1 is None else offset1
        if (scale0 is None) != (scale1 is None):
            raise ValueError(
                f"{_NAME}: scale0 and scale1 must both be given (per tensor) or both be None (per token)"
            )
        quant = "per_token" if scale0 is None else "per_tensor"
        if quant == "per_token" and any(v is not None for v in (offset0, offset1, bias0, bias1)):
            raise ValueError(
                f"{_NAME}: per-token quantization has no offset and no bias; leave them out, or give scale0 and scale1"
            )
        norms = gamma0, gamma1, gamma2, beta0, beta1
        made = Parts(wdqkv_int8, wuq_int8, wuk, *norms, bias0, bias1, descale0, descale1)
        parts = made._replace(quant=quant, interleaved=bool(interleaved))
        parts.check(_NAME, (heads, nope, rope, kv_lora, q_lora), wuv)
        for i, (scale, offset) in enumerate(((scale0, offset0), (scale1, offset1))):
            if scale is not None:
                parts = parts._replace(**static_scale(_NAME, i, scale, offset, wuk))
        return cls._made(parts, wuv)

    @classmethod
    def from_deepseek(cls, attention_module: nn.Module) -> MLAWeights:
        """The weights of a Hugging Face DeepSeek-V2 or V3 attention module, its rope rows permuted to two halves.

        Queries come before keys there, `kv_b_proj` holds wuk and wuv, and the rope rows are pairs of neighbors; what
        comes out is `interleaved=False`. The norm before the attention is not part of the module: gamma0 is None.
        The tensors are copies without gradients.

        Raises:
            TypeError: a module that is no multi-head latent attention, naming what it lacks.
        """
        return cls(**_read_deepseek(attention_module)).deinterleaved()

    def quantize(self, form: str, calibration: Tensor | Iterable[Tensor] | None = None) -> MLAWeights:
        """Both projections with quantized weights; wuk stays as it is.

        "per_tensor": int8 times int8, activations with one static scale and offset each; "per_token": int8 times int8,
        each token's activations scaled by their own maximum; "weight_int8", "weight_int4": activations stay in
        floating point, a scale for each output channel, or for each group of 128, 64 or 32 of its inputs in int4.

        Args:
            form: one of these.
            calibration: hidden states as `mla_preprocess` gets them, [..., D] or several of these: their ranges give
                the static scales of "per_tensor". Without any, normal numbers stand in for them: true activations have
                outliers that these do not, so pass some. The other forms look at weights alone.

        Returns:
            New weights, their `.error` the relative error of each quantized weight; inference only.

        Raises:
            ValueError: an unknown form, weights that are quantized already, or not finite; a bias in "per_token".
        """
        if form not in QUANTS:
            raise ValueError(f"{_NAME}.quantize: the form must be one of {', '.join(QUANTS)}, got {form!r}")
        if self.quant is not None:
            raise ValueError(
                f"{_NAME}.quantize: these weights are {self.quant} already; start from the original"
            )
        parts = self.parts()
        ranges = self._ranges(calibration) if form == "per_tensor" else [[], []]
        down, error0 = quantize_projection(parts.down, form, *ranges[0])
        up, error1 = quantize_projection(parts.up, form, *ranges[1])
        detached = Parts._make((*map(_detached, parts.tensors), form, parts.interleaved))
        made = MLAWeights._made(detached.projecting(down, up), _detached(self.wuv))
        made.error = {"wdqkv": error0, "wuq": error1}
        return made

    def deinterleaved(self) -> MLAWeights:
        """The same function with rope dimensions in two halves: evens, then odds, in weights, scales and biases.

        Queries and keys change places alike, so scores stay what they were.
        """
        if not self.interleaved:
            return self
        s = parts = self.parts()
        half = torch.arange(s.rope).view(-1, 2).t().reshape(-1)
        shared = torch.arange(self.wdqkv.shape[0])
        shared[s.kv_lora : s.kv_lora + s.rope] = s.kv_lora + half
        each = torch.cat((torch.arange(s.nope), s.nope + half))
        of_heads = (torch.arange(s.heads)[:, None] * (s.nope + s.rope) + each).reshape(-1)
        device = parts.wuk.device
        down, up = parts.down.rows(shared.to(device)), parts.up.rows(of_heads.to(device))
        made = MLAWeights._made(parts.projecting(down, up, interleaved=False), self.wuv)
        made.error = self.error
        return made

    def parts(self) -> Parts:
        """The tensors, as the operators take them."""
        tensors = self._tensors()
        return Parts._make((*(tensors[name] for name in TENSORS), self.quant, self.interleaved))

    @property
    def nbytes(self) -> int:
        """Bytes of all that a call of `mla_preprocess` reads."""
        return sum(t.nbytes for name, t in self._tensors().items() if t is not None and name != "wuv")

    def extra_repr(self) -> str:
        names = ("heads", "nope", "rope", "kv_lora", "q_lora", "interleaved", "quant")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    wdqkv: Tensor
    wuq: Tensor
    wuk: Tensor
    wuv: Tensor | None
    q_lora: int | None
    quant: str | None
    interleaved: bool
    error: Mapping[str, float] | None
    kept = ("descale0", "descale1", "scale0", "offset0", "scale1", "offset1")

    def _tensors(self) -> dict[str, Any]:
        # Asking the module itself for each of twenty tensors takes five times as long.
        return {**self._buffers, **self._parameters}

    @classmethod
    def _made(cls, parts: Parts, wuv: Maybe) -> MLAWeights:
        """Without the constructor, whose projections are in floating point."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._fill(parts, wuv)
        return made

    def _fill(self, parts: Parts, wuv: Maybe) -> None:
        self.interleaved, self.quant, self.error = parts.interleaved, parts.quant, None
        self.heads, self.nope, self.rope, self.kv_lora, self.q_lora = parts.sizes
        tensors = {**dict(zip(TENSORS, parts.tensors, strict=True)), "wuv": wuv}
        for name, t in tensors.items():
            if isinstance(t, nn.Parameter):
                self.register_parameter(name, t)
            else:
                self.register_buffer(name, t)

    def _ranges(self, calibration: Tensor | Iterable[Tensor] | None) -> list[list[float]]:
        """The least and the greatest input of both projections."""
        parts, size = self.parts(), self.wdqkv.shape[1]
        if calibration is None:
            generator = torch.Generator().manual_seed(0)
            calibration = torch.randn(_STAND_IN_ROWS, size, generator=generator).to(self.wdqkv)
        seen: list[list[float]] = [[0.0, 0.0], [0.0, 0.0]]
        for rows in (calibration,) if isinstance(calibration, Tensor) else calibration:
            if not isinstance(rows, Tensor) or not rows.shape or rows.shape[-1] != size:
                got = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
                raise ValueError(
                    f"{_NAME}.quantize: calibration must be hidden states [..., {size}], got {got}"
                )
            with torch.no_grad():
                x = rows.reshape(-1, size).to(self.wdqkv)
                y = normalize(x, parts.gamma0, parts.beta0)
                z = y  # without q_lora one quantized x serves both
                if self.q_lora is not None:
                    _, latent = parts.split(project(y, parts.down, None, x.dtype))
                    z = normalize(latent, parts.gamma1, parts.beta1)
            for bounds, values in zip(seen, (y, z), strict=True):
                if values.numel():
                    bounds[:] = min(bounds[0], float(values.min())), max(bounds[1], float(values.max()))
        return seen


def _read_deepseek(module: nn.Module) -> dict[str, Any]:
    """The arguments of MLAWeights: queries after keys, kv_b_proj split, rope rows still as they were."""
    missing = [name for name in _DEEPSEEK if not hasattr(module, name)]
    direct = getattr(module, "q_proj", None)
    chain = [getattr(module, name, None) for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")]
    if missing or (direct is None and None in chain):
        lacks = ", ".join(missing) or "q_proj, or q_a_proj with q_a_layernorm and q_b_proj"
        raise TypeError(
            f"MLAWeights.from_deepseek: {type(module).__name__} is no multi-head latent attention, it lacks {lacks}; "
            "pass the self_attn of a DeepSeek-V2 or V3 layer, or build MLAWeights from its tensors"
        )
    m: Any = module
    nope, rope = int(m.qk_nope_head_dim), int(m.qk_rope_head_dim)
    kv_lora = int(m.kv_a_layernorm.weight.shape[0])
    of_kv = m.kv_b_proj.weight.detach()
    values = int(m.v_head_dim)
    heads = of_kv.shape[0] // (nope + values)
    wuk, wuv = of_kv.view(heads, nope + values, kv_lora).split((nope, values), dim=1)
    first = [m.kv_a_proj_with_mqa]
    if direct is None:
        first.append(m.q_a_proj)
    second = m.q_b_proj if direct is None else m.q_proj
    return {
        "wdqkv": torch.cat([layer.weight.detach() for layer in first]),
        "wuq": second.weight.detach().clone(),
        "wuk": wuk.contiguous(),
        "wuv": wuv.contiguous(),
        "gamma1": None if direct is not None else m.q_a_layernorm.weight.detach().clone(),
        "gamma2": m.kv_a_layernorm.weight.detach().clone(),
        "bias0": _biases(first),
        "bias1": None if second.bias is None else second.bias.detach().clone(),
        "heads": heads,
        "nope": nope,
        "rope": rope,
        "kv_lora": kv_lora,
        "q_lora": None if direct is not None else int(m.q_a_layernorm.weight.shape[0]),
        # V2 always rotates neighbors; V3's configuration may say that its checkpoint was permuted.
        "interleaved": bool(getattr(getattr(m, "config", None), "rope_interleave", True)),
    }


def _biases(layers: list[Any]) -> Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    filled = [
        layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(filled)


def _detached(t: Maybe) -> Maybe:
    return None if t is None else t.detach()
