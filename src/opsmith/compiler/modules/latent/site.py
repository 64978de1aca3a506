"""One attention module at work on latent rows: its weights, its two forms, and the operator that a graph sees.

In a captured graph the whole of it, from the normalized hidden states to the heads' results, is one opaque node. What
belongs to a call (slots, block tables, lengths) does not pass through the graph: the session lays it down before the
call, as `Laid`, so that a graph stays the same while its sequences grow.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from opsmith import decoding
from opsmith.compiler.choose.weights import Seen
from opsmith.compiler.modules.conventions import HUGGING_FACE
from opsmith.compiler.modules.latent.find import Reading, Weights
from opsmith.compiler.modules.latent.pages import LatentPages
from opsmith.compiler.modules.linear_layers import own
from opsmith.decoding.pages import Step
from opsmith.ops import (
    MLACache,
    MLAWeights,
    PackedLinear,
    attention,
    linear,
    mla_attention,
    mla_kv_epilogue,
    mla_preprocess,
    mla_q_epilogue,
    rms_norm,
    rope as rope_op,
)
from opsmith.ops.mla.projection import normalize_and_project

FORMS = {"int8": "weight_int8", "int8_dynamic": "per_token", "int4": "weight_int4"}
OPERATORS = {  # by whether they stand around packed products
    False: (mla_preprocess.__name__, mla_attention.__name__),
    True: (mla_kv_epilogue.__name__, mla_q_epilogue.__name__, mla_attention.__name__),
}
To = tuple[Tensor, Tensor, Tensor, MLACache]  # cosines, sines, slots, and where these are
_NUMBERS = itertools.count()
_SITES: weakref.WeakValueDictionary[str, LatentSite] = weakref.WeakValueDictionary()


@dataclass
class Switch:
    """Whether calls go to the rewritten attention: all that a graph is guarded on."""

    on: bool = False


@dataclass(frozen=True)
class Laid:
    """A call's pages and its step on them, as its layers and what records it find them."""

    sites: list[LatentSite]
    pages: LatentPages
    step: Step

    def fixed(self) -> Hashable | None:
        """Sizes, and where rows and weights lie; None for a prompt, which is told its padding by other means."""
        step, batch = self.step, self.pages.batch
        forms = {cheaper(site.reading, batch, step.tokens, step.columns) for site in self.sites}
        if not step.past or forms != {"absorbed"}:
            return None
        held = [t for cache in self.pages.caches for t in (cache.latent, cache.rope) if t is not None]
        places = [(t.data_ptr(), t.shape) for t in held]
        return (step.tokens, *step.tables.shape, *places, *[site.weights() for site in self.sites])

    def tensors(self) -> list[Tensor]:
        return [self.step.slots, self.step.tables, self.step.lens]

    def of(self, tensors: list[Tensor]) -> AbstractContextManager[None]:
        """The same step with these."""
        slots, tables, lens = tensors
        return decoding.laying(replace(self, step=replace(self.step, slots=slots, tables=tables, lens=lens)))


