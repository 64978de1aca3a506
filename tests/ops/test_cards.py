"""Holds every card in the registry to what it says; a new card is tested by existing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.call.arguments import short
from opsmith.call.dispatch import always_native
from opsmith.kernels import libraries, triton
from opsmith.measure.pool import tensors_of
from opsmith.operator import Implementation, Make, Operator, Sample, registry
from opsmith.proof.conduct import Recorder
from opsmith.proof.outs import outs
from opsmith.proof.verify import Finding, elements_of, verify, with_leaves

CARDS = list(registry().values())
DIFFERENTIABLE = [card for card in CARDS if card.differentiable]
WITH_OUT = [card for card in CARDS if any(i.takes_out for i in card.implementations)]

NO_DERIVATIVE = {"padding_idx"}  # options that withhold a part of the gradient on purpose

native = pytest.mark.skipif(not libraries.load(), reason="the native library is not available")


def by_name(cards: list[Operator]) -> Any:
    return pytest.mark.parametrize("card", cards, ids=[card.name for card in cards])


def samples(card: Operator, dtype: torch.dtype = torch.float32) -> list[Sample]:
    return list(card.samples(Make(dtype)))


def styles(card: Operator) -> Iterator[Sample]:
    """The first sample of each way to call the operator: the same options, present inputs and layouts."""
    seen = set()
    for sample in samples(card):
        inputs = [v for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, torch.Tensor)]
        plain = tuple(sorted((k, v) for k, v in sample.kwargs.items() if isinstance(v, bool | str)))
        style = (
            len(sample.args),
            tuple(sorted(sample.kwargs)),
            plain,
            tuple((t.dtype, t.is_contiguous(), t.numel() == 0) for t in inputs),
        )
        if style not in seen:
            seen.add(style)
            yield sample


def with_grad(sample: Sample) -> tuple[Sample, list[torch.Tensor]]:
    """A copy of the sample whose floating-point tensors (those that ask, if any) want gradients, and these."""
    args, kwargs, leaves = with_leaves(sample.args, dict(sample.kwargs))
    return Sample(sample.name, args, kwargs), leaves


def each(fn: Callable[..., Any]) -> Callable[[Any], list[Any]]:
    """The function of several calls, for a graph of all of them."""
    return lambda calls: [fn(*args, **kwargs) for args, kwargs in calls]


def run_both_ways(fn: Callable[[Any], list[Any]], calls: list[Sample]) -> list[list[torch.Tensor]]:
    """Of each call: outputs, then the gradients of their sum with fixed weights."""
    copies = [with_grad(sample) for sample in calls]
    outputs = [list(tensors_of(got)) for got in fn([(c.args, dict(c.kwargs)) for c, _ in copies])]
    flat = [t for one in outputs for t in one if t.requires_grad]  # the others are ids
    leaves = [t for _, own in copies for t in own]
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in flat]
    grads = iter(torch.autograd.grad(flat, leaves, weights, allow_unused=True))
    return [
        one + [g for g in [next(grads) for _ in own] if g is not None]
        for one, (_, own) in zip(outputs, copies, strict=True)
    ]


def interpreted(card: Operator, dtype: torch.dtype) -> list[Finding]:
    """`verify` where Triton's interpreter has the CPU, which takes minutes.

    Kernels are run into given memory alone, the harder case. That their callers keep nothing from one call to the next
    is shown of each way to call them, in one dtype: sizes and dtypes have nothing to do with it. One call of a million
    elements takes a quarter of a minute: its options are those of smaller samples, which are called more often.
    """
    ways = [sample for sample in styles(card) if elements_of(sample) < 1_000_000]
    often = {sample.name for sample in ways} if dtype == torch.float32 else set()
    findings: list[Finding] = []
    for calls in (1, 3):
        some = replace(
            card,
            samples=lambda make, calls=calls: (
                s for s in card.samples(make) if (s.name in often) == (calls > 1)
            ),
        )
        findings += verify(some, [dtype], allocating=False, calls=calls)
    return findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=short)
@by_name(CARDS)
def test_implementations_and_gradients_keep_the_tolerance(card: Operator, dtype: torch.dtype) -> None:
    """Values, out= and gradients of all samples, in memory filled with NaN, the inputs left as they were."""
    assert dtype in card.dtypes
    findings = interpreted(card, dtype) if triton.INTERPRETED else list(verify(card, [dtype]))
    tried = {f.implementation for f in findings}
    # Where Triton's interpreter has the CPU, what is written in C++ takes no call.
    refused = {i.name for i in card.implementations if i.device == "cpu" and i.name != "triton"}
    expected = {i.name for i in card.implementations if i.available() is True} - {"onednn"}
    assert tried >= expected - (refused if triton.INTERPRETED else set())
    failed = [f"{f.implementation}, {f.sample}, {f.check}: {f.why}" for f in findings if not f.ok]
    assert failed == []


@by_name(CARDS)
def test_samples_hold_what_goes_wrong_easily(card: Operator) -> None:
    shapes = [list(tensors_of((s.args, dict(s.kwargs)))) for s in samples(card)]
    assert any(any(not t.is_contiguous() for t in tensors) for tensors in shapes), "no strided sample"
    assert any(any(t.numel() == 0 for t in tensors) for tensors in shapes), "no empty sample"
    assert any(any(t.dim() and t.shape[-1] % 8 for t in tensors) for tensors in shapes), "no odd size"
    names = [s.name for s in samples(card)]
    assert len(names) == len(set(names)), "two samples share a name"


@by_name(CARDS)
def test_cost_counts_what_must_be_touched(card: Operator) -> None:
    for sample in samples(card):
        cost = card.cost(*sample.args, **sample.kwargs)
        results = list(tensors_of(card.reference(*sample.args, **sample.kwargs)))
        assert cost.min_bytes >= sum(t.nbytes for t in results), sample.name
        assert cost.flops >= 0
        half = sample.cast(torch.bfloat16)
        assert card.cost(*half.args, **half.kwargs).flops == cost.flops, sample.name


@by_name(DIFFERENTIABLE)
def test_gradcheck_in_float64(card: Operator) -> None:
    for sample in samples(card, torch.float64):
        copy, leaves = with_grad(sample)
        if not leaves or max(t.numel() for t in leaves) > 20_000 or NO_DERIVATIVE & set(copy.kwargs):
            continue
        names = list(copy.kwargs)

        def call(*values: Any, names: list[str] = names, n: int = len(copy.args)) -> Any:
            return card.function(*values[:n], **dict(zip(names, values[n:], strict=True)))

        assert torch.autograd.gradcheck(call, (*copy.args, *copy.kwargs.values()), fast_mode=True), (
            sample.name
        )


@by_name(DIFFERENTIABLE)
def test_tangents_are_those_of_the_definition(card: Operator) -> None:
    """Forward-mode differentiation is PyTorch's, as kernels have no rules for it, and so is its error for the same."""

    def tangents(fn: Callable[..., Any], sample: Sample) -> list[torch.Tensor | None] | str:
        generator = torch.Generator().manual_seed(0)

        def dual(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point():
                return t
            return forward_ad.make_dual(t.detach(), torch.randn(t.shape, generator=generator).to(t.dtype))

        with forward_ad.dual_level():
            args, kwargs = tree_map_only(torch.Tensor, dual, (sample.args, dict(sample.kwargs)))
            try:
                results = list(tensors_of(fn(*args, **kwargs)))
            except NotImplementedError as error:
                return str(error).splitlines()[0]
            return [forward_ad.unpack_dual(t).tangent for t in results]

    for sample in styles(card):
        with always_native():
            found = tangents(card.function, sample)
        expected = tangents(card.eager, sample)
        if isinstance(found, str) or isinstance(expected, str):
            assert found == expected, sample.name
        else:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True, msg=sample.name)


