"""Cross-entropy over the last dimension, with label smoothing and z-loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import check_device, check_float, check_is_tensor, check_number, one_of, short
from opsmith.call.dispatch import compiling, needs_grad
from opsmith.call.layouts import as_rows
from opsmith.call.run import Call, declare
from opsmith.call.signature import (
    Constant,
    Gradient,
    Input,
    Kept,
    Made,
    Number,
    Output,
    Rows,
    Saved,
    Signature,
    Sizes,
    Slope,
)
from opsmith.operator import Kind, Pattern, Supports
from opsmith.ops.cross_entropy.ranks import Ranks
from opsmith.ops.cross_entropy.samples import cost, samples, workloads

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
SIGNATURE = Signature(
    "cross_entropy",
    (
        *(Input("logits", "... V"), Input("target", "...", torch.int64), Number("ignore_index", int)),
        *(Number("label_smoothing", float), Number("z_loss", float), Number("reduction", int)),
    ),
    (Output("loss", ""),),
    kept=(Kept("stats", Rows.PAIR),),
    gradient=Gradient(
        "cross_entropy_backward",
        (
            *(Slope("loss"), Saved("logits"), Saved("target"), Saved("stats"), Saved("ignore_index")),
            *(Saved("label_smoothing"), Saved("z_loss"), Saved("reduction")),
            *(Constant("first", 0), Constant("classes", -1)),
        ),
        (Made("logits", optional=False),),
    ),
    beside=("dtype", "overwrite"),
)


class TargetError(IndexError, ValueError):
    """A target that names no class: an IndexError as in PyTorch, and a ValueError as in opsmith."""


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> Tensor:
    """Negative log-likelihood of the targets under the softmax of the logits; reads the logits once.

    `loss = lse - (1 - e) * logits[target] - e * mean(logits) + z_loss * lse^2`, with `lse = log(sum(exp(logits)))`
    and `e = label_smoothing`; 0 where `target == ignore_index`. The mean is over the targets not ignored, and NaN
    if there is none, as in PyTorch. Classes are the LAST dimension, however many come before it.

    >>> logits = torch.randn(2, 128, 32000, requires_grad=True)
    >>> cross_entropy(logits, torch.randint(0, 32000, (2, 128))).shape
    torch.Size([])

    Args:
        logits: [..., V], float32, bfloat16 or float16 (float64 through PyTorch).
        target: [...], int32 or int64, each in [0, V) or `ignore_index`.
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: the part of the target's probability that is spread over all classes, in [0, 1].
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting.
        reduction: "mean", "sum" or "none" (a loss for each target).
        dtype: of the loss, by default that of the logits. `torch.float32` on bfloat16 logits is what
            `cross_entropy(logits.float(), ...)` computes, without the copy.
        overwrite: the backward writes the gradient over the logits' own memory. They are destroyed by it, so
            nothing else may need them: an operator that saved them refuses its own backward.

    Raises:
        TargetError: (an IndexError and a ValueError) a target is outside [0, V) and not ignored.
        TypeError, ValueError: for a wrong dtype, shape, device, reduction or label smoothing.

    Source: Szegedy et al., "Rethinking the Inception Architecture", 2015 (label smoothing); Chowdhery et al.,
    "PaLM", 2022 (z-loss); Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    code = code_of(reduction)
    call = _CALL.fast.call if code in (1, 2) and not compiling() else _CALL.traced
    options = (ignore_index, label_smoothing, z_loss, code)
    return call(logits, target, *options, dtype, overwrite, None)  # type: ignore[no-any-return]


def definition(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    dtype: torch.dtype | None,
    overwrite: bool,
    op: str = "cross_entropy",
) -> Tensor:
    """The definition, in plain PyTorch."""
    classes = logits.shape[-1]
    if dtype is not None and logits.dtype != torch.float64:
        logits = logits.to(dtype)
    rows, flat = logits.reshape(target.numel(), classes), target.reshape(-1).long()
    whole = z_loss == 0 and reduction != REDUCTIONS["none"]
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    try:
        loss = F.cross_entropy(rows, flat, **options, reduction=[*REDUCTIONS][reduction] if whole else "none")
    except (IndexError, RuntimeError):
        if type(target) is Tensor:
            check_targets(target, classes, ignore_index, op)
        raise
    if whole:
        return loss
    if z_loss != 0:
        valid = flat != ignore_index
        loss = loss + z_loss * rows.logsumexp(-1).square().masked_fill(~valid, 0.0)
        if reduction == REDUCTIONS["mean"]:
            return loss.sum() / valid.sum()
    return loss.sum() if reduction == REDUCTIONS["sum"] else loss.view(target.shape)


