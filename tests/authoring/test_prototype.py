"""The prototype: msopgen's JSON is read as it is, and what is wrong with one is one clear message."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from opsmith.authoring.formula import FormulaError
from opsmith.authoring.new import create
from opsmith.authoring.prototype import KINDS, PrototypeError, parse, read, snake_case
from opsmith.operator import Kind
from tests.authoring.prototypes import PROTOTYPES, text

# As msopgen's documentation publishes it, comments and trailing commas included.
ADD = """[
    {
        "op": "AddCustom",  // UpperCamel
        "language": "cpp",
        "input_desc": [
            {"name": "x", "param_type": "required", "format": ["ND", "ND"], "type": ["fp16", "float"],},
            {"name": "y", "param_type": "required", "format": ["ND"], "type": ["fp16", "float"]},
        ],
        "output_desc": [
            {"name": "z", "param_type": "required", "format": "ND", "type": ["fp16", "float"]}
        ],
        "attr": [{"name": "alpha", "param_type": "optional", "type": "float", "default_value": "2.0"}],
        "formula": {"z": "x + alpha * y"}
    }, /* nothing more */
]
"""

CONV = {
    "op": "Conv2D",
    "input_desc": [
        {"name": "x", "param_type": "required", "format": ["NCHW"], "type": ["fp16"]},
        {"name": "filter", "param_type": "required", "format": ["NCHW"], "type": ["fp16"]},
        {"name": "bias", "param_type": "optional", "format": ["ND"], "type": ["fp16"]},
    ],
    "output_desc": [{"name": "y", "param_type": "required", "format": ["NCHW"], "type": ["fp16"]}],
    "attr": [{"name": "strides", "param_type": "required", "type": "list_int"}],
}


def test_a_published_prototype_is_read_as_it_is() -> None:
    p = parse(ADD)
    assert p.name == "add_custom"
    assert p.columns() == [("float16",) * 3, ("float32",) * 3]
    assert p.attr[0].default() == 2.0


def test_one_of_several_operators_is_chosen_by_name() -> None:
    both = json.dumps([PROTOTYPES["Relu6"], PROTOTYPES["SiluMulCustom"]])
    assert parse(both, op="SiluMulCustom").op == "SiluMulCustom"
    with pytest.raises(
        PrototypeError, match=r"holds 2 operators; choose one with --op: Relu6, SiluMulCustom"
    ):
        parse(both)
    with pytest.raises(PrototypeError, match=r"no operator named 'Gelu'; there are: Relu6, SiluMulCustom"):
        parse(both, op="Gelu")


@pytest.mark.parametrize(
    ("op", "name"), [("RopeCustom", "rope_custom"), ("RMSNorm", "rms_norm"), ("Conv2D", "conv2_d")]
)
def test_names_of_files_are_those_of_msopgen(op: str, name: str) -> None:
    assert snake_case(op) == name


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("RoPECustomer", "rope_customer"),
        ("SwiGLU", "swiglu"),
        ("FusedMoE", "fused_moe"),
        ("ReLU6", "relu6"),
        ("ALiBiMask", "alibi_mask"),
        ("LoRALinear", "lora_linear"),
    ],
)
def test_acronyms_stay_together_as_the_field_writes_them(op: str, name: str) -> None:
    assert snake_case(op) == name


def test_groups_of_types_are_lists_of_types() -> None:
    p = parse(ADD.replace('["fp16", "float"]', '"realnumbertype"').replace('["ND", "ND"]', '"ND"'))
    assert ("float32",) * 3 in p.columns()
    assert ("int8",) * 3 in p.columns()


def test_the_kinds_are_those_of_the_cards() -> None:
    assert {k.value for k in Kind} == set(KINDS)


@pytest.mark.parametrize(
    ("found", "instead", "message"),
    [
        ('"x"', '"../x"', r"line 6: input_desc\[0\]\.name: found '../x'; allowed: a letter"),
        ('"x"', '"x;}"', r"line 6: input_desc\[0\]\.name: found 'x;}'"),
        ('"AddCustom"', '"../../etc/Add"', r"line 3: op: found '../../etc/Add'; allowed: UpperCamel"),
        ('"ND", "ND"', f'"{"x" * 70_000}"', r"line 6: input_desc\[0\]\.format: .{200,600}$"),
        ('"AddCustom"', '"АddCustom"', r"line 3: op: found 'АddCustom'"),  # a Cyrillic letter
        ('"alpha"', '"аlpha"', r"line 12: attr\[0\]\.name: found 'аlpha'"),
        ('"alpha"', '"__class__"', r"attr\[0\]\.name: found '__class__'"),
        ('"alpha"', '"lambda"', r"attr\[0\]\.name: found 'lambda'; that name has a meaning"),
        (
            '"2.0"',
            "\"__import__('os')\"",
            r"line 12: attr\[0\]\.default_value: found .* a value of type float",
        ),
        ('"y"', '"x"', r"line 7: input_desc\[1\]\.name: 'x' is taken by input_desc\[0\]"),
        ('"z"', '"x"', r"line 10: output_desc\[0\]\.name: 'x' is taken by input_desc\[0\]"),
        ('"ND", "ND"', '"ND", "ND", "ND"', r"line 6: input_desc\[0\]\.format: found 3 entries; allowed: 2"),
        (
            '"fp16", "float"',
            '"fp16", "flaot"',
            r"'flaot' is neither a type nor a group of types; allowed: float",
        ),
        ('["ND", "ND"]', '["NDX"]', r"'NDX' is no format; allowed: ND, NCHW"),
        ('"op"', '"opp"', r"line 3: opp: is no field of a prototype; allowed: op, language"),
        ('"op": "AddCustom",', "", r"op: is required, and missing"),
        ('"cpp"', '"cpp", "language": "c"', r"line 4: \[0\]\.language is given twice, first on line 4"),
        (
            '"required"',
            '"maybe"',
            r"param_type: found 'maybe'; Input should be 'required', 'optional' or 'dynamic'",
        ),
        ('"fp16", "float"', "3", r"input_desc\[0\]\.type\[0\]: found 3; allowed: a string$"),
        ('"ND", "ND"', "", r"input_desc\[0\]\.format: found \[\]; allowed: one entry at least$"),
        ('{"z": "x + alpha * y"}', "3", r"formula: found 3; allowed: a string or an object$"),
        ('"formula"', '"tolerance": {"facto": 2}, "formula"', r"tolerance\.facto: .* allowed: factor, ulps$"),
        ('"name": "y"', '"shape": ["N"], "name": "y"', r"line 6: input_desc\[0\]: shape of x is missing"),
        (
            '"name": "x"',
            '"shape": [], "name": "x"',
            r"line 6: input_desc\[0\]: shape of x is without an axis; allowed: a shape for every input, such as \[1\]",
        ),
        ("]\n", "", r"line 15: expected"),
        ('"fp16"', "fp16", r"line 6: expected a value.*, found 'fp16"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(found: str, instead: str, message: str) -> None:
    wrong = ADD[:-2] if found == "]\n" else ADD.replace(found, instead, 1)
    with pytest.raises(PrototypeError, match=message) as raised:
        parse(wrong)
    assert "\n" not in str(raised.value)


def test_size_and_depth_are_limited(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    file.write_text('{"op": "' + "A" * (10 << 20) + '"}')
    with pytest.raises(PrototypeError, match=r"bytes; a prototype has at most 1048576"):
        read(file)
    with pytest.raises(PrototypeError, match=r"a number of at most 64 characters"):
        parse('{"op": ' + "1" * 5000 + "}")
    with pytest.raises(PrototypeError, match=r"at most 32 levels"):
        parse("[" * 100_000)
    file.write_bytes(b'{"op": "\xff"}')
    with pytest.raises(PrototypeError, match=r"byte 8 is no UTF-8"):
        read(file)


def broken(name: str, **changes: Any) -> dict[str, Any]:
    return {**PROTOTYPES[name], **changes}


@pytest.mark.parametrize(
    ("prototype", "error", "message"),
    [
        (CONV, PrototypeError, r"Conv2D: x has format NCHW; cpu take ND"),
        (
            broken("SiluMulCustom", formula={"y": "silu(gate) * down"}),
            FormulaError,
            r"down is unknown; there are: gate, up",
        ),
        (
            broken("SiluMulCustom", formula="gate * up * alpa", attr=[{"name": "alpha", "type": "float"}]),
            FormulaError,
            r"alpa is unknown; there are: gate, up, alpha",
        ),
        (
            broken("SiluMulCustom", formula={"y": "silu(gate)"}),
            FormulaError,
            r"input up is not used by the formula",
        ),
        (
            broken("SiluMulCustom", formula={"y": "__import__('os').system('touch x')"}),
            FormulaError,
            r"no character of formulas",
        ),
        (
            broken("SiluMulCustom", formula={"y": 'gate * up # """ + exit() + """'}),
            FormulaError,
            r"'#' is no character of formulas",
        ),
        (
            broken("SiluMulCustom", formula={"y": "gate * up\nimport os"}),
            FormulaError,
            r"is no character of formulas",
        ),
        (
            broken("SiluMulCustom", attr=[{"name": "eps", "type": "int", "default_value": "1e999"}]),
            PrototypeError,
            r"attr\[0\]\.default_value: found '1e999'; allowed: a value of type int",
        ),
        (
            broken(
                "SiluMulCustom",
                attr=[{"name": "mode", "type": "string", "default_value": "tanh"}],
                formula={"y": "where(mode, gate, up)"},
            ),
            PrototypeError,
            r"SiluMulCustom: attribute mode is a string; formulas read float, int, bool",
        ),
        (
            broken("SiluMulCustom", output_desc=[{"name": "y", "type": ["float", "float", "float"]}]),
            PrototypeError,
            r"output y has the type of no input in all combinations; give it those of gate or up",
        ),
        (
            broken("SiluMulCustom", formula={"z": "gate + up"}),
            FormulaError,
            r"'z' belongs to no output.* are y",
        ),
        (broken("SiluMulCustom", formula=None), PrototypeError, r"SiluMulCustom has no formula; add one"),
        (broken("SiluMulCustom", op="Softmax"), ValueError, r"softmax is one of opsmith's own operators"),
        (broken("SiluMulCustom", kind="fast"), PrototypeError, r"kind: found 'fast'; allowed: matmul"),
    ],
)
def test_nothing_is_written_for_what_is_refused(
    prototype: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(prototype))
    with pytest.raises(error, match=message):
        create(file, tmp_path / "made")
    assert [f.name for f in tmp_path.iterdir()] == ["p.json"]


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(text("SiluMulCustom"))
    (tmp_path / "made").mkdir()
    with pytest.raises(ValueError, match=r"made exists, and `new` overwrites nothing"):
        create(file, tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


def test_an_attribute_that_the_formula_does_not_use_is_left_out_and_named(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    extra = {"name": "keep_dims", "param_type": "optional", "type": "bool", "default_value": True}
    file.write_text(json.dumps(broken("SiluMulCustom", attr=[extra])))
    folder, _, notes = create(file, tmp_path / "made")
    assert notes == ["Left out, as the formula does not use it: keep_dims."]
    assert not re.search("keep_dims", (folder / "operator.py").read_text())
