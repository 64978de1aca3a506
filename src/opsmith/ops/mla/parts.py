"""The tensors of MLA pre-processing as its operators take them, and what is refused of their shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from opsmith.call.common import check_number, dense, short
from opsmith.ops.mla.projection import Projection

NORMS = ("gamma0", "gamma1", "gamma2", "beta0", "beta1")


class Parts(NamedTuple):
    """The tensors of `MLAWeights` as the operators take them; every size is read off their shapes."""

    down: Projection
    up: Projection
    wuk: torch.Tensor
    gamma0: torch.Tensor | None
    gamma1: torch.Tensor | None
    gamma2: torch.Tensor
    beta0: torch.Tensor | None = None
    beta1: torch.Tensor | None = None
    quant: str | None = None
    interleaved: bool = False

    @property
    def heads(self) -> int:
        return self.wuk.shape[0]

    @property
    def nope(self) -> int:
        return self.wuk.shape[1]

    @property
    def kv_lora(self) -> int:
        return self.wuk.shape[2]

    @property
    def rope(self) -> int:
        return self.up.weight.shape[0] // self.wuk.shape[0] - self.wuk.shape[1]

    def as_rows(self) -> tuple[torch.Tensor | None, ...]:
        """What the kernels take of them, in their order: with contiguous last dimensions."""
        down, up = self.down, self.up
        return (
            *(
                rows_of(p.weight if self.quant != "weight_int4" else p.weight.view(torch.int8))
                for p in (down, up)
            ),
            self.wuk.contiguous(),
            dense(self.gamma0),
            dense(self.gamma1),
            self.gamma2.contiguous(),
            dense(self.beta0),
            dense(self.beta1),
            dense(down.bias),
            dense(up.bias),
            dense(down.descale),
            dense(up.descale),
            down.scale,
            down.offset,
            up.scale,
            up.offset,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (*self.down, *self.up, *self[2:8])


def rows_of(t: Any) -> Any:
    """With a contiguous last dimension; itself, where it has one."""
    return t if t is None or t.shape[-1] < 2 or t.stride(-1) == 1 else t.contiguous()


class Sizes(NamedTuple):
    """What the constructor is told."""

    heads: int
    nope: int
    rope: int
    kv_lora: int
    q_lora: int | None


def check_weights(
    op: str,
    down: Projection,
    up: Projection,
    wuk: Any,
    norms: Mapping[str, Any],
    wuv: Any,
    sizes: Sizes,
    quant: str | None,
) -> None:
    """Refuse weights of other shapes or dtypes than these sizes and this form of quantization have."""
    heads, nope, rope, kv_lora, q_lora = sizes
    check_number(op, "rope", rope, whole=True)
    if q_lora is not None:
        check_number(op, "q_lora", q_lora, whole=True)
    for name, value in zip(("heads", "nope", "kv_lora"), (heads, nope, kv_lora), strict=True):
        check_number(op, name, value, whole=True)
        if value < 1:
            raise ValueError(f"{op}: {name} must be positive, got {value}")
    if rope < 0 or rope % 2 or (q_lora is not None and q_lora < 1):
        raise ValueError(
            f"{op}: rope must be even and not negative, q_lora positive or None, got {rope} and {q_lora}"
        )
    if not isinstance(down.weight, torch.Tensor) or down.weight.dim() != 2:
        raise ValueError(
            f"{op}: wdqkv must be a tensor [kv_lora + rope + q_lora, D], got "
            f"{tuple(down.weight.shape) if isinstance(down.weight, torch.Tensor) else type(down.weight).__name__}"
        )
    packed = quant == "weight_int4"
    n0, n1 = kv_lora + rope + (q_lora or 0), heads * (nope + rope)
    size = down.weight.shape[1]
    inner = up.weight.shape[1] if packed else (size if q_lora is None else q_lora)
    expected: dict[str, tuple[Any, tuple[int, ...], str]] = {
        "wdqkv": (down.weight, (n0, size), "kv_lora + rope + q_lora, D"),
        "wuq": (up.weight, (n1, inner), "heads * (nope + rope), q_lora (D, without q_lora)"),
        "wuk": (wuk, (heads, nope, kv_lora), "heads, nope, kv_lora"),
        "gamma2": (norms["gamma2"], (kv_lora,), "kv_lora"),
    }
    if q_lora is None:
        for name in ("gamma1", "beta1"):
            if norms[name] is not None:
                raise ValueError(f"{op}: {name} must be None without q_lora: x goes straight through wuq")
    else:
        expected["gamma1"] = (norms["gamma1"], (q_lora,), "q_lora")
    if norms["beta0"] is not None and norms["gamma0"] is None:
        raise ValueError(f"{op}: beta0 belongs to the norm of gamma0, which is None: x comes normalized")
    if wuv is not None:
        shape = tuple(wuv.shape) if isinstance(wuv, torch.Tensor) else ()
        v = shape[1] if len(shape) == 3 else 0
        expected["wuv"] = (wuv, (heads, v, kv_lora), "heads, v, kv_lora")
    wide_size = None if packed else size
    for name, n in (("gamma0", wide_size), ("beta0", wide_size), ("beta1", q_lora)):
        if norms[name] is not None and n is not None:
            expected[name] = (norms[name], (n,), "D" if name != "beta1" else "q_lora")
    for i, (p, n) in enumerate(((down, n0), (up, n1))):
        if p.bias is not None:
            expected[f"bias{i}"] = (p.bias, (n,), "one for each output channel")
        if quant is not None and not packed:
            expected[f"descale{i}"] = (p.descale, (n,), "one for each output channel")
    for name, (t, shape, what) in expected.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor {shape} ({what}), got {type(t).__name__}")
        if tuple(t.shape) != shape:
            raise ValueError(f"{op}: {name} must have shape {shape} ({what}), got {tuple(t.shape)}")
        if t.device != wuk.device:
            raise ValueError(f"{op}: {name} is on {t.device}, wuk on {wuk.device}; move one of them")
        _check_dtype(op, name, t, wuk.dtype, quant)


def _check_dtype(op: str, name: str, t: torch.Tensor, dtype: torch.dtype, quant: str | None) -> None:
    if name.startswith("descale"):
        allowed: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    elif name in ("wdqkv", "wuq") and quant is not None:
        allowed = (torch.uint8,) if quant == "weight_int4" else (torch.int8,)
    elif name.startswith("bias") and quant == "per_tensor":
        allowed = (torch.int32,)
    elif name.startswith(("gamma", "beta")):
        allowed = (dtype, torch.float32)
    else:
        allowed = (dtype,)
    if not dtype.is_floating_point:
        raise TypeError(f"{op}: wuk must be floating-point, got {short(dtype)}")
    if t.dtype not in allowed:
        known = " or ".join(dict.fromkeys(short(d) for d in allowed))
        raise TypeError(f"{op}: {name} must be {known}, got {short(t.dtype)}; cast it first")
