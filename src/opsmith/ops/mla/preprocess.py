"""MLA pre-processing: thirteen operators between a token's hidden state and its attention, as one.

Its cards are functions of tensors alone, whose results are all that a call changes, a fresh cache among them: so what
holds an operator to its card (verify, gradcheck, captured graphs, benchmarks) can hold this one too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from opsmith.call.dispatch import compiling, kernels, native, needs_grad
from opsmith.call.fast import direct
from opsmith.call.layouts import nbytes
from opsmith.kernels import libraries
from opsmith.kernels.triton import DEVICE
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops.mla.cache import MLACache, check_cache_type, check_slots
from opsmith.ops.mla.call import Call, Maybe, Result, Rotation, in_float32, new_queries, rows_of
from opsmith.ops.mla.eager import eager
from opsmith.ops.mla.names import either_name
from opsmith.ops.mla.projection import Projection, quantize_weight
from opsmith.ops.mla.reference import define
from opsmith.ops.mla.samples import fresh_cache, fresh_rows, some_slots, table
from opsmith.ops.mla.weights import MLAWeights, Parts
from opsmith.ops.rms_norm.quant import Steps

# As kernels count them.
_FORMS = {None: 0, "per_tensor": 1, "per_token": 2, "weight_int8": 3, "weight_int4": 4}
_MOST_TOKENS = 64  # whose activations stay in cache beside a weight that is read once
_OP, _OP_INT8 = "mla_preprocess", "mla_preprocess_int8"


@either_name
def mla_preprocess(
    x: torch.Tensor,
    w: MLAWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: torch.Tensor | float | None = None,
    q_nope_scale: torch.Tensor | None = None,
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
        eps: added to the mean square, under the root, of all three norms.
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
    if ctkv_scale is None and q_nope_scale is None and type(w) is MLAWeights and type(cache) is MLACache:
        done = _at_once(x, w, cos, sin, slot_mapping, cache, eps, return_latent_q)
        if done is not None:
            return done
    if not isinstance(w, MLAWeights):
        raise TypeError(
            f"{_OP}: w must be MLAWeights, got {type(w).__name__}; build it, or MLAWeights.from_deepseek"
        )
    check_cache_type(_OP, cache)
    call = call_of(x, w, cos, sin, slot_mapping, cache, eps, return_latent_q, ctkv_scale, q_nope_scale)
    return compute(call.checked(_OP, values=False))


def call_of(
    x: Any, w: MLAWeights, cos: Any, sin: Any, slot_mapping: Any, cache: MLACache, *options: Any
) -> Call:
    """The arguments of `mla_preprocess`, in their order, as one, unchecked."""
    parts = w.parts()
    return Call(x, parts, Rotation(cos, sin, parts.interleaved), slot_mapping, cache, *options)


def _at_once(
    x: Any, w: MLAWeights, cos: Any, sin: Any, slot_mapping: Any, cache: MLACache, eps: float, latent: bool
) -> Result | None:
    """The kernel, for a call on a CPU in the usual form, of which it refuses itself, before anything is written, what
    does not fit; None for any other call, and for a refused one.

    While weights stream from memory nothing else stays in cache, and every check from Python waits for its objects.
    """
    mode = cache.mode
    ready = None if compiling() or mode == "int8_tiled" else w.prepared()
    if ready is None:
        return None
    rows, quant, interleaved, q_out, q_rope, q_lora = ready
    if latent and q_lora is None:
        return None
    try:
        sizes = direct.sizes(x)
        if len(sizes) != 2 or sizes[0] > _MOST_TOKENS:
            return None
        joint = mode == "joint"
        widths = ((q_out[0], q_out[1] + q_rope[1]), None) if joint else (q_out, q_rope)
        queries = [None if width is None else direct.empty(x, (sizes[0], *width)) for width in widths]
        low = direct.empty(x, (sizes[0], q_lora)) if latent and q_lora is not None else None
        options = _FORMS[quant], interleaved, mode == "tiled", eps, None, None
        written = *queries, cache.latent, cache.rope, low
        if not direct.new_mla_preprocess(x, *rows, cos, sin, slot_mapping, *options, *written):
            return None
    except (RuntimeError, TypeError, AttributeError):
        return None
    if joint:
        cache.kv_lora = q_out[1]
    return (*queries, low) if latent else tuple(queries)  # type: ignore[return-value]


def compute(c: Call) -> Result:
    """By the kernel, where it takes this call and no gradients are recorded."""
    tokens = c.x.shape[0]
    # A graph is captured for any number of tokens, and the kernel's blocks of tokens would be one for each number.
    captured = torch.compiler.is_compiling()
    if captured or supports(c) is not True or needs_grad(*c.tensors):
        check_slots(_OP, c.slots, tokens, c.cache)
        return run(c)
    # The kernel looks at all slots of a region before it writes, so that a look from here would only cost time.
    looked = tokens > _MOST_TOKENS or DEVICE == "cpu" or not c.x.is_cpu
    check_slots(_OP, c.slots, tokens, c.cache, values=looked)
    try:
        return kernel(c)
    except RuntimeError:
        if not looked:
            check_slots(_OP, c.slots, tokens, c.cache)  # names what is wrong
        raise


def supports(c: Call) -> bool | str:
    """Whether the kernel takes these weights and as many tokens, or why not."""
    if c.w.quant is None and c.x.shape[0] > _MOST_TOKENS:
        return f"{c.x.shape[0]} tokens are more than {_MOST_TOKENS}: the matmuls of PyTorch are faster"
    return native(c.x, _OP)


def kernel(c: Call) -> Result:
    """On a CPU, one parallel region for every `_MOST_TOKENS` tokens."""
    x, w, tokens = rows_of(c.x), c.w, c.x.shape[0]
    q_out, q_rope = new_queries(x, w.rope, w.kv_lora, c.joint, c.query_scale is not None, w.heads)
    latent_q = x.new_empty((tokens, w.q_lora)) if c.return_latent_q else None
    scales, held = (in_float32(c.latent_scale), in_float32(c.query_scale)), w.as_rows()
    most = _MOST_TOKENS if x.is_cpu and DEVICE != "cpu" else max(tokens, 1)
    for first in range(0, tokens, most):
        some = slice(first, first + most) if tokens > most else slice(None)
        torch.ops.opsmith.mla_preprocess.default(
            x[some],
            *held,
            *c.rotation.rows(some),
            c.slots[some],
            _FORMS[w.quant],
            c.rotation.interleaved,
            "tiled" in c.cache.mode,
            c.eps,
            *scales,
            q_out=q_out[some],
            q_rope=None if q_rope is None else q_rope[some],
            latent=c.cache.latent,
            rope=c.cache.rope,
            latent_q=None if latent_q is None else latent_q[some],
        )
    c.cache.kv_lora = w.kv_lora
    c.remember_scales()
    return (q_out, q_rope) if latent_q is None else (q_out, q_rope, latent_q)


def run(c: Call) -> Result:
    """The definition, in plain PyTorch, and the write into the cache."""
    return c.finish(*define(c.x, c.w, c.rotation, c.eps, c.latent_scale, c.query_scale))


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
    quant: str | None = None,
    descale0: Maybe = None,
    descale1: Maybe = None,
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
    by: Callable[[Call], Result] | None = None,
) -> tuple[torch.Tensor, ...]:
    """`mla_preprocess` into a fresh cache of this mode: its queries, then the cache's tensors.

    Thirteen operators as one: norm, down-projection, split, norms, up-projection, absorption, rotations, write. With
    `quant` the projections are W8A8 per tensor or per token, or weights alone in int8 or int4, and the cache may be
    int8 too; inference only.
    """
    op = _OP if quant is None else _OP_INT8
    down = Projection(wdqkv, bias0, descale0, scale0, offset0)
    up = Projection(wuq, bias1, descale1, scale1, offset1)
    w = Parts(down, up, wuk, gamma0, gamma1, gamma2, beta0, beta1, quant, interleaved)
    cache = fresh_cache(op, mode, blocks, block_size, w.kv_lora, w.rope, x)
    rotation = Rotation(cos, sin, interleaved)
    call = Call(x, w, rotation, slot_mapping, cache, eps, False, ctkv_scale, q_nope_scale)
    # An implementation is called by those who have checked; weights are checked once, and no benchmark should time it.
    if by is None:
        w.check(op, w.sizes)
        call = call.checked(op, values=False)
    return (*(t for t in (by or compute)(call) if t is not None), *fresh_rows(cache))


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


def _entry_cost(
    x: torch.Tensor,
    wdqkv: torch.Tensor,
    wuq: torch.Tensor,
    wuk: torch.Tensor,
    q_out: torch.Tensor,
    q_rope: torch.Tensor | None,
    latent: torch.Tensor,
    **rest: Any,
) -> Cost:
    """Three products with weights that are read once; of the cache the rows of these tokens are written."""
    tokens, (heads, nope, kv_lora) = x.shape[0], wuk.shape
    turned = q_out.shape[-1] - kv_lora if q_rope is None else q_rope.shape[-1]
    # A quantized weight may hide its rows in its layout, not what they must add up to.
    up = heads * (nope + turned)
    down = kv_lora + turned + (0 if rest["gamma1"] is None else rest["gamma1"].shape[0])
    inner = x.shape[1] if rest["gamma1"] is None else rest["gamma1"].shape[0]
    products = down * x.shape[1] + up * inner + wuk.numel()
    norms = 4 * (x.shape[1] + inner + kv_lora) + 3 * turned * (heads + 1)
    results = (q_out, q_rope, rest["latent_q"])
    small = [t for n, t in rest.items() if isinstance(t, torch.Tensor) and n not in ("rope", "latent_q")]
    rows = tokens * (kv_lora + turned) * latent.element_size()
    integer = rest["quant"] in (1, 2)  # per tensor or per token, as kernels count the forms
    return Cost(
        2.0 * tokens * products + tokens * norms,
        nbytes(x, wdqkv, wuq, wuk, *small, *results) + rows,
        2.0 * tokens * (products - wuk.numel()) if integer else 0.0,
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


def _sample(
    make: Make, quant: str | None, name: str, *args: Any, more: dict[str, Any] | None = None, **options: Any
) -> Sample:
    positional, named = _arguments(make, *args, **options)
    if quant is not None:
        positional, found = _quantized(make, quant, positional)
        named |= found
    return Sample(name, positional, {**named, **(more or {})})


def _samples(make: Make) -> Iterator[Sample]:
    sample = partial(_sample, make, None)
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


def _workloads(make: Make, quant: str | None = None, form: str = "") -> Iterator[Sample]:
    for tokens in (1, 4, 32):
        name = f"V3, {tokens} token{'s' * (tokens > 1)}{form}"
        yield _sample(make, quant, name, tokens, 7168, 128, _V3, layout=("split", 1, 32), skip=False)


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
    sample = partial(_sample, make)

    def integers(n: int) -> torch.Tensor:
        return make.ids(n, high=4000).sub_(2000).to(torch.int32)

    for tokens, size in ((2, 33), (5, 40), (33, 65)):
        yield sample("per_token", f"per token, {tokens}x{size}", tokens, size, 3, _SMALL)
    yield sample("per_tensor", "per tensor", 5, 40, 3, _SMALL)
    biases = {"bias0": integers(20 + 4 + 28), "bias1": integers(3 * 12)}
    betas = {"beta0": make(40), "beta1": make(28)}
    yield sample("per_tensor", "per tensor, betas and biases", 5, 40, 3, _SMALL, more={**betas, **biases})
    yield sample("per_tensor", "per tensor, no q_lora", 5, 40, 3, (8, 4, 20, None), layout=("joint", 2, 16))
    yield sample("weight_int8", "int8 weights", 5, 40, 3, _SMALL)
    yield sample("weight_int4", "int4 weights", 5, 64, 3, (8, 4, 20, 32))
    scales = {
        "ctkv_scale": torch.tensor(0.03, device=make.device),
        "q_nope_scale": torch.tensor([20.0, -31.0, 45.0], device=make.device),
    }
    for quant in ("per_token", "per_tensor"):
        name = f"{quant.replace('_', ' ')}, int8 cache"
        yield sample(quant, name, 7, 40, 3, (8, 16, 32, 24), layout=("int8_tiled", 2, 7), more=scales)
    yield sample("per_token", "strided", 5, 40, 3, _SMALL, x=make(40, 5).t())
    yield sample("per_token", "rows of zeros", 3, 40, 3, _SMALL, x=make(3, 40, scale=0.0))
    yield sample("per_token", "empty", 0, 40, 3, _SMALL)


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
        entries={"mla_preprocess": _entry_cost},
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
        function=partial(preprocess_form, quant="per_token"),
        reference=partial(preprocess_form, by=run),
        cost=_cost,
        samples=_samples_int8,
        workloads=partial(_workloads, quant="per_token", form=", per token"),
        tolerance=Steps(of_scale=1 / 64),
        domain=_promised,
        implementations=[
            *kernels(partial(preprocess_form, by=kernel), _supports, takes_out=False),
            Implementation("eager", partial(preprocess_form, by=eager)),
        ],
        differentiable=False,
        outputs=4,
        source="DeepSeek-AI, 2024",
    )
)

libraries.offer("mla", "mla_preprocess", "mla_trace")
