"""Ways in which models write the operators, as plain PyTorch; and ways that look alike and are not the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

N = 24
_X = (2, 5, N)
_W = (N,)
_Q = (2, 3, 6, 8)


def _ln_definition(x: Any, w: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    var = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5) * w + b


def _ln_rsqrt(x: Any, w: Any, b: Any) -> Any:
    mean = torch.mean(x, dim=-1, keepdim=True)
    centered = x - mean
    return b + w * (centered * torch.rsqrt(centered.square().mean(-1, True) + 1e-5))


def _ln_var(x: Any, w: Any, b: Any) -> Any:
    var, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    return torch.addcmul(b, (x - mean) * (var + 1e-5).pow(-0.5), w)


def _ln_moments(x: Any, w: Any, b: Any) -> Any:
    mean = x.sum(-1).unsqueeze(-1) / x.shape[-1]
    var = (x * x).mean(-1, keepdim=True) - mean * mean
    return w * ((x - mean) / (var + 1e-5) ** 0.5) + b


def _ln_std(x: Any, w: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5) * w + b


def _ln_upcast(x: Any, w: Any, b: Any) -> Any:
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    return ((h - mean) * torch.rsqrt((h - mean).pow(2).mean(-1, keepdim=True) + 1e-5) * w + b).to(x.dtype)


def _ln_residual(x: Any, r: Any, w: Any, b: Any) -> Any:
    s = x + r
    mean = s.mean(-1, keepdim=True)
    var = ((s - mean) ** 2).mean(-1, keepdim=True)
    return (s - mean) / torch.sqrt(var + 1e-5) * w + b, s


def _rms_llama(x: Any, w: Any) -> Any:
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def _rms_gemma(x: Any, w: Any) -> Any:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).type_as(x)


def _rms_t5(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6))


def _rms_division(x: Any, w: Any) -> Any:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) * w


def _rms_residual(x: Any, r: Any, w: Any) -> Any:
    s = x + r
    return w * (s * (s**2).mean(-1, keepdim=True).add(1e-6).pow(-0.5)), s


def _rms_residual_gemma(x: Any, r: Any, w: Any) -> Any:
    s = r + x
    return _rms_gemma(s, w), s


def _sm_definition(x: Any) -> Any:
    e = torch.exp(x - x.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def _sm_amax(x: Any) -> Any:
    e = (x - x.amax(dim=-1, keepdim=True)).exp()
    return e * e.sum(dim=-1, keepdim=True).reciprocal()


def _sm_log(x: Any) -> Any:
    return torch.exp(x - torch.logsumexp(x, -1, keepdim=True))


def _sm_logsoftmax(x: Any) -> Any:
    return F.log_softmax(x, dim=-1).exp()


def _attn_definition(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


def _attn_einsum(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("bhld,bhsd->bhls", q * 8**-0.5, k)
    return torch.einsum("bhls,bhsd->bhld", F.softmax(scores, dim=-1), v)


def _attn_einsum_inside(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("blhd,bshd->bhls", q, k)
    return torch.einsum("bhls,bshd->blhd", F.softmax(scores * 8**-0.5, dim=-1), v).flatten(2)


def _attn_bmm(q: Any, k: Any, v: Any) -> Any:
    b, h, n, d = q.shape
    fold = [t.reshape(b * h, -1, d) for t in (q, k, v)]
    scores = torch.bmm(fold[0], fold[1].transpose(1, 2)) * (d**-0.5)
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    p = p / p.sum(-1, keepdim=True)
    return torch.bmm(p, fold[2]).view(b, h, n, d)


def _attn_late_division(q: Any, k: Any, v: Any) -> Any:
    scores = torch.matmul(q, k.mT) * 0.35
    p = torch.exp(scores - scores.max(dim=-1, keepdim=True)[0])
    return (p @ v) / p.sum(-1, keepdim=True)


def _attn_sequence_first(q: Any, k: Any, v: Any) -> Any:
    """[B, L, H, D] in and out, K transposed in one permutation."""
    scores = q.permute(0, 2, 1, 3) @ k.permute(0, 2, 3, 1) * 0.25
    return (scores.softmax(-1) @ v.permute(0, 2, 1, 3)).transpose(1, 2)


def _attn_additive(q: Any, k: Any, v: Any, m: Any) -> Any:
    return (
        F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5 + m, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    )


def _attn_fill(q: Any, k: Any, v: Any, m: Any) -> Any:
    return (q @ k.transpose(-1, -2) * 0.5).masked_fill(~m, float("-inf")).softmax(-1) @ v


def _attn_divided(q: Any, k: Any, v: Any, m: Any) -> Any:
    """CodeGen's: what hides a key is divided too."""
    hidden = torch.where(m, 0.0, torch.finfo(q.dtype).min)
    return torch.softmax((q @ k.transpose(-2, -1) + hidden) / math.sqrt(8), dim=-1) @ v


