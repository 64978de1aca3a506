"""What `tests/interpreter.py` puts in the place of the interpreter's own is the same, or right where that is wrong."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime import interpreter

from tests.interpreter import cast_with

OWN = interpreter.InterpreterBuilder.cast_impl  # replaced already, where this process interprets
BITS = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
SPECIAL = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x00800000], np.uint32)


def cast(impl: object, data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    handle = impl(interpreter.interpreter_builder, interpreter.TensorHandle(data, source), target)  # type: ignore[operator]
    assert handle.dtype == target
    return handle.data


def test_every_bfloat16_is_the_float32_of_the_same_value() -> None:
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256).T  # not contiguous
    got = cast(cast_with(None), bits, tl.bfloat16, tl.float32)
    exact = torch.from_numpy(bits.astype(np.int32)).to(torch.int16).view(torch.bfloat16).float()
    assert np.array_equal(got.view(np.uint32), exact.numpy().view(np.uint32))


def test_float32_is_cut_off_as_the_interpreter_does() -> None:
    bits = np.concatenate([BITS, SPECIAL])
    normal = bits[((bits >> 23) & 255 != 0) | (bits << 1 == 0)]
    assert len(normal) > 90_000
    got = cast(cast_with(None), normal.view(np.float32), tl.float32, tl.bfloat16)
    assert np.array_equal(got, cast(OWN, normal.view(np.float32), tl.float32, tl.bfloat16))
    assert got.dtype == np.uint16


def test_other_casts_are_left_to_the_interpreter() -> None:
    values = np.array([1.5, -2.25], np.float32)
    assert cast(cast_with(OWN), values, tl.float32, tl.float16).tolist() == [1.5, -2.25]
