"""opsmith's attention as transformers calls it: `model.set_attn_implementation("opsmith")`.

A mask comes with what it says in few words (a window, padding at the left), where it says no more than that. So the
kernels do without its numbers; and where somebody changed them on the way, these count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from opsmith.decoding.cache import PagedLayer, Update
from opsmith.decoding.pages import Step, padded
from opsmith.decoding.states import PagedStates
from opsmith.ops import attention, paged_attention

FEW = 32  # new tokens, up to which the blocks are read where they lie


@dataclass(frozen=True)
class Words:
    """What a mask says beside causality."""

    window: int | None
    # Of each sequence, how many columns at the left are padding; None where it has other holes.
    starts: list[int] | None
    aligned: bool  # whether the last key is the last query's own


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    always: bool = False,
    **options: Any,
) -> Tensor | None:
    """PyTorch's mask [batch, 1, q_length, kv_length], True where a key is seen; None for a plain causal one.

    Where it is causal, within a window perhaps, and hides nothing but padding, it has these words with it. With
    `always`, a plain one is made, too.
    """
    made: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        local_size,
        allow_is_causal_skip and not always,
        **options,
    )
    if made is None or not allow_is_causal_skip or torch.compiler.is_compiling():
        return made
    if plain(mask_function, local_size):
        end = kv_offset + kv_length
        starts = [0] * batch_size if attention_mask is None else padded(attention_mask, end)
        made.opsmith = Words(local_size, starts, int(q_offset) + q_length == end)  # type: ignore[attr-defined]
    return made


def plain(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Whether a mask is causal, and within a window if there is one: asked at the places where others differ."""
    if window is None:
        return mask_function is causal_mask_function
    queries = torch.tensor([0, 1, window - 1, window, window + 1, 2 * window, 5 * window + 3]).view(-1, 1)
    keys = (queries + torch.tensor([-2 * window, -window - 1, -window, 1 - window, -1, 0, 1])).clamp(min=0)
    first = torch.zeros((), dtype=torch.int64)
    seen = mask_function(first, first, queries, keys)
    return torch.equal(seen, (keys <= queries) & (keys > queries - window))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention [batch, tokens, heads, width] of queries, keys and values [batch, heads, ..., width]."""
    if options.get("output_attentions"):
        raise ValueError(
            "opsmith attention: no weights of attention come out of it; for output_attentions=True call "
            'model.set_attn_implementation("eager")'
        )
    if dropout or any(options.get(name) is not None for name in ("position_bias", "cache")):
        # What only the library's own has.
        if s_aux is not None:
            raise ValueError(
                "opsmith attention: sinks go with neither dropout nor position biases; call "
                'model.set_attn_implementation("eager")'
            )
        other: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        more: Any = {"is_causal": is_causal, "softcap": softcap, **options}
        found: tuple[Tensor, None] = other(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return found
    how: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    words: Words | None = getattr(attention_mask, "opsmith", None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(key, PagedStates):
        update: Update = key.source
        step = _step(module, update, attention_mask, words) if causal else None
        if step is not None:
            window = None if words is None else words.window
            return on_pages(update.layer, step, query, update.key, update.value, window, how), None
    if attention_mask is None:
        tokens = query.shape[2]
        if causal and tokens > 1 and key.shape[2] > tokens:
            # An empty cache of a fixed size: what is behind the new tokens is not there yet.
            key, value = key[:, :, :tokens], value[:, :, :tokens]
        how["causal"] = causal
    elif words is not None and words.aligned and words.starts is not None and not any(words.starts):
        how |= {"causal": True, "window": words.window}
    else:
        how["mask"] = attention_mask
    return attention(query, key, value, **how).transpose(1, 2), None


def _step(
    module: nn.Module, update: Update, attention_mask: Tensor | None, words: Words | None
) -> Step | None:
    """The step that a call on pages takes, if what its mask hides is what the pages leave out."""
    layer, step = update.layer, update.step
    layer.belong(module)
    if attention_mask is None:
        starts: list[int] | None = [0] * len(update.key)
    else:
        starts = None if words is None else words.starts
    if starts == layer.pages.starts:
        return layer.pages.step
    if starts is None or step.past or layer.pages.writer is not layer:
        return None
    return layer.lay_anew(update, starts)


def on_pages(
    layer: PagedLayer,
    step: Step,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    how: dict[str, Any],
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens, whose rows are in their blocks, on these and on what was there before.

    A few of them read the blocks, and may write to `out`; a prompt its own keys and values, with what was there before,
    if anything was.
    """
    pages, pool = layer.pages, layer.held
    if step.past and step.tokens <= FEW:
        q = query.transpose(1, 2)
        given = q if pool.dtype in (q.dtype, torch.int8) else q.to(pool.dtype)
        if how["sinks"] is not None:
            how = how | {"sinks": how["sinks"].to(given.dtype)}
        how = how | {"block_tables": step.tables, "seq_lens": step.lens, "out": out if given is q else None}
        y = paged_attention(given, window=window, **pool.parts, **how)
        return y if given is q else y.to(q.dtype)
    first = pages.oldest(step.past)
    if step.past:
        key, value = pool.read(pages.slots(first, step.columns), query.dtype)
    mask = pages.there(first, step.columns)
    y = attention(query, key, value, mask=mask, causal=True, window=window, **how)
    return y.transpose(1, 2)
