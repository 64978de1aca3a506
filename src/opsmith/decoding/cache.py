"""A Hugging Face cache whose keys and values lie in blocks. Imported where there is transformers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from opsmith.decoding.pages import Pages, Step
from opsmith.decoding.pool import KeyValuePool
from opsmith.decoding.states import PagedStates

KINDS = (DynamicLayer, DynamicSlidingWindowLayer)  # the library's layers that ours take the place of


@dataclass
class Update:
    """What one layer was given: new keys and values, which its blocks have too, and where these are."""

    layer: PagedLayer
    step: Step
    key: Tensor
    value: Tensor

    @property
    def first(self) -> int:
        """The first column that the layer gives back, as the library's layers do."""
        return self.layer.pages.oldest(self.step.past)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def gathered(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns that the new tokens may see."""
        if not self.step.past:
            return self.key, self.value
        slots = self.layer.pages.slots(self.first, self.step.columns)
        return self.layer.held.read(slots, self.key.dtype)


class OnPages(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """What the library asks of a cache's layer, where its rows lie in pages that layers share: one leads them."""

    pages: Pages
    lead: bool
    columns: int
    _rows: Any  # keys and values of so many columns, as the library's layers have them

    @property
    def keys(self) -> Tensor | None:
        """[batch, heads, columns, width]: read together, as the library's layers have them."""
        return self._rows(self.columns)[0] if self.columns else None

    @property
    def values(self) -> Tensor | None:
        """[batch, heads, columns, width]: read together, as the library's layers have them."""
        return self._rows(self.columns)[1] if self.columns else None

    def get_seq_length(self) -> int:
        return self.columns

    def reset(self) -> None:
        if self.lead:
            self.pages.reset(0, self.pages.device)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected a negative number of tokens to remove, got {tokens_to_remove}")
        if self.lead:
            self.pages.crop(max(0, self.columns + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(self.pages.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(rows.tolist())

    def _select(self, order: list[int]) -> None:
        if not (self.lead and self.columns):
            return
        batch = self.pages.batch
        if any(not -batch <= i < batch for i in order):
            raise IndexError(f"cache: expected sequences of a batch of {batch}, got {order}")
        self.pages.select([i % batch for i in order])

    def offload(self) -> None:
        """Blocks stay where they are."""

    def prefetch(self) -> None:
        """Blocks stay where they are."""


class PagedLayer(OnPages):
    """One layer's keys and values in blocks. Layers that see alike share their pages; each has memory of its own."""

    def __init__(self, pages: Pages, dtype: torch.dtype | None = None, max_tokens: int | None = None) -> None:
        self.pages, self.dtype_held, self.max_tokens = pages, dtype, max_tokens
        self.lead = not pages.layers
        pages.layers += 1
        self.columns = 0
        self.pool: KeyValuePool | None = None
        self.owner: weakref.ref[nn.Module] | None = None  # the module whose keys and values these are

    @property
    def held(self) -> KeyValuePool:
        """The memory, once there is some."""
        assert self.pool is not None
        return self.pool

    @property
    def is_initialized(self) -> bool:
        """Whether the memory is there."""
        return self.pool is not None

    @property
    def is_sliding(self) -> bool:
        """Whether only the columns in a window are held."""
        return self.pages.window is not None

    @property
    def sliding_window(self) -> int | None:
        """A token sees only the columns less than so many before its own."""
        return self.pages.window

    @property
    def batch_size(self) -> int:
        return self.pages.batch

    @property
    def record_past(self) -> bool:
        """Whether what leaves the window is kept until the next crop."""
        return self.pages.keep

    @record_past.setter
    def record_past(self, keep: bool) -> None:
        self.pages.keep = keep

    def activate_past_recording(self) -> None:
        self.pages.keep = True

    def _rows(self, columns: int) -> tuple[Tensor, Tensor]:
        slots = self.pages.slots(self.pages.oldest(columns), columns)
        return self.held.read(slots, self.held.given)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        dtype = self.dtype_held or key_states.dtype
        ahead = len(key_states) * -(-(self.max_tokens or 0) // self.pages.block_size)
        self.pool = KeyValuePool(key_states, value_states, self.pages.block_size, dtype, ahead)
        self.pages.pools.append(self.pool)

    def begin(self, key: Tensor, value: Tensor) -> Step:
        """Room for new tokens' keys and values; the first of the layers that share pages makes it for all.

        Raises:
            TypeError, ValueError: for what does not fit with what is held, before anything is written.
        """
        self._check(key, value)
        pages, tokens = self.pages, key.shape[2]
        if self.pool is None:
            self.lazy_initialization(key, value)
        if self.columns == pages.columns:
            if not pages.columns:
                pages.reset(len(key), key.device)
            pages.step, pages.writer = pages.begin(tokens), self
            pages.commit(tokens)
        step = pages.step
        if step is None or (self.columns, tokens, len(key)) != (step.past, step.tokens, pages.batch):
            raise ValueError(
                f"PagedCache: a layer that holds {self.columns} tokens got {tokens} more, but others are at "
                f"{pages.columns} already: a call stopped half way; reset() the cache, or begin with a new one"
            )
        return step

    def _check(self, key: Tensor, value: Tensor) -> None:
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                "PagedCache: expected keys and values [batch, heads, tokens, width], alike but for the width, got "
                f"{tuple(key.shape)} and {tuple(value.shape)}"
            )
        if not key.is_floating_point() or key.dtype != value.dtype:
            raise TypeError(
                f"PagedCache: expected keys and values of one floating-point dtype, got {key.dtype} and {value.dtype}"
            )
        if self.columns and len(key) != self.pages.batch:
            raise ValueError(
                f"PagedCache: it holds a batch of {self.pages.batch} sequences, the input has {len(key)}; "
                "batch_select_indices or batch_repeat_interleave changes which it holds, reset() empties it"
            )
        if self.pool is not None and not self.pool.fits(key, value):
            shape = tuple(self.pool.parts["k_cache"].shape[2:]), tuple(self.pool.parts["v_cache"].shape[2:])
            raise ValueError(
                f"PagedCache: it holds keys and values of heads and widths {shape[0]} and {shape[1]}, got "
                f"{(key.shape[1], key.shape[3])} and {(value.shape[1], value.shape[3])}: a cache serves one model"
            )
        self.check_room(key.shape[2])

    def check_room(self, tokens: int) -> None:
        """Refuse more tokens than there may be."""
        if self.max_tokens is not None and self.columns + tokens > self.max_tokens:
            raise ValueError(
                f"PagedCache: {self.columns} tokens are there, and {tokens} more do not fit into "
                f"max_tokens={self.max_tokens}; make it with a larger one, or with None for no limit"
            )

    def belong(self, module: nn.Module) -> None:
        """Refuse another attention module than that whose keys and values are held."""
        owner = self.owner and self.owner()
        if owner is None or not self.columns:
            self.owner = weakref.ref(module)
        elif owner is not module:
            raise ValueError(
                "PagedCache: what it holds came from another model; a cache serves one model until it is reset()"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def write(self, key: Tensor, value: Tensor) -> Update:
        """Put new keys and values into their blocks."""
        step = self.begin(key, value)
        self.held.fit(self.pages.capacity)
        self.held.write(key, value, step.slots)
        self.columns = step.columns
        return Update(self, step, key, value)

    def lay_anew(self, update: Update, starts: Sequence[int]) -> Step:
        """Write a prompt again, now that its mask has said which of its columns are padding."""
        pages, step = self.pages, update.step
        pages.reset(pages.batch, pages.device, starts)
        pages.step = pages.begin(step.tokens)
        pages.commit(step.tokens)
        self.held.fit(pages.capacity)
        self.held.write(update.key, update.value, pages.step.slots)
        return pages.step

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Hold new keys and values, and give back those of all columns that the new tokens may see."""
        update = self.write(key_states, value_states)
        if torch.compiler.is_compiling():
            return update.gathered()  # type: ignore[no-any-return]
        columns = update.step.columns - update.first
        return (
            PagedStates.of(key_states, columns, lambda: update.gathered()[0], update),
            PagedStates.of(value_states, columns, lambda: update.gathered()[1], update),
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self.pages.oldest(self.columns)
        return self.columns + query_length - first, first

    def get_max_length(self) -> int:
        return -1 if self.max_tokens is None else self.max_tokens

    def reset(self) -> None:
        super().reset()
        self.columns, self.owner = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.columns = max(0, self.columns + tokens_to_remove)


class PagedCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache for `generate` and for a model's call that keeps keys and values in blocks of a few tokens.

    Key j of a sequence is row `j % block_size` of the block that its table names at `j // block_size`. So a token more
    moves nothing that is held, beams share the blocks of what they have in common, a crop gives blocks back, padding at
    the left takes none, and a layer with a sliding window uses the blocks again that left it.

    With `model.set_attn_implementation("opsmith")`, attention reads the blocks where they lie. Any other attention gets
    keys and values read together, as from a `DynamicCache`.

    >>> cache = opsmith.PagedCache(model)
    >>> model.generate(**inputs, past_key_values=cache)

    Args:
        config_or_model: a Hugging Face model or its configuration, which says what layers it has, and which of them see
            only a window.
        block_size: tokens in a block.
        dtype: that keys and values are held in; None for their own.
        int8: hold them in int8, each row of a head with a scale; half the bytes of bfloat16, and its error.
        max_tokens: of a sequence, padding included; more is an error. None: no limit.

    Raises:
        TypeError, ValueError: for sizes or a dtype that no cache has.

    Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023.
    """

    def __init__(
        self,
        config_or_model: Any,
        *,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        int8: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        config = getattr(config_or_model, "config", config_or_model)
        if not hasattr(config, "get_text_config"):
            raise TypeError(
                "PagedCache: expected a transformers model or its configuration, got "
                f"{type(config_or_model).__name__}"
            )
        for name, size in (("block_size", block_size), ("max_tokens", max_tokens)):
            if size is not None and not (isinstance(size, int) and size > 0):
                raise ValueError(f"PagedCache: {name} must be a positive number of tokens, got {size!r}")
        if dtype is not None and (int8 or not dtype.is_floating_point):
            raise ValueError(
                f"PagedCache: dtype must be a floating-point one, or None beside int8=True, got {dtype}"
            )
        held = torch.int8 if int8 else dtype
        super().__init__(layers=paged(DynamicCache(config=config).layers, block_size, held, max_tokens))

    def reorder(self, order: Tensor) -> None:
        """Sequences `order` become the batch, as `reorder_cache` does: `cache.reorder(torch.tensor([0, 0, 2]))`."""
        self.reorder_cache(order)


def paged(
    layers: Sequence[Any], block_size: int, dtype: torch.dtype | None = None, max_tokens: int | None = None
) -> list[Any]:
    """The library's layers with ours in the place of those for keys and values of heads; others stay what they are."""
    pages: dict[int | None, Pages] = {}
    made: list[Any] = []
    for layer in layers:
        if type(layer) not in KINDS:
            made.append(layer)
            continue
        window = getattr(layer, "sliding_window", None)
        if window not in pages:
            pages[window] = Pages(block_size, window)
        pages[window].keep |= getattr(layer, "record_past", False)
        made.append(PagedLayer(pages[window], dtype, max_tokens))
    return made


def unfit(cache: Any) -> str | None:
    """Why a cache cannot be given pages; None for an empty one of the library's that grows."""
    if type(cache) is not DynamicCache:
        return f"a {type(cache).__name__} is not a DynamicCache"
    if cache.offloading:
        return "the cache is offloaded"
    odd = next((x for x in cache.layers if type(x) not in KINDS), None)
    if odd is not None:
        return f"the cache has a {type(odd).__name__}"
    return "the cache holds tokens already" if cache.get_seq_length() else None