def _attn_where(q: Any, k: Any, v: Any, m: Any) -> Any:
    scores = torch.where(m, q @ k.transpose(-1, -2) * 0.5, torch.finfo(q.dtype).min)
    return scores.softmax(-1) @ v


def _attn_einsum_scores(q: Any, k: Any, v: Any) -> Any:
    """DeepSeek's own: the scores of a query, head by head."""
    n = q.shape[1]
    mask = torch.full((n, n), float("-inf")).triu_(1)
    scores = torch.einsum("bshd,bthd->bsht", q, k) * 0.5 + mask.unsqueeze(1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,bthd->bshd", weights, v)


def _attn_numbers(q: Any, k: Any, v: Any, m: Any) -> Any:
    """GPT-2's: numbers as tensors without axes."""
    scores = q @ k.transpose(-1, -2) / torch.full([], 8**0.5, dtype=q.dtype)
    hidden = torch.full([], torch.finfo(q.dtype).min, dtype=q.dtype)
    return torch.where(m, scores, hidden).softmax(-1) @ v


def _attn_tril(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-1, -2) * 0.5
    causal = torch.tril(torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device))
    return scores.masked_fill(causal.logical_not(), float("-inf")).softmax(-1) @ v


def _attn_repeat(q: Any, k: Any, v: Any) -> Any:
    b, h, n, d = k.shape
    wide = [t[:, :, None].expand(b, h, 3, n, d).reshape(b, 3 * h, n, d) for t in (k, v)]
    return (q @ wide[0].transpose(-1, -2) * 0.5).softmax(-1) @ wide[1]


def _attn_positions(q: Any, k: Any, v: Any, m: Any) -> Any:
    """More scores are added to those of q and k while all heads are one axis with the batch (DeBERTa)."""
    b, n, _ = q.shape
    q, k, v = (t.view(b, n, 3, 8).transpose(1, 2).contiguous().view(-1, n, 8) for t in (q, k, v))
    more = torch.cos(torch.bmm(k, q.mT))
    scores = torch.bmm(q, k.transpose(1, 2) / math.sqrt(24)) + (more * 0.5 + more.mT * 0.25)
    scores = scores.view(-1, 3, n, n).masked_fill(~m, torch.finfo(q.dtype).min)
    return torch.bmm(scores.softmax(-1).view(-1, n, n), v).view(b, 3, n, 8)


def _attn_slopes(q: Any, k: Any, v: Any, slopes: Any, m: Any) -> Any:
    """Each head's slope by position, a row for all queries, while all heads are one axis with the batch (Bloom)."""
    b, h, n, d = q.shape
    row = (slopes[:, None, None] * torch.arange(n)).repeat(b, 1, 1)
    fold = [t.reshape(b * h, n, d) for t in (q, k, v)]
    scores = row.baddbmm(fold[0], fold[1].transpose(-1, -2), beta=1.0, alpha=0.25).view(b, h, n, n) + m
    return torch.bmm(scores.softmax(-1).view(b * h, n, n), fold[2]).view(b, h, n, d)


def _attn_no_heads(q: Any, k: Any, v: Any) -> Any:
    """A head that stands alone, as in many a first transformer."""
    n = q.shape[1]
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.masked_fill(torch.tril(torch.ones(n, n)) == 0, float("-inf")).softmax(-1) @ v


