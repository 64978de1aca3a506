"""Correct before fast: catches wrong results, and the ways in which a kernel can look right without being so.

A call is tried on memory full of NaN, on other values in the same tensors, and on other tensors; its inputs
are compared byte by byte afterwards. An unwritten output, a mutated input, a cached answer, a skipped tail
and an accumulator in low precision all show in one of these.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .pool import Inputs, tensors_of, with_tensors

# A number is the largest absolute error allowed. A callable gets (got, exact) and returns that number.
Tolerance = float | Callable[[Tensor, Tensor], float]

# Without a tolerance: this many units in the last place of the output's dtype, at the output's scale.
_ULPS = 4.0


class WrongResult(ValueError):
    """A contestant that computed something else than it should; it has no time.

    Attributes:
        contestant: its name.
        fault: "wrong shape", "unwritten output", "skipped tail", "mutated input", "cached answer",
            "low precision" or "wrong value".
        why: the fault, and how it shows.
        error: the largest absolute error, infinity where it cannot be given.
        allowed: the largest error that would have passed.
    """

    def __init__(self, contestant: str, fault: str, detail: str, error: float, allowed: float) -> None:
        self.why = f"{fault}: {detail}"
        super().__init__(f"{contestant}: {self.why}; a wrong result has no time, correct it first")
        self.contestant, self.fault, self.error, self.allowed = contestant, fault, error, allowed


@dataclass(frozen=True)
class Checked:
    """What a check that passed has seen: the largest error, and what was allowed where it occurred."""

    error: float
    allowed: float
    calls: int


def ulp(dtype: torch.dtype, scale: float) -> float:
    """One unit in the last place of `dtype` at a magnitude.

    >>> ulp(torch.float32, 1.0) == 2.0**-23
    True
    """
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(scale)) if 0 < scale < math.inf else -math.inf
    return float(max(info.eps * 2.0**exponent, info.tiny * info.eps))


def _allowed(got: Tensor, exact: Tensor, tolerance: Tolerance | None) -> float:
    if callable(tolerance):
        return float(tolerance(got, exact))
    if tolerance is not None:
        return float(tolerance)
    if not got.dtype.is_floating_point:
        return 0.0
    finite = exact[exact.isfinite()]
    return _ULPS * ulp(got.dtype, float(finite.abs().max()) if finite.numel() else 0.0)


def compare_outputs(
    name: str,
    got: object,
    exact: object,
    tolerance: Tolerance | None = None,
    previous: object = None,
    called: Sequence[str] = (),
) -> tuple[float, float]:
    """Raises when an output is not what the reference says; returns (largest error, what was allowed).

    NaN never passes, not even where the reference has it, and infinities must stand exactly where the
    reference has them.

    >>> compare_outputs("ours", torch.ones(3), torch.ones(3, dtype=torch.float64))[0]
    0.0

    Args:
        name: the contestant, for the error.
        got: tensor, or nested tensors, that it returned.
        exact: the same, computed by the reference, usually in float64.
        tolerance: largest absolute error, or a function (got, exact) -> that; four units in the last place
            of the output's dtype by default.
        previous: outputs of the call before, to tell a cached answer from another wrong one.
        called: what the error calls each output.

    Raises:
        WrongResult: naming the contestant, the fault, and the error.
    """
    outputs, expected = list(tensors_of(got)), list(tensors_of(exact))
    before = list(tensors_of(previous))
    if len(outputs) != len(expected):
        detail = f"expected {len(expected)} tensors, got {len(outputs)}"
        raise WrongResult(name, "wrong shape", detail, math.inf, 0.0)
    worst = (0.0, math.inf)
    for index, (out, right) in enumerate(zip(outputs, expected, strict=True)):
        title = called[index] if len(called) == len(expected) else f"output {index}"
        if out.shape != right.shape:
            detail = f"{title} is {tuple(out.shape)}, expected {tuple(right.shape)}"
            raise WrongResult(name, "wrong shape", detail, math.inf, 0.0)
        out, right = out.detach(), right.detach().to(out.device)
        allowed = _allowed(out, right, tolerance)
        wrong, error = _differences(out, right, allowed)
        if bool(wrong.any()):
            old = before[index] if index < len(before) else None
            fault = _fault(out, right, wrong, error, old)
            place = tuple(int(i) for i in wrong.nonzero()[0]) if wrong.dim() else ()
            detail = (
                f"{title} differs in {int(wrong.sum())} of {wrong.numel()} elements, "
                f"the first at {place}: {float(out[place]):.6g}, expected {float(right[place]):.6g}; "
                f"largest error {error:.3g}, allowed {allowed:.3g}"
            )
            raise WrongResult(name, fault, detail, error, allowed)
        if error >= worst[0]:
            worst = (error, allowed)
    return worst


def _differences(out: Tensor, right: Tensor, allowed: float) -> tuple[Tensor, float]:
    """Where the output is wrong, and the largest error, infinite where one of the two is not finite."""
    a, b = out.double(), right.double()
    if out.dtype.is_floating_point:
        # What overflows the output's dtype is an infinity there.
        b = torch.where(b.isfinite() & (b.abs() > torch.finfo(out.dtype).max), b.sign() * math.inf, b)
    error = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    # Written so that a NaN bound fails as well.
    return ~(error <= allowed), float(error.max()) if error.numel() else 0.0


def _fault(out: Tensor, right: Tensor, wrong: Tensor, error: float, previous: Tensor | None) -> str:
    if previous is not None and previous.shape == out.shape and torch.equal(previous, out):
        return "cached answer"
    bad = wrong.flatten()
    first = int(bad.nonzero()[0])
    untouched = _looks_poisoned(out).flatten()
    if bool((bad & untouched).any()):
        return "skipped tail" if first > 0 and bool(bad[first:].all()) else "unwritten output"
    if first > 0 and bool(bad[first:].all()) and bad.numel() - first < first:
        return "skipped tail"
    finite = right.double()[right.double().isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return "low precision" if out.dtype.is_floating_point and error < 0.1 * scale else "wrong value"


def poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with what no kernel computes: NaN, or the extreme value of an integer dtype; returns it.

    >>> bool(poison(torch.empty(3)).isnan().all())
    True
    """
    with torch.no_grad():
        return tensor.fill_(_poison_of(tensor.dtype))


