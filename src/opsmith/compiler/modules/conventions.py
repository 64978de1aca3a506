"""How models and their attention are called: Hugging Face's names, masks, positions and caches, known nowhere else.

An attention module of somebody else has other names. What its arguments are, their shapes say.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.decoding.pages import Pages, padded

_CACHE = "past_key_values"
_MASK = "attention_mask"
_POSITIONS = "position_ids"
KEEP = "logits_to_keep"
_PLAIN = ("input_ids", "inputs_embeds", _MASK, _POSITIONS, KEEP)  # that a step of decoding may have
_HIDES = "the mask hides other columns than those of the padding at the left"


@dataclass(frozen=True)
class Roles:
    """Which arguments of an attention module's call are what, and what it returns beside its output."""

    hidden: str
    table: tuple[str, ...]  # cosines and sines: one argument each, or one for both
    mask: str | None = None
    cache: str | None = None  # a cache of Hugging Face's
    beside: tuple[str | None, ...] | None = None  # "cache" or None each; None where the output is all
    known: bool = True  # whether that is all that it returns

    def parts(self, given: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Cosines and sines of a call, or complex numbers."""
        values = [given[name] for name in self.table]
        return tuple(values[0]) if isinstance(values[0], tuple | list) else tuple(values)

    def result(self, out: Tensor, given: Mapping[str, Any]) -> Any:
        """What the module returns with this output."""
        if self.beside is None:
            return out
        return out, *(given.get(self.cache) if what and self.cache else None for what in self.beside)


HUGGING_FACE = Roles("hidden_states", ("position_embeddings",), _MASK, _CACHE, (None,))


def roles(given: Mapping[str, Any], result: Any, width: int, ropes: Collection[int]) -> Roles | None:
    """The roles in a call of an attention module: by Hugging Face's names, else by the shapes of the arguments.

    Args:
        given: the arguments by name.
        result: what the module returned.
        width: of the hidden states.
        ropes: how many rotated features a head may have.
    """
    if {HUGGING_FACE.hidden, *HUGGING_FACE.table} <= set(given):
        return HUGGING_FACE
    hidden = [k for k, v in given.items() if _floating(v) and v.dim() == 3 and v.shape[-1] == width]
    if len(hidden) != 1:
        return None
    tokens = given[hidden[0]].shape[1]
    rest = {k: v for k, v in given.items() if k != hidden[0]}
    pairs = [k for k, v in rest.items() if _is_table(v, tokens, ropes)]
    single = [k for k, v in rest.items() if isinstance(v, Tensor) and _is_half(v, tokens, ropes)]
    table = tuple(pairs or single)
    if len(table) != (1 if pairs else 2):
        return None
    mask = next((k for k, v in rest.items() if k not in table and _is_mask(v, tokens)), None)
    cache = next((k for k, v in rest.items() if _is_cache(v)), None)
    several = isinstance(result, tuple)
    beside = tuple("cache" if _is_cache(r) else None for r in result[1:]) if several else None
    known = not several or all(r is None or (_is_cache(r) and cache) for r in result[1:])
    return Roles(hidden[0], table, mask, cache, beside, known)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_half(value: Tensor, tokens: int, ropes: Collection[int]) -> bool:
    fits = value.dim() in (2, 3) and value.shape[-2] == tokens
    return fits and any(value.shape[-1] in (rope, rope // 2) for rope in ropes)


def _is_table(value: Any, tokens: int, ropes: Collection[int]) -> bool:
    """True for cosines and sines in one argument: a pair, or complex numbers."""
    if isinstance(value, Tensor):
        return value.is_complex() and _is_half(value, tokens, ropes)
    pair = isinstance(value, tuple | list) and len(value) == 2
    return pair and all(_floating(v) and _is_half(v, tokens, ropes) for v in value)


def _is_mask(value: Any, tokens: int) -> bool:
    square = isinstance(value, Tensor) and value.dim() > 1 and value.shape[-2] == tokens
    return square and value.shape[-1] >= tokens


def _is_cache(value: Any) -> bool:
    return hasattr(value, "layers") and hasattr(value, "get_seq_length")


def alone(roles: Roles, given: Mapping[str, Any], tokens: slice) -> dict[str, Any]:
    """The other arguments of an attention module's call, for some tokens of its first sequence without a cache."""
    if roles == HUGGING_FACE:
        return {}
    rest = {name: v for name, v in given.items() if name != roles.hidden and name not in roles.table}
    for name, value in rest.items():
        if isinstance(value, Tensor) and name == roles.mask:
            rest[name] = value[:1, ..., tokens, tokens] if value.dim() > 2 else value[tokens, tokens]
        elif isinstance(value, Tensor):
            rest[name] = value[:1, tokens] if value.dim() == 2 else value
        elif not isinstance(value, bool | int | float | str):
            rest[name] = None
    return rest


def masked(like: Tensor | None, x: Tensor) -> Tensor:
    """A causal mask for these hidden states [1, n, D]: of numbers to add, or of the kind of another one."""
    tokens = x.shape[1]
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
    if like is not None and like.dtype == torch.bool:  # a token sees itself, whatever says so
        mask = mask ^ like.flatten()[-1]
    else:
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask, torch.finfo(x.dtype).min)
    return mask if like is None else mask[(0,) * (4 - like.dim())]


