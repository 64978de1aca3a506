"""Kernels called without PyTorch's dispatcher: the same results and errors, and PyTorch's way wherever it matters."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.conftest import at_once
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith.ops
from opsmith.call import dispatch
from opsmith.call.fast import direct
from opsmith.kernels import build, libraries
from opsmith.ops.gelu import SIGNATURE as GELU
from opsmith.ops.linear import FEW_ROWS
from opsmith.ops.rms_norm import SIGNATURE as RMS_NORM

EPS = 1e-6
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(autouse=True)
def _direct():
    if not dispatch.native_library() or direct.library() is None:
        pytest.skip("kernels are not called directly here")


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=EPS)


@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm", "softmax", "gelu", "packed_linear", "mla_preprocess"]
)
def test_kernels_are_called_directly(name):
    assert type(getattr(direct, name)).__name__ == "Kernel"
    assert name in repr(getattr(direct, f"new_{name}"))
    assert direct.of(getattr(torch.ops.opsmith, name).default) is getattr(direct, name)


def test_other_operators_stay_pytorchs():
    assert direct.of(torch.ops.aten.view.default) is torch.ops.aten.view.default._op
    with pytest.raises(AttributeError):
        direct.no_such_kernel  # noqa: B018


def test_writes_what_the_operator_writes():
    x, weight = torch.randn(3, 40), torch.randn(40)
    y, expected, s, sum_expected = (torch.empty_like(x) for _ in range(4))
    torch.ops.opsmith.rms_norm(x, x, weight, EPS, 0.0, False, y=expected, summed=sum_expected)
    assert direct.rms_norm(x, x, weight, EPS, 0.0, False, summed=s, y=y) is None
    assert torch.equal(y, expected)
    assert torch.equal(s, sum_expected)


def test_makes_results_as_their_signatures_declare_them():
    x = torch.randn(2, 3, 40)
    torch.testing.assert_close(direct.new_rms_norm(x, None, None, EPS, 0.0, False), _norm(x))
    y, s = direct.new_rms_norm(x, x, None, EPS, 0.0, False)
    assert torch.equal(s, 2 * x)
    q, scales = direct.new_rms_norm_quant(x, None, None, EPS, None, None)
    assert (q.dtype, q.shape) == (torch.int8, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, x.shape[:-1])
    assert direct.new_rms_norm_quant(x, None, None, EPS, torch.tensor(0.1), None).dtype == torch.int8  # alone
    with pytest.raises(RuntimeError, match="x must be floating-point"):
        direct.new_rms_norm_quant(x.long(), None, None, EPS, None, None)
    torch.testing.assert_close(y, _norm(2 * x))
    given = torch.empty_like(x)
    made = direct.new_rms_norm(x, x, None, EPS, 0.0, False, y=given)
    assert torch.equal(made, s)
    assert torch.equal(given, y)
    assert direct.new_rms_norm(x, None, None, EPS, 0.0, False, y=given) is True
    gate = torch.randn(2, 3, 40)
    half = torch.nn.functional.silu(gate[..., :20]) * gate[..., 20:]
    torch.testing.assert_close(direct.new_gated(gate, None, 0), half)


@pytest.mark.parametrize("described", [-1, (20, -1), [], "20", 1 << 70, torch.empty])
def test_a_result_that_is_no_tensor_is_left_to_pytorch(described):
    x = torch.randn(2, 40)
    assert direct.new_rms_norm_quant(x, None, None, EPS, None, None, q=described, s=None) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_what_kernels_do_not_take_is_not_made(dtype):
    assert direct.new_gelu(torch.ones(2, 8, dtype=dtype), None, False) is None


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages"
)
def test_large_results_lie_on_huge_pages():
    def huge():
        found = re.search(r"AnonHugePages: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        return int(found[1]) << 10 if found else 0

    x = torch.ones(32, 1 << 20)  # a result of 128 MB comes from the system at every call
    before = huge()
    y = direct.new_gelu(x, None, False)
    assert huge() - before >= y.nbytes / 2
    before = huge()
    z = direct.in_huge_pages(torch.empty_like(x))
    assert huge() - before >= z.nbytes / 2
    assert direct.in_huge_pages(z) is z  # and again, as nothing is to be done


@pytest.mark.skipif(
    not HUGE.exists() or "[never]" in HUGE.read_text(), reason="this system has no huge pages"
)
def test_a_weight_packed_before_any_kernel_is_loaded_lies_on_huge_pages():
    program = """
import re, torch
from pathlib import Path
from opsmith.call.fast import direct
from opsmith.ops import PackedLinear
layer = PackedLinear.from_linear(torch.nn.Linear(4096, 4096), format="int8")
assert not direct.loaded
at = layer.weight.data_ptr() + layer.weight.nbytes // 2
for of in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M):
    if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", of):
        if int(found[1], 16) <= at < int(found[2], 16):
            print(re.search(r"AnonHugePages: *([0-9]+) kB", of)[1])
