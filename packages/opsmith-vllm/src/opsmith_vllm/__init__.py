"""opsmith in vLLM's engine: what its entry point `vllm.general_plugins` calls in each of vLLM's processes.

Every part has a word in the environment variable OPSMITH_VLLM, by default all of them:

    OPSMITH_VLLM=attention,quantization vllm serve ...
    OPSMITH_VLLM=off vllm serve ...
"""

from __future__ import annotations

import os
from importlib import import_module

__all__ = ["PARTS", "parts", "register"]

VARIABLE = "OPSMITH_VLLM"
# Each part and the module whose function of the part's name registers it.
PARTS = {
    "attention": "opsmith_vllm.attention",
    "quantization": "opsmith_vllm.quantization",
    "norms": "opsmith_vllm.layers",
    "activations": "opsmith_vllm.layers",
    "rotary": "opsmith_vllm.layers",
}
_IN_GRAPHS = {"quantization", "norms", "activations", "rotary"}

_registered: set[str] = set()


def parts() -> list[str]:
    """The parts that OPSMITH_VLLM asks for.

    Raises:
        ValueError: for a word that is no part.
    """
    words = [word.strip() for word in os.environ.get(VARIABLE, "all").split(",") if word.strip()]
    if words in (["all"], ["off"], []):
        return list(PARTS) if words == ["all"] else []
    unknown = [word for word in words if word not in PARTS]
    if unknown:
        raise ValueError(
            f"{VARIABLE}: expected all, off, or some of {', '.join(PARTS)} with commas between them, "
            f"got {unknown[0]!r}; correct the variable or unset it"
        )
    return words


def register() -> None:
    """Register the parts that are asked for with vLLM; a second call in the same process adds nothing.

    Raises:
        ValueError: OPSMITH_VLLM has a word that is no part.
    """
    asked = parts()
    if set(asked) & _IN_GRAPHS:
        # vLLM finds a graph that was compiled before by its own configuration, which says nothing of these parts.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    for part in asked:
        if part not in _registered:
            getattr(import_module(PARTS[part]), part)()
            _registered.add(part)