def place(module: nn.Module) -> int | None:
    """Which layer of a cache is an attention module's."""
    at = getattr(module, "layer_idx", None)
    return at if isinstance(at, int) else None


def layers(model: nn.Module) -> int | None:
    """How many layers a model says it has."""
    return getattr(getattr(model, "config", None), "num_hidden_layers", None)


def new_cache(model: nn.Module | None = None) -> Any:
    """An empty cache of the library's, for the layers of a model if there is one, where there is the library."""
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=getattr(model, "config", None))


def pages_of(cache: Any) -> Any:
    """The (first) pages that a cache's layers lie in, if they do."""
    return next((x.pages for x in getattr(cache, "layers", ()) if hasattr(x, "pages")), None)


def with_cache(result: Any, given: Any, cache: Any) -> Any:
    """What a model returned, with a cache in the place of the one that it was given."""
    if isinstance(result, tuple):
        return tuple(cache if value is given else value for value in result)
    if isinstance(result, dict):  # a ModelOutput
        for name in [name for name, value in result.items() if value is given]:
            result[name] = cache
    return result


def configs(model: nn.Module) -> Iterator[Any]:
    """The configurations of a model and of the models in it that choose an attention."""
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), ATTENTION)}
    return iter(found.values())


ATTENTION = "_attn_implementation"  # how a configuration calls what it chose; the library's users set it, too


def attention_of(model: nn.Module) -> str | None:
    """The name of the attention that a model uses, if it asks the library's registry for it."""
    names = {getattr(config, ATTENTION) for config in configs(model)}
    return names.pop() if len(names) == 1 else None


def own_attention(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """The function behind a name: the library's, or the one beside an attention module's class."""
    from transformers import AttentionInterface

    if name == "eager":
        return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get(name)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=8)
