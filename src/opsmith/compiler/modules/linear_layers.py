"""A model's linear layers: PyTorch's own, and modules that hold their weight the other way round, as GPT-2's do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from opsmith.compiler.meanwhile import meanwhile


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`nn.Linear`, its subclasses, and what computes `x @ weight + bias`, in the order of the model."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        matrix = isinstance(weight, Tensor) and weight.dim() == 2 and weight.numel() and not weight.is_meta
        if matrix and (isinstance(module, nn.Linear) or _turned(module)):
            yield name, module


def output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that makes logits, where a model says which one that is, as Hugging Face's do."""
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    return layer if isinstance(layer, nn.Module) else None


def embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding]]:
    """`nn.Embedding` and its subclasses, in the order of the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.numel() and not module.weight.is_meta:
            yield name, module


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model by name, those that several modules share once for each."""
    parameters = model.named_parameters(remove_duplicate=False)
    return dict(parameters) | dict(model.named_buffers(remove_duplicate=False))


def own(*modules: nn.Module) -> list[Tensor]:
    """The parameters and buffers of modules themselves, in the time that a call has for it."""
    return [t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]


def as_linear(module: nn.Module) -> nn.Linear:
    """The layer as an `nn.Linear` on the same memory."""
    if isinstance(module, nn.Linear):
        return module
    held = dict(module.named_parameters())
    return layer_of(held["weight"].t(), held.get("bias")).train(module.training)


def layer_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer on the memory of a weight [N, K]."""
    n, k = weight.shape
    layer = nn.Linear(k, n, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def _turned(module: nn.Module) -> bool:
    """Whether a module is `x @ weight + bias` with a weight [K, N]: called in float64, it is asked, not its name."""
    held = dict(module.named_parameters())
    own = not type(module).__module__.startswith("torch.")  # whose modules with such a weight are embeddings
    if not own or not {"weight"} <= set(held) <= {"weight", "bias"} or any(True for _ in module.buffers()):
        return False
    weight, bias = held["weight"], held.get("bias")
    if not weight.is_floating_point() or (bias is not None and bias.shape != weight.shape[1:]):
        return False
    x = torch.randn(2, 3, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.to(weight.device)
    wide = {name: t.detach().double() for name, t in held.items()}
    try:
        with torch.no_grad(), meanwhile([*module.modules()], "training", False):
            got = torch.func.functional_call(module, wide, x)
    except Exception:  # whatever it wants, it is not one tensor [..., K]
        return False
    right = x @ wide["weight"] + (wide["bias"] if bias is not None else 0.0)
    if not isinstance(got, Tensor) or got.shape != right.shape or got.dtype != right.dtype:
        return False
    # Float64 is exact to 2^-52 of the sum of magnitudes for each of K products; another arithmetic is far off.
    scale = x.abs() @ wide["weight"].abs() + (wide["bias"].abs() if bias is not None else 0.0)
    return bool(((got - right).abs() <= len(weight) * torch.finfo(torch.float64).eps * scale).all())
