"""MLA pre-processing: thirteen operators between a token's hidden state and its attention, as one.

Its cards are functions of tensors alone, whose results are all that a call changes, a fresh cache among them: so what
holds an operator to its card (verify, gradcheck, captured graphs, benchmarks) can hold this one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import Maybe
from opsmith.call.dispatch import compiling, native, needs_grad, uncast
from opsmith.call.fast import direct
from opsmith.call.layouts import dense_rows, nbytes
from opsmith.kernels import libraries
from opsmith.kernels.triton import DEVICE
from opsmith.operator import Cost, Kind, Make, Operator, Sample, register
from opsmith.ops.mla.cache import MLACache, check_cache_type
from opsmith.ops.mla.call import REFUSALS, Call, Result, Rotation, in_float32, new_queries
from opsmith.ops.mla.cards import fresh_cache, fresh_rows, implementations, table
from opsmith.ops.mla.names import either_name
from opsmith.ops.mla.projection import quantize_weight, static_scale
from opsmith.ops.mla.reference import define, eager
from opsmith.ops.mla.weights import TENSORS, MLAWeights, Parts
from opsmith.ops.pages import check_slots, some_slots
from opsmith.ops.rms_norm.quant import Steps

# As kernels count them.
_FORMS = {None: 0, "per_tensor": 1, "per_token": 2, "weight_int8": 3, "weight_int4": 4}
_MOST_TOKENS = 64  # whose activations stay in cache beside a weight that is read once
_OP, _OP_INT8 = "mla_preprocess", "mla_preprocess_int8"


@either_name
def mla_preprocess(
    x: Tensor,
    w: MLAWeights,
    cos: Tensor | None,
    sin: Tensor | None,
    slot_mapping: Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: Tensor | float | None = None,
    q_nope_scale: Tensor | None = None,
) -> Result:
    """From hidden states to queries in the latent space of the cache, which gets its rows on the way.

    `y = rms_norm(x, gamma0)`; `ckv, k_pe, ql = split(y @ wdqkv.T)`; `q = rms_norm(ql, gamma1) @ wuq.T`;
    `q_out = q_nope @ wuk`, `q_rope = rope(q_pe)`; `cache[slot[t]] = (rms_norm(ckv, gamma2), rope(k_pe))`.

    >>> w = MLAWeights(
    ...     torch.randn(32 + 8 + 24, 64), torch.randn(4 * (16 + 8), 24), torch.randn(4, 16, 32),
    ...     gamma0=torch.ones(64), gamma1=torch.ones(24), gamma2=torch.ones(32),
    ...     heads=4, nope=16, rope=8, kv_lora=32, q_lora=24,
    ... )
    >>> cache = MLACache.allocate("split", 2, 16, kv_lora=32, rope=8, dtype=torch.float32)
    >>> cos, sin = torch.randn(3, 8), torch.randn(3, 8)
    >>> q_out, q_rope = mla_preprocess(torch.randn(3, 64), w, cos, sin, torch.tensor([0, 1, 17]), cache)
    >>> q_out.shape, q_rope.shape
    (torch.Size([3, 4, 32]), torch.Size([3, 4, 8]))

    Args:
        x: [T, D], float32, bfloat16 or float16, in the dtype of `w.wuk` (float64 through PyTorch).
        w: the layer's weights, in floating point or quantized.
        cos, sin: [T, rope], each token's row of the table, in x's dtype or float32; both None: no rotation.
        slot_mapping: [T] int32 or int64: block * block_size + offset; -1: this token is not written. No two tokens may
            share a slot.
        cache: written in place. Autograd sees it: train with a fresh cache for every step.
        eps: added to the mean square, under the root, of all three norms; 0 or more.
        return_latent_q: return the normalized latent queries [T, q_lora] too, as sparse attention's indexer wants them.
        ctkv_scale: one number that the normalized latent is divided by; for mode "int8_tiled" alone.
        q_nope_scale: [H], what q_out is multiplied by; the same.

    Returns:
        (q_out, q_rope): [T, H, kv_lora] (int8 in "int8_tiled") and [T, H, rope]; in mode "joint"
        [T, H, kv_lora + rope] and None. With `return_latent_q` a third.

    Raises:
        TypeError, ValueError: for a wrong dtype, layout, rank, device or slot, naming the tensor and both shapes,
            before anything is written; for quantized weights or an int8 cache while gradients are recorded.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024.
    """
    scaled = ctkv_scale is not None or q_nope_scale is not None
    if not scaled and not compiling() and isinstance(w, MLAWeights) and isinstance(cache, MLACache):
        done = _at_once(x, w, cos, sin, slot_mapping, cache, eps, return_latent_q)
        if done is not None:
            return done
    call = call_of(x, w, cos, sin, slot_mapping, cache, eps, return_latent_q, ctkv_scale, q_nope_scale)
    return compute(call.checked(_OP))


def call_of(x: Any, w: Any, cos: Any, sin: Any, slot_mapping: Any, cache: Any, *options: Any) -> Call:
    """The arguments of `mla_preprocess`, in their order, as one; of them only weights and cache are checked."""
    if not isinstance(w, MLAWeights):
        raise TypeError(
            f"{_OP}: w must be MLAWeights, got {type(w).__name__}; build it, or MLAWeights.from_deepseek"
        )
    check_cache_type(_OP, cache)
    return Call(x, w.parts(), Rotation(cos, sin, w.interleaved), slot_mapping, cache, *options)


def _at_once(
    x: Any, w: MLAWeights, cos: Any, sin: Any, slots: Any, cache: MLACache, eps: float, latent: bool
) -> Result | None:
    """The kernel, which refuses what does not fit before anything is written; None where it did, and for calls that it
    does not take as they are.

    While weights stream from memory nothing else stays in cache, and every check from Python waits for its objects.
    """
    mode = cache.mode
    try:
        if w.quant is None and x.shape[0] > _MOST_TOKENS:
            return None
        parts = w.parts()
        pair = new_queries(x, parts.wuk, w.rope, mode == "joint")
        latent_q = x.new_empty((x.shape[0], w.q_lora)) if latent else None
        how = _FORMS[w.quant], w.interleaved, mode == "tiled", eps, None, None
        written = *pair, cache.latent, cache.rope, latent_q
        if not direct.new_mla_preprocess(x, *parts.tensors, cos, sin, slots, *how, *written):
            return None
    except REFUSALS:  # the checks say why
        return None
    cache.kv_lora = w.kv_lora
    return pair if latent_q is None else (*pair, latent_q)


def compute(c: Call) -> Result:
    """By the kernel, where it takes this call and no gradients are recorded."""
    # The kernel looks at all slots before it writes, so that a look from here would only cost time.
    looks = c.x.is_cpu and DEVICE != "cpu"
    by_kernel = supports(c) is True and not needs_grad(*c.tensors)
    held = c.slots, c.cache.blocks, c.cache.block_size
    if not (by_kernel and looks):
        check_slots(_OP, *held)
    if not by_kernel:
        with uncast(c.x):
            return run(c)
    try:
        return kernel(c)
    except RuntimeError:
        check_slots(_OP, *held)  # names what is wrong
        raise


def supports(c: Call) -> bool | str:
    """Whether the kernel takes these weights and as many tokens, or why not."""
    if c.w.quant is None and c.x.shape[0] > _MOST_TOKENS:
        return f"{c.x.shape[0]} tokens are more than {_MOST_TOKENS}: the matmuls of PyTorch are faster"
    return native(c.x, _OP)


def kernel(c: Call) -> Result:
    """By the kernel, of a checked call."""
    x, w = dense_rows(c.x), c.w
    q_out, q_rope = new_queries(x, w.wuk, w.rope, c.joint, c.query_scale is not None)
    latent_q = x.new_empty((x.shape[0], w.q_lora or 0)) if c.return_latent_q else None
    torch.ops.opsmith.mla_preprocess.default(
        x,
        *w.as_rows(),
        *c.rotation.rows(),
        c.slots,
        _FORMS[w.quant],
        c.rotation.interleaved,
        "tiled" in c.cache.mode,
        c.eps,
        in_float32(c.latent_scale),
        in_float32(c.query_scale),
        q_out=q_out,
        q_rope=q_rope,
        latent=c.cache.latent,
        rope=c.cache.rope,
        latent_q=latent_q,
    )
    c.remember()
    return (q_out, q_rope) if latent_q is None else (q_out, q_rope, latent_q)


def run(c: Call) -> Result:
    """The definition, in plain PyTorch, and the write into the cache."""
    return c.finish(*define(c.x, c.w, c.rotation, c.eps, c.latent_scale, c.query_scale))


def preprocess_form(
    x: Tensor,
    wdqkv: Tensor,
    wuq: Tensor,
    wuk: Tensor,
    gamma0: Maybe,
    gamma1: Maybe,
    gamma2: Tensor,
    cos: Maybe,
    sin: Maybe,
    slot_mapping: Tensor,
    *,
    mode: str,
    blocks: int,
    block_size: int,
    ctkv_scale: Maybe = None,
    q_nope_scale: Maybe = None,
    eps: float = 1e-6,
    by: Callable[[Call], Result] | None = None,
    **form: Any,
) -> tuple[Tensor, ...]:
    """`mla_preprocess` into a fresh cache of this mode: its queries, then the cache's tensors.

    Thirteen operators as one: norm, down-projection, split, norms, up-projection, absorption, rotations, write. `form`
    has the other tensors of the weights by their names, `interleaved` and `quant`: the projections W8A8 per tensor or
    per token, or weights alone in int8 or int4, where the cache may be int8 too; inference only.
    """
    w = Parts(wdqkv, wuq, wuk, gamma0, gamma1, gamma2, **form)
    op = _OP if w.quant is None else _OP_INT8
    cache = fresh_cache(op, mode, blocks, block_size, w.kv_lora, w.rope, x)
    rotation = Rotation(cos, sin, w.interleaved)
    call = Call(x, w, rotation, slot_mapping, cache, eps, False, ctkv_scale, q_nope_scale)
    # An implementation is called by those who have checked; weights are checked once, and no benchmark should time it.
    if by is None:
        w.check(op, w.sizes)
        call = call.checked(op)
    return (*(t for t in (by or compute)(call) if t is not None), *fresh_rows(cache))


def _cost(x: Tensor, *given: Any, blocks: int, block_size: int, **options: Any) -> Cost:
    """Of the form, which makes its cache."""
    form = {name: options[name] for name in Parts._fields if name in options}
    w = Parts(*given[:6], **form)
    written = blocks * block_size + x.shape[0] * w.heads
    read = *given[6:], options.get("ctkv_scale"), options.get("q_nope_scale")
    integer = w.quant in ("per_tensor", "per_token")
    return _work(x, w, integer, nbytes(*read) + written * (w.kv_lora + w.rope) * x.element_size())


def _entry_cost(x: Tensor, latent: Tensor, quant: int, **rest: Any) -> Cost:
    """Of the kernel alone; of the cache the rows of these tokens are written."""
    w = Parts(*(rest[name] for name in TENSORS))
    beside = ("cos", "sin", "slots", "ctkv_scale", "q_nope_scale", "q_out", "q_rope", "latent_q")
    rows = x.shape[0] * (w.kv_lora + w.rope) * latent.element_size()
    return _work(x, w, quant in (1, 2), nbytes(*(rest[name] for name in beside)) + rows)


def _work(x: Tensor, w: Parts, integer: bool, moved: int) -> Cost:
    """Three products with weights that are read once, and what is done to rows between them."""
    tokens, inner = x.shape[0], w.q_lora or x.shape[1]
    projected = w.wdqkv.shape[0] * x.shape[1] + w.wuq.shape[0] * inner
    norms = 4 * (x.shape[1] + inner + w.kv_lora) + 3 * w.rope * (w.heads + 1)
    return Cost(
        tokens * (2.0 * (projected + w.wuk.numel()) + norms),
        nbytes(x, *w.tensors) + moved,
        2.0 * tokens * projected if integer else 0.0,
    )


_SMALL = (8, 4, 20, 28)  # nope, rope, kv_lora, q_lora
_V3 = (128, 64, 512, 1536)


def _sample(
    make: Make,
    quant: str | None,
    name: str,
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
    **more: Any,
) -> Sample:
    """A call of either form; sizes are (nope, rope, kv_lora, q_lora)."""
    nope, rope, kv_lora, q_lora = sizes
    inner = size if q_lora is None else q_lora
    options = dict(zip(("mode", "blocks", "block_size"), layout, strict=True)) | more

    def gain(n: int) -> Tensor:
        return make(n, scale=0.3, shift=1.0)

    x = make(tokens, size) if x is None else x
    weights = [
        make(kv_lora + rope + (q_lora or 0), size, scale=size**-0.5),
        make(heads * (nope + rope), inner, scale=inner**-0.5),
    ]
    wuk = make(heads, nope, kv_lora, scale=nope**-0.5)
    if quant is not None:
        options["quant"] = quant
        for i, weight in enumerate(weights):
            weights[i], found = _quantized(weight, quant, i)
            options |= found
    args = (
        gain(size) if gamma0 else None,
        None if q_lora is None else gain(q_lora),
        gain(kv_lora),
        *(table(make, tokens, rope) if turn else (None, None)),
        some_slots(make, tokens, layout[1] * layout[2], skip),
    )
    return Sample(name, (x, *weights, wuk, *args), options)


def _quantized(weight: Tensor, quant: str, i: int) -> tuple[Tensor, dict[str, Any]]:
    """The weight of projection i in this form, and what belongs to it by its names."""
    if weight.is_meta:  # shapes alone are asked for
        return weight.to(torch.int8), {f"descale{i}": weight.new_empty(len(weight))}
    held, descale, _ = quantize_weight(weight, 4 if quant == "weight_int4" else 8)
    if quant != "per_tensor":
        return held, {f"descale{i}": descale}
    step, offset = ((0.031, 5.0), (0.027, -12.0))[i]
    scales = static_scale(_OP_INT8, i, step, offset, weight)
    return held, {f"descale{i}": descale * step, **scales}  # which has the activations' scale in it


def _samples(make: Make) -> Iterator[Sample]:
    sample = partial(_sample, make, None)
    for tokens, size in ((2, 33), (5, 40), (33, 65)):
        yield sample(f"{tokens}x{size}", tokens, size, 3, _SMALL)
    yield sample("one token, joint", 1, 24, 2, _SMALL, layout=("joint", 2, 1))
    yield sample("no q_lora", 5, 40, 3, (8, 4, 20, None))
    yield sample("tiled", 7, 40, 2, (8, 16, 32, 24), layout=("tiled", 2, 7))
    yield sample("interleaved", 5, 40, 3, _SMALL, interleaved=True)
    betas: dict[str, Any] = {"beta0": make(40), "beta1": make(28)}
    biases: dict[str, Any] = {"bias0": make(20 + 4 + 28), "bias1": make(3 * 12)}
    yield sample("betas and biases", 5, 40, 3, _SMALL, **betas, **biases)
    yield sample("normalized already", 5, 40, 3, _SMALL, gamma0=False)
    yield sample("no rotation", 5, 40, 3, _SMALL, turn=False)
    yield sample("strided", 5, 40, 3, _SMALL, x=make(40, 5).t())
    yield sample("rows of zeros", 3, 40, 3, _SMALL, x=make(3, 40, scale=0.0), **betas, eps=1e-5)
    yield sample("empty", 0, 40, 3, _SMALL)


def _workloads(make: Make, quant: str | None = None, form: str = "") -> Iterator[Sample]:
    for tokens in (1, 4, 32):
        name = f"V3, {tokens} token{'s' * (tokens > 1)}{form}"
        yield _sample(make, quant, name, tokens, 7168, 128, _V3, layout=("split", 1, 32), skip=False)


def _samples_int8(make: Make) -> Iterator[Sample]:
    sample = partial(_sample, make)

    def integers(n: int) -> Tensor:
        return make.ids(n, high=4000).sub_(2000).to(torch.int32)

    for tokens, size in ((2, 33), (5, 40), (33, 65)):
        yield sample("per_token", f"per token, {tokens}x{size}", tokens, size, 3, _SMALL)
    yield sample("per_tensor", "per tensor", 5, 40, 3, _SMALL)
    biases: dict[str, Any] = {"bias0": integers(20 + 4 + 28), "bias1": integers(3 * 12)}
    betas: dict[str, Any] = {"beta0": make(40), "beta1": make(28)}
    yield sample("per_tensor", "per tensor, betas and biases", 5, 40, 3, _SMALL, **betas, **biases)
    yield sample("per_tensor", "per tensor, no q_lora", 5, 40, 3, (8, 4, 20, None), layout=("joint", 2, 16))
    yield sample("weight_int8", "int8 weights", 5, 40, 3, _SMALL)
    yield sample("weight_int4", "int4 weights", 5, 64, 3, (8, 4, 20, 32))
    scales: dict[str, Any] = {
        "ctkv_scale": torch.tensor(0.03, device=make.device),
        "q_nope_scale": torch.tensor([20.0, -31.0, 45.0], device=make.device),
    }
    for quant in ("per_token", "per_tensor"):
        name = f"{quant.replace('_', ' ')}, int8 cache"
        yield sample(quant, name, 7, 40, 3, (8, 16, 32, 24), layout=("int8_tiled", 2, 7), **scales)
    yield sample("per_token", "strided", 5, 40, 3, _SMALL, x=make(40, 5).t())
    yield sample("per_token", "rows of zeros", 3, 40, 3, _SMALL, x=make(3, 40, scale=0.0))
    yield sample("per_token", "empty", 0, 40, 3, _SMALL)


def _promised(*args: Any, **options: Any) -> bool:
    """Finite calls in which no two tokens share a slot and no scale of an int8 cache is nothing."""
    given = [t for t in (*args, *options.values()) if isinstance(t, Tensor)]
    scales = [t for n in ("ctkv_scale", "q_nope_scale") if isinstance(t := options.get(n), Tensor)]
    slots = args[9][args[9] >= 0]
    right = all(bool(t.isfinite().all()) for t in given) and all(bool(t.all()) for t in scales)
    return right and slots.unique().numel() == slots.numel()


def _card(name: str, **more: Any) -> Operator:
    """What the cards of both forms share."""
    ours, eagers, defined = (partial(preprocess_form, by=by) for by in (kernel, eager, run))
    return register(
        Operator(
            name=name,
            kind=Kind.MLA,
            reference=defined,
            cost=_cost,
            domain=_promised,
            implementations=implementations(_OP, ours, eagers),
            source="DeepSeek-AI, 2024",
            **more,
        )
    )


CARD = _card(
    _OP,
    function=preprocess_form,
    samples=_samples,
    workloads=_workloads,
    entries={_OP: _entry_cost},
    schemas=(
        "mla_preprocess(Tensor x, Tensor wdqkv, Tensor wuq, Tensor wuk, Tensor? gamma0, Tensor? gamma1, "
        "Tensor gamma2, Tensor? beta0, Tensor? beta1, Tensor? bias0, Tensor? bias1, Tensor? descale0, "
        "Tensor? descale1, Tensor? scale0, Tensor? offset0, Tensor? scale1, Tensor? offset1, Tensor? cos, "
        "Tensor? sin, Tensor slots, int quant, bool interleaved, bool tiled, float eps, Tensor? ctkv_scale, "
        "Tensor? q_nope_scale, *, Tensor(a!) q_out, Tensor(b!)? q_rope, Tensor(c!) latent, Tensor(d!)? rope=None, "
        "Tensor(e!)? latent_q=None) -> ()",
    ),
)

CARD_INT8 = _card(
    _OP_INT8,
    function=partial(preprocess_form, quant="per_token"),
    samples=_samples_int8,
    workloads=partial(_workloads, quant="per_token", form=", per token"),
    tolerance=Steps(of_scale=1 / 64),
    differentiable=False,
)

libraries.offer("mla", _OP)