def check_target(op: str, target: Any, logits: Tensor, name: str = "logits") -> None:
    """Refuse targets that are no class numbers, or live elsewhere."""
    check_is_tensor(op, target, "target")
    if target.dtype not in (torch.int64, torch.int32):
        more = "; probabilities are not supported" if target.is_floating_point() else "; cast it first"
        raise TypeError(f"{op}: target must hold classes as int64 or int32, got {short(target.dtype)}{more}")
    check_device(op, target, logits, "target", name)


def code_of(reduction: Any) -> int | str:
    """What the kernels call a reduction; of what is none, the words that a message says it with."""
    return REDUCTIONS.get(reduction, repr(reduction)) if isinstance(reduction, str) else repr(reduction)


def check_options(
    op: str, x: Tensor, dtype: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any, reduction: int | str
) -> None:
    """Refuse a reduction or a dtype of the loss that does not exist, no share of smoothing, and what is no number."""
    check_number(op, "ignore_index", ignore_index, whole=True)
    check_number(op, "label_smoothing", label_smoothing)
    check_number(op, "z_loss", z_loss)
    if isinstance(reduction, str):
        raise ValueError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")
    if dtype is not None and dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{op}: dtype must be {one_of(x.dtype, torch.float32)}, got {dtype}")


def check_targets(target: Tensor, classes: int, ignore_index: int, op: str) -> None:
    """Refuse the first target outside [0, classes) that is not ignored, naming its position."""
    bad = (((target < 0) | (target >= classes)) & (target != ignore_index)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise TargetError(
            f"{op}: targets must be in [0, {classes}) or ignore_index={ignore_index}, got {int(target[at])} at "
            f"position {at[0] if len(at) == 1 else at}; check the tokenizer's vocabulary against the size of the "
            "output layer"
        )


class Loss(Call):
    """A loss for each of the targets, or their sum or mean."""

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        known = self.named(values)
        shape = [] if known["reduction"] else [*known["target"].shape]
        return [(self.signature.results[0], shape, known["dtype"] or values[0].dtype)]

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        if t is None or of.name == "stats":
            return t
        return as_rows(t) if of is self.signature.tensors[0] else t.reshape(-1)

    def taken_result(self, of: Any, t: Tensor) -> Tensor:
        return t.view(-1) if of is self.signature.results[0] else super().taken_result(of, t)

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        return "...", "V"

    def sizes(self, values: Sequence[Any]) -> Mapping[str, Sizes]:
        one = self.named(values)["reduction"]
        return {**super().sizes(values), "loss": () if one else ("...",)}

    def spread(self, values: Sequence[Any], out: Any) -> Any:
        from torch.distributed.tensor import Partial, Replicate

        from opsmith.call.sharding import Spread

        self.check(values)
        spread, known = Spread(self, values), self.named(values)
        parts = dict(zip(self.given, spread.parts(self, values), strict=True))
        classes = self._classes(known)
        # On all ranks alike: who stopped later would be waited for.
        check_targets(parts["target"], classes, known["ignore_index"], self.op)
        counted = (parts["target"] != known["ignore_index"]).sum()
        rows = any((along or "").startswith("...") for along in spread.divides)
        # A mean over rows that are spread is a sum of sums: each rank counts its own.
        mean = rows and known["reduction"] == REDUCTIONS["mean"]
        if mean:
            parts["reduction"] = REDUCTIONS["sum"]
        ((_, shape, _),) = self.made(values)
        over_classes = self._over_classes(spread, classes)
        if over_classes is None:
            loss = self.traced(*parts.values(), None)
        else:
            ours = self.supported([*parts.values()])
            if ours is not True:
                raise TypeError(
                    f"{self.op}: {ours}; classes that are spread over ranks need one: cast, or redistribute first"
                )
            learns = needs_grad(*(t for t in parts.values() if isinstance(t, Tensor)))
            loss = (self.recorded if learns else self.native)(over_classes, [*parts.values()])
        summed = [Replicate() if along in (None, "V") else Partial() for along in spread.divides]
        if not known["reduction"]:
            return spread.whole("loss", loss, shape)
        if mean:
            total = spread.placed(counted, (), summed).redistribute(placements=[Replicate()] * len(summed))
            loss = loss / total.to_local()
        return spread.placed(loss, shape, summed)

    @staticmethod
    def _classes(known: dict[str, Any]) -> int:
        """How many there are."""
        return int(known["weight"].shape[0] if "weight" in known else known["logits"].shape[-1])

    def _over_classes(self, spread: Any, classes: int) -> Ranks | None:
        """Who has the other classes; None where this rank has all."""
        over = [i for i, along in enumerate(spread.divides) if along == "V"]
        if not over:
            return None
        if len(over) > 1:
            raise ValueError(f"{self.op}: classes must be spread over one dimension of the mesh, got {over}")
        ranks, place = spread.mesh.size(over[0]), spread.mesh.get_local_rank(over[0])
        first = min(-(-classes // ranks) * place, classes)  # as Shard divides
        return Ranks(first, classes, spread.mesh.get_group(over[0]))

    def explain(self, values: Sequence[Any]) -> None:
        known = self.named(values)
        check_targets(known["target"], self._classes(known), known["ignore_index"], self.op)


class _CrossEntropy(Loss):
    """Rows of logits with a target each; forward keeps the pivot of a row and the logarithm of the sum above it."""

    def check(self, values: Sequence[Any]) -> None:
        logits, target, *options, dtype, _ = values
        check_float(self.op, logits, "logits")
        check_target(self.op, target, logits)
        if target.shape != logits.shape[:-1]:
            advice = f"expected {tuple(logits.shape[:-1])}"
            if logits.dim() > 2 and target.shape == (logits.shape[0], *logits.shape[2:]):
                advice = "classes are the last dimension here, not the second: pass logits.movedim(1, -1)"
            raise ValueError(
                f"cross_entropy: target must have the shape of logits {tuple(logits.shape)} without the last "
                f"dimension, got {tuple(target.shape)}; {advice}"
            )
        if logits.shape[-1] == 0 and target.numel():
            raise ValueError(f"cross_entropy: logits must have at least one class, got {tuple(logits.shape)}")
        check_options(self.op, logits, dtype, *options)

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        return super().supported(values, "cross_entropy_part", *more)

    def kernel(self, backend: Any, backward: bool = False) -> Callable[..., Any]:
        if isinstance(backend, Ranks):
            return backend.backward if backward else backend.forward
        return super().kernel(backend, backward)

    def made_gradient(self, name: str, like: Tensor, known: dict[str, Any]) -> Tensor:
        if not (known["overwrite"] and like.is_contiguous()):
            return super().made_gradient(name, like, known)
        torch.autograd.graph.increment_version(like)
        return like.detach()


_CALL = _CrossEntropy(
    SIGNATURE, cross_entropy, definition, converted={"reduction": lambda reduction: REDUCTIONS[reduction]}
)
_SHAPES = {"logits": ("N", "V"), "target": ("N",)}


def _pattern(reduction: str) -> Pattern:
    def written(logits: Tensor, target: Tensor, ignore_index: float, **smoothing: Any) -> Tensor:
        options: dict[str, Any] = {"ignore_index": int(ignore_index), "reduction": reduction, **smoothing}
        return F.cross_entropy(logits, target, **options)

    return Pattern(
        f"cross_entropy(logits, target, {reduction})",
        written,
        {**_SHAPES, "ignore_index": -12345, "label_smoothing": 0.12345},
        dtypes={"target": "ids"},
        fixed={"reduction": reduction},
    )


_SELECTED = Pattern(
    "logsumexp(logits) - logits[target]",
    lambda logits, target: logits.logsumexp(-1) - logits.gather(-1, target.unsqueeze(-1)).squeeze(-1),
    _SHAPES,
    dtypes={"target": "ids"},
    fixed={"reduction": "none", "ignore_index": -(2**63)},  # as `gather` ignores none
)

CARD = _CALL.card(
    kind=Kind.LOSS,
    cost=cost,
    samples=samples,
    workloads=workloads,
    patterns=(*map(_pattern, REDUCTIONS), _SELECTED),
    widens="logits",
    schemas=declare(SIGNATURE),
    source="Szegedy et al., 2015; Chowdhery et al., 2022; Milakov, Gimelshein, 2018",
)