"""
    kib = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(kib) >= 8192


def test_strides_other_than_a_rows_are_not_for_us():
    x = torch.randn(8, 4).t()
    assert direct.new_rms_norm(x, None, None, EPS, 0.0, False) is None
    assert direct.new_rms_norm(x, None, None, EPS, 0.0, False, y=torch.empty(4, 8)) is None


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 3, 1, 8), (2, 3, 5, 1)])
def test_results_lie_as_what_they_are_like(shape):
    order = (0, 2, 1, 3)
    packed = torch.randn(*(shape[i] for i in order), 3).permute(4, *order).contiguous()
    for t in (torch.randn(shape), torch.randn(*(shape[i] for i in order)).permute(order), packed[0]):
        y = direct.new_attention(t, t, t, None, None, None, None, None, 1.0, False, 0, 0.0)
        assert y.stride() == torch.empty_like(t).stride()
        expected = torch.nn.functional.scaled_dot_product_attention(t, t, t, scale=1.0)
        torch.testing.assert_close(y, expected)


def test_gradients_are_not_lost():
    x = torch.randn(2, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.ones(8))
    for args in (
        (x, None, None),
        (x.detach(), None, weight),
    ):  # recorded by a node (test_nodes.py), or not taken
        y = direct.new_rms_norm(*args, EPS, 0.0, False)
        assert y is None or y.requires_grad
    assert direct.new_rms_norm(x, None, None, EPS, 0.0, False, y=torch.empty_like(x)) is None
    with torch.no_grad():
        y = direct.new_rms_norm(x, None, None, EPS, 0.0, False)
    assert not y.requires_grad
    assert direct.new_rms_norm_quant(x, None, None, EPS, None, None, q=torch.int8, s=(torch.float32,)) is None


def test_inference_mode_makes_inference_tensors():
    with torch.inference_mode():
        y = direct.new_rms_norm(torch.randn(2, 8), None, None, EPS, 0.0, False)
    assert y.is_inference()


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_operator():
    x = torch.randn(2, 8)
    y = torch.empty_like(x)
    with _Seen() as seen:
        direct.rms_norm(x, None, None, EPS, 0.0, False, y=y)
        assert direct.new_rms_norm(x, None, None, EPS, 0.0, False) is None
    assert seen.names == ["opsmith.rms_norm.default"]
    torch.testing.assert_close(y, _norm(x))


def test_a_function_mode_sees_public_calls_alone():
    class Nothing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.randn(2, 8)
    with Nothing():
        assert direct.new_rms_norm(x, None, None, EPS, 0.0, False) is None
        torch.testing.assert_close(opsmith.ops.rms_norm(x, eps=EPS), _norm(x))


def test_a_profiler_sees_the_operator():
    x = torch.randn(2, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        direct.rms_norm(x, None, None, EPS, 0.0, False, y=torch.empty_like(x))
    assert "opsmith::rms_norm" in {event.key for event in profile.key_averages()}


def test_tensors_that_are_not_plain_go_to_pytorch():
    x = torch.randn(2, 8)

    class Sub(torch.Tensor):
        pass

    assert direct.new_rms_norm(x.as_subclass(Sub), None, None, EPS, 0.0, False) is None
    assert direct.new_rms_norm(x.to("meta"), None, None, EPS, 0.0, False) is None
    with FakeTensorMode() as mode:
        fake, y = mode.from_tensor(x), mode.from_tensor(x)
        assert direct.new_rms_norm(fake, None, None, EPS, 0.0, False) is None
        direct.rms_norm(fake, None, None, EPS, 0.0, False, y=y)
    conjugate = torch.randn(2, 8, dtype=torch.complex64).conj()
    assert direct.new_rms_norm(conjugate, None, None, EPS, 0.0, False) is None


def test_functorch_is_not_passed_by():
    x = torch.randn(3, 2, 8)
    seen = []
    torch.vmap(lambda row: seen.append(direct.new_rms_norm(row, None, None, EPS, 0.0, False)) or row)(x)
    assert seen == [None]


@pytest.mark.parametrize("which", ["x", "weight"])
def test_tangents_are_not_lost(which):
    given = {"x": torch.randn(3, 40), "weight": torch.nn.Parameter(torch.ones(40), requires_grad=False)}
    tangent = torch.randn_like(given[which])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[which], tangent)
        args = [dual if name == which else t for name, t in given.items()]
        assert direct.new_rms_norm(args[0], None, args[1], EPS, 0.0, False) is None
        with pytest.raises(NotImplementedError, match=r"opsmith.rms_norm.*forward-mode"):
            direct.rms_norm(args[0], None, args[1], EPS, 0.0, False, y=torch.empty(3, 40))
    x, weight = given.values()
    torch.testing.assert_close(direct.new_rms_norm(x, None, weight, EPS, 0.0, False), _norm(x))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.randn(2, 8), None, torch.ones(3), EPS, 0.0, False), {}),
        ((torch.randn(2, 8), None, None, EPS, 0.0), {}),
        ((1, None, None, EPS, 0.0, False), {}),
        ((torch.randn(2, 8), None, None, EPS, 0.0, False), {"no_such": 1}),
        ((torch.randn(2, 8), None, None, EPS, 0.0, False, 1, 2, 3, 4, 5), {}),
        ((torch.randn(2, 8), None, None, EPS, 0.0, False), {"x": torch.randn(2, 8)}),
    ],
)
def test_errors_are_the_operators(args, kwargs):
    y = torch.empty(2, 8)
    op = torch.ops.opsmith.rms_norm.default._op
    errors = []
    for call in (op, direct.rms_norm):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            call(*args, **{"y": y, **kwargs})
        errors.append((caught.type, str(caught.value).splitlines()[0]))
    assert errors[0] == errors[1]


def test_numbers_are_converted_as_pytorch_does():
    x, y = torch.randn(2, 8), torch.empty(2, 8)
    direct.rms_norm(x, None, None, 0, 0, False, y=y)  # whole numbers for floats: PyTorch's parser takes them
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), eps=0.0))


def test_nothing_is_kept_of_what_was_given():
    x, w = torch.randn(2, 8), torch.ones(3)
    before = (x._use_count(), w._use_count(), sys.getrefcount(x), sys.getrefcount(w))
    for _ in range(20):
        y = direct.new_rms_norm(x, None, None, EPS, 0.0, False)
        with pytest.raises(RuntimeError):  # a weight of another size
            direct.new_rms_norm(x, x, w, EPS, 0.0, False)
        direct.rms_norm(x, x, None, EPS, 0.0, False, y=y, summed=torch.empty_like(x))
    assert y._use_count() == 1
    assert before == (x._use_count(), w._use_count(), sys.getrefcount(x), sys.getrefcount(w))


def test_threads_call_at_once():
    x = torch.randn(64, 512)
    expected = direct.new_rms_norm(x, None, None, EPS, 0.0, False)
    at_once(lambda: torch.equal(direct.new_rms_norm(x, None, None, EPS, 0.0, False), expected))


@pytest.mark.parametrize("error", [build.BuildError("no headers"), OSError("not for this process")])
def test_without_the_library_all_calls_are_pytorchs(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    assert type(direct.gelu) is type(direct.new_gelu)  # both are there, to be put back
    for name in ("gelu", "new_gelu"):
        monkeypatch.delitem(vars(direct), name)
    monkeypatch.setattr(direct, "loaded", [])
    monkeypatch.setattr(direct, "_waiting", {})
    monkeypatch.setattr(direct.build, "build_libraries", fail)
    assert direct.library.__wrapped__() is None
    assert direct.gelu is torch.ops.opsmith.gelu.default._op
    assert direct.new_gelu(torch.randn(8), None, False) is None
    x = torch.randn(2, 8)
    torch.testing.assert_close(opsmith.ops.gelu(x), torch.nn.functional.gelu(x))


def test_what_was_asked_for_too_early_is_asked_for_again(monkeypatch):
    assert type(direct.gelu).__name__ == "Kernel"  # is put back afterwards
    monkeypatch.setattr(direct, "loaded", [])
    monkeypatch.setattr(direct, "_waiting", {})
    monkeypatch.delitem(vars(direct), "gelu")
    assert direct.gelu is torch.ops.opsmith.gelu.default._op
    assert vars(direct)["gelu"] is direct.gelu  # not looked up at every call
    direct.begin(libraries.status().libraries["gelu"])
    assert type(direct.gelu).__name__ == "Kernel"


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0,)], ids=str)
def test_a_result_is_the_rows_that_ids_pick(shape):
    table = torch.randn(7, 5)
    ids = torch.randint(0, 7, shape)
    assert torch.equal(direct.new_embedding(ids, table), table[ids])


@pytest.mark.parametrize("dtype", dispatch.NATIVE_DTYPES, ids=str)
def test_picked_rows_may_have_a_dtype_of_their_own(dtype):
    table, scale = torch.randint(-127, 128, (7, 5), dtype=torch.int8), torch.rand(7)
    ids = torch.tensor([[3, 0], [6, 3]])
    y = direct.new_quantized_embedding(ids, table, scale, 0, None, None, None, y=dtype)
    assert torch.equal(y, (table[ids] * scale[ids][..., None]).to(dtype))


@pytest.mark.parametrize("how", [torch.int8, torch.float64, "float32"], ids=str)
def test_picked_rows_of_other_dtypes_are_refused(how):
    table, scale = torch.zeros(7, 5, dtype=torch.int8), torch.rand(7)
    ids = torch.tensor([3])
    if how == "float32":
        assert direct.new_quantized_embedding(ids, table, scale, 0, None, None, None, y=how) is None
        return
    with pytest.raises(RuntimeError, match="float32, bfloat16"):
        direct.new_quantized_embedding(ids, table, scale, 0, None, None, None, y=how)


def test_a_result_is_the_product_of_so_many_rows():
    weight = torch.randn(5, 8)
    few = direct.Ready(FEW_ROWS, most_rows=8).call
    for shape in ((8,), (1, 8), (2, 4, 8), (0, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(few(x, weight, None, None, 0), x @ weight.T)
    assert few(torch.randn(3, 3, 8), weight, None, None, 0) is None
    assert few(torch.randn(2, 8), weight[0], None, None, 0) is None
    with pytest.raises(RuntimeError, match="linear"):
        few(torch.randn(2, 8), torch.randn(5, 9), None, None, 0)
    assert few(torch.ones(1, 8, dtype=torch.long), weight.long(), None, None, 0) is None


def test_what_is_not_for_a_kernel_is_handed_on():
    seen = []
    gelu = direct.Ready(GELU, lambda *given: seen.append(given) or "otherwise").call
    x = torch.randn(2, 8)
    torch.testing.assert_close(gelu(x, None, False, None), torch.nn.functional.gelu(x))
    assert not seen
    for given in (
        (x.t(), None, False, None),
        (x, None, False, x.t()),
        (x, None, False, x.new_empty(3, 8)),
        (x, None, False, x.double()),
        (x, None, False, x.new_empty(8, 2).t()),
        (x, None, False, x.view(-1).new_empty(20)[4:].view(2, 8).requires_grad_()),
        (x, None, False, (x,) * 2),
        (x, None, False, ()),
        (x, None, False, [x]),
        (x[:, :4].contiguous(), None, False, x.view(-1)[:8].view(2, 4).t()),
        (x, x, False, None),
        (x.long(), None, False, None),
    ):
        assert gelu(*given) == "otherwise"
        assert seen.pop() is not None
    leaf = torch.randn(2, 8, requires_grad=True)
    assert isinstance(gelu(leaf, None, False, None), str) or gelu(leaf, None, False, None).requires_grad


def test_results_are_written_where_the_call_says():
    def otherwise(*given):
        pytest.fail("the call went another way")

    norm, more = direct.Ready(RMS_NORM, otherwise).call, (None, EPS, 0.0, False)
    memory = torch.randn(4, 2, 8)
    x, residual, y, summed = memory
    expected, total = _norm(x + residual), x + residual
    assert norm(x, None, *more, y) is y
    torch.testing.assert_close(y, _norm(x))
    both = (y, summed)
    assert norm(x, residual, *more, both) is both
    torch.testing.assert_close(both, (expected, total))
    assert y._version == summed._version == memory._version == 3
    over = (x, residual)  # its own inputs
    assert norm(*over, *more, over) is over
    torch.testing.assert_close(over, (expected, total))


@pytest.mark.parametrize("first", [-1, 0, 1, 7])
def test_a_result_that_reaches_into_what_is_read_is_handed_on(first):
    gelu = direct.Ready(GELU, lambda *given: "otherwise").call
    memory = torch.randn(32)
    x, y = memory[8:16].view(1, 8), memory[8 + first :][:8].view(1, 8)
    assert (gelu(x, None, False, y) is y) is (first == 0)
    assert gelu(x, None, False, memory[16:24].view(1, 8)) is not None
    assert gelu(x, memory[16:24], False, memory[23:31].view(1, 8)) == "otherwise"


def test_a_number_that_is_left_out_is_not_zero():
    q, lengths = torch.randn(1, 2, 16), torch.tensor([4])
    k, v = torch.randn(2, 1, 4, 2, 16)
    tables = torch.zeros(1, 1, dtype=torch.int32)

    def attend(scale):
        return direct.new_paged_attention(q, k, v, tables, lengths, None, None, None, None, scale, 0, 0.0)

    assert torch.equal(attend(None), attend(0.25))
    torch.testing.assert_close(attend(0.0), v.mean(1))
    y = torch.empty_like(q)
    torch.ops.opsmith.paged_attention(q, k, v, tables, lengths, None, None, None, None, None, 0, 0.0, y=y)
    assert torch.equal(y, attend(None))
    assert attend(1) is None  # an int is PyTorch's to convert
