"""Proof that a model's attention is what the pages compute: layer by layer in float64, and the whole on a few tokens.

The model runs once with its own attention, on the first call's tokens twice, once padded. What each layer asks of its
mask is noted; its queries, keys and values go through the blocks, a prompt and a token, and are held to the model's own
function in float64. Then the model runs as it will, without a mask and with a cache that has no state. How far that may
be from its own logits, it says itself: it runs again with each attention's results moved by a rounding at random.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.compiler.choose.ranks import Ranks, agreed
from opsmith.compiler.meanwhile import meanwhile
from opsmith.compiler.modules import conventions
from opsmith.compiler.prove.wide import Exact, widened
from opsmith.compiler.reasons import raised
from opsmith.decoding import Unserved
from opsmith.ops.attention import CARD

_TOKENS = 48  # of a sequence
_PADDING = 3
_BLOCK = 8  # so that they fill several
_NAME = "opsmith_watch"
_FARTHER = 4  # than what roundings do to the logits
_ROUNDINGS = 8  # of the largest logit, which any order of sums may take
_DRAWS = 3  # a rounding may send a token to another expert, and ours need not be the first
_MORE = ("position_bias", "head_mask", "alibi", "is_causal")  # what changes an attention, and pages have not


@dataclass
class Seen:
    """What one layer's attention was called with: the sequence without padding."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor  # [1, 1, n, n], True where a key is seen
    plain: bool  # whether it is causal, in a window perhaps, and hides nothing but padding
    window: int | None
    options: dict[str, Any] = field(default_factory=dict)


class _Watching(threading.local):
    name = ""  # of the model's own attention
    seen: list[Seen]
    roundings: torch.Generator | None = None  # where results are moved


_watching = _Watching()


def study(model: nn.Module, tokens: Tensor, windows: list[int | None], verify: bool) -> str | nn.Module:
    """Why a model's attention is not served from pages with these windows; or that of its first layer, where it is."""
    from opsmith.decoding import step

    _register()
    name = conventions.attention_of(model)
    if name not in ("sdpa", "eager", "opsmith"):
        return "its attention is not chosen by name" if name is None else f"its attention is {name}"
    inputs = _inputs(tokens)
    chosen = list(conventions.configs(model))
    _watching.name, _watching.seen = name, []

    def runs(cache: Any) -> Tensor:
        with torch.no_grad(), meanwhile(chosen, conventions.ATTENTION, _NAME):
            return _last(model._call_impl(**inputs, **_kept(model), past_key_values=cache, use_cache=True))

    try:
        cache = conventions.new_cache(model)
        own = runs(cache)
        by_layer = {conventions.place(seen.module): seen for seen in _watching.seen}
        used = {at for at, layer in enumerate(cache.layers) if layer.get_seq_length()}
        if not by_layer or set(by_layer) != used or used != set(range(len(windows))):
            return "its attention is not reached by the library's registry"
        for at, window in enumerate(windows):
            seen = by_layer[at]
            if not seen.plain or seen.window not in (None, window):
                return f"the mask of layer {at} is more than causality, a window and padding"
            if seen.window is None and window is not None:
                return f"layer {at} sees all tokens, and its cache holds a window"
            if odd := [name for name in _MORE if seen.options.get(name) is not None]:
                return f"layer {at} gives its attention {odd[0]}"
        layers = {at: (by_layer[at], window) for at, window in enumerate(windows)}
        # Each rank has other heads.
        if verify and (why := agreed(Ranks.of(model), _wrong(layers))):
            return why
        with torch.no_grad(), meanwhile(chosen, conventions.ATTENTION, step.NAME):
            ours = _last(_stepwise(model, inputs, windows))
        if not _near(own, ours, lambda: runs(conventions.new_cache(model))):
            return "without its mask and with another cache it computes something else"
    except Unserved as error:
        return str(error)
    except Exception as error:  # whatever the model does with such a call, it is served as it was
        return f"called alone it {raised(error)}"
    finally:
        _watching.seen, _watching.roundings = [], None
    return by_layer[0].module


def _last(result: Any) -> Tensor:
    """What a call gives at the last position."""
    values = result.values() if isinstance(result, dict) else result
    return next(v for v in values if isinstance(v, Tensor))[:, -1]


def _near(own: Tensor, ours: Tensor, run: Callable[[], Tensor]) -> bool:
    """Whether the two are as alike as the model is to itself where each attention rounds otherwise."""
    allowed = _ROUNDINGS * torch.finfo(own.dtype).eps * own.abs().max()
    for seed in range(_DRAWS if own.shape == ours.shape else 0):
        _watching.roundings = torch.Generator(own.device).manual_seed(seed)
        allowed = torch.maximum(allowed, _FARTHER * (run() - own).abs().max())
        if bool((own - ours).abs().max() <= allowed):
            return True
    return False


