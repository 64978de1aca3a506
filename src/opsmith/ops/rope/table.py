"""The table of the rotary embedding: cosines and sines by position, under the scalings that models use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_number, short

Scaling = Mapping[str, Any]


def rope_table(
    dim: int,
    length: int,
    *,
    theta: float = 10000.0,
    scaling: Scaling | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every position and rotated dimension.

    `cos[p, i] = cos[p, i + dim/2] = m cos(p f_i)` with `f_i = theta^(-2i/dim)`, and likewise the sine. A scaling
    changes the frequencies `f` and, for some, the factor `m` (1 otherwise). Angles are computed in float64 and
    the results rounded once.

    >>> cos, sin = rope_table(128, 4096)
    >>> cos.shape
    torch.Size([4096, 128])

    Args:
        dim: rotated dimensions of a head, even.
        length: positions.
        theta: the base of the frequencies; `rope_theta` in `scaling` takes its place.
        scaling: Hugging Face's `rope_parameters` (or the older `rope_scaling`), by `rope_type`: default, linear,
            dynamic, yarn, llama3, longrope, proportional. `max_position_embeddings`, which Hugging Face keeps
            beside them, is read from here too; without it, `length` is taken as what the model was trained for.
        dtype: of the table; float32 also serves bfloat16 and float16 inputs.
        device: of the table.

    Returns:
        cos and sin, [length, dim].

    Raises:
        TypeError, ValueError: for a wrong size, an unknown scaling, or one that misses a parameter.

    Source: Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023; Ding et al., "LongRoPE", 2024.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"rope_table: dtype must be floating-point, got {short(dtype)}")
    check_number("rope_table", "length", length, whole=True)
    if length < 0:
        raise ValueError(f"rope_table: length must not be negative, got {length}")
    frequencies, factor = frequencies_of(dim, length, theta, scaling)
    # On the host: not every device has float64.
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype)


def frequencies_of(
    dim: int, length: int, theta: float = 10000.0, scaling: Scaling | None = None
) -> tuple[Tensor, float]:
    """The angle from one position to the next, [dim / 2] in float64, and the factor on cosine and sine."""
    check_number("rope_table", "dim", dim, whole=True)
    if dim < 2 or dim % 2:
        raise ValueError(f"rope_table: dim must be a positive even number, got {dim}")
    given = _Parameters({} if scaling is None else scaling)
    kind = given.get("rope_type", given.get("type", "default"))
    scale = _SCALINGS.get(kind)
    if scale is None:
        raise ValueError(f"rope_table: rope_type must be one of {', '.join(_SCALINGS)}; got {kind!r}")
    base = given.get("rope_theta", theta)
    check_number("rope_table", "theta", base)
    theta = float(base)
    if not (math.isfinite(theta) and theta > 0):
        raise ValueError(f"rope_table: theta must be a positive number, got {theta}")
    return scale(dim, length, theta, given)


class _Parameters(dict[str, Any]):
    """A scaling's parameters, in which None stands for absent, as in configuration files."""

    def __init__(self, values: Scaling):
        if not isinstance(values, Mapping):
            raise TypeError(f"rope_table: scaling must be a mapping, got {type(values).__name__}")
        super().__init__({name: value for name, value in values.items() if value is not None})

    def __missing__(self, name: str) -> Any:
        kind = self.get("rope_type", self.get("type"))
        raise ValueError(f"rope_table: {kind} scaling needs {name!r}, got {sorted(self)}")

    def trained(self) -> float:
        """The context length before scaling."""
        trained = self.get("original_max_position_embeddings", self.get("max_position_embeddings"))
        return float(self["original_max_position_embeddings"] if trained is None else trained)

    def stretch(self) -> float:
        """How much longer the context is than it was in training."""
        longest = self.get("max_position_embeddings")
        if longest is not None and self.get("factor") is None:
            return float(longest) / self.trained()
        return self.number("factor")

    def number(self, name: str) -> float:
        value = self[name]
        check_number("rope_table", f"scaling's {name}", value)
        return float(value)


def _powers(dim: int, theta: float) -> Tensor:
    return theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)


def _proportional(dim: int, length: int, theta: float, given: _Parameters) -> tuple[Tensor, float]:
    """The first part of the pairs turns as in a whole head, the others stand still."""
    turning = int(float(given.get("partial_rotary_factor", 1.0)) * dim // 2)
    frequencies = _powers(dim, theta)
    frequencies[turning:] = 0
    return frequencies / float(given.get("factor", 1.0)), 1.0


def _dynamic(dim: int, length: int, theta: float, given: _Parameters) -> tuple[Tensor, float]:
    """A larger base once the text is longer than the model was trained for."""
    factor = given.number("factor")
    trained = float(
        given.get("max_position_embeddings", given.get("original_max_position_embeddings", length))
    )
    growth = factor * max(length, trained) / trained - (factor - 1) if trained else 1.0
    exponent = dim / (dim - 2) if dim > 2 else 0.0  # a single pair has frequency 1 whatever the base
    return _powers(dim, theta * growth**exponent), 1.0


def _yarn(dim: int, length: int, theta: float, given: _Parameters) -> tuple[Tensor, float]:
    """Slow pairs are stretched, fast ones left, those between are a blend of both."""
    factor, trained = given.stretch(), given.trained()

    def turns_at(turns: float) -> float:
        """The pair, as a dimension, that turns so many times in the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turns_at(given.get("beta_fast") or 32), turns_at(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0, 1)
    frequencies = _powers(dim, theta)
    frequencies = frequencies / factor * stretched + frequencies * (1 - stretched)
    return frequencies, _yarn_factor(factor, given)


def _yarn_factor(factor: float, given: _Parameters) -> float:
    def at(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    explicit = given.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, of_all = given.get("mscale"), given.get("mscale_all_dim")
    return at(mscale) / at(of_all) if mscale and of_all else at(1.0)


def _llama3(dim: int, length: int, theta: float, given: _Parameters) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones left, those between are a blend by their length."""
    factor, trained = given.number("factor"), given.trained()
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    frequencies = _powers(dim, theta)
    turns = trained * frequencies / (2 * math.pi)  # in the trained length
    kept = (turns - low) / (high - low) if high != low else (turns >= low).double()
    kept = kept.clamp(0, 1)
    return frequencies * ((1 - kept) / factor + kept), 1.0


def _longrope(dim: int, length: int, theta: float, given: _Parameters) -> tuple[Tensor, float]:
    """A divisor of its own for every pair: one list for short texts, one for those longer than in training."""
    trained = given.trained()
    name = "long_factor" if length > trained else "short_factor"
    divisors = torch.as_tensor(given[name], dtype=torch.float64, device="cpu")
    if divisors.shape != (dim // 2,):
        raise ValueError(
            f"rope_table: {name} must have {dim // 2} numbers for dim={dim}, got {tuple(divisors.shape)}"
        )
    explicit, factor = given.get("attention_factor"), given.stretch()
    if explicit is None:
        explicit = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return _powers(dim, theta) / divisors, float(explicit)


_SCALINGS: dict[str, Callable[[int, int, float, _Parameters], tuple[Tensor, float]]] = {
    "default": lambda dim, length, theta, given: (_powers(dim, theta), 1.0),
    "linear": lambda dim, length, theta, given: (_powers(dim, theta) / given.number("factor"), 1.0),
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
