"""The formats of a packed weight: how many bits a number has, and what it is multiplied by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

GROUPS = (32, 64, 128)
BLOCK = 128  # numbers along K, and rows, that share a scale of fp8 where a column has several
SUPER = 256  # numbers along K that share a number of `outer`


class Scales(IntEnum):
    """What a number is multiplied by."""

    PLAIN = 0  # float32, one for each column; or bfloat16 by groups around whole zeros
    DYNAMIC = 1  # the same, one for each column, and the rows of x are rounded too
    HALF = 2  # float16, one for each group
    NESTED = 3  # a whole number for each group times a float16 of `outer`, and what is taken off likewise
    FLOAT8 = 4  # float32, one for each column or for groups of it; the numbers are floats of 8 bits (e4m3)
    FLOAT4 = 5  # uint8, 127 more than the exponent of a power of two; the numbers are floats of 4 bits (e2m1)


@dataclass(frozen=True)
class Format:
    """How the numbers of a packed weight are held: their bits and scales, and what of groups is not to be chosen."""

    bits: int
    scales: Scales = Scales.PLAIN
    group: int = 0
    steps: int = 0  # of a format that files have: how many values its numbers take
    minima: bool = False  # whether these begin at a group's least number, and not around zero


FORMATS = {
    "bf16": Format(16),
    "int8": Format(8),
    "int8_dynamic": Format(8, Scales.DYNAMIC),
    "int4": Format(4),
    "fp8": Format(8, Scales.FLOAT8, 0, 253),
    "q8_0": Format(8, Scales.HALF, 32, 255),
    "q5_0": Format(8, Scales.HALF, 32, 32),
    "q4_0": Format(4, Scales.HALF, 32, 16),
    "mxfp4": Format(4, Scales.FLOAT4, 32, 16),
    "q6_k": Format(8, Scales.NESTED, 16, 64),
    "q5_k": Format(8, Scales.NESTED, 32, 32, True),
    "q4_k": Format(4, Scales.NESTED, 32, 16, True),
}
CHOSEN = {"int4": GROUPS, "fp8": (BLOCK, 0)}  # formats whose group is chosen
CHOICES = tuple(name for name, of in FORMATS.items() if not of.steps)  # what a model is quantized to