@by_name(WITH_OUT)
def test_out_is_filled_and_returned_or_refused_untouched(card: Operator) -> None:
    findings = list(outs(card, torch.float32))
    assert {f.check for f in findings} == {"out=, returned", "out=, refused"}
    assert [f"{f.sample}, {f.check}: {f.why}" for f in findings if not f.ok] == []


@by_name(WITH_OUT)
def test_out_of_another_shape_or_dtype_is_refused(card: Operator) -> None:
    sample = samples(card)[1]
    expected = card.function(*sample.args, **sample.kwargs)
    for change in (torch.Tensor.double, lambda t: t.new_empty((*t.shape, 2))):
        wrong = tree_map_only(torch.Tensor, change, expected)
        with pytest.raises(ValueError, match=rf"{card.name}: out must be (float32|int8) \("):
            card.function(*sample.args, **sample.kwargs, out=wrong)
    with pytest.raises(
        TypeError, match=rf"{card.name}: out must be (a tensor|a (pair|triple) of tensors), got list"
    ):
        card.function(*sample.args, **sample.kwargs, out=[1.0])


@by_name(CARDS)
def test_fake_and_meta_tensors_give_the_shapes(card: Operator) -> None:
    for sample in samples(card):
        real = list(tensors_of(card.function(*sample.args, **sample.kwargs)))
        inputs = (sample.args, dict(sample.kwargs))
        with FakeTensorMode() as mode:
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, inputs)
            fake = list(tensors_of(card.function(*args, **kwargs)))
        args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), inputs)
        meta = list(tensors_of(card.function(*args, **kwargs)))
        for r, f, m in zip(real, fake, meta, strict=True):
            assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride()), sample.name
            assert (m.shape, m.dtype, m.device.type) == (r.shape, r.dtype, "meta"), sample.name


