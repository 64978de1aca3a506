"""mla_q_epilogue in Ascend C, emulated."""

import pytest
import torch
from held_to_cards import check, check_samples

from opsmith.operator import Make, Sample
from opsmith.ops.mla.call import Rotation
from opsmith.ops.mla.cards import table
from opsmith.ops.mla.reference import queries
from opsmith_ascend.launches import mla_q_epilogue as launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_of_the_card(dtype: torch.dtype) -> None:
    check_samples("mla_q_epilogue", launch, dtype)


@pytest.mark.parametrize(("cores", "tokens", "blocks"), [(1, 3, 1), (48, 1, 20), (48, 11, 33)])
def test_heads_of_a_model_and_a_weight_that_is_read_once(cores: int, tokens: int, blocks: int) -> None:
    make, heads = Make(torch.bfloat16), 5
    wuk = make(heads, 128, 512, scale=128**-0.5)
    sample = Sample("V3", (make(tokens, heads, 192), wuk, *table(make, tokens, 64)))
    call = launch(*sample.args)
    done = check("mla_q_epilogue", sample, call, cores)
    assert done is not None
    assert done.blocks == blocks
    assert done.tensors["wuk"] == (wuk.nbytes, 0)
    assert done.written == sum(t.nbytes for t in call.outputs.values())


def test_int8_queries_are_those_of_the_rounded_product() -> None:
    make = Make(torch.bfloat16)
    q, wuk = make(9, 3, 48), make(3, 32, 96, scale=0.2)
    cos, sin = table(make, 9, 16)
    scale = torch.tensor([20.0, 0.5, 300.0])
    call = launch(q, wuk, cos, sin, interleaved=True, q_nope_scale=scale)
    assert call.emulated(7) is not None
    want, turned = queries(q, wuk, Rotation(cos, sin, True), scale)
    got, rope = call.result
    off = (got.int() - want.int()).abs()
    assert off.max() <= 3  # half a last bit of bfloat16 at 127 times 300 / 256
    assert (off == 0).float().mean() > 0.95
    torch.testing.assert_close(rope, turned)


def test_a_nope_part_that_local_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks, got 0"):
        launch(torch.randn(1, 1, 300), torch.randn(1, 300, 8), None, None).emulated()