def _attn_module(q: Any, k: Any, v: Any, m: Any) -> Any:
    """As `nn.MultiheadAttention` computes it, unless it is told that nobody needs the weights."""
    n, b, _ = q.shape
    q, k, v = (t.reshape(n, b * 3, 8).transpose(0, 1) for t in (q, k, v))
    weights = torch.baddbmm(m, q * math.sqrt(1 / 8), k.transpose(-2, -1)).softmax(-1)
    return torch.bmm(weights, v).transpose(0, 1).reshape(n * b, 24)


def _attn_cached(q: Any, k: Any, v: Any) -> Any:
    """Queries with heads behind tokens, keys as a cache has them, copied for each of the queries' heads."""
    b, h, n, d = k.shape
    wide = [t[:, :, None].expand(b, h, 3, n, d).reshape(b, 3 * h, n, d) for t in (k, v)]
    return F.scaled_dot_product_attention(q.transpose(1, 2), wide[0], wide[1])


def _attn_clipped(q: Any, k: Any, v: Any) -> Any:
    """As MPT and OLMo limit what they project."""
    q, k, v = q.clamp(-2.0, 2.0), k.clamp(-2.0, 2.0), v.clamp(max=0.5)
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v


def _attn_folded(q: Any, k: Any, v: Any, m: Any) -> Any:
    """fairseq's: heads are one axis with the batch, but where the mask is filled in (and so in the first BART)."""
    n, b, d = q.shape
    q, k, v = (t.view(-1, b * 3, d // 3).transpose(0, 1) for t in (q * 0.5, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, 3, n, n).masked_fill(~m, float("-inf"))
    weights = F.softmax(scores.view(b * 3, n, n), dim=-1, dtype=torch.float32)
    return torch.bmm(weights.type_as(q), v).transpose(0, 1).reshape(n, b, d)


def _attn_megatron(q: Any, k: Any, v: Any, m: Any) -> Any:
    """Tokens first, heads and batch as one axis of a product that is added to nothing, and filled in place."""
    n, b, h, d = q.shape
    q, k, v = (t.reshape(n, b * h, d) for t in (q, k, v))
    empty = torch.empty(b * h, n, n, dtype=q.dtype)
    scores = torch.baddbmm(empty, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=0.25)
    weights = scores.view(b, h, n, n).masked_fill_(~m, -10000.0).softmax(-1).view(b * h, n, n)
    return torch.bmm(weights, v.transpose(0, 1)).view(b, h, n, d).permute(2, 0, 1, 3)


def _attn_relative(q: Any, k: Any, v: Any, more: Any) -> Any:
    """Scores of positions are added before both are scaled (Transformer-XL, Conformer)."""
    return ((q @ k.transpose(-1, -2) + more) / math.sqrt(8)).softmax(-1) @ v


def _attn_shared(q: Any, k: Any, v: Any) -> Any:
    """One head of keys and values for all queries, as PaLM's einsum has it."""
    scores = torch.einsum("bhid,bjd->bhij", q * 8**-0.5, k)
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)


def _attn_einsum_normed(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    """Of queries and keys of length one, with biases that grow with the distance (x-transformers)."""
    far = -(torch.arange(6)[None, None] - torch.arange(6)[None, :, None]).abs()
    scores = torch.einsum("bhid,bhjd->bhij", F.normalize(q, dim=-1), F.normalize(k, dim=-1)) * 10
    weights = (scores + far * slopes[:, None, None]).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, v)


def _attn_logarithms(q: Any, k: Any, v: Any) -> Any:
    """What hides keys is added as the logarithm of how far each counts (the first Mistral, Perceivers)."""
    counts = torch.log(torch.tril(torch.ones(6, 6)).to(q.dtype) + 1e-10)
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5 + counts, -1) @ v


def _attn_middle_axis(q: Any, k: Any, v: Any) -> Any:
    """Heads behind keys in the scores, whose softmax is along the axis before."""
    scores = torch.einsum("bnhd,bmhd->bnmh", q, k) * 0.5
    return torch.einsum("bnmh,bmhd->bnhd", scores.softmax(2), v)


