"""MLAWeights: what MLA pre-processing multiplies with, in floating point or quantized, from any checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from opsmith.call.common import short
from opsmith.ops.mla import deepseek as mla_deepseek
from opsmith.ops.mla.parts import NORMS, Parts, Sizes, check_weights
from opsmith.ops.mla.projection import QUANTS, Projection, project, quantize_projection, static_scale
from opsmith.ops.rms_norm.quant import normalize

_NAME = "MLAWeights"
_STAND_IN_ROWS = 256
_FLOAT32 = (
    "descale0",
    "descale1",
    "scale0",
    "offset0",
    "scale1",
    "offset1",
)  # whatever the module is cast to


class Prepared(NamedTuple):
    """What a call of the kernel takes from the weights, in one place: a module's attributes lie in many."""

    rows: tuple[torch.Tensor | None, ...]
    quant: str | None
    interleaved: bool
    q_out: tuple[int, int]  # heads and elements of a token's queries
    q_rope: tuple[int, int]
    q_lora: int | None


class MLAWeights(nn.Module):
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

    def __init__(
        self,
        wdqkv: torch.Tensor,
        wuq: torch.Tensor,
        wuk: torch.Tensor,
        *,
        gamma1: torch.Tensor | None,
        gamma2: torch.Tensor,
        gamma0: torch.Tensor | None = None,
        beta0: torch.Tensor | None = None,
        beta1: torch.Tensor | None = None,
        bias0: torch.Tensor | None = None,
        bias1: torch.Tensor | None = None,
        heads: int,
        nope: int,
        rope: int,
        kv_lora: int,
        q_lora: int | None,
        interleaved: bool = False,
        wuv: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        for name, t in (("wdqkv", wdqkv), ("wuq", wuq)):
            if isinstance(t, torch.Tensor) and not t.is_floating_point():
                raise TypeError(
                    f"{_NAME}: {name} must be floating-point, got {short(t.dtype)}; "
                    "MLAWeights.quantized takes quantized weights"
                )
        sizes = Sizes(heads, nope, rope, kv_lora, q_lora)
        norms = {"gamma0": gamma0, "gamma1": gamma1, "gamma2": gamma2, "beta0": beta0, "beta1": beta1}
        self._fill(
            Projection(wdqkv, bias0), Projection(wuq, bias1), wuk, norms, wuv, sizes, interleaved, None
        )

    @classmethod
    def quantized(
        cls,
        wdqkv_int8: torch.Tensor,
        wuq_int8: torch.Tensor,
        wuk: torch.Tensor,
        *,
        descale0: torch.Tensor,
        descale1: torch.Tensor,
        scale0: torch.Tensor | float | None = None,
        offset0: torch.Tensor | float | None = None,
        scale1: torch.Tensor | float | None = None,
        offset1: torch.Tensor | float | None = None,
        bias0: torch.Tensor | None = None,
        bias1: torch.Tensor | None = None,
        gamma1: torch.Tensor | None,
        gamma2: torch.Tensor,
        gamma0: torch.Tensor | None = None,
        beta0: torch.Tensor | None = None,
        beta1: torch.Tensor | None = None,
        heads: int,
        nope: int,
        rope: int,
        kv_lora: int,
        q_lora: int | None,
        interleaved: bool = False,
        wuv: torch.Tensor | None = None,
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
        first, second = (
            Projection(w, b, d, *(() if s is None else static_scale(_NAME, i, s, o, w)))
            for i, (w, b, d, s, o) in enumerate(
                ((wdqkv_int8, bias0, descale0, scale0, offset0), (wuq_int8, bias1, descale1, scale1, offset1))
            )
        )
        sizes = Sizes(heads, nope, rope, kv_lora, q_lora)
        norms = {"gamma0": gamma0, "gamma1": gamma1, "gamma2": gamma2, "beta0": beta0, "beta1": beta1}
        return cls._made(first, second, wuk, norms, wuv, sizes, interleaved, quant)

    @classmethod
    def from_deepseek(cls, attention_module: nn.Module) -> MLAWeights:
        """The weights of a Hugging Face DeepSeek-V2 or V3 attention module, its rope rows permuted to two halves.

        Queries come before keys there, `kv_b_proj` holds wuk and wuv, and the rope rows are pairs of neighbors; what
        comes out is `interleaved=False`. The norm before the attention is not part of the module: gamma0 is None.
        The tensors are copies without gradients.

        Raises:
            TypeError: a module that is no multi-head latent attention, naming what it lacks.
        """
        made = cls(**mla_deepseek.read(attention_module))
        return made.deinterleaved()

    def quantize(
        self, form: str, calibration: torch.Tensor | Iterable[torch.Tensor] | None = None
    ) -> MLAWeights:
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
        ranges = self._ranges(calibration) if form == "per_tensor" else ((0.0, 0.0), (0.0, 0.0))
        down, error0 = quantize_projection(parts.down, form, *ranges[0])
        up, error1 = quantize_projection(parts.up, form, *ranges[1])
        held = self._tensors()
        norms, wuv = {k: _detached(held[k]) for k in NORMS}, _detached(held["wuv"])
        made = MLAWeights._made(down, up, parts.wuk.detach(), norms, wuv, self._sizes, self.interleaved, form)
        made.error = {"wdqkv": error0, "wuq": error1}
        return made

    def deinterleaved(self) -> MLAWeights:
        """The same function with rope dimensions in two halves: evens, then odds, in weights, scales and biases.

        Queries and keys change places alike, so scores stay what they were.
        """
        if not self.interleaved:
            return self
        s = self._sizes
        half = torch.arange(s.rope).view(-1, 2).t().reshape(-1)
        shared = torch.arange(self.wdqkv.shape[0])
        shared[s.kv_lora : s.kv_lora + s.rope] = s.kv_lora + half
        each = torch.cat((torch.arange(s.nope), s.nope + half))
        of_heads = (torch.arange(s.heads)[:, None] * (s.nope + s.rope) + each).reshape(-1)
        parts, held = self.parts(), self._tensors()
        device = parts.wuk.device
        norms = {k: held[k] for k in NORMS}
        down, up = parts.down.rows(shared.to(device)), parts.up.rows(of_heads.to(device))
        made = MLAWeights._made(down, up, parts.wuk, norms, held["wuv"], s, False, self.quant)
        made.error = self.error
        return made

    def parts(self) -> Parts:
        """The tensors, as the operators take them."""
        t = self._tensors()
        down = Projection(t["wdqkv"], t["bias0"], t["descale0"], t["scale0"], t["offset0"])
        up = Projection(t["wuq"], t["bias1"], t["descale1"], t["scale1"], t["offset1"])
        norms = (t["gamma0"], t["gamma1"], t["gamma2"], t["beta0"], t["beta1"])
        return Parts(down, up, t["wuk"], *norms, self.quant, self.interleaved)

    def prepared(self) -> Prepared | None:
        """What kernels on a CPU take, kept between calls; None where they would need a copy of something."""
        held = self.__dict__.get("_prepared")
        if held is None:
            parts, s = self.parts(), self._sizes
            rows = parts.as_rows()
            given = {id(t) for t in parts.tensors}
            usable = parts.quant != "weight_int4" and all(id(t) in given for t in rows)
            sizes = (s.heads, s.kv_lora), (s.heads, s.rope), s.q_lora
            found = Prepared(rows, parts.quant, parts.interleaved, *sizes)
            held = self.__dict__["_prepared"] = found if usable and parts.wuk.is_cpu else ()
        return held or None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop("_prepared", None)
        super().__setattr__(name, value)

    def register_buffer(self, *args: Any, **options: Any) -> None:
        self.__dict__.pop("_prepared", None)
        super().register_buffer(*args, **options)

    def register_parameter(self, *args: Any, **options: Any) -> None:
        self.__dict__.pop("_prepared", None)
        super().register_parameter(*args, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of all that a call of `mla_preprocess` reads."""
        return sum(t.nbytes for name, t in self._tensors().items() if t is not None and name != "wuv")

    def extra_repr(self) -> str:
        s = self._sizes
        return (
            f"heads={s.heads}, nope={s.nope}, rope={s.rope}, kv_lora={s.kv_lora}, q_lora={s.q_lora}, "
            f"interleaved={self.interleaved}, quant={self.quant}"
        )

    wdqkv: torch.Tensor
    wuq: torch.Tensor
    wuk: torch.Tensor
    wuv: torch.Tensor | None
    q_lora: int | None
    quant: str | None
    interleaved: bool
    error: Mapping[str, float] | None

    def _tensors(self) -> dict[str, Any]:
        # Asking the module itself for each of twenty tensors takes five times as long.
        return {**self._buffers, **self._parameters}

    @classmethod
    def _made(cls, *content: Any) -> MLAWeights:
        """Weights of what `_fill` takes, without the constructor, whose projections are in floating point."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._fill(*content)
        return made

    def _fill(
        self,
        down: Projection,
        up: Projection,
        wuk: torch.Tensor,
        norms: Mapping[str, torch.Tensor | None],
        wuv: torch.Tensor | None,
        sizes: Sizes,
        interleaved: bool,
        quant: str | None,
    ) -> None:
        check_weights(_NAME, down, up, wuk, norms, wuv, sizes, quant)
        self._sizes, self.interleaved, self.quant, self.error = sizes, bool(interleaved), quant, None
        self.heads, self.nope, self.rope, self.kv_lora, self.q_lora = sizes
        tensors = {"wdqkv": down.weight, "wuq": up.weight, "wuk": wuk, "wuv": wuv, **norms}
        for i, p in enumerate((down, up)):
            tensors |= {
                f"bias{i}": p.bias,
                f"descale{i}": p.descale,
                f"scale{i}": p.scale,
                f"offset{i}": p.offset,
            }
        for name, t in tensors.items():
            if isinstance(t, nn.Parameter):
                self.register_parameter(name, t)
            else:
                self.register_buffer(name, t)

    def _ranges(
        self, calibration: torch.Tensor | Iterable[torch.Tensor] | None
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """The least and the greatest input of both projections."""
        parts, size = self.parts(), self.wdqkv.shape[1]
        if calibration is None:
            generator = torch.Generator().manual_seed(0)
            calibration = torch.randn(_STAND_IN_ROWS, size, generator=generator).to(self.wdqkv)
        seen: list[list[float]] = [[0.0, 0.0], [0.0, 0.0]]
        for rows in (calibration,) if isinstance(calibration, torch.Tensor) else calibration:
            if not isinstance(rows, torch.Tensor) or not rows.shape or rows.shape[-1] != size:
                got = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
                raise ValueError(
                    f"{_NAME}.quantize: calibration must be hidden states [..., {size}], got {got}"
                )
            with torch.no_grad():
                x = rows.reshape(-1, size).to(self.wdqkv)
                y = normalize(x, parts.gamma0, parts.beta0)
                z = y
                if self.q_lora is not None:
                    a = project(y, parts.down, None, x.dtype)
                    z = normalize(
                        a[:, -self.q_lora :] if self.q_lora else a[:, :0], parts.gamma1, parts.beta1
                    )
            for bounds, values in zip(seen, (y, z), strict=True):
                if values.numel():
                    bounds[:] = min(bounds[0], float(values.min())), max(bounds[1], float(values.max()))
        if self.q_lora is None:
            seen[1] = seen[0]  # one quantized x serves both
        return (seen[0][0], seen[0][1]), (seen[1][0], seen[1][1])

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MLAWeights:
        """`.to`, `.half()`, `.cuda()`: a dtype is the inputs', never that of scales."""
        self.__dict__.pop("_prepared", None)
        before = {name: self._buffers[name] for name in _FLOAT32}
        super()._apply(fn, recurse)
        for name, t in before.items():
            now = self._buffers[name]
            if t is not None and now is not None and now.dtype != t.dtype:
                self._buffers[name] = t.to(now.device)
        return self


def _detached(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach()
