"""Routing of tokens to the experts of a mixture: which, and with what weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_fit, check_number
from opsmith.call.dispatch import carries_tangents, compiling, needs_grad
from opsmith.call.fast import direct
from opsmith.call.layouts import nbytes
from opsmith.call.run import Call
from opsmith.call.signature import Dtype, Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.kernels import libraries
from opsmith.operator import Cost, Kind, Make, Sample

_OP = "moe_route"
_SCORINGS = {"softmax": False, "sigmoid": True}
_TINY = 1e-20  # DeepSeek's, so that scores that are all 0 give weights of 0

SIGNATURE = Signature(
    _OP,
    (
        *(Input("logits", "... E"), Input("bias", "E", Dtype.FIRST_OR_FLOAT32, optional=True)),
        *(Number("k", int), Number("scoring", bool), Number("groups", int), Number("topk_groups", int)),
        *(Number("normalize", bool), Number("scale", float)),
    ),
    (Output("ids", "...", torch.int64), Output("weights", "...", torch.float32)),
    gradient=Gradient(
        "moe_route_backward",
        (
            *(Slope("weights"), Saved("logits"), Saved("ids"), Saved("scoring"), Saved("normalize")),
            Saved("scale"),
        ),
        (Made("logits", optional=False),),
    ),
)


def moe_route(
    logits: Tensor,
    k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose k experts for each token, and weigh them.

    `ids = topk(scores + bias)`, `weights = scale * scores[ids] / sum(scores[ids])`, with `scores` the softmax or the
    sigmoid of the logits. Of equal experts the first is taken. With groups, only experts of the best groups are chosen:
    those with the largest sum of two `scores + bias` (DeepSeek-V3); or, with softmax and no bias, with the largest
    score (DeepSeek-V2).

    >>> ids, weights = moe_route(torch.randn(5, 64), 8)
    >>> ids.shape, weights.shape
    (torch.Size([5, 8]), torch.Size([5, 8]))

    Of a row that holds NaN or plus infinity, ids are some experts and weights any numbers.

    GPT-OSS's softmax over the chosen logits is the default: normalizing makes it the same.

    Args:
        logits: [T, E], float32, bfloat16 or float16 (float64 through PyTorch).
        k: experts a token.
        scoring: "softmax" or "sigmoid", in float32.
        bias: [E], float32 or in logits' dtype: takes part in choosing alone, so it gets no gradient.
        groups: in which the experts lie, each as many of them.
        topk_groups: how many of them a token may choose from.
        normalize: whether the weights are divided by their sum (and 1e-20).
        scale: multiplies the weights.

    Returns:
        ids [T, k], int64, the best first; and weights [T, k], float32 whatever the logits are, as Mixtral and DeepSeek
        have them. Qwen, OLMoE and GPT-OSS round them to the logits' dtype.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device, scoring or number of groups.

    Source: Fedus et al., "Switch Transformers", 2021; DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """
    code = _SCORINGS.get(scoring, repr(scoring)) if isinstance(scoring, str) else repr(scoring)
    values = (logits, bias, k, code, *_groups(groups, topk_groups), normalize, scale)
    if not compiling():
        try:
            if not needs_grad(logits) and not carries_tangents():
                shape, device = (logits.shape[0], k), logits.device
                ids = torch.empty(shape, dtype=torch.int64, device=device)
                weights = torch.empty(shape, dtype=torch.float32, device=device)
                direct.moe_route(*values, ids=ids, weights=weights)
                return ids, weights
        except (RuntimeError, IndexError, TypeError, AttributeError):  # the checks say why
            pass
    return _CALL.compiled(*values, None)  # type: ignore[no-any-return]


def _groups(groups: int | None, topk_groups: int | None) -> tuple[Any, Any]:
    """The kernel's numbers: without groups, one that is open."""
    return (
        1 if groups is None else groups,
        topk_groups if topk_groups is not None or groups is not None else 1,
    )


def definition(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    sigmoid: bool,
    groups: int,
    topk_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The definition, in plain PyTorch. Without a bias the logits choose, in whose order the scores are."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    by = wide if bias is None else scores + bias
    by = by.detach()
    if groups > 1:
        parts = by.unflatten(-1, (groups, -1))
        if bias is None and not sigmoid:
            rank = parts.amax(-1)
        else:
            each = (scores.detach() if bias is None else by).unflatten(-1, (groups, -1))
            rank = each.topk(min(2, each.shape[-1]), -1).values.sum(-1)
        best = rank.sort(dim=-1, descending=True, stable=True).indices[..., :topk_groups]
        open_ = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True)
        by = parts.masked_fill(~open_[..., None], -math.inf).flatten(-2)
    ids = by.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    ids = ids.contiguous()
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return ids, weights * scale


