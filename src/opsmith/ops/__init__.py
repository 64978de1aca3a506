"""The operator library: `opsmith.ops.NAME(...)`, one file per operator (family)."""

from opsmith.ops.layer_norm import layer_norm

__all__ = ["layer_norm"]