SPELLINGS: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = [
    ("layer_norm", "definition", _ln_definition, (_X, _W, _W)),
    ("layer_norm", "rsqrt", _ln_rsqrt, (_X, _W, _W)),
    ("layer_norm", "var_mean", _ln_var, (_X, _W, _W)),
    ("layer_norm", "moments", _ln_moments, (_X, _W, _W)),
    ("layer_norm", "var", _ln_std, (_X, _W, _W)),
    ("layer_norm", "upcast", _ln_upcast, (_X, _W, _W)),
    ("layer_norm", "residual", _ln_residual, (_X, _X, _W, _W)),
    ("layer_norm", "weight kept less one", lambda x, w, b: F.layer_norm(x, (N,), w + 1.0, b), (_X, _W, _W)),
    ("layer_norm", "no bias", lambda x, w: F.layer_norm(x, (N,), w), (_X, _W)),
    ("rms_norm", "Llama", _rms_llama, (_X, _W)),
    ("rms_norm", "Gemma", _rms_gemma, (_X, _W)),
    ("rms_norm", "T5", _rms_t5, (_X, _W)),
    ("rms_norm", "division", _rms_division, (_X, _W)),
    ("rms_norm", "functional", lambda x, w: F.rms_norm(x, (N,), w, 1e-5), (_X, _W)),
    ("rms_norm", "functional, default eps", lambda x, w: F.rms_norm(x, (N,), w), (_X, _W)),
    ("rms_norm", "no weight", lambda x: F.rms_norm(x, (N,)), (_X,)),
    ("rms_norm", "length one", lambda x, w: F.normalize(x, dim=-1) * N**0.5 * w, (_X, _W)),
    ("rms_norm", "Gemma, length one", lambda x, w: F.normalize(x, dim=-1) * N**0.5 * (w + 1), (_X, _W)),
    (
        "rms_norm",
        "length bounded",
        lambda x, w: x / (x.norm(dim=-1, keepdim=True) * N**-0.5).clamp(1e-8) * w,
        (_X, _W),
    ),
    ("rms_norm", "residual", _rms_residual, (_X, _X, _W)),
    ("rms_norm", "Gemma, residual", _rms_residual_gemma, (_X, _X, _W)),
    ("softmax", "definition", _sm_definition, (_X,)),
    ("softmax", "amax", _sm_amax, (_X,)),
    ("softmax", "logsumexp", _sm_log, (_X,)),
    ("softmax", "log_softmax", _sm_logsoftmax, (_X,)),
    ("gelu", "erf", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), (_X,)),
    ("gelu", "ndtr", lambda x: x * torch.special.ndtr(x), (_X,)),
    ("gelu", "erfc", lambda x: 0.5 * x * torch.erfc(-x * 0.7071067811865476), (_X,)),
    ("gelu", "distributed", lambda x: 0.5 * x + 0.5 * x * torch.erf(x * 0.70710678), (_X,)),
    (
        "gelu",
        "tanh",
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        (_X,),
    ),
    (
        "gelu",
        "tanh, factored",
        lambda x: x * (0.5 + 0.5 * torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
        (_X,),
    ),
    ("gelu", "sigmoid", lambda x: x * torch.sigmoid(1.5957691216 * (x + 0.044715 * torch.pow(x, 3))), (_X,)),
    ("bias_gelu", "erf", lambda x, b: (x + b) * 0.5 * (1 + torch.erf((x + b) / math.sqrt(2))), (_X, _W)),
    ("bias_gelu", "aten", lambda x, b: F.gelu(b + x), (_X, _W)),
    ("bias_gelu", "tanh", lambda x, b: F.gelu(x + b, approximate="tanh"), (_X, _W)),
    ("silu_mul", "sums", lambda g, a, u, b: F.silu(g + a * 2) * (u + b * 2), (_X, _X, _X, _X)),
    ("gelu_mul", "aten", lambda g, u: F.gelu(g) * u, (_X, _X)),
    ("gelu_mul", "up first", lambda g, u: u * F.gelu(g), (_X, _X)),
    ("gelu_mul", "erf", lambda g, u: 0.5 * g * (1 + torch.erf(g * math.sqrt(0.5))) * u, (_X, _X)),
    ("gelu_mul", "aten, tanh", lambda g, u: F.gelu(g, approximate="tanh") * u, (_X, _X)),
    (
        "gelu_mul",
        "tanh",
        lambda g, u: u * 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
        (_X, _X),
    ),
    ("embedding", "functional", lambda t, i: F.embedding(i, t), ((11, N), "ids")),
    ("embedding", "index", lambda t, i: t[i], ((11, N), "ids")),
    (
        "embedding",
        "index_select",
        lambda t, i: torch.index_select(t, 0, i.reshape(-1)).view(*i.shape, N),
        ((11, N), "ids"),
    ),
    ("embedding", "one_hot", lambda t, i: F.one_hot(i, 11).to(t.dtype) @ t, ((11, N), "ids")),
    ("linear", "functional", lambda x, w, b: F.linear(x, w, b), (_X, (7, N), (7,))),
    ("linear", "matmul", lambda x, w, b: x @ w.t() + b, (_X, (7, N), (7,))),
    (
        "linear",
        "addmm",
        lambda x, w, b: torch.addmm(b, x.view(-1, N), w.T).view(*x.shape[:-1], 7),
        (_X, (7, N), (7,)),
    ),
    ("linear", "einsum", lambda x, w, b: torch.einsum("bln,on->blo", x, w) + b, (_X, (7, N), (7,))),
    ("linear", "einsum, heads out", lambda x, w: torch.einsum("ibh,hnd->ibnd", x, w), (_X, (N, 3, 4))),
    (
        "linear",
        "einsum, heads in",
        lambda x, w: torch.einsum("ibnd,hnd->ibh", x, w),
        ((2, 5, 3, 8), (7, 3, 8)),
    ),
    ("linear", "einsum, heads apart", lambda x, w: torch.einsum("...k,khd->h...d", x, w), (_X, (N, 3, 4))),
    (
        "linear",
        "Conv1D",
        lambda x, w, b: torch.addmm(b, x.view(-1, N), w).view(*x.shape[:-1], 7),
        (_X, (N, 7), (7,)),
    ),
    ("linear", "of a scaled input", lambda x, w: (x * x.mean(-1, keepdim=True)) @ w.t(), (_X, (7, N))),
    ("linear", "gelu", lambda x, w, b: F.gelu(F.linear(x, w, b)), (_X, (7, N), (7,))),
    ("attention", "definition", _attn_definition, (_Q, _Q, _Q)),
    ("attention", "einsum", _attn_einsum, (_Q, _Q, _Q)),
    ("attention", "einsum, heads inside", _attn_einsum_inside, ((2, 6, 3, 8),) * 3),
    ("attention", "einsum, heads inside the scores", _attn_einsum_scores, ((2, 6, 3, 8),) * 3),
    ("attention", "bmm", _attn_bmm, (_Q, _Q, _Q)),
    ("attention", "late division", _attn_late_division, (_Q, _Q, _Q)),
    ("attention", "sequence first", _attn_sequence_first, ((2, 6, 3, 8),) * 3),
    (
        "attention",
        "sdpa",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (_Q, _Q, _Q),
    ),
    ("attention", "additive", _attn_additive, (_Q, _Q, _Q, (2, 1, 6, 6))),
    ("attention", "masked_fill", _attn_fill, (_Q, _Q, _Q, "mask")),
    ("attention", "where", _attn_where, (_Q, _Q, _Q, "mask")),
    ("attention", "numbers", _attn_numbers, (_Q, _Q, _Q, "mask")),
    ("attention", "mask before the division", _attn_divided, (_Q, _Q, _Q, "mask")),
    ("attention", "tril", _attn_tril, (_Q, _Q, _Q)),
    ("attention", "positions", _attn_positions, ((2, 6, N), (2, 6, N), (2, 6, N), "mask")),
    ("attention", "no heads", _attn_no_heads, ((2, 6, 8),) * 3),
    ("attention", "module", _attn_module, ((6, 2, N), (6, 2, N), (6, 2, N), (1, 6, 6))),
    ("attention", "clipped", _attn_clipped, (_Q, _Q, _Q)),
    ("attention", "folded", _attn_folded, ((6, 2, N), (6, 2, N), (6, 2, N), "mask")),
    ("attention", "Megatron", _attn_megatron, (*((6, 2, 3, 8),) * 3, "mask")),
    ("attention", "relative", _attn_relative, (_Q, _Q, _Q, (2, 3, 6, 6))),
    ("attention", "shared by einsum", _attn_shared, (_Q, (2, 6, 8), (2, 6, 8))),
    ("attention", "einsum, normed", _attn_einsum_normed, (_Q, _Q, _Q, (3,))),
    ("attention", "logarithms", _attn_logarithms, (_Q, _Q, _Q)),
    ("attention", "softmax of a middle axis", _attn_middle_axis, ((2, 6, 3, 8),) * 3),
    ("attention", "slopes", _attn_slopes, (_Q, _Q, _Q, (3,), (2, 1, 6, 6))),
    ("attention", "one head", _attn_cached, ((2, 6, 3, 8), (2, 1, 6, 8), (2, 1, 6, 8))),
    ("attention", "repeated heads", _attn_repeat, ((2, 6, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8))),
]


