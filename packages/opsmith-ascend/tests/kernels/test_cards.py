"""Every kernel joins its card, and is asked for the results that a call wants."""

import subprocess
from typing import Any

import pytest
import torch

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import registry
from opsmith_ascend import SHARED, SOURCES, launches
from opsmith_ascend.library import NAMESPACE

STEMS = sorted(file.stem for file in SOURCES.glob("*.cpp"))


def test_every_kernel_is_an_implementation_of_its_card() -> None:
    assert {"layer_norm", "rms_norm", "rope", "silu_mul", "softmax"} <= set(STEMS)
    for stem in STEMS:
        names = [i.name for i in registry()[stem].implementations]
        assert names.index("ascend") < names.index("eager"), stem
        assert (SOURCES / f"{stem}_tiling.h").is_file()
        assert stem in launches.__all__


@pytest.mark.skipif(not find_compiler(), reason="there is no compiler")
def test_a_tiling_header_includes_what_it_uses() -> None:
    """A board's host reads it alone; the emulation has read C++'s own library before it."""
    compiler = find_compiler()
    assert compiler
    headers = sorted(SOURCES.glob("*_tiling.h"))
    assert len(headers) >= len(STEMS)
    command = [*compiler.command, "-std=c++17", "-w", "-fsyntax-only", f"-I{SHARED}", "-x", "c++"]
    done = subprocess.run([*command, *map(str, headers)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_sum_that_nobody_asked_for_is_no_output() -> None:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("rms_norm(Tensor?[] inputs, Tensor(a!)[] outputs, float[] sizes) -> ()")
    asked = []

    def run(inputs: list[Any], outputs: list[torch.Tensor], sizes: list[float]) -> None:
        asked.append(([t is not None for t in inputs], len(outputs)))

    library.impl("rms_norm", run, "CPU")
    call = registry()["rms_norm"].implementation("ascend").fn
    x, weight = torch.randn(5, 40), torch.ones(40)
    assert call(x, weight).shape == x.shape
    assert len(call(x, residual=x)) == 2
    call(x[:0], weight)  # nothing to do: no launch
    assert asked == [([True, False, True], 1), ([True, True, False], 2)]
    library._destroy()


def test_softmax_refuses_what_its_kernel_does_not_take() -> None:
    supports = registry()["softmax"].implementation("ascend").supports
    x = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert supports(x) is True
    assert supports(x, 1, mask=x == 0) is True
    assert "last dimension" in str(supports(x, 0))
    assert "of x's type" in str(supports(x, mask=torch.zeros(3, 4)))