def _last(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        last = torch.tensor([-1], device=device)
    torch._dynamo.mark_static(last)
    return last


def loop() -> int | None:
    """Which loop of the library's generate over tokens calls right now; the prompt's call comes from elsewhere."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("opsmith.", "torch.")):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "transformers.generation.utils":
        return None
    return id(frame) if "_prefill" in frame.f_code.co_names else None


def may_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call can be one with a cache. To ask its signature takes as long as a layer of a short sentence."""
    told = kwargs.get(_CACHE) is not None or kwargs.get("use_cache") is True
    return told or not all(a is None or isinstance(a, Tensor) for a in args)


class ModelCall:
    """A call of a whole model, by what its arguments mean."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model, self.names = model, inspect.signature(model.forward).parameters
        self.given = dict(zip(self.names, args, strict=False)) | dict(kwargs)

    @property
    def cache(self) -> Any:
        """What the call brings along."""
        return self.given.get(_CACHE)

    @cache.setter
    def cache(self, cache: Any) -> None:
        self.given[_CACHE] = cache

    @property
    def tokens(self) -> Any:
        """The input: class numbers, or embeddings of them."""
        ids = self.given.get("input_ids")
        return self.given.get("inputs_embeds") if ids is None else ids

    def refusal(self, weights: Iterable[nn.Parameter]) -> str | None:
        """Why no cache in blocks serves the call, as far as its arguments and PyTorch's modes say.

        Args:
            weights: what would learn, where gradients are recorded.
        """
        if self.model.training:
            return "the model is in training mode"
        if torch.is_grad_enabled() and any(p.requires_grad for p in weights):
            return "gradients are recorded"
        config = getattr(self.model, "config", None)
        if _CACHE not in self.names:
            return f"the model's call takes no {_CACHE}"
        if self.given.get("output_attentions") or getattr(config, "output_attentions", False):
            return "attention weights are asked for"
        if "decoder_input_ids" in self.names:
            return "a model of an encoder and a decoder keeps a cache of two attentions"
        if not isinstance(self.tokens, Tensor) or not self.tokens.numel():
            return "there is no input of tokens"
        if self.cache is None:
            use = self.given.get("use_cache")
            if not (getattr(config, "use_cache", False) if use is None else use):
                return "no cache is asked for"
        return "autocast is on" if torch.is_autocast_enabled(self.tokens.device.type) else None

    @property
    def caches(self) -> bool:
        """Whether the caller says that the model is to use a cache: by giving one, or in a word."""
        return _CACHE in self.names and (self.cache is not None or self.given.get("use_cache") is True)

    def beside(self) -> str | None:
        """Why the call is more than tokens, a mask, positions and a cache."""
        more = [k for k, v in self.given.items() if isinstance(v, Tensor) and k not in _PLAIN]
        return f"{more[0]} is given" if more else None

    def padding(self, columns: int) -> list[int] | str:
        """How many columns at the left of each sequence are padding; a text where it is another mask."""
        mask = self.given.get(_MASK)
        if mask is None:
            return [0] * len(self.tokens)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return "the mask is not one of padding"
        if tuple(mask.shape) != (self.tokens.shape[0], columns):
            return "the mask has another length than the cache and the input"
        starts = padded(mask, columns)
        return _HIDES if starts is None else starts

    def begin(self, pages: Pages, past: int, starts: list[int]) -> str | None:
        """Have pages hold the call's sequences, which is nothing new behind so many columns; or why they cannot."""
        batch = len(self.tokens)
        if not past:
            pages.reset(batch, self.tokens.device, starts)
        elif pages.batch != batch:
            raise ValueError(
                f"opsmith: the cache is for a batch of {pages.batch}, the input has {batch} sequences"
            )
        return None if pages.starts == starts else _HIDES

    def say_positions(self, start: int) -> None:
        """Count the positions of the tokens from here, where the caller did not.

        The caller's are copied: where they are a view, a graph is for views of such a tensor alone.
        """
        if (given := self.given.get(_POSITIONS)) is not None:
            self.given[_POSITIONS] = given.clone(memory_format=torch.contiguous_format)
        elif _POSITIONS in self.names:
            stop, device = start + self.tokens.shape[1], self.tokens.device
            self.given[_POSITIONS] = torch.arange(start, stop, device=device).unsqueeze(0)

    def count_last(self) -> None:
        """Ask for the last position's logits by its number: how long a slice is, is not known before all sizes are."""
        keep, named = self.given.get(KEEP), self.names.get(KEEP)
        if type(keep) is int and keep == 1 and named and "Tensor" in str(named.annotation):
            self.given[KEEP] = _last(self.tokens.device)

    def drop_mask(self) -> None:
        """Replace the mask, which nobody reads any more: the library takes one of four dimensions as it is, and a
        graph without the growing one stays the same at every length.
        """
        self.given[_MASK] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.tokens.device)


def rehearse(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The model on a call's inputs, as it is, and on a copy of the call's cache, which is to change once.

    A mask speaks of the cache's columns too, so the call would not be the same without one.
    """
    call = ModelCall(model, args, kwargs)
    other: dict[str, Any] = {}
    if call.cache is not None:
        # What autograd recorded in it cannot be copied, and is not needed.
        held = [t for layer in getattr(call.cache, "layers", ()) for t in vars(layer).values()]
        detached = {id(t): t.detach().clone() for t in held if isinstance(t, Tensor)}
        other[_CACHE] = copy.deepcopy(call.cache, detached)
    elif "use_cache" in call.names:
        other["use_cache"] = False
    # Arguments stay where they are: a model that takes *args has no names for them.
    first = [other.pop(name, value) for name, value in zip(call.names, args, strict=False)]
    model._call_impl(*first, *args[len(first) :], **kwargs | other)
