"""The cards of MLA pre-processing: `mla_preprocess` as a function of tensors alone, with a fresh cache as a result.

A card's inputs are tensors and its results are all that a call changes, so that what holds an operator to its card
(verify, gradcheck, captured graphs, benchmarks) can hold this one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from opsmith.call.common import kernels, native, nbytes
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops import entry_costs
from opsmith.ops.mla.epilogue_forms import fresh_cache, fresh_rows, some_slots, table
from opsmith.ops.mla.parts import Parts, Sizes, check_weights
from opsmith.ops.mla.preprocess import check, compute, kernel, run
from opsmith.ops.mla.projection import Projection, quantize_weight
from opsmith.ops.mla.rungs import eager
from opsmith.ops.rms_norm.quant import Steps

Results = tuple[torch.Tensor, ...]
Maybe = torch.Tensor | None

_OP, _OP_INT8 = "mla_preprocess", "mla_preprocess_int8"


def preprocess_form(
    x: torch.Tensor,
    wdqkv: torch.Tensor,
    wuq: torch.Tensor,
    wuk: torch.Tensor,
    gamma2: torch.Tensor,
    gamma1: Maybe,
    gamma0: Maybe,
    cos: Maybe,
    sin: Maybe,
    slot_mapping: torch.Tensor,
    *,
    mode: str,
    blocks: int,
    block_size: int,
    beta0: Maybe = None,
    beta1: Maybe = None,
    bias0: Maybe = None,
    bias1: Maybe = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    by: Callable[..., Any] | None = None,
) -> Results:
    """`mla_preprocess` into a fresh cache of this mode: its queries, then the cache's tensors.

    Thirteen operators as one: norm, down-projection, split, norms, up-projection, absorption, rotations, write.
    """
    down, up = Projection(wdqkv, bias0), Projection(wuq, bias1)
    w = Parts(down, up, wuk, gamma0, gamma1, gamma2, beta0, beta1, None, interleaved)
    return _into_fresh_cache(_OP, by, x, w, cos, sin, slot_mapping, (mode, blocks, block_size), eps)


def quantized_form(
    x: torch.Tensor,
    wdqkv: torch.Tensor,
    wuq: torch.Tensor,
    wuk: torch.Tensor,
    gamma2: torch.Tensor,
    gamma1: Maybe,
    gamma0: Maybe,
    cos: Maybe,
    sin: Maybe,
    slot_mapping: torch.Tensor,
    *,
    quant: str,
    descale0: torch.Tensor,
    descale1: torch.Tensor,
    mode: str,
    blocks: int,
    block_size: int,
    scale0: Maybe = None,
    offset0: Maybe = None,
    scale1: Maybe = None,
    offset1: Maybe = None,
    beta0: Maybe = None,
    beta1: Maybe = None,
    bias0: Maybe = None,
    bias1: Maybe = None,
    ctkv_scale: Maybe = None,
    q_nope_scale: Maybe = None,
    interleaved: bool = False,
    eps: float = 1e-6,
    by: Callable[..., Any] | None = None,
) -> Results:
    """`mla_preprocess` with quantized weights into a fresh cache: its queries, then the cache's tensors.

    W8A8 per tensor or per token, or weights alone in int8 or int4; the cache may be int8 too. Inference only.
    """
    down = Projection(wdqkv, bias0, descale0, scale0, offset0)
    up = Projection(wuq, bias1, descale1, scale1, offset1)
    w = Parts(down, up, wuk, gamma0, gamma1, gamma2, beta0, beta1, quant, interleaved)
    scales = ctkv_scale, q_nope_scale
    return _into_fresh_cache(
        _OP_INT8, by, x, w, cos, sin, slot_mapping, (mode, blocks, block_size), eps, scales
    )


def _into_fresh_cache(
    op: str,
    by: Callable[..., Any] | None,
    x: torch.Tensor,
    w: Parts,
    cos: Maybe,
    sin: Maybe,
    slot_mapping: torch.Tensor,
    layout: tuple[str, int, int],
    eps: float,
    scales: tuple[Maybe, Maybe] = (None, None),
) -> Results:
    cache = fresh_cache(op, *layout, w.kv_lora, w.rope, x)
    if by is None:
        q_lora = None if w.gamma1 is None else w.down.weight.shape[0] - w.kv_lora - w.rope
        norms = {
            "gamma0": w.gamma0,
            "gamma1": w.gamma1,
            "gamma2": w.gamma2,
            "beta0": w.beta0,
            "beta1": w.beta1,
        }
        sizes = Sizes(w.heads, w.nope, w.rope, w.kv_lora, q_lora)
        check_weights(op, w.down, w.up, w.wuk, norms, None, sizes, w.quant)
        scales = check(op, x, w, cos, sin, slot_mapping, cache, *scales, values=False)
    # An implementation is called by those who have checked; weights are checked once, and no benchmark should time it.
    pair = (by or compute)(x, w, cos, sin, slot_mapping, cache, eps, False, *scales)
    return (*(t for t in pair if t is not None), *fresh_rows(cache))


def _cost(
    x: torch.Tensor,
    wdqkv: torch.Tensor,
    wuq: torch.Tensor,
    wuk: torch.Tensor,
    *more: Maybe,
    blocks: int,
    block_size: int,
    **options: Any,
) -> Cost:
    tokens, (heads, nope, kv_lora) = x.shape[0], wuk.shape
    rope = wuq.shape[0] // heads - nope
    inner = x.shape[1] if more[1] is None else wdqkv.shape[0] - kv_lora - rope
    projected = wdqkv.shape[0] * x.shape[1] + wuq.shape[0] * inner
    integer = options.get("quant") in ("per_tensor", "per_token")
    norms = 4 * (x.shape[1] + inner + kv_lora) + 3 * rope * (heads + 1)
    slots = blocks * block_size * (kv_lora + rope)  # this form makes its cache
    written = (tokens * heads * (kv_lora + rope) + slots) * x.element_size()
    tensors = [t for t in (*more, *options.values()) if isinstance(t, torch.Tensor)]
    return Cost(
        tokens * (2.0 * (projected + wuk.numel()) + norms),
        nbytes(x, wdqkv, wuq, wuk, *tensors) + written,
        2.0 * tokens * projected if integer else 0.0,
    )


def _arguments(
    make: Make,
    tokens: int,
    size: int,
    heads: int,
    sizes: tuple[int, int, int, int | None],
    *,
    layout: tuple[str, int, int] = ("split", 3, 16),
    x: Maybe = None,
    turn: bool = True,
    gamma0: bool = True,
    skip: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What both forms are called with; sizes are (nope, rope, kv_lora, q_lora)."""
    nope, rope, kv_lora, q_lora = sizes
    inner = size if q_lora is None else q_lora
    mode, blocks, block_size = layout

    def gain(n: int) -> torch.Tensor:
        return make(n, scale=0.3, shift=1.0)

    args = (
        make(tokens, size) if x is None else x,
        make(kv_lora + rope + (q_lora or 0), size, scale=size**-0.5),
        make(heads * (nope + rope), inner, scale=inner**-0.5),
        make(heads, nope, kv_lora, scale=nope**-0.5),
        gain(kv_lora),
        None if q_lora is None else gain(q_lora),
        gain(size) if gamma0 else None,
        *(table(make, tokens, rope) if turn else (None, None)),
        some_slots(make, tokens, blocks, block_size, skip),
    )
    return args, {"mode": mode, "blocks": blocks, "block_size": block_size}