class _Route(Call):
    """How many experts are chosen is a number, which the sizes of the results are."""

    def check(self, values: Sequence[Any]) -> None:
        logits, bias, k, scoring, groups, topk_groups, _, scale = values
        biases = () if bias is None else (("bias", bias, "E", None, torch.float32),)
        check_fit(_OP, ("logits", logits, "T E"), *biases)
        if isinstance(scoring, str):
            raise ValueError(f"{_OP}: scoring must be one of {', '.join(_SCORINGS)}, got {scoring}")
        check_number(_OP, "scale", scale)
        count = logits.shape[1]
        if topk_groups is None or (groups == 1 and topk_groups != 1):
            raise ValueError(f"{_OP}: groups and topk_groups belong together, got one of them")
        for name, number in (("k", k), ("groups", groups), ("topk_groups", topk_groups)):
            check_number(_OP, name, number, whole=True)
            if number < 1:
                raise ValueError(f"{_OP}: {name} must be 1 or more, got {number}")
        if count % groups or topk_groups > groups:
            raise ValueError(
                f"{_OP}: groups must divide the {count} experts, and topk_groups be at most as many, "
                f"got groups={groups} and topk_groups={topk_groups}"
            )
        if k > count // groups * topk_groups:
            raise ValueError(
                f"{_OP}: k must be at most {count // groups * topk_groups}, the experts that can be chosen, got {k}"
            )

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        return [(one, [values[0].shape[0], values[2]], one.dtype) for one in self.signature.results]  # type: ignore[misc]

    def sizes(self, values: Sequence[Any]) -> Mapping[str, Any]:
        return {**super().sizes(values), **dict.fromkeys(("ids", "weights"), ("...", "k"))}

    def recorded(self, backend: str, values: Sequence[Any]) -> Any:
        logits, bias, *rest = values
        return super().recorded(backend, (logits, None if bias is None else bias.detach(), *rest))

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        chosen = t is not None and of.name in ("ids", "weights")
        return t.contiguous() if chosen and t is not None else super().taken(of, t)


_CALL = _Route(
    SIGNATURE,
    moe_route,
    definition,
    converted={
        "scoring": lambda scoring: _SCORINGS[scoring],
        "groups": lambda groups, topk_groups: _groups(groups, topk_groups)[0],
        "topk_groups": lambda groups, topk_groups: _groups(groups, topk_groups)[1],
    },
)


def _cost(logits: Tensor, k: int, *, bias: Tensor | None = None, **options: Any) -> Cost:
    tokens = logits.shape[0] if logits.dim() else 0
    return Cost(6.0 * logits.numel(), nbytes(logits, bias) + tokens * k * (8 + max(4, logits.element_size())))


def _samples(make: Make) -> Iterator[Sample]:
    for t, e, k in ((1, 1, 1), (1, 8, 2), (7, 33, 4), (40, 60, 4), (129, 128, 4)):
        yield Sample(f"{t}x{e}, {k}", (make(t, e, scale=2.0), k))
    x = make(19, 48)
    for scoring in _SCORINGS:
        options = {"scoring": scoring, "scale": 2.5}
        yield Sample(f"{scoring}, not normalized", (x, 6), {**options, "normalize": False})
        yield Sample(f"{scoring}, groups", (x, 6), {**options, "groups": 8, "topk_groups": 3})
        grouped = {**options, "bias": make(48, scale=0.1), "groups": 6, "topk_groups": 2}
        yield Sample(f"{scoring}, groups and bias", (x, 6), grouped)
        yield Sample(f"{scoring}, bias", (x, 3), {**options, "bias": make(48, scale=0.1)})
    yield Sample("groups of one", (x, 3), {"scoring": "sigmoid", "groups": 48, "topk_groups": 5})
    yield Sample("large", (make(5, 40, scale=80.0), 4))
    yield Sample("strided", (make(24, 10).t(), 3))
    yield Sample("sliced rows", (make(9, 60)[:, 5:37], 3), {"scoring": "sigmoid"})
    yield Sample("empty", (make(0, 16), 2))


def _workloads(make: Make) -> Iterator[Sample]:
    for t in (1, 4096):
        yield Sample(f"{t}x128, 8", (make(t, 128), 8))
        grouped = {"scoring": "sigmoid", "bias": make(256, scale=0.1), "groups": 8, "topk_groups": 4}
        yield Sample(f"{t}x256, 8 of 4 of 8 groups", (make(t, 256), 8), {**grouped, "scale": 2.5})


def _promised(logits: Tensor, k: int, *, bias: Tensor | None = None, **options: Any) -> bool:
    """Rows that have a largest number, and none that is not one: of others nothing is promised but ids in range.

    And choices that rounding does not make: the same experts in float64, and of logits a little larger.
    """
    wrong = logits.isnan() | (logits == math.inf)
    rows = logits.isfinite().any(-1) if logits.shape[-1] else torch.ones(())
    if bool(wrong.any()) or not bool(rows.all()) or not (bias is None or bool(bias.isfinite().all())):
        return False
    with torch.no_grad():
        here = CARD.eager(logits, k, bias=bias, **options)[0]
        wide, of = logits.double(), None if bias is None else bias.double()
        return all(
            here.equal(CARD.reference(wide * by, k, bias=of, **options)[0]) for by in (1, 1 + 1e-5, 1 - 1e-5)
        )


CARD = _CALL.card(
    kind=Kind.SOFTMAX,
    cost=_cost,
    domain=_promised,
    samples=_samples,
    workloads=_workloads,
    # Models write it in ways that sort ties differently: nothing is recognized.
    schemas=SIGNATURE.schemas(),
    source="Fedus et al., 2021; DeepSeek-AI, 2024",
)

libraries.offer(_OP, _OP, "moe_route_backward")