def _poison_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _looks_poisoned(tensor: Tensor) -> Tensor:
    if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:  # of the latter, none does
        return tensor.isnan()
    return tensor == _poison_of(tensor.dtype)


@contextlib.contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """What torch allocates without initializing it is meanwhile full of NaN, or of the largest integer."""
    # The debug mode sets the same switch as use_deterministic_algorithms, without importing Inductor for it.
    was = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic  # its attributes are properties that type stubs do not know
    filled = switch.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_deterministic_debug_mode("warn")
        switch.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(was)
            switch.fill_uninitialized_memory = filled


class _Copy:
    """A private copy of the inputs, strides and sharing kept, whose memory can be compared and changed."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._memory: dict[int, Tensor] = {}
        self.inputs: Inputs = with_tensors(tuple(inputs), self._copy)

    def _copy(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        key = storage.data_ptr()
        if key not in self._memory:
            flat = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            self._memory[key] = flat.clone()
        twin = torch.empty(0, dtype=t.dtype, device=t.device)
        twin.set_(self._memory[key].untyped_storage(), t.storage_offset(), t.shape, t.stride())
        return twin.requires_grad_(t.requires_grad)

    def snapshot(self) -> list[Tensor]:
        return [flat.clone() for flat in self._memory.values()]

    def unchanged_since(self, snapshot: list[Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._memory.values(), snapshot, strict=True))

    def vary(self, turn: int) -> None:
        """Puts other values of the same kind in place: each tensor's own elements, in another order."""
        done: set[int] = set()
        for tensor in tensors_of(self.inputs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() in done or tensor.numel() == 0:
                continue
            done.add(storage.data_ptr())
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            generator = torch.Generator().manual_seed(turn)
            if _are_offsets(flat):  # stay so: the steps between them change places
                steps = flat.diff()
                order = torch.randperm(steps.numel(), generator=generator)
                flat[1:] = steps[order.to(flat.device)].cumsum(0)
                continue
            other = flat[torch.randperm(flat.numel(), generator=generator).to(flat.device)]
            if tensor.dtype.is_floating_point and torch.equal(other, flat):
                other = other * 0.75 + 0.125
            flat.copy_(other)


def _turns(inputs: Sequence[Any], calls: int) -> Iterator[_Copy]:
    copy = _Copy(inputs)
    for turn in range(calls):
        if turn == 2:
            copy = _Copy(inputs)
        if turn:
            copy.vary(turn)
        yield copy


def exact_turns(inputs: Sequence[Any], calls: int = 3) -> Iterator[Inputs]:
    """What `check_call` will give its reference, call by call."""
    return (_exact(copy.inputs) for copy in _turns(inputs, calls))


def _are_offsets(flat: Tensor) -> bool:
    """Integers from 0 that never decrease: where parts of something begin, which would mean nothing shuffled."""
    if flat.dtype not in (torch.int32, torch.int64):
        return False
    return int(flat[0]) == 0 and bool((flat.diff() >= 0).all())


def _exact(inputs: Inputs) -> Inputs:
    def up(t: Tensor) -> Tensor:
        raised = t.detach().double() if t.dtype.is_floating_point else t.detach().clone()
        return raised.requires_grad_(t.requires_grad)

    return with_tensors(inputs, up)  # type: ignore[no-any-return]


def check_call(
    fn: Callable[..., object],
    inputs: Sequence[Any],
    reference: Callable[..., object],
    tolerance: Tolerance | None = None,
    *,
    outs: Sequence[Tensor] = (),
    calls: int = 3,
    name: str = "call",
    called: Sequence[str] = (),
) -> Checked:
    """Calls `fn` three times, under conditions in which a cheat fails, and compares with a float64 reference.

    The calls see: the inputs; the same tensors with other values in them; other tensors. Other values are the same
    in another order, which keeps indices in range, masks masks, and offsets (integers from 0 that never decrease)
    offsets. Output memory is full of NaN before each call, whether passed in or allocated by torch inside. The inputs
    given stay untouched.

    >>> check_call(torch.exp, (torch.randn(64),), torch.exp, 1e-5).calls
    3

    Args:
        fn: `fn(*inputs, *outs)`. What it returns is compared; with `outs`, the out buffers are.
        inputs: positional arguments; nested tensors are seen.
        reference: `reference(*inputs)` with every floating-point tensor in float64; returns all outputs.
        tolerance: largest absolute error, or a function (got, exact) -> that; four units in the last place
            of each output's dtype, at its scale, by default. Pass twice eager's own error plus one unit for
            operators that cannot reach this.
        outs: output buffers that `fn` writes; only their shape, strides and dtype are used.
        calls: the first of these alone, where others have shown that nothing is kept from one call to the next.
        name, called: the contestant and its outputs, for the error.

    Raises:
        WrongResult: naming the contestant, the fault, and the error.
        ValueError: `calls` is not 1, 2 or 3.
    """
    if calls not in (1, 2, 3):
        raise ValueError(f"check_call: calls must be 1, 2 or 3, got {calls!r}")
    error, allowed = 0.0, 0.0
    previous: list[Tensor] = []
    for copy in _turns(inputs, calls):
        buffers = [poison(o.new_empty_strided(o.shape, o.stride())) for o in outs]
        # The reference works on its own copy, so a cheat that mutates its inputs cannot mislead it.
        exact = reference(*_exact(copy.inputs))
        before = copy.snapshot()
        with _poisoned_allocations():
            returned = fn(*copy.inputs, *buffers)
        got: object = buffers if outs else returned
        if not copy.unchanged_since(before):
            raise WrongResult(
                name, "mutated input", "an input's bytes changed during the call", math.inf, 0.0
            )
        seen = compare_outputs(name, got, exact, tolerance, previous, called)
        if seen[0] >= error:
            error, allowed = seen
        previous = [tensor.detach().clone() for tensor in tensors_of(got)]
    return Checked(error, allowed, calls)
