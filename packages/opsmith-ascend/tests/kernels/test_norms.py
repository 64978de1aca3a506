"""rms_norm and layer_norm in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample, registry
from opsmith_ascend.launches import Launch, layer_norm, rms_norm

LAUNCH = {"rms_norm": rms_norm, "layer_norm": layer_norm}
CARDS = pytest.mark.parametrize("card", list(LAUNCH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@CARDS
def test_every_sample_of_the_card(card: str, dtype: torch.dtype) -> None:
    check_samples(card, LAUNCH[card], dtype)


def vectors(card: str, make: Make, n: int) -> tuple[torch.Tensor, ...]:
    return (make(n),) if card == "rms_norm" else (make(n), make(n))


def launched(card: str, sample: Sample) -> Launch:
    return LAUNCH[card](*sample.args, **sample.kwargs)


@pytest.mark.parametrize("cores", [1, 2, 47, 48])
@CARDS
def test_any_number_of_cores_and_traffic_of_one_pass(card: str, cores: int) -> None:
    make = Make(torch.bfloat16)
    for rows, n in ((97, 300), (50, 1030), (4, 8192)):
        x, w = make(rows, n), vectors(card, make, n)
        for options in ({}, {"residual": make(rows, n)}):
            sample = Sample(f"{rows}x{n} {list(options)}", (x, *w), options)
            done = check(card, sample, launched(card, sample), cores)
            assert done is not None
            least = registry()[card].cost(*sample.args, **sample.kwargs).min_bytes
            per_core = sum(t.nbytes for t in w)  # each core reads the weights for itself
            assert done.traffic == least + (done.blocks - 1) * per_core
            if cores == 1:
                assert done.traffic == least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@CARDS
def test_rows_longer_than_local_memory(card: str, dtype: torch.dtype) -> None:
    """They are read twice, and the statistics of the pieces are merged."""
    make = Make(dtype)
    n = 30_001
    x, w = make(3, n, shift=100.0), vectors(card, make, n)
    for options in ({}, {"residual": make(3, n)}):
        sample = Sample(f"long rows {list(options)}", (x, *w), options)
        done = check(card, sample, launched(card, sample), 2)
        assert done is not None
        inputs = 2 if options else 1
        vectors_read = 3 * sum(t.nbytes for t in w)
        assert done.read == 2 * inputs * x.nbytes + vectors_read
        assert done.written == inputs * x.nbytes


@CARDS
def test_weights_in_float32_beside_rows_of_16_bits(card: str) -> None:
    make = Make(torch.bfloat16)
    x = make(5, 200)
    check(
        card,
        s := Sample("float32 weight", (x, *(w.float() for w in vectors(card, make, 200)))),
        launched(card, s),
    )


def test_a_bias_without_a_weight_has_its_own_type() -> None:
    make = Make(torch.bfloat16)
    sample = Sample("float32 bias alone", (make(5, 200), None, make(200).float()))
    check("layer_norm", sample, launched("layer_norm", sample))


def test_layer_norm_keeps_its_digits_far_from_zero() -> None:
    """Mean 1e4 and deviation 1: E[x^2] - E[x]^2 would have none left."""
    make = Make(torch.float32)
    sample = Sample("mean 1e4, long rows", (make(2, 20_000, shift=1e4),))
    check("layer_norm", sample, launched("layer_norm", sample), 2)
