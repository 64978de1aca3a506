"""The formula language: what it says, which shapes follow, and where an error points."""

import pytest

from opsmith.authoring.formula import FormulaError, parse
from opsmith.authoring.formula.gradient import NoDerivative, gradients
from opsmith.authoring.formula.shapes import Shape, broadcast
from opsmith.authoring.lower.plan import plan
from opsmith.authoring.lower.torch import reference_lines

X: Shape = ("...", "N")


@pytest.mark.parametrize(
    ("a", "b", "both"),
    [
        (("B", "N"), ("N",), ("B", "N")),
        (("B", 1), ("B", "N"), ("B", "N")),
        (("...", "N"), ("...", 1), ("...", "N")),
        (("...", "N"), ("N",), ("...", "N")),
        (("B", 1, "N"), ("B", "L", 1), ("B", "L", "N")),
        (("B", "N"), ("M", "N"), None),
        (("B", 4), ("B", "N"), None),
        (("...", "N"), ("B", "N"), None),
    ],
)
def test_shapes_broadcast_as_pytorchs_do(a: Shape, b: Shape, both: Shape | None) -> None:
    assert broadcast(a, b) == both
    assert broadcast(b, a) == both


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a - (b - a)", ["return a - (b - a)"]),
        ("a - b - a", ["return a - b - a"]),
        ("a / (b * a)", ["return a / (b * a)"]),
        ("a * (b / a)", ["return a * (b / a)"]),
        ("-(a + b)", ["return -(a + b)"]),
        ("a ** 2 + b", ["return a * a + b"]),
        ("a ** -0.5 + b", ["return torch.rsqrt(a) + b"]),
        ("where(a > b, a, 0)", ["return torch.where(a > b, a, 0)"]),
        ("clamp(a, -1, 1) + b", ["return torch.clamp(torch.clamp(a, min=-1), max=1) + b"]),
        ("a * 1 + 0 * 2 + b", ["return a + b"]),
        ("cast(a + b, float16)", ["return (a + b).to(torch.float16).to(a.dtype)"]),
        ("exp(a + b) * (a + b)", ["v_1 = a + b", "return torch.exp(v_1) * v_1"]),
    ],
)
def test_the_reference_says_the_same(text: str, lines: list[str]) -> None:
    assert reference_lines(parse({"y": text}, {"a": X, "b": X}, {"y": None})) == lines


def test_a_choice_between_numbers_is_one_of_python() -> None:
    formula = parse({"y": "a * where(c > 1, 3, c)"}, {"a": X}, {"y": None}, {"c": 2.0})
    assert reference_lines(formula) == ["return a * (3 if c > 1 else c)"]


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("a +", "here the formula can't be read", 3),
        ("(a + b", r"here the formula can't be read: '\(' was never closed", 1),
        ("a + c", "c is unknown; there are: a, b", 5),
        ("a + foo(b)", "foo is no function here", 5),
        ("a.data", "not in the language", 1),
        ("a[0]", "is no character of formulas", 2),
        ("a if b else a", "not in the language", 1),
        ("(lambda: a)()", "is no character of formulas", 8),
        ("a @ b", "is no character of formulas", 3),
        ("exp(a, b)", r"exp takes 1 argument\(s\), got 2", 1),
        ("sum(a, b)", r"sum takes 1 argument\(s\), got 2", 1),
        ("softmax(x=a)", "softmax takes no named arguments", 1),
        ("a * (a > b)", "a truth value is no number", 6),
        ("where(a, a, b)", "where's first argument", 7),
        ("a < b < a", "one comparison at a time", 1),
        ("a ** b", "the exponent is one of", 1),
        ("sum(sum(a))", "works along the last axis, and", 1),
        ("a + 1e400", "is no number that float32 holds", 5),
        ("matmul(a + b, b)", "matmul takes two inputs by name", 8),
        ("matmul(a, b)", r"matmul takes \[..., M, K\] and \[K, N\]", 1),
        ("a + 'text'", "is no character of formulas", 5),
        ('a + b # """ + b', "is no character of formulas", 7),
        ("a + b \\ ", "is no character of formulas", 7),
        ("a + (b)()", "b is no function here", 5),
        ("a > b", "the formula gives truth values", 1),
        ("1 + 1", "the formula gives a number", 1),
        ("a + ｂ", "is no character of formulas", 5),
    ],
)
def test_errors_point_at_what_is_wrong(text: str, message: str, column: int) -> None:
    with pytest.raises(FormulaError, match=message) as raised:
        parse({"y": text}, {"a": X, "b": X}, {"y": None})
    lines = str(raised.value).splitlines()
    assert f"(column {column})" in lines[0]
    assert lines[1] == f"  y = {text}"
    assert lines[2].index("^") == 6 + column - 1


def test_deep_and_long_formulas_are_refused() -> None:
    for text in ("(" * 5000 + "a" + ")" * 5000, "-" * 3000 + "a", "a" + "+a" * 1999):
        with pytest.raises(FormulaError):
            parse({"y": text}, {"a": X}, {"y": None})


def test_formulas_and_outputs_are_each_other_s() -> None:
    with pytest.raises(FormulaError, match="output z has no formula; add one"):
        parse({"y": "a"}, {"a": X}, {"y": None, "z": None})
    with pytest.raises(FormulaError, match="formula 'x' belongs to no output; the outputs are y"):
        parse({"y": "a", "x": "a"}, {"a": X}, {"y": None})


@pytest.mark.parametrize(
    ("text", "declared", "shape"),
    [("sum(a)", None, ("B", 1)), ("sum(a)", ("B",), ("B",)), ("a * sum(a)", ("B", "N"), ("B", "N"))],
)
def test_a_reduction_keeps_its_axis_unless_the_output_drops_it(
    text: str, declared: Shape | None, shape: Shape
) -> None:
    assert parse({"y": text}, {"a": ("B", "N")}, {"y": declared}).shapes["y"] == shape
    with pytest.raises(
        FormulaError, match=r"output y is declared \[N\], but its formula gives .*; change either\n"
    ):
        parse({"y": text}, {"a": ("B", "N")}, {"y": ("N",)})


def kinds(text: str) -> list[list[str]]:
    f = parse({"y": text}, {"a": X, "b": X}, {"y": None})
    return [sorted(s.kind for s in stage) for stage in plan(f).stages]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("a + b", []),
        ("(a - mean(a)) * rsqrt(var(a) + 1) + b", [["Moments"]]),
        ("(a - mean(a)) * rsqrt(mean((a - mean(a)) ** 2) + 1) + b", [["Moments"]]),
        ("softmax(a + b)", [["Online"]]),
        ("log(sum(exp(a - max(a)))) + max(a) + b", [["Online"]]),
        ("a * sum(a * b) + mean(b)", [["Sum", "Sum"]]),
        ("(a - max(a)) * sum(a - max(a)) + b", [["Max"], ["Sum"]]),
    ],
)
def test_reductions_share_a_pass_where_they_can(text: str, passes: list[list[str]]) -> None:
    assert kinds(text) == passes


def test_a_mean_that_is_a_result_has_its_own_sum() -> None:
    f = parse({"m": "mean(a)", "y": "(a - m) * rsqrt(var(a) + 1)"}, {"a": X}, {"m": None, "y": None})
    assert [sorted(s.kind for s in stage) for stage in plan(f).stages] == [["Moments", "Sum"]]


def test_a_maximum_along_rows_is_left_to_autograd() -> None:
    f = parse({"y": "a - max(a)"}, {"a": X}, {"y": None})
    with pytest.raises(NoDerivative, match="max along rows"):
        gradients(f, ["a"])