def _ln_wrong_axis(x: Any, w: Any, b: Any) -> Any:
    mean = x.mean(1, keepdim=True)
    var = ((x - mean) ** 2).mean(1, keepdim=True)
    return (x - mean) / torch.sqrt(var + 1e-5) * w + b


def _ln_unbiased(x: Any, w: Any, b: Any) -> Any:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5) * w + b


def _ln_eps_outside(x: Any, w: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True)) + 1e-5) * w + b


def _rms_wrong_axis(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


def _rms_sum(x: Any, w: Any) -> Any:
    """An L2 normalization: the sum of the squares, not their mean."""
    return w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6))


def _sm_wrong_axis(x: Any) -> Any:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(1, keepdim=True)


def _attn_wrong_axis(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-2) @ v


def _attn_multiplied(q: Any, k: Any, v: Any, m: Any) -> Any:
    return torch.softmax((q @ k.transpose(-2, -1)) * 0.5 * m, dim=-1) @ v


def _attn_permuted(q: Any, k: Any, v: Any) -> Any:
    """[B, L, H, D] with L == H: the shapes fit, the axes of K do not."""
    scores = q.permute(0, 2, 1, 3) @ k.permute(0, 1, 3, 2) * 0.25
    return scores.softmax(-1) @ v.permute(0, 2, 1, 3)


