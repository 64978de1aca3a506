"""What entries of the dispatcher cost when they are called by themselves, held to what is counted by hand."""

import inspect
from dataclasses import replace

import torch

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith.operator import Cost, registry
from opsmith.profiler import entries


def _entry(name: str, *given: object) -> tuple[Cost | None, str]:
    inputs = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in given]
    return entries.cost_of(name, inputs)


def test_every_entry_of_ours_has_a_cost_or_says_why_not() -> None:
    """An entry's own formula takes the arguments of its schema, and names no other entry."""
    for card in registry().values():
        mine = {schema.split("(", 1)[0] for schema in card.schemas}
        for entry, formula in card.entries.items():
            assert entry in mine or not mine, (card.name, entry)
            schema = getattr(torch.ops.opsmith, entry).default._schema
            inspect.signature(formula).bind(**{a.name: None for a in schema.arguments})


def test_latent_attention_counts_what_it_multiplies() -> None:
    """By hand, with tiny sizes: 2 tokens, 3 heads, 4 + 2 wide queries, latent rows of 5, inputs of 7, inner 6."""
    bf16 = torch.bfloat16
    x, slots = torch.zeros(2, 7, dtype=bf16), torch.zeros(2, dtype=torch.int32)
    down, up = torch.zeros(5 + 2 + 6, 7, dtype=bf16), torch.zeros(3 * 6, 6, dtype=bf16)
    wuk = torch.zeros(3, 4, 5, dtype=bf16)
    gamma0, gamma1, gamma2 = (torch.zeros(n, dtype=bf16) for n in (7, 6, 5))
    cos, sin = torch.zeros(2, 2, dtype=bf16), torch.zeros(2, 2, dtype=bf16)
    q_out, q_rope = torch.zeros(2, 3, 5, dtype=bf16), torch.zeros(2, 3, 2, dtype=bf16)
    latent, rope = torch.zeros(9, 16, 5, dtype=bf16), torch.zeros(9, 16, 2, dtype=bf16)
    found, fault = _entry(
        "opsmith::mla_preprocess", x, down, up, wuk, gamma0, gamma1, gamma2, *[None] * 10, cos, sin, slots,
        0, True, False, 1e-6, None, None, q_out, q_rope, latent, rope, None,
    )  # fmt: skip
    assert fault == ""
    assert found is not None
    products = sum(2 for _ in range(2) for _ in range(13 * 7 + 18 * 6 + 3 * 4 * 5))
    assert found.flops == products + 2 * (4 * (7 + 6 + 5) + 3 * 2 * (3 + 1))
    read = sum(t.nbytes for t in (x, down, up, wuk, gamma0, gamma1, gamma2, cos, sin, slots))
    assert found.min_bytes == read + q_out.nbytes + q_rope.nbytes + 2 * (5 + 2) * 2  # two rows of the cache

    assert found.int8_ops == 0
    for quant, integer in ((1, True), (2, True), (3, False)):
        found, _ = _entry(
            "opsmith::mla_preprocess", x, down.to(torch.int8), up.to(torch.int8), wuk, gamma0, gamma1, gamma2,
            *[None] * 10, cos, sin, slots, quant, True, False, 1e-6, None, None, q_out, q_rope, latent, rope, None,
        )  # fmt: skip
        assert found is not None
        assert found.int8_ops == (2 * 2 * (13 * 7 + 18 * 6) if integer else 0)

    tables, lens = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    q, turned, out = (torch.zeros(1, 3, n, dtype=bf16) for n in (5, 2, 5))
    found, _ = _entry(
        "opsmith::mla_attention", q, turned, latent, rope, tables, lens, 0.5, None, None, None, out, None
    )
    rows = 2 * 16 + 1  # two full blocks, and one row of the third
    assert found is not None
    assert found.flops == sum(2 * (5 + 2) + 2 * 5 for _ in range(3) for _ in range(rows))
    assert (
        found.min_bytes == rows * 7 * 2 + q.nbytes + turned.nbytes + out.nbytes + tables.nbytes + lens.nbytes
    )

    a = torch.zeros(2, 13, dtype=bf16)
    found, _ = _entry(
        "opsmith::mla_kv_epilogue", a, gamma2, cos, sin, slots, 2, True, False, 1e-6, None, latent, rope
    )
    assert found is not None
    assert found.min_bytes == 2 * 7 * 2 * 2 + gamma2.nbytes + cos.nbytes + sin.nbytes + slots.nbytes
    q = torch.zeros(2, 3, 6, dtype=bf16)
    found, _ = _entry("opsmith::mla_q_epilogue", q, wuk, cos, sin, True, None, q_out, q_rope)
    assert found is not None
    assert found.flops == 2 * 3 * (2 * 4 * 5 + 3 * 2)