_SMALL = (8, 4, 20, 28)  # nope, rope, kv_lora, q_lora
_V3 = (128, 64, 512, 1536)


def _samples(make: Make) -> Iterator[Sample]:
    def sample(name: str, *args: Any, more: dict[str, Any] | None = None, **options: Any) -> Sample:
        positional, named = _arguments(make, *args, **options)
        return Sample(name, positional, {**named, **(more or {})})

    for tokens, size in ((2, 33), (5, 40), (33, 65)):
        yield sample(f"{tokens}x{size}", tokens, size, 3, _SMALL)
    yield sample("one token, joint", 1, 24, 2, _SMALL, layout=("joint", 2, 1))
    yield sample("no q_lora", 5, 40, 3, (8, 4, 20, None))
    yield sample("tiled", 7, 40, 2, (8, 16, 32, 24), layout=("tiled", 2, 7))
    yield sample("interleaved", 5, 40, 3, _SMALL, more={"interleaved": True})
    betas = {"beta0": make(40), "beta1": make(28)}
    biases = {"bias0": make(20 + 4 + 28), "bias1": make(3 * 12)}
    yield sample("betas and biases", 5, 40, 3, _SMALL, more={**betas, **biases})
    yield sample("normalized already", 5, 40, 3, _SMALL, gamma0=False)
    yield sample("no rotation", 5, 40, 3, _SMALL, turn=False)
    yield sample("strided", 5, 40, 3, _SMALL, x=make(40, 5).t())
    yield sample("rows of zeros", 3, 40, 3, _SMALL, x=make(3, 40, scale=0.0), more={**betas, "eps": 1e-5})
    yield sample("empty", 0, 40, 3, _SMALL)