def _attn_not_transposed(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k * 0.5, dim=-1) @ v


NEAR_MISSES: list[tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = [
    ("layer_norm", "wrong axis", _ln_wrong_axis, (_X, _W, _W)),
    ("layer_norm", "unbiased variance", _ln_unbiased, (_X, _W, _W)),
    ("layer_norm", "eps outside the root", _ln_eps_outside, (_X, _W, _W)),
    ("rms_norm", "wrong axis", _rms_wrong_axis, (_X, _W)),
    ("rms_norm", "sum of squares", _rms_sum, (_X, _W)),
    ("softmax", "wrong axis", _sm_wrong_axis, (_X,)),
    ("gelu_mul", "another constant", lambda g, u: g * 0.5 * (1 + torch.erf(g / 1.5)) * u, (_X, _X)),
    ("gelu", "another constant", lambda x: x * 0.5 * (1 + torch.erf(x / 1.5)), (_X,)),
    ("attention", "softmax over queries", _attn_wrong_axis, (_Q, _Q, _Q)),
    ("attention", "mask multiplied", _attn_multiplied, (_Q, _Q, _Q, (2, 1, 6, 6))),
    ("attention", "K permuted", _attn_permuted, ((2, 6, 6, 8),) * 3),
    ("attention", "K not transposed", _attn_not_transposed, ((2, 3, 8, 8),) * 3),
]


def inputs(specs: tuple[Any, ...], seed: int = 0) -> list[torch.Tensor]:
    """Tensors for a spelling's input specification."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for spec in specs:
        if spec == "ids":
            made.append(torch.randint(0, 11, (2, 5), generator=g))
        elif spec == "mask":
            made.append((torch.rand(2, 1, 6, 6, generator=g) < 0.7) | torch.eye(6, dtype=torch.bool))
        else:
            made.append(torch.randn(spec, generator=g))
    return made
