"""opsmith in vLLM's engine: what its entry point `vllm.general_plugins` calls in each of vLLM's processes.

By default it brings all its parts, and those that have a rival in vLLM are taken where they are measured to be faster.
The environment variable OPSMITH_VLLM names parts that are taken anyway, and leaves the others to vLLM:

    OPSMITH_VLLM=attention,quantization python -m vllm.entrypoints.openai.api_server ...    # or all, or off
"""

from __future__ import annotations

import os
from importlib import import_module

__all__ = ["PARTS", "measured", "parts", "register"]

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
    words = _words()
    if words in (["auto"], ["all"], ["off"]):
        return [] if words == ["off"] else list(PARTS)
    unknown = [word for word in words if word not in PARTS]
    if unknown:
        raise ValueError(
            f"{VARIABLE}: expected auto, all, off, or some of {', '.join(PARTS)} with commas between them, "
            f"got {unknown[0]!r}; correct the variable or unset it"
        )
    return words


def measured() -> bool:
    """Whether a part is taken only where it is measured to be faster than vLLM's own."""
    return _words() == ["auto"]


def _words() -> list[str]:
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    return [word for word in words if word] or ["auto"]


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