def _workloads(make: Make) -> Iterator[Sample]:
    for tokens in (1, 4, 32):
        args = _arguments(make, tokens, 7168, 128, _V3, layout=("split", 1, 32), skip=False)
        yield Sample(f"V3, {tokens} token{'s' * (tokens > 1)}", *args)


def _quantized(make: Make, quant: str, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with their two projections in this form."""
    bits = 4 if quant == "weight_int4" else 8
    x, wdqkv, wuq, *rest = args
    found: dict[str, Any] = {"quant": quant}
    weights = []
    for i, weight in enumerate((wdqkv, wuq)):
        if weight.is_meta:  # shapes alone are asked for
            held, descale = (
                torch.empty(weight.shape, dtype=torch.int8, device="meta"),
                weight.new_empty(len(weight)),
            )
        else:
            held, descale, _ = quantize_weight(weight, bits)
        weights.append(held)
        found[f"descale{i}"] = descale
    if quant == "per_tensor":
        for i, values in enumerate(((0.031, 5.0), (0.027, -12.0))):
            for name, value in zip(("scale", "offset"), values, strict=True):
                found[f"{name}{i}"] = torch.tensor(value, device=make.device)
            # A descale has the scale of the activations in it.
            found[f"descale{i}"] = found[f"descale{i}"] * values[0]
    return (x, *weights, *rest), found


def _samples_int8(make: Make) -> Iterator[Sample]:
    def sample(
        name: str, quant: str, *args: Any, more: dict[str, Any] | None = None, **options: Any
    ) -> Sample:
        positional, named = _arguments(make, *args, **options)
        positional, found = _quantized(make, quant, positional)
        return Sample(name, positional, {**named, **found, **(more or {})})

    def integers(n: int) -> torch.Tensor:
        return make.ids(n, high=4000).sub_(2000).to(torch.int32)

    for tokens, size in ((2, 33), (5, 40), (33, 65)):
        yield sample(f"per token, {tokens}x{size}", "per_token", tokens, size, 3, _SMALL)
    yield sample("per tensor", "per_tensor", 5, 40, 3, _SMALL)
    biases = {"bias0": integers(20 + 4 + 28), "bias1": integers(3 * 12)}
    betas = {"beta0": make(40), "beta1": make(28)}
    yield sample("per tensor, betas and biases", "per_tensor", 5, 40, 3, _SMALL, more={**betas, **biases})
    yield sample("per tensor, no q_lora", "per_tensor", 5, 40, 3, (8, 4, 20, None), layout=("joint", 2, 16))
    yield sample("int8 weights", "weight_int8", 5, 40, 3, _SMALL)
    yield sample("int4 weights", "weight_int4", 5, 64, 3, (8, 4, 20, 32))
    scales = {
        "ctkv_scale": torch.tensor(0.03, device=make.device),
        "q_nope_scale": torch.tensor([20.0, -31.0, 45.0], device=make.device),
    }
    for quant in ("per_token", "per_tensor"):
        name = f"{quant.replace('_', ' ')}, int8 cache"
        yield sample(name, quant, 7, 40, 3, (8, 16, 32, 24), layout=("int8_tiled", 2, 7), more=scales)
    yield sample("strided", "per_token", 5, 40, 3, _SMALL, x=make(40, 5).t())
    yield sample("rows of zeros", "per_token", 3, 40, 3, _SMALL, x=make(3, 40, scale=0.0))
    yield sample("empty", "per_token", 0, 40, 3, _SMALL)


def _workloads_int8(make: Make) -> Iterator[Sample]:
    for tokens in (1, 4, 32):
        args, named = _arguments(make, tokens, 7168, 128, _V3, layout=("split", 1, 32), skip=False)
        args, found = _quantized(make, "per_token", args)
        yield Sample(f"V3, {tokens} token{'s' * (tokens > 1)}, per token", args, {**named, **found})


def _supports(x: torch.Tensor, *args: Any, **options: Any) -> bool | str:
    return native(x, "mla_preprocess")


def _promised(*args: Any, **options: Any) -> bool:
    """Finite calls in which no two tokens share a slot."""
    given = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor)]
    slots = args[9][args[9] >= 0]
    return all(bool(t.isfinite().all()) for t in given) and slots.unique().numel() == slots.numel()


CARD = register(
    Operator(
        name=_OP,
        kind=Kind.MLA,
        function=preprocess_form,
        reference=partial(preprocess_form, by=run),
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        domain=_promised,
        implementations=[
            *kernels(partial(preprocess_form, by=kernel), _supports, takes_out=False),
            Implementation("eager", partial(preprocess_form, by=eager)),
        ],
        entries={"mla_preprocess": entry_costs.mla_preprocess},
        schemas=(
            "mla_preprocess(Tensor x, Tensor wdqkv, Tensor wuq, Tensor wuk, Tensor? gamma0, Tensor? gamma1, "
            "Tensor gamma2, Tensor? beta0, Tensor? beta1, Tensor? bias0, Tensor? bias1, Tensor? descale0, "
            "Tensor? descale1, Tensor? scale0, Tensor? offset0, Tensor? scale1, Tensor? offset1, Tensor? cos, "
            "Tensor? sin, Tensor slots, int quant, bool interleaved, bool tiled, float eps, Tensor? ctkv_scale, "
            "Tensor? q_nope_scale, *, Tensor(a!) q_out, Tensor(b!)? q_rope, Tensor(c!) latent, Tensor(d!)? rope=None, "
            "Tensor(e!)? latent_q=None) -> ()",
        ),
        outputs=4,
        source="DeepSeek-AI, 2024",
    )
)

CARD_INT8 = register(
    Operator(
        name=_OP_INT8,
        kind=Kind.MLA,
        function=quantized_form,
        reference=partial(quantized_form, by=run),
        cost=_cost,
        samples=_samples_int8,
        workloads=_workloads_int8,
        tolerance=Steps(of_scale=1 / 64),
        domain=_promised,
        implementations=[
            *kernels(partial(quantized_form, by=kernel), _supports, takes_out=False),
            Implementation("eager", partial(quantized_form, by=eager)),
        ],
        differentiable=False,
        outputs=4,
        source="DeepSeek-AI, 2024",
    )
)
