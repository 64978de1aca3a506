"""Formulas out of the ordinary, whose projects pass all of `opsmith verify` without an edit, as all projects do."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith.authoring import load, new
from opsmith.authoring.project.checks import verify_project
from opsmith.authoring.prototype import PrototypeError
from opsmith.authoring.prototype.spellings import NAMESPACES, RESERVED
from opsmith.kernels import triton
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import Operator
from tests.authoring.prototypes import ROWS, prototype

runs = pytest.mark.skipif(
    not find_compiler() or triton.INTERPRETED, reason="there is no compiler, or the interpreter has the CPU"
)
WHOLE: dict[str, dict[str, Any]] = {
    "a matmul, whose out may lie on neither factor": prototype(
        "UneditedProduct", {"x": "M K", "w": "K N", "b": "N"}, "gelu(matmul(x, w) + b)"
    ),
    "a flag": prototype("UneditedFlag", {"x": ROWS, "b": "N"}, "where(flag, x, b - x)", flag=True),
    "a condition on a number": prototype("UneditedChoice", {"x": ROWS}, "where(c > 1, x, 0) * x", c=1.5),
    "steps, which have no gradient": prototype("UneditedStep", {"x": ROWS}, "where(x > 0, 1, 0)"),
    "a slope in which the errors of tanh grow": prototype(
        "UneditedMish", {"x": ROWS}, "x * tanh(log(1 + exp(x)))"
    ),
    "names in capitals": prototype("UneditedCase", {"x": ROWS, "X": ROWS, "DX": ROWS}, "x * X + DX"),
}
for one in WHOLE.values():
    for tensor in (*one["input_desc"], *one["output_desc"]):
        tensor["type"] = "float"
WHOLE["a flag"]["attr"][0]["type"] = "bool"


def made(described: dict[str, Any], folder: Path, **how: Any) -> tuple[Path, list[str]]:
    file = folder / "p.json"
    file.write_text(json.dumps(described))
    path, _, notes = new.create(file, folder / "made", **how)
    return path, notes


@runs
@pytest.mark.parametrize("name", WHOLE)
def test_a_project_passes_every_check(name: str, tmp_path: Path) -> None:
    folder, _ = made(WHOLE[name], tmp_path, backends=("cpu", "triton"))
    findings = list(verify_project(folder))
    assert [str(f) for f in findings if not f.ok] == []
    assert ("gradients" in {f.check for f in findings}) is (name != "steps, which have no gradient")


@runs
def test_numbers_decide_in_python_and_in_kernels_alike(tmp_path: Path) -> None:
    for name, given in (("a flag", {"flag": False}), ("a condition on a number", {"c": 0.5})):
        described = {**WHOLE[name], "op": f"{WHOLE[name]['op']}Other"}
        (tmp_path / described["op"]).mkdir()
        card: Operator = load(made(described, tmp_path / described["op"])[0]).CARD
        args = [torch.randn(3, 8), torch.randn(8)][: len(described["input_desc"])]
        compiled = torch.compile(card.reference, backend="eager", fullgraph=True)
        for kwargs in ({}, given):
            right = card.reference(*args, **kwargs)
            assert right.shape == (3, 8)
            torch.testing.assert_close(card.function(*args, **kwargs), right)
            torch.testing.assert_close(compiled(*args, **kwargs), right)
        assert not torch.equal(card.function(*args), card.function(*args, **given))


@pytest.mark.parametrize(
    ("formula", "attributes", "said"),
    [
        ("tanh(x) * x", {}, "then looks for it in models that write it out, and reports where it was found."),
        ("c * tanh(x)", {"c": 2.0}, "Any c will do, unless the arithmetic has it twice"),
        ("x * (1 + c)", {"c": 2.0}, "does not recognize this formula in a model: call it."),
        ("where(c > 1, x, -x)", {"c": 2.0}, "does not recognize this formula in a model: call it."),
        ({"y": "tanh(x)", "z": "x * x"}, {}, "does not recognize this formula in a model: call it."),
        ("where(x > 0, 1, 0)", {}, "It has no gradient"),
    ],
)
def test_the_readme_says_what_is_true(
    formula: Any, attributes: dict[str, float], said: str, tmp_path: Path
) -> None:
    folder, _ = made(prototype("UneditedReadme", {"x": ROWS}, formula, **attributes), tmp_path)
    assert said in (folder / "README.md").read_text()
    assert "then finds it" not in (folder / "README.md").read_text()


def test_what_is_not_recognized_has_no_pattern(tmp_path: Path) -> None:
    described = prototype("UneditedPair", {"x": ROWS}, {"y": "tanh(x)", "z": "x * x"})
    assert load(made(described, tmp_path)[0]).CARD.patterns == ()


def by_reference(inputs: dict[str, str | None], shape: str | None) -> dict[str, Any]:
    described = prototype("UneditedByHand", inputs, "x")
    del described["formula"]
    if shape is not None:
        described["output_desc"][0]["shape"] = [int(d) if d.isdigit() else d for d in shape.split()]
    return described


@pytest.mark.parametrize("shape", [None, "B N", "B 1", "B"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_reference_may_give_rows_or_a_number_for_each(
    shape: str | None, by_hand: bool, tmp_path: Path
) -> None:
    described = by_reference({"x": "B N", "bias": "N"}, shape)
    backends = ("cpu", "triton", "cuda")
    folder, notes = made(described, tmp_path, backends=backends, reference="m:f", by_hand=by_hand)
    assert notes[0].endswith("forward and backward." if by_hand else "forward.")
    assert f'outputs={{"y": "{shape or "B N"}"}}' in (folder / "operator.py").read_text()


@pytest.mark.parametrize(
    ("inputs", "shape", "why"),
    [
        ({"x": "B N"}, "N", r"walk along the rows .* found x \[B, N\], and y \[N\]"),
        ({"x": "M K", "w": "K N"}, "M N", r"found x \[M, K\], w \[K, N\], and y \[M, N\]"),
    ],
)
def test_a_reference_of_another_shape_is_refused_for_what_it_is(
    inputs: dict[str, str | None], shape: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(PrototypeError, match=why):
        made(by_reference(inputs, shape), tmp_path, reference="m:f")


def test_an_optional_input_is_refused_for_what_it_is(tmp_path: Path) -> None:
    described = by_reference({"x": "B N", "bias": "N"}, None)
    described["input_desc"][1]["param_type"] = "optional"
    with pytest.raises(PrototypeError, match=r"input bias is optional; kernels need every input"):
        made(described, tmp_path, reference="m:f")


def test_no_operator_is_named_as_a_namespace_of_pytorchs(tmp_path: Path) -> None:
    for op in ("Profiler", "Inductor"):
        with pytest.raises(
            PrototypeError, match=f"would be named '{op.lower()}', which means something else"
        ):
            made(prototype(op, {"x": ROWS}, "x + 1"), tmp_path)
    code = (
        "import torch, torch._inductor.compile_fx, torch.ao.quantization, torch.distributed.tensor, torch.onnx;"
        "print({name.split('::')[0] for name in torch._C._dispatch_get_all_op_names()})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    taken = set(re.findall(r"'([a-z]\w*)'", done.stdout))
    assert {"aten", "profiler"} <= taken <= NAMESPACES | RESERVED