@by_name(DIFFERENTIABLE)
def test_compiled_as_one_graph_equals_eager(card: Operator) -> None:
    """Every style of a call, in one graph: most of what compiling takes, it takes for each graph."""
    chosen = list(styles(card))
    torch.compiler.reset()
    compiled = torch.compile(each(card.function), fullgraph=True, backend="aot_eager", dynamic=False)
    got, expected = run_both_ways(compiled, chosen), run_both_ways(each(card.function), chosen)
    for sample, mine, value in zip(chosen, got, expected, strict=True):
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6, msg=lambda m: f"{sample.name}: {m}")  # noqa: B023


@by_name(DIFFERENTIABLE)
def test_one_tensor_may_be_several_arguments_of_a_compiled_call(card: Operator) -> None:
    for sample in reversed([*samples(card)]):
        first: dict[Any, torch.Tensor] = {}
        inputs = (sample.args, dict(sample.kwargs))
        one = tree_map_only(
            torch.Tensor,
            lambda t: first.setdefault((t.shape, t.dtype, t.requires_grad), t),  # noqa: B023
            inputs,
        )
        if any(a is not b for a, b in zip(tensors_of(one), tensors_of(inputs), strict=True)):
            break
    else:
        pytest.skip("no two tensors of one shape and dtype among the arguments of any sample")
    sample = Sample(sample.name, *one)
    torch.compiler.reset()
    compiled = torch.compile(each(card.function), fullgraph=True, backend="aot_eager", dynamic=False)
    got, expected = run_both_ways(compiled, [sample]), run_both_ways(each(card.function), [sample])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@by_name(CARDS)
