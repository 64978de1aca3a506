"""A decoder's calls with a cache, served from pages: prepared before the captured graph runs, counted when it is done.

A call that cannot be served runs as it came, and the report says why.
"""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from opsmith.compiler.config import Config
from opsmith.compiler.meanwhile import meanwhile
from opsmith.compiler.modules import conventions
from opsmith.decoding import Unserved

if TYPE_CHECKING:
    from opsmith.decoding.cache import PagedLayer

BLOCK = 16  # tokens in a block
Run = Callable[..., Any]


class Paged:
    """The decoding of one model."""

    def __init__(self, config: Config) -> None:
        self.int8 = config.cache == "paged_int8"
        self.verify = config.verify
        self.fallbacks: Counter[str] = Counter()
        self.windows: list[int | None] = []  # of each layer, once they are known
        self.why: str | None = None  # nothing is served
        if config.cache == "off":
            self.why = "Config.cache is off"
        elif importlib.util.find_spec("transformers") is None:
            self.why = "transformers is not installed"
        self._spare: defaultdict[int | None, list[Any]] = defaultdict(list)  # memory of a cache that is gone
        self._first: nn.Module | None = None  # of its attentions
        self._configs: list[Any] = []  # of the models whose attention is exchanged for a call
        # A model's attention is exchanged for all threads: no other call runs meanwhile.
        self.lock = threading.RLock()

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        """The model's call: by `run` on pages, where these serve it."""
        if self.why is not None and not self.windows:  # none of its caches has pages
            if self.why in self.fallbacks and conventions.may_cache(args, kwargs):
                self.fallbacks[self.why] += 1
            return run(*args, **kwargs)
        with self.lock:
            if not conventions.may_cache(args, kwargs):
                return run(*args, **kwargs)
            call, known = conventions.ModelCall(model, args, kwargs), self.why
            if not call.caches:
                return run(*args, **kwargs)
            why = self.why or call.refusal(model.parameters()) or call.beside()
            why = why or self._take_over(model, call)
            if why is None:
                try:
                    return self._on_pages(model, call, run)
                except Unserved as error:
                    self.why = why = str(error)
            self.fallbacks[why] += 1
            # Pages change in place, so studying a graph would write to them several times, and elsewhere.
            through = conventions.pages_of(call.cache) is None
            try:
                return (run if through else model._call_impl)(*args, **kwargs)
            except Exception:  # a call that fails, of a token that there is not, says nothing of the next one
                self.why = known
                raise

    def _take_over(self, model: nn.Module, call: conventions.ModelCall) -> str | None:
        """Give the call's cache pages, where it is an empty one of the library's own; or why not."""
        from opsmith.compiler.modules.paged import prove
        from opsmith.decoding import cache as paged

        cache = conventions.new_cache(model) if call.cache is None else call.cache
        layers = cache.layers
        if conventions.pages_of(cache) is None:
            if (why := paged.unfit(cache)) is not None:
                return why
            layers = layers or conventions.new_cache(model).layers
            layers = paged.paged(layers, BLOCK, torch.int8 if self.int8 else None)
            if call.tokens.is_cuda:
                self._reuse(layers)
        if not all(isinstance(layer, paged.PagedLayer) for layer in layers):
            return "the cache has other layers than such of keys and values of heads"
        windows = [layer.pages.window for layer in layers]
        if self._first is None:
            found = prove.study(model, call.tokens, windows, self.verify)
            if isinstance(found, str):
                self.why = found
                return found
            self.windows, self._first, self._configs = windows, found, list(conventions.configs(model))
        if windows != self.windows:
            return "the cache has other layers than the model"
        if (why := _places(call, layers)) is not None:
            return why
        layers[0].check_room(call.tokens.shape[1])
        layers[0].belong(self._first)
        call.cache, cache.layers = cache, layers
        cache.layer_class_to_replicate = None
        return None

    def _reuse(self, layers: list[PagedLayer]) -> None:
        """Give a new cache the memory of one that is gone, where recorded calls read it."""
        for pages in dict.fromkeys(layer.pages for layer in layers):
            mine, spare = [layer for layer in layers if layer.pages is pages], self._spare[pages.window]
            if spare and len(spare[-1]) == len(mine):
                for layer, pool in zip(mine, spare.pop(), strict=True):
                    layer.pool = pool
                    pages.pools.append(pool)
            weakref.finalize(pages, keep_one, spare, pages.pools).atexit = False

    def _on_pages(self, model: nn.Module, call: conventions.ModelCall, run: Run) -> Any:
        from opsmith.decoding import step

        cache, tokens = call.cache, call.tokens.shape[1]
        call.say_positions(cache.layers[0].columns)
        call.drop_mask()
        call.count_last()
        call.cache = stateless = step.Stateless(len(cache.layers))
        prepared = step.Calling.on(cache.layers, tokens)
        with prepared, meanwhile(self._configs, conventions.ATTENTION, step.NAME):
            result = run(**call.given)
        return conventions.with_cache(result, stateless, cache)

    def lines(self) -> list[str]:
        """For the plan: what is cached, and which operators read it."""
        if not self.windows or self.why is not None:
            return []
        windows = Counter(w for w in self.windows if w is not None)
        seen = ", ".join(f"{n} of them the last {w} tokens" for w, n in windows.items())
        held = "int8" if self.int8 else "the model's dtype"
        return [
            f"  {len(self.windows):3d} x paged_attention  keys and values in {held}, in blocks of {BLOCK} tokens"
            f"{seen and '; ' + seen}; a prompt by attention"
        ]


def keep_one(spare: list[Any], memory: Any) -> None:
    """Keep the memory of a cache that is gone for the next one."""
    spare[:] = [memory]


def _places(call: conventions.ModelCall, layers: list[PagedLayer]) -> str | None:
    """Say which columns are padding, where a prompt begins; or why the pages cannot leave out what the mask hides."""
    past = layers[0].columns
    starts = call.padding(past + call.tokens.shape[1])
    if isinstance(starts, str):
        return starts
    each = dict.fromkeys(layer.pages for layer in layers)
    return next(filter(None, [call.begin(pages, past, starts) for pages in each]), None)
