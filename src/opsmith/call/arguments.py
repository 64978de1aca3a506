"""What is wrong with one argument: the checks that operators share, and how their messages say it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.call.overlap import refuse_overlap

Maybe = Tensor | None
EPS = (0.0, torch.finfo(torch.float32).max)  # from which to which number norms add under their root


def check_number(
    op: str, name: str, value: Any, within: tuple[float, float] | None = None, *, whole: bool = False
) -> None:
    """Refuse an option that is no number, or none from the least to the greatest that may be."""
    if torch.compiler.is_dynamo_compiling():
        return
    if not hasattr(value, "__index__" if whole else "__float__"):  # tensors and NumPy's numbers have it
        kind = "a whole number" if whole else "a number"
        raise TypeError(f"{op}: {name} must be {kind}, got {value!r} ({type(value).__name__})")
    if within is not None and not within[0] <= float(value) <= within[1]:
        raise ValueError(f"{op}: {name} must be from {within[0]:g} to {within[1]:g}, got {value!r}")


def check_count(op: str, name: str, value: Any) -> int:
    """Refuse what is no number of things."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{op}: {name} must be a whole number, 0 or more, got {value!r}")
    return value


def alike(t: Any, x: Tensor, shape: Sequence[int]) -> bool:
    """True for a tensor of this shape, in x's dtype and on its device: the usual case, found out quickly."""
    return isinstance(t, Tensor) and t.shape == shape and t.dtype is x.dtype and t.device == x.device


def check_is_tensor(op: str, t: Any, name: str) -> None:
    """Refuse what is no tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(t).__name__}")


def check_float(op: str, x: Any, name: str = "x", *, least_dim: int = 1) -> None:
    """Refuse what is no floating-point tensor of at least `least_dim` dimensions."""
    dense = isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested
    if dense and x.is_floating_point() and x.dim() >= least_dim:
        return
    check_is_tensor(op, x, name)
    if not dense:
        layout, step = ("a nested one", "to_padded_tensor") if x.is_nested else (x.layout, "to_dense")
        raise TypeError(f"{op}: {name} must be a dense tensor, got {layout}; call {step}() first")
    if not x.is_floating_point():
        raise TypeError(f"{op}: {name} must be a floating-point tensor, got {short(x.dtype)}; cast it first")
    if x.dim() < least_dim:
        raise ValueError(
            f"{op}: {name} must have at least {least_dim} dimension(s), got shape {tuple(x.shape)}"
        )


def check_like(
    op: str, t: Any, x: Tensor, name: str, shape: Sequence[int], what: str, like: str = "x"
) -> None:
    """Refuse an argument that is not a floating-point tensor of this shape on x's device."""
    check_float(op, t, name, least_dim=0)
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)} ({what}), got {tuple(t.shape)}")
    check_device(op, t, x, name, like)


def check_device(op: str, t: Tensor, x: Tensor, name: str, like: str = "x") -> None:
    """Refuse a tensor that is not on x's device."""
    if t.device != x.device:
        raise ValueError(f"{op}: {name} is on {t.device}, {like} on {x.device}; move one of them")


def check_dtype(op: str, t: Tensor | None, x: Tensor, name: str, like: str = "x") -> None:
    """Refuse a tensor, where there is one, that is not in x's dtype."""
    if t is not None and t.dtype != x.dtype:
        raise TypeError(
            f"{op}: {name} must be {short(x.dtype)} like {like}, got {short(t.dtype)}; cast it first"
        )


def check_fit(op: str, *tensors: tuple[Any, ...]) -> None:
    """Refuse tensors of other shapes, dtypes or devices than are wanted.

    >>> x = torch.ones(3, 4)
    >>> check_fit("scale", ("x", x, "T D"), ("factor", x[0], "D"), ("ids", x[:, 0].int(), "T", torch.int32))

    Args:
        op: the operator.
        tensors: of each its name, the tensor, a word for each of its sizes, of which equal ones stand for equal
            sizes (and `N+1` for one that is not 0), and the dtypes that it may have: None, or none at all, for that
            of the first one, which is floating-point.
    """
    first, x, *_ = tensors[0]
    known: dict[str, int] = {}
    for name, t, words, *dtypes in tensors:
        sizes = words.split()
        check_is_tensor(op, t, name)
        if t is x:
            check_float(op, x, first, least_dim=0)
        wanted = [x.dtype if dtype is None else dtype for dtype in dtypes or (None,)]
        if t.dtype not in wanted:
            names = " or ".join(
                short(d) + (f" like {first}" if d == x.dtype else "") for d in dict.fromkeys(wanted)
            )
            raise TypeError(f"{op}: {name} must be {names}, got {short(t.dtype)}; cast it first")
        check_device(op, t, x, name, first)
        if t.dim() != len(sizes) or any(
            known.get(word, n) != n or (n == 0 and word.endswith("+1"))
            for word, n in zip(sizes, t.shape, strict=True)
        ):
            shape = ", ".join(str(known.get(word, word)) for word in sizes)
            fits = "" if known.keys().isdisjoint(sizes) else f" to fit {first}"
            raise ValueError(f"{op}: {name} must have shape [{shape}]{fits}, got {tuple(t.shape)}")
        known.update(zip(sizes, t.shape, strict=True))


def one_of(*dtypes: torch.dtype) -> str:
    """Their names, each once, as a message says them."""
    return " or ".join(dict.fromkeys(short(dtype) for dtype in dtypes))


def check_mask(op: str, mask: Any, x: Tensor, shape: Sequence[int], what: str) -> None:
    """Refuse a mask that is neither boolean nor additive, or does not broadcast to this shape."""
    check_is_tensor(op, mask, "mask")
    if mask.dtype not in (torch.bool, torch.float32, x.dtype):
        raise TypeError(
            f"{op}: mask must be bool (True = keep), or additive in {one_of(x.dtype, torch.float32)}, "
            f"got {short(mask.dtype)}"
        )
    check_device(op, mask, x, "mask", "the input")
    lead = len(shape) - mask.dim()
    sizes = zip(mask.shape, shape[lead:], strict=True)
    if mask.shape != shape and (lead < 0 or any(m not in (1, n) for m, n in sizes)):
        raise ValueError(f"{op}: mask must broadcast to {tuple(shape)} ({what}), got {tuple(mask.shape)}")


def check_out(
    op: str,
    out: Any,
    like: Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    onto: Collection[str] = (),
    **read: Any,
) -> None:
    """Refuse an output that is not on like's device, and of this shape and dtype (like's, by default).

    Nor may it share memory with what is read, except that it may be one of the inputs named in `onto` (overlap.py).
    """
    shape = like.shape if shape is None else shape
    dtype = like.dtype if dtype is None else dtype
    if dtype != like.dtype or not alike(out, like, shape):
        check_is_tensor(op, out, "out")
        if out.shape != shape or out.dtype != dtype or out.device != like.device:
            raise ValueError(
                f"{op}: out must be {short(dtype)} {tuple(shape)} on {like.device}, "
                f"got {short(out.dtype)} {tuple(out.shape)} on {out.device}"
            )
    refuse_overlap(op, out, onto, read)


def earlier(out: Sequence[Any], i: int) -> dict[str, Any]:
    """The outputs before one of several, by name: they may not share memory either."""
    return {f"out[{j}]": t for j, t in enumerate(out[:i])}


def short(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
