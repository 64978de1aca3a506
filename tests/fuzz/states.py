"""What remembers from call to call, called in any order: caches in blocks, and the rows that many ask for.

Beside each stands the plainest thing that remembers the same.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opsmith.call.dispatch import always_native
from opsmith.operator import Sample, registry
from opsmith.ops import QuantizedEmbedding, quantized_embedding, reshape_and_cache
from tests.fuzz.fuzzer import StateFuzzer
from tests.ops.test_properties import check, values_of

BLOCKS = 9
GUARD = 77.0


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SEEDS = st.integers(0, 1 << 16)


class Pages(RuleBasedStateMachine):
    """`reshape_and_cache` and `paged_attention` over sequences that come, grow and go; beside them, lists of rows."""

    @initialize(
        size=st.sampled_from((1, 4, 16)),
        heads=st.sampled_from((1, 2, 3)),
        dims=st.sampled_from(((8, 8), (33, 16), (16, 64))),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        int8=st.booleans(),
    )
    def begin(self, size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, int8: bool) -> None:
        self.size, self.heads, self.dims, self.dtype, self.int8 = size, heads, dims, dtype, int8
        shapes = [(BLOCKS, size, heads, dim) for dim in dims]
        held, fill = (torch.int8, 77) if int8 else (dtype, GUARD)
        self.caches = [torch.full(shape, fill, dtype=held) for shape in shapes]
        self.scales = [torch.full(shape[:3], GUARD) for shape in shapes] if int8 else [None, None]
        self.free = list(range(BLOCKS))
        self.tables: list[list[int]] = []
        self.rows: list[list[list[torch.Tensor]]] = []  # by sequence and by k or v, as they went in

    def _write(self, rows: list[torch.Tensor], slots: list[int]) -> None:
        with always_native():
            reshape_and_cache(
                *rows,
                *self.caches,
                torch.tensor(slots, dtype=torch.int64),
                k_scale=self.scales[0],
                v_scale=self.scales[1],
            )

    @precondition(lambda self: hasattr(self, "free") and len(self.tables) < 4)
    @rule()
    def arrive(self) -> None:
        self.tables.append([])
        self.rows.append([[], []])

    @precondition(lambda self: getattr(self, "tables", None))
    @rule(data=st.data(), seed=SEEDS, skipped=st.integers(0, 2))
    def grow(self, data: Any, seed: int, skipped: int) -> None:
        """Some sequences get tokens in one call, and padding goes nowhere."""
        at = data.draw(st.integers(0, len(self.tables) - 1))
        count = data.draw(st.integers(1, 2 * self.size + 1))
        have = len(self.rows[at][0])
        while len(self.tables[at]) * self.size < have + count and self.free:
            self.tables[at].append(self.free.pop(data.draw(st.integers(0, len(self.free) - 1))))
        count = min(count, len(self.tables[at]) * self.size - have)
        slots = [
            self.tables[at][p // self.size] * self.size + p % self.size for p in range(have, have + count)
        ]
        slots += [-1] * skipped
        rows = [
            numbers(seed + i, len(slots), self.heads, d, dtype=self.dtype) for i, d in enumerate(self.dims)
        ]
        self._write(rows, slots)
        for kept, new in zip(self.rows[at], rows, strict=True):
            kept.extend(new[:count])

    @precondition(lambda self: getattr(self, "tables", None))
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        """A sequence goes, and its blocks are anybody's."""
        at = data.draw(st.integers(0, len(self.tables) - 1))
        self.free += self.tables.pop(at)
        self.rows.pop(at)

    @precondition(lambda self: hasattr(self, "free"))
    @rule(slot=st.sampled_from((-2, BLOCKS * 16, 1 << 40)), seed=SEEDS)
    def go_astray(self, slot: int, seed: int) -> None:
        """A slot that is not there is refused; the invariant sees that nothing was written."""
        rows = [numbers(seed, 2, self.heads, d, dtype=self.dtype) for d in self.dims]
        before = [t.clone() for t in (*self.caches, *self.scales) if t is not None]
        with pytest.raises(ValueError, match="reshape_and_cache: "):
            self._write(rows, [0, slot])
        for old, t in zip(before, [t for t in (*self.caches, *self.scales) if t is not None], strict=True):
            assert torch.equal(old, t), "written to before it was refused"

    @precondition(lambda self: getattr(self, "tables", None))
    @rule(
        seed=SEEDS, group=st.sampled_from((1, 3)), new=st.integers(1, 3), window=st.sampled_from((None, 1, 5))
    )
    def attend(self, seed: int, group: int, new: int, window: int | None) -> None:
        widest = max(1, *(len(table) for table in self.tables))
        tables = torch.tensor(
            [[*table, *[0] * (widest - len(table))] for table in self.tables], dtype=torch.int32
        )
        lengths = torch.tensor([len(rows[0]) for rows in self.rows])
        q = numbers(seed, len(self.tables), new, group * self.heads, self.dims[0], dtype=self.dtype)
        scales = {} if not self.int8 else {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        sample = Sample("pages", (q, *self.caches, tables, lengths), {**scales, "window": window})
        check(registry()["paged_attention"], sample, values_of)

    @invariant()
    def what_went_in_is_there(self) -> None:
        """Every row, to half a step of its scale where rows are int8; and nothing where nobody wrote."""
        for table, rows in zip(getattr(self, "tables", ()), getattr(self, "rows", ()), strict=True):
            for cache, scale, kept in zip(self.caches, self.scales, rows, strict=True):
                if not kept:
                    continue
                at = torch.arange(len(kept))
                blocks = torch.tensor(table)[at // self.size]
                got, want = cache[blocks, at % self.size], torch.stack(kept)
                if scale is None:
                    assert torch.equal(got, want), "a row is another than went in"
                else:
                    step = scale[blocks, at % self.size].unsqueeze(-1)
                    off = (got.double() * step - want.double()).abs()
                    assert bool((off <= 0.501 * step + 1e-12).all()), (
                        "an int8 row is off by more than rounding"
                    )


class Rows(RuleBasedStateMachine):
    """A quantized embedding that keeps its most wanted rows, beside the same without."""

    @initialize(
        rows=st.sampled_from((1, 7, 100)),
        width=st.sampled_from((1, 16, 33)),
        cache=st.sampled_from((1, 2, 30, 1000)),
        seed=SEEDS,
    )
    def begin(self, rows: int, width: int, cache: int, seed: int) -> None:
        self.embedding = QuantizedEmbedding.from_float(numbers(seed, rows, width), cache_rows=cache)

    @precondition(lambda self: hasattr(self, "embedding"))
    @rule(
        data=st.data(),
        count=st.integers(0, 300),
        skew=st.sampled_from((1, 3, 1000)),
        dtype=st.sampled_from((None, torch.float32, torch.bfloat16, torch.float16)),
    )
    def look_up(self, data: Any, count: int, skew: int, dtype: torch.dtype | None) -> None:
        seed, high = data.draw(SEEDS), min(skew, self.embedding.num_embeddings)
        ids = torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(seed))
        ids[::7] = self.embedding.num_embeddings - 1
        with always_native():
            got = self.embedding(ids, dtype=dtype)
            want = quantized_embedding(
                ids, self.embedding.table, self.embedding.scale, dtype=dtype or self.embedding.dtype
            )
        assert torch.equal(got, want), "a row from the cache differs from the table's"

    @precondition(lambda self: hasattr(self, "embedding"))
    @rule(bad=st.sampled_from((-1, 10**6)))
    def ask_for_what_is_not_there(self, bad: int) -> None:
        with pytest.raises(IndexError):
            self.embedding(torch.tensor([0, bad]))

    @precondition(lambda self: hasattr(self, "embedding"))
    @rule(rows=st.sampled_from((0, 1, 5, 200)))
    def keep_others(self, rows: int) -> None:
        self.embedding.cache_rows = rows

    @precondition(lambda self: hasattr(self, "embedding"))
    @rule(dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    def become(self, dtype: torch.dtype) -> None:
        self.embedding = self.embedding.to(dtype)

    @precondition(lambda self: hasattr(self, "embedding"))
    @rule(seed=SEEDS)
    def load_others(self, seed: int) -> None:
        shape = self.embedding.num_embeddings, self.embedding.embedding_dim
        self.embedding.load_state_dict(QuantizedEmbedding.from_float(numbers(seed, *shape)).state_dict())

    @precondition(lambda self: hasattr(self, "embedding"))
    @rule()
    def be_copied(self) -> None:
        self.embedding = copy.deepcopy(self.embedding)


def fuzzers() -> list[StateFuzzer]:
    """One for each thing that remembers."""
    return [StateFuzzer("states.pages", Pages), StateFuzzer("states.rows", Rows)]