def test_compiled_graphs_do_not_depend_on_leading_sizes(card: Operator) -> None:
    groups: dict[Any, list[Sample]] = {}
    for sample in samples(card):
        tensors = list(tensors_of((sample.args, dict(sample.kwargs))))
        if all(size > 1 for t in tensors for size in t.shape):  # sizes 0 and 1 have graphs of their own
            options = tuple((k, v) for k, v in sample.kwargs.items() if not isinstance(v, torch.Tensor))
            kinds = tuple((t.dtype, t.dim(), t.is_contiguous(), t.requires_grad) for t in tensors)
            groups.setdefault((options, tuple(sample.kwargs), kinds), []).append(sample)
    fitting = max(groups.values(), key=len)
    assert len(fitting) > 2, "no three samples that differ in their sizes alone"
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(card.function, fullgraph=True, backend=counter, dynamic=True)
    # Without duck shaping, two sizes that happen to be equal in the first sample may differ in the next.
    with torch.no_grad(), torch.fx.experimental._config.patch(use_duck_shape=False):
        for sample in fitting:
            wide = sample.cast(torch.float64)
            results = [
                tensors_of(fn(*one.args, **one.kwargs))
                for fn, one in ((compiled, sample), (card.eager, sample), (card.reference, wide))
            ]
            for mine, eager, exact in zip(*results, strict=True):
                verdict = card.tolerance.check(mine, eager, exact)
                assert verdict.ok, f"{sample.name}: {verdict.why}"
    # Not one: attention's scale is a number computed from a size, and numbers are constants in a graph.
    assert counter.frame_count < len(fitting)


@native
@by_name([card for card in CARDS if card.schemas])
def test_opcheck_of_the_native_operators(card: Operator) -> None:
    with Recorder("opsmith") as recorder:
        for sample in samples(card):
            if card.differentiable:
                run_both_ways(each(card.function), [sample])
            for implementation in card.candidates(*sample.args, **sample.kwargs)[0]:
                implementation.fn(*sample.args, **sample.kwargs)
    called = {call[0]._schema.name.removeprefix("opsmith::") for call in recorder.calls.values()}
    # A layer's step of decoding is no operator of its own, and modules are no samples: their tests are beside these.
    others = {"paged_step", "experts_packed"}
    assert called >= {schema.partition("(")[0] for schema in card.schemas} - others
    for func, args, kwargs in recorder.calls.values():
        torch.library.opcheck(func, args, kwargs)


def unwritten_tail(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        right = fn(*args, **kwargs)
        left = torch.empty_like(right)
        left.view(-1)[:-1] = right.reshape(-1)[:-1]
        return left

    return wrong


def wrong_eps(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, weight=None, bias=None, eps=1e-5, **more: fn(x, weight, bias, eps * 3, **more)


def half_inside(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        low = tree_map_only(torch.Tensor, lambda t: t.half() if t.is_floating_point() else t, (args, kwargs))
        return tree_map_only(torch.Tensor, lambda t: t.to(dtype), fn(*low[0], **low[1]))

    return wrong


def mutated_input(fn: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        y = fn(x, *args, **kwargs)
        x.add_(1)
        return y

    return wrong


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gelu", unwritten_tail),
        ("softmax", unwritten_tail),
        ("attention", unwritten_tail),
        ("layer_norm", wrong_eps),
        ("layer_norm", half_inside),
        ("attention", half_inside),
        ("linear", half_inside),
        ("gelu", mutated_input),
        ("layer_norm", mutated_input),
    ],
)
def test_a_planted_fault_is_found(name: str, fault: Callable[..., Any]) -> None:
    card = registry()[name]
    implementation = Implementation("planted", fault(card.eager))
    broken = replace(card, implementations=[implementation, Implementation("eager", card.eager)])
    findings = verify(broken, [torch.float32])  # one by one, and only as far as the first that tells
    assert any(f.implementation == "planted" and not f.ok for f in findings)


@by_name(DIFFERENTIABLE)
def test_autocast_gives_the_same_dtypes_whether_gradients_are_recorded(card: Operator) -> None:
    """And whatever the sizes: `linear` in autocast's, as the function of PyTorch's, all others as without autocast."""
    expected = {torch.bfloat16} if card.name == "linear" else None
    for sample in samples(card)[:8]:
        with_gradients = with_grad(sample)[0]
        with torch.autocast("cpu", torch.bfloat16):
            found = [
                {t.dtype for t in tensors_of(card.function(*s.args, **s.kwargs))}
                for s in (sample, with_gradients)
            ]
        usual = expected or {t.dtype for t in tensors_of(card.function(*sample.args, **sample.kwargs))}
        assert found == [usual, usual], sample.name
