"""What the tests of MLA share: weights of any size, and its formulas spelled out in numpy, a token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opsmith.ops import MLACache, MLAWeights


@dataclass(frozen=True)
class Sizes:
    tokens: int = 5
    hidden: int = 40
    heads: int = 3
    nope: int = 8
    rope: int = 16
    kv_lora: int = 32
    q_lora: int | None = 28

    def weights(self, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> MLAWeights:
        """Random weights; gamma0 there, betas and biases not, unless changed."""
        g = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
            return (torch.randn(shape, generator=g) * scale + shift).to(dtype)

        inner = self.hidden if self.q_lora is None else self.q_lora
        first = self.kv_lora + self.rope + (self.q_lora or 0)
        options: dict[str, Any] = {
            "gamma0": random(self.hidden, scale=0.3, shift=1.0),
            "gamma1": None if self.q_lora is None else random(inner, scale=0.3, shift=1.0),
            "gamma2": random(self.kv_lora, scale=0.3, shift=1.0),
            "wuv": random(self.heads, 10, self.kv_lora, scale=self.kv_lora**-0.5),
        }
        for name, flag in list(changes.items()):
            if flag is True and name != "interleaved":
                size = {"beta0": self.hidden, "beta1": inner, "bias0": first, "bias1": self.up}[name]
                changes[name] = random(size, scale=0.5)
        return MLAWeights(
            random(first, self.hidden, scale=self.hidden**-0.5),
            random(self.up, inner, scale=inner**-0.5),
            random(self.heads, self.nope, self.kv_lora, scale=self.nope**-0.5),
            **{**options, **changes},
            heads=self.heads,
            nope=self.nope,
            rope=self.rope,
            kv_lora=self.kv_lora,
            q_lora=self.q_lora,
        )

    @property
    def up(self) -> int:
        return self.heads * (self.nope + self.rope)

    def inputs(
        self, dtype: torch.dtype = torch.float32, seed: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, and a table whose columns have nothing to do with each other."""
        g = torch.Generator().manual_seed(seed)
        shapes = (self.tokens, self.hidden), (self.tokens, self.rope), (self.tokens, self.rope)
        x, cos, sin = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
        return x, cos, sin

    def cache(
        self, mode: str = "split", block_size: int = 16, dtype: torch.dtype = torch.float32, spare: int = 2
    ) -> MLACache:
        blocks = -(-self.tokens // block_size) + spare
        return MLACache.allocate(mode, blocks, block_size, kv_lora=self.kv_lora, rope=self.rope, dtype=dtype)

    def slots(self, cache: MLACache, skip: bool = True) -> torch.Tensor:
        """In no order, none twice, every fourth token without one."""
        order = torch.randperm(cache.blocks * cache.block_size, generator=torch.Generator().manual_seed(3))
        slots = order[: self.tokens].clone()
        if skip:
            slots[2::4] = -1
        return slots


def double(w: MLAWeights) -> MLAWeights:
    """The same numbers in float64, scales included."""
    s = w.state_dict()
    wide = {k: v.double() if v.is_floating_point() else v for k, v in s.items()}
    made = w.double()
    for name, value in wide.items():
        made._buffers[name] = value
    return made


def row_of(cache: MLACache, slot: int, kv_lora: int) -> tuple[np.ndarray, np.ndarray]:
    """What a slot holds, found by the arithmetic of the table of layouts."""
    block, offset = divmod(slot, cache.block_size)
    latent = cache.latent[block].double().numpy()
    if cache.mode == "joint":
        return latent[offset, 0, :kv_lora], latent[offset, 0, kv_lora:]
    assert cache.rope is not None
    rope = cache.rope[block].double().numpy()
    if cache.mode == "split":
        return latent[offset, 0], rope[offset, 0]
    return latent[:, offset, :].reshape(-1), rope[:, offset, :].reshape(-1)


def array(t: torch.Tensor | None) -> Any:
    return None if t is None else t.detach().double().numpy()


@dataclass
class Token:
    """What the formulas give for one token, in float64."""

    q_out: np.ndarray
    q_rope: np.ndarray
    k_nope: np.ndarray
    k_rope: np.ndarray
    latent_q: np.ndarray | None


def norm(v: np.ndarray, gamma: np.ndarray | None, beta: np.ndarray | None, eps: float) -> np.ndarray:
    if gamma is None:
        return v
    y = v / np.sqrt((v**2).mean() + eps) * gamma
    return y if beta is None else y + beta


def turn(v: np.ndarray, cos: np.ndarray | None, sin: np.ndarray | None, interleaved: bool) -> np.ndarray:
    if cos is None or sin is None:
        return v
    half, y = len(v) // 2, np.empty_like(v)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        y[a] = v[a] * cos[i] - v[b] * sin[i]
        y[b] = v[b] * cos[i + half] + v[a] * sin[i + half]
    return y


def quantized_product(y: np.ndarray, w: MLAWeights, i: int) -> np.ndarray:
    t = w.state_dict()
    weight = array(t["wdqkv" if i == 0 else "wuq"])
    if w.quant is None:
        bias = t.get(f"bias{i}")
        return y @ weight.T + (0 if bias is None else array(bias))
    descale = array(t[f"descale{i}"])
    if w.quant == "per_tensor":
        q = np.rint(np.clip(y / array(t[f"scale{i}"]) + array(t[f"offset{i}"]), -128, 127))
        return (q @ weight.T + array(t.get(f"bias{i}", torch.zeros(len(weight))))) * descale
    assert w.quant == "per_token"
    s = np.abs(y).max() / 127
    q = np.rint(np.clip(y / s, -128, 127)) if s > 0 else np.zeros_like(y)
    return (q @ weight.T) * descale * s


def spelled_out(
    w: MLAWeights,
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    t: int,
    eps: float = 1e-6,
    ctkv_scale: float | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> Token:
    """The specification, line by line, for token t; nothing is rounded but what is quantized."""
    state = {name: array(value) for name, value in w.state_dict().items()}
    c, s = (None if v is None else array(v)[t] for v in (cos, sin))
    y = norm(array(x)[t], state.get("gamma0"), state.get("beta0"), eps)
    a = quantized_product(y, w, 0)
    ckv, k_pe, ql = np.split(a, [w.kv_lora, w.kv_lora + w.rope])
    latent_q = None if w.q_lora is None else norm(ql, state["gamma1"], state.get("beta1"), eps)
    q = quantized_product(y if latent_q is None else latent_q, w, 1).reshape(w.heads, w.nope + w.rope)
    q_out = np.stack([q[h, : w.nope] @ state["wuk"][h] for h in range(w.heads)])
    q_rope = np.stack([turn(q[h, w.nope :], c, s, w.interleaved) for h in range(w.heads)])
    k_nope = norm(ckv, state["gamma2"], None, eps)
    if ctkv_scale is not None:
        k_nope = np.rint(np.clip(k_nope / ctkv_scale, -128, 127))
        q_out = np.rint(np.clip(q_out * array(q_nope_scale)[:, None], -128, 127))
    return Token(q_out, q_rope, k_nope, turn(k_pe, c, s, w.interleaved), latent_q)


def as_specified(
    w: MLAWeights,
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    ctkv_scale: float | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The specification for all tokens, with its roundings: to x's dtype after each matmul, int8 of float32 numbers.

    Sums are float64's, which has no order of its own. Gives q_out, q_rope, k_nope and k_rope.
    """
    s, dtype = w.state_dict(), x.dtype

    def rms_norm(v: torch.Tensor, gamma: str, beta: str = "") -> torch.Tensor:
        if gamma not in s:
            return v.double()
        v = v.double()
        y = v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * s[gamma].double()
        return y + s[beta].double() if beta in s else y

    def int8(v: torch.Tensor) -> torch.Tensor:
        return v.float().clamp(-128, 127).round()

    def product(y: torch.Tensor, i: int) -> torch.Tensor:
        weight = s["wuq" if i else "wdqkv"]
        bias = s[f"bias{i}"].double() if f"bias{i}" in s else torch.zeros(len(weight), dtype=torch.float64)
        if w.quant is None:
            return (y.to(dtype).double() @ weight.double().T + bias).to(dtype)
        descale = s[f"descale{i}"]
        if w.quant == "per_tensor":
            q = int8(y.float() / s[f"scale{i}"] + s[f"offset{i}"])
            return ((q.double() @ weight.double().T + bias).float() * descale).to(dtype)
        if w.quant == "per_token":
            step = y.float().abs().amax(-1, keepdim=True) / 127
            q = int8(y.float() / step).where(step > 0, 0.0)
            return ((q.double() @ weight.double().T).float() * descale * step).to(dtype)
        if w.quant == "weight_int4":  # two numbers a byte, the even column's in the low bits; 8 is zero
            weight = torch.stack((weight & 15, weight >> 4), -1).flatten(1).double() - 8
            descale = descale.repeat_interleave(weight.shape[1] // descale.shape[1], 1)
            weight = (weight * descale)[:, : y.shape[1]]
        else:
            weight = weight.double() * descale[:, None]
        return (y.to(dtype).double() @ weight.T + bias).to(dtype)

    def turned(v: torch.Tensor) -> torch.Tensor:
        if cos is None or sin is None:
            return v
        half, y, v = w.rope // 2, torch.empty_like(v, dtype=torch.float64), v.double()
        c, n = (t.double().view(len(x), *(1,) * (v.dim() - 2), w.rope) for t in (cos, sin))
        a = slice(0, None, 2) if w.interleaved else slice(0, half)
        b = slice(1, None, 2) if w.interleaved else slice(half, None)
        y[..., a] = v[..., a] * c[..., :half] - v[..., b] * n[..., :half]
        y[..., b] = v[..., b] * c[..., half:] + v[..., a] * n[..., half:]
        return y.to(dtype)

    y = rms_norm(x, "gamma0", "beta0")
    a = product(y, 0)
    if w.q_lora is not None:
        y = rms_norm(a[:, w.kv_lora + w.rope :], "gamma1", "beta1")
    q = product(y, 1).view(len(x), w.heads, w.nope + w.rope)
    q_out = torch.einsum("thn,hnk->thk", q[..., : w.nope].double(), s["wuk"].double()).to(dtype)
    k_nope = rms_norm(a[:, : w.kv_lora], "gamma2")
    if ctkv_scale is not None and q_nope_scale is not None:
        k_nope = int8(k_nope.float() / torch.tensor(ctkv_scale)).to(torch.int8)
        q_out = int8(q_out.float() * q_nope_scale[:, None]).to(torch.int8)
    else:
        k_nope = k_nope.to(dtype)
    k_rope = turned(a[:, w.kv_lora : w.kv_lora + w.rope])
    return q_out, turned(q[..., w.nope :]), k_nope, k_rope


def hold(got: torch.Tensor, right: torch.Tensor, integers: bool, eager: torch.Tensor | None = None) -> None:
    """Integers within a step and 999 of 1000 equal. Floating point within 8 units in the last place of the largest
    number, or within what eager PyTorch's error allows; behind integer activations, of which one at a tie may round
    either way, not in every token.
    """
    assert got.shape == right.shape
    assert got.dtype == right.dtype
    if not got.numel():
        return
    off = (got.double() - right.double()).abs()
    if got.dtype == torch.int8:
        assert off.max() <= 1
        assert (off > 0).sum() <= max(1, off.numel() // 1000)
        return
    scale = right.double().abs().max()
    unit = torch.finfo(got.dtype).eps * scale
    bound = 8 * unit
    if eager is not None:  # whose sums are as long
        bound = torch.maximum(bound, 2 * (eager.double() - right.double()).abs().max() + unit)
    tokens = off.flatten(1).amax(1) > bound
    assert tokens.sum() <= (max(1, len(tokens) // 10) if integers else 0)
    assert off.max() <= scale / 64