def operations(r: Reading, batch: int, tokens: int, columns: int) -> dict[str, int]:
    """Multiplications and additions of both forms, for the last `tokens` of `columns` of each sequence.

    Absorbed, a token pays for the up-projections, and more for each row it sees; expanded, each row pays for them.
    """
    pairs = batch * (tokens * columns - tokens * (tokens - 1) // 2)
    up = r.heads * r.kv_lora * (r.nope + r.value)
    return {
        "absorbed": 2 * (batch * tokens * up + pairs * r.heads * (2 * r.kv_lora + r.rope)),
        "expanded": 2 * (batch * columns * up + pairs * r.heads * (r.nope + r.rope + r.value)),
    }


def cheaper(r: Reading, batch: int, tokens: int, columns: int) -> str:
    """The form with fewer operations."""
    counts = operations(r, batch, tokens, columns)
    return min(counts, key=counts.__getitem__)


@dataclass
class LatentReport:
    """One attention layer that keeps latent rows, or why it does not."""

    name: str
    status: str = "found"  # until it has been proved, then "kept" or "rolled back"
    heads: int = 0
    values: int = 0  # cached for a token
    plain_values: int = 0  # that attention with keys and values of all heads would cache
    token_bytes: int = 0
    mode: str = ""
    weights: str = ""  # how they are quantized, or packed by the model
    operators: tuple[str, ...] = ()  # that a layer which is kept is made of
    error: float = 0.0
    bound: float = 0.0
    lost: float = 0.0  # relative, by quantized weights or rows
    why: str = ""

    def __str__(self) -> str:
        if self.status != "kept":
            return f"{self.name} {self.status}: {self.why}"
        return (
            f"{self.name}: {self.values} values ({self.token_bytes} bytes) a token in mode {self.mode!r}, "
            f"{self.plain_values} with keys and values of {self.heads} heads"
        )


class LatentSite:
    """An attention module whose call computes in the latent space."""

    def __init__(self, name: str, module: nn.Module, readings: list[Reading], switch: Switch) -> None:
        self.name, self.module, self.readings, self.switch = name, module, readings, switch
        self.report = LatentReport(name)
        self.index = 0  # among the layers of a cache
        self.original = module.forward
        self.names = list(inspect.signature(self.original).parameters)
        self.key = f"{name}#{next(_NUMBERS)}"
        self.roles = HUGGING_FACE
        self.reading: Reading
        self.interleaved = True
        self.order: Tensor | None = None  # from the library's order of rope dimensions to ours
        self.portable = False  # whether rows may come from the library's own cache, and go back
        self.quantize: str | None = None
        # ctkv_scale, q_nope_scale of an int8 cache
        self.scales: tuple[Tensor, Tensor] | None = None
        self._weights: tuple[Weights, Seen] | None = None  # and what they were made of
        _SITES[self.key] = self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call; its own, where there is no step."""
        if not self.switch.on:
            return self.original(*args, **kwargs)
        kwargs.update(zip(self.names, args, strict=False))
        cos, *sin = self.roles.parts(kwargs)
        x = kwargs[self.roles.hidden]
        heads = torch.ops.opsmith.mla_layer.default(x, cos, sin[0] if sin else None, self.key)
        return self.roles.result(self.reading.out(heads), kwargs)

    def __reduce__(self) -> Any:
        raise TypeError(
            "pickle: this model's attention is rewritten by opsmith.optimize; call opsmith.restore(model) first, or "
            "save its state_dict or save_pretrained, which are as they were"
        )

    @property
    def scale(self) -> float:
        """What the module multiplies scores with, where it says so: YaRN adds to the root of the width."""
        said = (getattr(self.module, name, None) for name in ("scaling", "softmax_scale", "scale"))
        root = float((self.reading.nope + self.reading.rope) ** -0.5)
        return next((value for value in said if isinstance(value, float)), root)

    @property
    def width(self) -> int:
        return self.reading.heads * self.reading.value

    def cache(self, mode: str, blocks: int, block_size: int) -> MLACache:
        """An empty pool for this layer's rows."""
        made = self.reading.cache(mode, blocks, block_size)
        if mode == "int8_tiled" and self.scales is not None:
            made.ctkv_scale, made.q_nope_scale = self.scales
        return made

    def weights(self) -> Weights:
        """Absorbed and packed from the module's own, which may have changed since."""
        now = own(*self.reading.absorbed)
        if self._weights is None or self._weights[1].changed(now):
            made = self.reading.weights(self.interleaved)
            if self.quantize is not None and isinstance(made, MLAWeights):
                made = made.quantize(self.quantize)
            self._weights = made, Seen(now)
        return self._weights[0]

    def close(self) -> None:
        """Let go of the weights."""
        self._weights = None

    def compute(
        self, x: Tensor, cos: Tensor, sin: Tensor | None, pages: LatentPages, step: Step, form: str = ""
    ) -> Tensor:
        """[batch, tokens, heads * value] of hidden states [batch, tokens, D]; their rows go into the cache.

        In the form that is cheaper, where none is said.
        """
        if (x.shape[0], x.shape[1]) != (pages.batch, step.tokens):
            raise ValueError(
                f"opsmith: {self.name} was prepared for {pages.batch} x {step.tokens} tokens, and got "
                f"{x.shape[0]} x {x.shape[1]}"
            )
        # A row of cosines and one of sines for each token.
        parts = (cos.real, cos.imag) if sin is None else (cos, sin)
        cos, sin = (t.expand(*x.shape[:2], -1).reshape(-1, t.shape[-1]).contiguous() for t in parts)
        form = form or cheaper(self.reading, pages.batch, step.tokens, step.columns)
        compute = self._absorbed if form == "absorbed" else self._expanded
        with torch.no_grad():
            return compute(x.reshape(-1, x.shape[2]), cos, sin, pages, step).view(*x.shape[:2], self.width)

    def _absorbed(self, x: Tensor, cos: Tensor, sin: Tensor, pages: LatentPages, step: Step) -> Tensor:
        w, cache = self.weights(), pages.caches[self.index]
        q_out, q_rope = self.preprocess(w, x, (cos, sin, step.slots, cache))
        how: Any = {"ctkv_scale": cache.ctkv_scale, "q_nope_scale": cache.q_nope_scale, "scale": self.scale}
        return mla_attention(q_out, q_rope, cache, step.tables, step.lens, wuv=w.wuv, **how)

    def preprocess(self, w: Weights, x: Tensor, to: To) -> tuple[Tensor, Tensor | None]:
        """Queries in the latent space: by one operator, or by two fused chains between packed products."""
        cos, sin, _, cache = to
        how: Any = {"q_nope_scale": cache.q_nope_scale}
        if isinstance(w, MLAWeights):
            return mla_preprocess(x, w, *to, eps=self.reading.eps, ctkv_scale=cache.ctkv_scale, **how)[:2]
        how |= {"interleaved": w.interleaved, "joint": cache.mode == "joint"}
        return mla_q_epilogue(self._queries(w, x, to), w.wuk, cos, sin, **how)

    def _queries(self, w: Weights, x: Tensor, to: To) -> Tensor:
        """Queries [T, heads, nope + rope] that are not rotated yet; the keys' rows go into the cache."""
        r = self.reading
        if isinstance(w, MLAWeights):
            p = w.parts()
            keys = normalize_and_project(x, None, None, p.down, p.quant, r.eps)
            latent_q = x if p.gamma1 is None else p.split(keys)[1]
            q = normalize_and_project(latent_q, p.gamma1, p.beta1, p.up, p.quant, r.eps)
        else:
            keys = r.kv_a(x)
            q = r.q(x if r.q_a is None else rms_norm(r.q_a(x), r.q_norm.weight, r.eps))
        how: Any = {"eps": r.eps, "interleaved": w.interleaved, "ctkv_scale": to[-1].ctkv_scale}
        mla_kv_epilogue(keys, r.kv_norm.weight, *to, **how)
        return q.view(-1, r.heads, r.nope + r.rope)

    def _expanded(self, x: Tensor, cos: Tensor, sin: Tensor, pages: LatentPages, step: Step) -> Tensor:
        """Keys and values of heads, made of all rows: cheaper where many tokens see few rows."""
        r, w = self.reading, self.weights()
        q = self._queries(w, x, (cos, sin, step.slots, pages.caches[self.index]))
        turned = rope_op(q[..., r.nope :], cos, sin, interleaved=w.interleaved)
        q = torch.cat((q[..., : r.nope], turned), -1).view(pages.batch, step.tokens, r.heads, -1)
        nope, rope = pages.read(self.index, step.columns)
        b = r.kv_b
        made = b(nope) if isinstance(b, PackedLinear) else linear(nope, b.weight.detach())
        made = made.view(*nope.shape[:2], r.heads, r.nope + r.value)
        shared = rope.unsqueeze(2).expand(-1, -1, r.heads, -1)
        keys = torch.cat((made[..., : r.nope], shared), -1)
        y = attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            made[..., r.nope :].transpose(1, 2),
            mask=pages.there(0, step.columns),
            causal=True,
            scale=self.scale,
        )
        return y.transpose(1, 2).reshape(-1, self.width)


_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
_LIBRARY.define("mla_layer(Tensor x, Tensor cos, Tensor? sin, str site) -> Tensor")


def _run(x: Tensor, cos: Tensor, sin: Tensor | None, site: str) -> Tensor:
    layer, laid = _SITES[site], decoding.call.laid
    if not isinstance(laid, Laid):
        raise RuntimeError(f"opsmith: {layer.name} was called without a cache prepared for it")
    return layer.compute(x, cos, sin, laid.pages, laid.step)


def _shape(x: Tensor, cos: Tensor, sin: Tensor | None, site: str) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], _SITES[site].width))


_LIBRARY.impl("mla_layer", _run, "CompositeExplicitAutograd")
torch.library.register_fake("opsmith::mla_layer", _shape, lib=_LIBRARY)
