"""QuantizedEmbedding: an embedding module whose table is int8, with a cache and prefetching where they pay."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opsmith import measure
from opsmith.call.arguments import check_count, short
from opsmith.ops.embedding import check_ids
from opsmith.ops.embedding.quantized import DTYPES, prefetch_rows, quantized_embedding
from opsmith.ops.embedding.row_cache import CacheInfo, RowCache
from opsmith.ops.rounding import KeepsDtypes, RoundingError, round_in_parts, round_rows

_NAME = "QuantizedEmbedding"
_compiling = torch.compiler.is_dynamo_compiling
_AT_ONCE = 1 << 22  # elements that are quantized at a time
# Some calls each, so that what the contestant before them left in the caches counts little.
_SAMPLE_SECONDS = 2e-3


@dataclass(frozen=True)
class Tuning:
    """What `autotune` found: seconds a call for each setting that ran, and the one that was chosen."""

    prefetch: int
    cache_rows: int
    seconds: Mapping[str, float]


class QuantizedEmbedding(KeepsDtypes):
    """An embedding whose rows are int8 with one float32 scale each: a quarter of float32's memory.

    `forward(ids) = table[ids] * scale[ids]`, rounded once to `dtype`. No gradient.

    >>> embedding = QuantizedEmbedding.from_float(torch.randn(1000, 64))
    >>> embedding(torch.tensor([[3, 1, 3]])).shape
    torch.Size([1, 3, 64])

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row.
        bits: 8.
        cache_rows: this many of the rows asked for most often are kept dequantized; 0 for none.
        prefetch: fetch rows from memory this many tokens before they are needed; 0 to leave it to the processor.
        dtype: of the result. `.to(dtype)` changes it; the scales stay float32.
        device: of the table.

    Both are off unless asked for, or unless `autotune` measures that they pay here.

    Raises:
        TypeError, ValueError: for other bits, or numbers that make no sense.
    """

    table: Tensor
    scale: Tensor
    like: Tensor
    kept = ("table", "scale")  # what the module is cast to is the dtype of the result
    error: RoundingError | None  # set by `from_float`; None for a module whose state was loaded

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        bits: int = 8,
        cache_rows: int = 0,
        prefetch: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if bits != 8:
            raise ValueError(f"{_NAME}: bits must be 8, got {bits!r}; there is no kernel for other widths")
        if dtype not in (*DTYPES, torch.float64):
            raise TypeError(f"{_NAME}: dtype must be float32, bfloat16 or float16, got {dtype}")
        self.num_embeddings = check_count(_NAME, "num_embeddings", num_embeddings)
        self.embedding_dim = check_count(_NAME, "embedding_dim", embedding_dim)
        self.bits = bits
        self.error = None
        shape = (num_embeddings, embedding_dim)
        self.register_buffer("table", torch.zeros(shape, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.zeros(num_embeddings, dtype=torch.float32, device=device))
        # `.to` and `.half()` change it.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.prefetch = prefetch
        self.cache_rows = cache_rows

    @classmethod
    def from_float(
        cls,
        table: Tensor | nn.Embedding,
        *,
        bits: int = 8,
        cache_rows: int = 0,
        prefetch: int = 0,
        dtype: torch.dtype | None = None,
    ) -> QuantizedEmbedding:
        """Quantize a table: `scale = max(abs(row)) / 127`, `int8 = round(row / scale)`.

        An element is off by at most half its row's scale, 1/254 of the row's largest magnitude. A row of zeros stays
        exactly zero. What was lost in total is in `.error`.

        >>> QuantizedEmbedding.from_float(torch.randn(1000, 64), dtype=torch.bfloat16)(torch.tensor([7])).dtype
        torch.bfloat16

        Args:
            table: [V, N], or an `nn.Embedding`; any floating-point dtype.
            bits, cache_rows, prefetch: as for the class.
            dtype: of the result; the table's by default.

        Raises:
            TypeError, ValueError: for a wrong dtype or shape, and for a row that holds NaN or an infinity, which no
                scale could represent.
        """
        if isinstance(table, nn.Embedding):
            if table.max_norm is not None:
                raise ValueError(f"{_NAME}: an nn.Embedding with max_norm changes its table as it reads it")
            table = table.weight
        if not isinstance(table, Tensor):
            raise TypeError(f"{_NAME}: table must be a tensor or an nn.Embedding, got {type(table).__name__}")
        if not table.is_floating_point():
            raise TypeError(f"{_NAME}: table must be floating-point, got {short(table.dtype)}")
        if table.dim() != 2:
            raise ValueError(f"{_NAME}: table must have shape [V, N], got {tuple(table.shape)}")
        table = table.detach()
        how: dict[str, Any] = {"bits": bits, "cache_rows": cache_rows, "prefetch": prefetch}
        made = cls(*table.shape, **how, dtype=dtype or table.dtype, device=table.device)

        def keep(here: slice, part: Tensor) -> Tensor:
            made.table[here], made.scale[here] = numbers, scale = round_rows(part)
            return numbers * scale[:, None]

        rows = max(1, _AT_ONCE // max(1, table.shape[1]))
        made.error = round_in_parts(table, rows, keep, f"{_NAME}: every element of the table")
        return made

    def forward(self, ids: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """The rows of the ids, in `dtype` (the module's by default).

        Args:
            ids: any shape, int32 or int64, each in [0, num_embeddings).
            dtype: float32, bfloat16 or float16.

        Raises:
            IdError: (an IndexError and a ValueError) an id is out of range.
            TypeError: ids of another dtype.
        """
        held: Any = self._buffers  # asking the module itself for a buffer takes five times as long
        table, scale, like = held["table"], held["scale"], held["like"]
        dtype = like.dtype if dtype is None else dtype
        cache = self._cache
        if cache is None or _compiling():
            return quantized_embedding(ids, table, scale, dtype=dtype, prefetch=self._prefetch)
        return cache.gather(ids, table, scale, dtype, like.dtype, self._prefetch)

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.like.dtype

    def prefetch_rows(self, ids: Tensor) -> None:
        """Ask the CPU to fetch rows that are likely to be needed next, such as the likeliest next tokens.

        Returns at once, while memory is still on its way. On a GPU, and without native kernels, this does nothing.

        >>> embedding = QuantizedEmbedding.from_float(torch.randn(1000, 64))
        >>> embedding.prefetch_rows(torch.tensor([17, 4, 256]))

        Raises:
            IdError: (an IndexError and a ValueError) an id is out of range.
            TypeError: ids of another dtype.
        """
        prefetch_rows(ids, self.table, self.scale)

    @property
    def prefetch(self) -> int:
        """How many tokens ahead rows are fetched from memory; 0: as the processor sees fit."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, tokens: int) -> None:
        self._prefetch = check_count(_NAME, "prefetch", tokens)

    @property
    def cache_rows(self) -> int:
        """How many rows the cache keeps dequantized; 0: there is no cache."""
        return 0 if self._cache is None else self._cache.capacity

    @cache_rows.setter
    def cache_rows(self, rows: int) -> None:
        rows = min(check_count(_NAME, "cache_rows", rows), self.num_embeddings)
        self._cache = RowCache(rows) if rows else None

    @property
    def hit_rate(self) -> float:
        """The part of the rows asked for that the cache held, since it was made; 0 where nothing was asked for."""
        return self.cache_info().hit_rate

    def cache_info(self) -> CacheInfo:
        """Capacity, rows held, hits and lookups of the cache, and its memory."""
        return CacheInfo() if self._cache is None else self._cache.info()

    @property
    def nbytes(self) -> int:
        """Bytes of the table and its scales, without the cache's (`cache_info().nbytes`)."""
        return self.table.nbytes + self.scale.nbytes

    def dequantize(self) -> Tensor:
        """The whole table [V, N] in `dtype`."""
        return (self.table.float() * self.scale[:, None]).to(self.dtype)

    def autotune(
        self, ids: Tensor, *, cache_rows: tuple[int, ...] = (1024, 8192), budget_s: float = 2.0
    ) -> Tuning:
        """Turn prefetching and the cache on where they are measured to pay on this machine, else off.

        Each setting, and none, gathers the rows of `ids` in turn, interleaved. One is chosen only if it is shown to
        be faster than none.

        >>> embedding = QuantizedEmbedding.from_float(torch.randn(1000, 64))
        >>> embedding.autotune(torch.randint(0, 1000, (8, 64)), budget_s=0.1).prefetch >= 0
        True

        Args:
            ids: [calls, tokens] as they will come, or the tokens of one call; the more calls, the truer.
            cache_rows: sizes of the cache to try.
            budget_s: seconds for everything.

        Raises:
            IdError, TypeError, ValueError: as `forward` does; no ids.
        """
        check_ids(f"{_NAME}.autotune", ids, self.table)
        if not ids.numel():
            raise ValueError(f"{_NAME}.autotune: expected ids as they will come, got none")
        calls = list(ids.unbind()) if ids.dim() > 1 else [ids]
        settings = {"neither": (0, 0)}
        settings |= {f"prefetch={tokens}": (tokens, 0) for tokens in (2, 4, 8, 16)}
        settings |= {
            f"cache_rows={rows}": (0, rows)
            for rows in sorted({min(r, self.num_embeddings) for r in cache_rows})
        }
        contestants: dict[str, Callable[[], object]] = {}
        for name, (tokens, rows) in settings.items():
            twin = copy.copy(self)  # the table is the same
            twin.prefetch, twin.cache_rows = tokens, rows
            if twin._cache is not None:  # as it will be after a while
                for call in calls:
                    twin(call)
                twin._cache.refresh(self.table, self.scale, self.dtype)
            contestants[name] = _in_turn(twin, calls)
        found = measure.quick(contestants, budget_s=budget_s, min_time=_SAMPLE_SECONDS)
        self.prefetch, self.cache_rows = settings[found.best(prefer="neither")]
        return Tuning(self.prefetch, self.cache_rows, {name: found.median(name) for name in found.names})

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, bits={self.bits}, dtype={short(self.dtype)}, "
            f"cache_rows={self.cache_rows}, prefetch={self.prefetch}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedEmbedding:
        super()._apply(fn, recurse)
        self.cache_rows = self.cache_rows  # what it holds is of the old device or dtype
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.error = None
        self.cache_rows = self.cache_rows  # what it holds is of the old table


def _in_turn(module: QuantizedEmbedding, calls: list[Tensor]) -> Callable[[], object]:
    """A function that gathers the next of the calls each time."""
    turns = itertools.cycle(calls)
    return lambda: module(next(turns))