def test_a_cache_is_charged_for_the_rows_that_are_written() -> None:
    k = torch.zeros(2, 3, 4)
    cache = torch.zeros(50, 16, 3, 4)
    found, _ = _entry(
        "opsmith::reshape_and_cache", k, k, torch.zeros(2, dtype=torch.int64), cache, cache, None, None
    )
    assert found is not None
    assert found.min_bytes == 2 * k.nbytes + 2 * 8 + 2 * k.nbytes


def test_attention_counts_the_pairs_that_are_visible() -> None:
    for length, keys in [(a, b) for a in range(1, 7) for b in range(1, 7)]:
        q, k, v, y = (torch.zeros(2, 3, n, d) for n, d in ((length, 4), (keys, 4), (keys, 5), (length, 5)))
        found, _ = _entry("opsmith::attention", q, k, v, *[None] * 5, 0.5, True, 0, 0.0, y, None)
        assert found is not None
        assert found.flops == 2 * 2 * 3 * 9 * int(torch.ones(length, keys).tril(keys - length).sum())
        assert found.min_bytes == sum(t.nbytes for t in (q, k, v, y))
        back, _ = _entry(
            "opsmith::attention_backward", y, q, k, v, y, y, *[None] * 5, 0.5, True, 0, 0.0, q, k, v, None
        )
        assert back is not None
        assert back.flops == 2.5 * found.flops


def test_a_product_with_a_packed_weight_counts_the_rows_of_its_result() -> None:
    x, packed, y = torch.zeros(3, 16), torch.zeros(128), torch.zeros(3, 8)
    found, _ = _entry("opsmith::linear_packed", x, packed, None, None, 0, y)
    assert found == Cost(2.0 * 3 * 16 * 8, float(x.nbytes + packed.nbytes + y.nbytes))


def test_packing_a_weight_is_no_product() -> None:
    found, _ = _entry("opsmith::linear_pack", torch.zeros(8, 16), torch.zeros(128))
    assert found == Cost(0.0, 2 * 128 * 4.0)


def test_an_entry_that_takes_what_its_card_takes_costs_what_the_card_says() -> None:
    logits, target = torch.zeros(6, 9), torch.zeros(6, dtype=torch.int64)
    found, _ = _entry("opsmith::cross_entropy", logits, target, -100, 0.0, 0.0, 1, torch.zeros(()), None)
    assert found == registry()["cross_entropy"].cost(logits, target)


def test_a_fault_in_a_cards_formula_surfaces() -> None:
    """Not known is one thing, and wrong another."""
    card = replace(registry()["softmax"], cost=lambda x: Cost(1.0, {}["bytes"]))
    assert entries.cost(card, {"x": torch.zeros(2, 3)}) == (
        None,
        "the cost of softmax raised KeyError: 'bytes'",
    )
    assert entries.cost(card, {"y": torch.zeros(2, 3)}) == (None, "")  # a call that is not known in full

    def none(x: torch.Tensor) -> Cost:
        raise NotImplementedError

    assert entries.cost(replace(card, cost=none), {"x": torch.zeros(2, 3)}) == (None, "")
    values = replace(card, cost=lambda x: Cost(float(x.sum()), 0.0))
    assert entries.cost(values, {"x": torch.zeros(2, 3, device="meta")}) == (None, "")
