"""Prototypes of operators in use, as a person would write them."""

from __future__ import annotations

import json
from typing import Any

EVERY = ["float", "bf16", "fp16"]


def tensor(name: str, shape: str | None = None, types: list[str] | None = None) -> dict[str, Any]:
    """A description; a shape of symbols as one word each."""
    sized = {} if shape is None else {"shape": [int(d) if d.isdigit() else d for d in shape.split()]}
    return {"name": name, "param_type": "required", "format": ["ND"], "type": types or EVERY, **sized}


def prototype(
    op: str,
    inputs: dict[str, str | None],
    formula: str | dict[str, str],
    /,
    *truths: str,
    **attributes: float,
) -> dict[str, Any]:
    """One operator in all three dtypes; inputs map to shapes, attributes to defaults."""
    formulas = formula if isinstance(formula, dict) else {"y": formula}
    return {
        "op": op,
        "input_desc": [tensor(n, s, ["bool"] if n in truths else None) for n, s in inputs.items()],
        "output_desc": [tensor(n) for n in formulas],
        "attr": [
            {"name": n, "param_type": "optional", "type": "float", "default_value": v}
            for n, v in attributes.items()
        ],
        "formula": formula,
    }


ROWS = "... N"
PROTOTYPES = {
    p["op"]: p
    for p in [
        prototype("AddCustom", {"x": None, "other": None}, "x + other"),
        prototype(
            "RopeCustom",
            {"x": "B H L D", "cos": "L D", "sin": "L D"},
            "x * cos + rotate_interleaved(x) * sin",
        ),
        prototype(
            "RopeHalves", {"x": "B H L D", "cos": "L D", "sin": "L D"}, "x * cos + rotate_half(x) * sin"
        ),
        prototype(
            "LayerNormCustom",
            {"x": ROWS, "weight": "N", "bias": "N"},
            "(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias",
            eps=1e-5,
        ),
        prototype(
            "RmsNormCustom", {"x": ROWS, "weight": "N"}, "x * rsqrt(mean(x * x) + eps) * weight", eps=1e-6
        ),
        prototype(
            "AddRmsNorm",
            {"x": ROWS, "residual": ROWS, "weight": "N"},
            {"total": "x + residual", "y": "total * rsqrt(mean(total * total) + eps) * weight"},
            eps=1e-6,
        ),
        prototype("SoftmaxCustom", {"x": ROWS}, "softmax(x * scale)", scale=0.125),
        prototype("SiluMulCustom", {"gate": ROWS, "up": ROWS}, "silu(gate) * up"),
        prototype("GeluMulCustom", {"gate": ROWS, "up": ROWS}, "gelu_tanh(gate) * up"),
        prototype("BiasGeluCustom", {"x": ROWS, "bias": "N"}, "gelu(x + bias)"),
        prototype("MatmulBiasGelu", {"x": "M K", "w": "K N", "b": "N"}, "gelu(matmul(x, w) + b)"),
        prototype("SoftCap", {"x": ROWS}, "cap * tanh(x / cap)", cap=30.0),
        prototype("Relu6", {"x": ROWS}, "clamp(x, 0, 6)"),
        prototype("HardSwish", {"x": ROWS}, "x * clamp(x + 3, 0, 6) / 6"),
        prototype("NormalizeL2", {"x": ROWS}, "x * rsqrt(sum(x * x) + eps)", eps=1e-6),
        prototype("LogSumExp", {"x": ROWS}, "log(sum(exp(x - max(x)))) + max(x)"),
        prototype("MaskedFill", {"x": ROWS, "keep": ROWS}, "where(keep, x, fill)", "keep", fill=-100.0),
        prototype(
            "AdaModulate", {"x": "B L D", "shift": "B 1 D", "scale": "B 1 D"}, "x * (1 + scale) + shift"
        ),
    ]
}


def text(name: str) -> str:
    """A prototype as a file holds it."""
    return json.dumps(PROTOTYPES[name], indent=2)
