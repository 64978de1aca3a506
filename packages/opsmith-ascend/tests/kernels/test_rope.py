"""rope in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample, registry
from opsmith.ops import rope_table
from opsmith_ascend.launches import rope as launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("rope", launch, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cores", [1, 7, 48])
def test_any_number_of_cores_and_traffic_of_one_pass(cores: int, interleaved: bool) -> None:
    make = Make(torch.bfloat16)
    cos, sin = rope_table(128, 200, dtype=torch.bfloat16)
    for x in (make(1, 32, 150, 128), make(150, 32, 128), make(1, 32, 1, 128)):
        sample = Sample(f"{tuple(x.shape)}", (x, cos, sin), {"interleaved": interleaved})
        done = check("rope", sample, launch(*sample.args, **sample.kwargs), cores)
        assert done is not None
        least = registry()["rope"].cost(*sample.args, **sample.kwargs).min_bytes
        if x.shape[-2] > 1 and cores < 48:  # one token on many cores reads its row of the tables on each
            assert least <= done.traffic <= 1.05 * least


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_token_at_a_position_is_that_row_of_the_whole(interleaved: bool) -> None:
    make = Make(torch.float16)
    x = make(2, 3, 20, 34)
    cos, sin = rope_table(34, 20, dtype=torch.float16)
    whole = launch(x, cos, sin, interleaved=interleaved)
    whole.emulated()
    for position in (0, 7, 19):
        token = x[:, :, position : position + 1].contiguous()
        one = launch(token, cos, sin, interleaved=interleaved, positions=torch.tensor([position]))
        one.emulated()
        assert torch.equal(one.result, whole.result[:, :, position : position + 1])


def test_in_place() -> None:
    make = Make(torch.bfloat16)
    x = make(2, 3, 9, 40)
    cos, sin = rope_table(40, 9, dtype=torch.bfloat16)
    apart = launch(x, cos, sin)
    apart.emulated()
    given = x.clone()
    launch(given, cos, sin, out=given).emulated()
    assert torch.equal(given, apart.result)


def test_a_position_without_a_row_is_refused() -> None:
    cos, sin = rope_table(40, 9)
    for bad in (-1, 9):
        with pytest.raises(ValueError, match=r"positions must lie in \[0, 9\)"):
            launch(torch.zeros(1, 2, 3, 40), cos, sin, positions=torch.tensor([0, bad, 1]))
