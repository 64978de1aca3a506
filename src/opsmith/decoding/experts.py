"""opsmith's experts as transformers calls them: `model.set_experts_implementation("opsmith")`."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.integrations import moe

from opsmith.ops.experts import experts
from opsmith.ops.experts.middle import OSS_ALPHA
from opsmith.ops.packed_linear.module import PackedExperts

_LOG = logging.getLogger("opsmith")
_OTHERWISE = "grouped_mm"  # transformers' own choice
_CURVES: dict[type[nn.Module], str] = {
    activations.SiLUActivation: "silu",
    nn.SiLU: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
}
_told: set[str] = set()  # why modules went another way, each reason once


def mixed(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, packed: Any = None
) -> Tensor:
    """What a module of experts computes [T, D], by `opsmith.ops.experts` where that has its form.

    Of another form it is left to transformers, and the log `opsmith` says why; but weights that are packed, its own or
    given for them, nobody else has.
    """
    gate_up, down = packed or (module.gate_up_proj, module.down_proj)
    of_few_bits = isinstance(gate_up, PackedExperts)
    if not of_few_bits and (why := unlike(module, hidden_states.dtype)):
        if why not in _told and not torch.compiler.is_compiling():
            _told.add(why)
            _LOG.info("%s: experts are left to transformers: %s", type(module).__name__, why)
        y: Tensor = moe.ALL_EXPERTS_FUNCTIONS[_OTHERWISE](module, hidden_states, top_k_index, top_k_weights)
        return y
    if module.is_transposed and not of_few_bits:
        gate_up, down = gate_up.mT, down.mT
    bias = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else None
    curve, limit = _gate(module)
    if top_k_weights.dtype is not hidden_states.dtype:
        top_k_weights = top_k_weights.float()
    return experts(
        hidden_states, gate_up, down, top_k_index, top_k_weights, activation=curve, bias=bias, limit=limit
    )


def unlike(module: Any, dtype: torch.dtype) -> str:
    """What of a module's form `opsmith.ops.experts` does not have, for inputs of a dtype; nothing where it has all."""
    if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
        return "a graph that learns would end at their gradients"  # which are an autograd.Function's
    # What a version of transformers does not know, its modules do not have.
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return "they have no gate, or a norm behind them"
    if getattr(module, "_is_expert_parallel", False):
        return "they are spread over processes"
    try:
        ours = _gate(module)[0]
    except AttributeError as error:
        return f"this version of transformers has others: {error}"
    if not ours:
        return f"their gate is none of ours ({type(module).__name__})"
    held = [getattr(module, name) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(t, Tensor) for t in held):
        return "their weights are no tensors"
    if others := [t.dtype for t in held if t.dtype is not dtype]:
        return f"their weights are {others[0]}, their input is {dtype}"
    return ""


def _gate(module: Any) -> tuple[str, float | None]:
    """The activation, as `experts` calls it, and the limit; "" for one that it does not have."""
    if type(module)._apply_gate is moe._default_apply_gate and module.is_concatenated:
        return _CURVES.get(type(module.act_fn), ""), None
    oss = type(module).__name__ == "GptOssExperts" and not module.is_concatenated
    if oss and math.isclose(module.alpha, OSS_ALPHA):
        return "swiglu_oss", module.limit
    return "", None