def _inputs(tokens: Tensor) -> dict[str, Any]:
    """The first sequence's last tokens twice, once with padding at the left."""
    n = min(max(tokens.shape[1], 2 * _PADDING), _TOKENS)
    times = -(-n // tokens.shape[1])
    one = tokens[:1, -n:].repeat(1, times, *[1] * (tokens.dim() - 2))[:, -n:]
    mask = torch.ones((2, n), dtype=torch.int64, device=tokens.device)
    mask[1, :_PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    name = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
    return {name: one.repeat(2, *[1] * (one.dim() - 1)), "attention_mask": mask, "position_ids": positions}


def _kept(model: nn.Module) -> dict[str, int]:
    """Of a model that can be told so, the logits of the last position alone, which are all that is compared."""
    call = conventions.ModelCall(model, (), {})
    return {conventions.KEEP: 1} if conventions.KEEP in call.names else {}


def _stepwise(model: nn.Module, inputs: dict[str, Any], windows: list[int | None]) -> Any:
    """The model on pages, all tokens but the last at once, then the last."""
    from opsmith.decoding import step

    layers = _layers(windows)
    mask = inputs["attention_mask"]
    for pages in dict.fromkeys(layer.pages for layer in layers):
        pages.reset(len(mask), mask.device, (mask.shape[1] - mask.sum(1)).tolist())
    for some in (slice(0, -1), slice(-1, None)):
        given = {name: t[:, some] for name, t in inputs.items()}
        call = conventions.ModelCall(model, (), given | _kept(model) | {"use_cache": True})
        call.cache = step.Stateless(len(layers))
        call.drop_mask()
        with step.Calling.on(layers, call.tokens.shape[1]):
            result = model._call_impl(**call.given)
    return result


def _layers(windows: list[int | None]) -> list[Any]:
    from opsmith.decoding.cache import PagedLayer
    from opsmith.decoding.pages import Pages

    pages = {window: Pages(_BLOCK, window) for window in windows}
    return [PagedLayer(pages[window]) for window in windows]


def _wrong(layers: Mapping[int, tuple[Seen, int | None]]) -> str:
    """Why the pages' attention is not accurate enough beside the model's own function, or nothing.

    Where eager's largest error was small by chance, a layer may be as far from eager as the errors of others allow.
    """
    close: list[float] = []  # eager's errors, relative, of the layers that are within the policy
    doubtful: dict[int, tuple[Tensor, Tensor, str]] = {}
    for at, (seen, window) in layers.items():
        own = conventions.own_attention(seen.module, _watching.name)
        assert own is not None  # it ran
        given = (seen.query, seen.key, seen.value)
        with torch.no_grad():
            eager = own(seen.module, *given, _as_taken(seen.mask, seen.query.dtype), **seen.options)[0]
            with Exact():
                wide, mask = widened(given), _as_taken(seen.mask, torch.float64)
                exact = own(seen.module, *wide, mask, **widened(seen.options))[0]
            ours = _by_pages(seen, window)
        verdict = CARD.tolerance.check(ours, eager, exact)
        if verdict.ok:
            close.append(verdict.eager)
        else:
            doubtful[at] = ours, eager, verdict.why
    near, allowed = CARD.tolerance.near, max(close, default=0.0)
    wrong = ((at, why) for at, (ours, eager, why) in doubtful.items() if not near(ours, eager, allowed).ok)
    return next((f"layer {at}: {why}" for at, why in wrong), "")


def _by_pages(seen: Seen, window: int | None) -> Tensor:
    """[1, n, heads, width] through blocks: all tokens but the last as a prompt, the last by decoding."""
    from opsmith.decoding.step import Calling, attend

    tokens, layers, results = seen.query.shape[2], _layers([window]), []
    first: Any = SimpleNamespace(layer_idx=0)
    layers[0].pages.reset(1, seen.query.device)
    for some in (slice(0, tokens - 1), slice(tokens - 1, tokens)):
        with Calling.on(layers, some.stop - some.start):
            q, k, v = (t[:, :, some] for t in (seen.query, seen.key, seen.value))
            results.append(attend(first, q, k, v, None, **seen.options)[0])
    return torch.cat(results, 1)


def _as_taken(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as the model's own attention takes it."""
    if _watching.name != "eager":
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> Any:
    """The model's own attention, whose arguments are noted."""
    words = getattr(attention_mask, "opsmith", None)
    q, k, v = (t[:1].detach() for t in (query, key, value))
    _watching.seen.append(
        Seen(
            *(module, q, k, v, attention_mask[:1]),
            plain=words is not None and words.aligned and words.starts is not None,
            window=None if words is None else words.window,
            options={k: v for k, v in options.items() if k in ("scaling", "softcap", "s_aux", *_MORE)},
        )
    )
    own = conventions.own_attention(module, _watching.name)
    if own is None:
        raise ValueError("has no function of its own for attention")
    y, *rest = own(module, query, key, value, _as_taken(attention_mask, query.dtype), **options)
    if (draws := _watching.roundings) is not None:
        moved = torch.rand(y.shape, generator=draws, device=y.device) * 2 - 1
        y = (y + y * moved * torch.finfo(y.dtype).eps).to(y.dtype)
    return y, *rest


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from opsmith.decoding import step
    from opsmith.decoding.attention import mask

    AttentionInterface.register(step.NAME, step.attend)
    AttentionInterface.register(_NAME, _attend)
    # Every mask in numbers, with what it says in words where it says no more.
    AttentionMaskInterface.register(_NAME, partial(mask, always=True))
