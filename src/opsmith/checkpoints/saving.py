"""Models with packed layers as folders: in compressed-tensors' layout, one file at a time, whole or not at all."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from opsmith.checkpoints import compressed
from opsmith.checkpoints.compressed import Scheme
from opsmith.checkpoints.empty import empty
from opsmith.checkpoints.folder import INDEX, quiet
from opsmith.checkpoints.quantized import EXPERT, MIXTRALS, as_mixtral
from opsmith.compiler.modules.embeddings import Rows
from opsmith.compiler.modules.mixtures import PackedMixture, experts_of
from opsmith.compiler.modules.quantize import Packing
from opsmith.compiler.session import Session
from opsmith.ops import PackedExperts, PackedLinear
from opsmith.ops.packed_linear.module import PackedEmbedding

_CONFIG = "config.json"
_MOST = 5_000_000_000  # bytes of a file

Packed = dict[str, PackedLinear]
Schemes = dict[str, tuple[Scheme, dict[str, None]]]  # and the layers that each is of, in order


@torch.no_grad()
def save(model: Any, folder: str | Path, *, max_shard_size: int = _MOST) -> None:
    """Write a model with its packed layers as they are: a folder that `opsmith.load`, transformers and vLLM read.

    Layers are in compressed-tensors' layout, with the values that they compute with to the last bit; all else as the
    model has it. Files are put together beside what the folder holds and take its place at the end, config.json last.

    >>> opsmith.save(opsmith.optimize(model, quantize="int8"), "model-int8")
    >>> model = opsmith.load("model-int8")

    Args:
        model: of transformers, after `optimize(model, quantize=...)`, or of a file or folder that `load` read.
        folder: is made where it is not there; another model's config and weights in it are replaced.
        max_shard_size: bytes of one file of weights; a larger tensor has one of its own.

    Raises:
        TypeError, ValueError: what is no model of transformers, has no packed layer, or one that the layout has no
            form of, as Q4_K; nothing is written then.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "save_pretrained"):
        raise TypeError(f"save: expected a model of transformers, got {type(model).__name__}")
    if type(max_shard_size) is not int or max_shard_size < 1:  # True is an int too
        raise ValueError(f"save: max_shard_size must be a number of bytes, got {max_shard_size!r}")
    layers, tables = _packed(model)
    if not layers:
        raise ValueError('save: no layer is packed; optimize(model, quantize="int8") packs them')
    its, place = _config(model, layers, tables), Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=place) as held, quiet():
        made, schemes = Path(held), Schemes()
        _write(_tensors(model, layers, tables, schemes), made, max_shard_size)
        if schemes:
            its.quantization_config = _how(model, list(schemes.values()))
        its.save_pretrained(made)
        if (generation := getattr(model, "generation_config", None)) is not None:
            generation.save_pretrained(made)
        for old in (place / _CONFIG, *place.glob("model*.safetensors"), place / INDEX):
            old.unlink(missing_ok=True)
        for file in sorted(made.iterdir(), key=lambda file: file.name == _CONFIG):
            file.replace(place / file.name)


def _packed(model: nn.Module) -> tuple[Packed, Packed]:
    """The packed layers and experts of a model by their names, its own and those that stand in, and its tables."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tables = {path: one.table for path, one in modules.items() if isinstance(one, PackedEmbedding)}
    layers = {path: one for path, one in modules.items() if type(one) in (PackedLinear, PackedExperts)}
    for path in tables:
        del layers[f"{path}.table"]
    session = getattr(model, "opsmith", None)
    packing = session.packing if isinstance(session, Session) else Packing()
    packing.follow()  # weights that changed since
    one: Any
    owners = {p: m for p, m in modules.items() if PackedExperts in map(type, m.children())}
    for path, owner in (owners | {p: one.owner for p, one in packing.packed.items()}).items():
        plain = isinstance(owner, nn.Linear | nn.Embedding)
        if not plain and (getattr(owner, "is_transposed", True) or owner.has_bias):
            kind = type(owner).__name__
            raise ValueError(f"save: {path} is a {kind}, which compressed-tensors has no form of")
    for path, one in packing.packed.items():
        if isinstance(one, PackedMixture):
            layers |= {f"{path}.{name}": weight for name, weight in zip(one.weights, one.packed, strict=True)}
        else:
            (tables if isinstance(one, Rows) else layers)[path] = one
    return layers, tables


def _tensors(model: Any, layers: Packed, tables: Packed, schemes: Schemes) -> Iterator[tuple[str, Tensor]]:
    """All that a folder holds of a model, each made when it is asked for; and by the way how layers are held."""
    named, seen = _names(model), set[int]()
    calls = MIXTRALS if named is as_mixtral else EXPERT
    for key, t in model.state_dict(keep_vars=True).items():
        path, _, name = key.rpartition(".")
        packed = key in layers or (path in layers and name != "bias")
        if packed or path in tables or path.removesuffix(".table") in tables or id(t) in seen:
            continue
        seen.add(id(t))  # a tied one is written once
        yield named(key), t.detach()
    for path, table in tables.items():
        yield named(f"{path}.weight"), table.dequantize()
    for path, layer in layers.items():
        for name, one, rows in _parts(path, layer, calls):
            try:
                scheme, tensors = compressed.write(one, rows)
            except ValueError as error:
                raise ValueError(f"save: {path}: {error}") from error
            if scheme is not None:
                schemes.setdefault(json.dumps(scheme), (scheme, {}))[1][_target(named(name))] = None
            for end, t in tensors.items():
                yield f"{named(name)}.{end}", t


def _names(model: Any) -> Callable[[str], str]:
    """What a folder calls a module of a model."""
    return as_mixtral if model.config.model_type == "mixtral" else str


def _parts(path: str, layer: Any, calls: Sequence[str]) -> Iterator[tuple[str, PackedLinear, slice]]:
    """A layer; or those of each expert, which folders hold by themselves, gate and up apart."""
    if type(layer) is not PackedExperts:
        yield path, layer, slice(None)
        return
    (at, _, name), half = path.rpartition("."), layer.out_features // 2
    both = ((calls[0], slice(half)), (calls[1], slice(half, None)))
    for e, one in enumerate(layer):
        for call, rows in both if name == "gate_up_proj" else ((calls[2], slice(None)),):
            yield f"{at}.{e}.{call}", one, rows


def _target(name: str) -> str:
    """What a configuration calls a layer; the same one of all experts of a mixture by one pattern."""
    its = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)", name)
    return name if its is None else rf"re:{re.escape(its[1])}\.\d+\.{its[2]}$"


def _how(model: nn.Module, schemes: list[tuple[Scheme, dict[str, None]]]) -> dict[str, Any]:
    """A configuration's word on how layers are held: all of one class, or those of several groups by their names."""
    targets = {target for _, its in schemes for target in its}
    # An output layer's class is another one in vLLM.
    one = ["Linear", *{"lm_head"} & targets] if len(schemes) == 1 else None
    formats = {scheme["format"] for scheme, _ in schemes}
    named, plain = _names(model), []
    for path, module in model.named_modules():
        weight = None if isinstance(module, nn.Embedding | PackedExperts) else getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2 and named(path) not in targets:
            plain.append(named(path))
    for path, _ in experts_of(model):
        pattern = f"re:{re.escape(named(path))}"
        if not any(target.startswith(pattern) for target in targets):
            plain.append(pattern)
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{i}": scheme | {"targets": one or list(its)} for i, (scheme, its) in enumerate(schemes)
        },
        "ignore": plain,
    }


def _config(model: Any, layers: Packed, tables: Packed) -> Any:
    """The configuration for a folder: of weights that are not tied where the table and its output layer now differ.

    Raises:
        ValueError: the model has buffers that no file holds, as frequencies of rotations, and that it does not make.
    """
    its = copy.deepcopy(model.config)
    its.architectures, its.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    held = model.state_dict(keep_vars=True)
    fresh = dict(empty(lambda: type(model)(copy.deepcopy(its))).named_buffers())
    for name, buffer in model.named_buffers():
        if name in fresh and name not in held and not fresh[name].to(buffer).equal(buffer):
            raise ValueError(
                f"save: no folder holds {name}, and config.json makes others; keep the model's file"
            )
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    if any((path in layers or path in tables) and module in ends for path, module in model.named_modules()):
        for one in (its, its.get_text_config()):
            one.tie_word_embeddings = False
    return its


def _write(tensors: Iterator[tuple[str, Tensor]], place: Path, most: int) -> None:
    """Files of so many bytes at most, and, of several, an index that says what is where."""
    files: list[dict[str, int]] = []
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        save_file(shard, place / f"{len(files)}", metadata={"format": "pt"})
        files.append({name: t.nbytes for name, t in shard.items()})
        shard.clear()

    for name, t in tensors:
        if shard and sum(one.nbytes for one in shard.values()) + t.nbytes > most:
            flush()
        # Of memory that several share, safetensors takes none.
        shard[name] = t.contiguous() if t.untyped_storage().nbytes() == t.nbytes else t.clone().contiguous()
    flush()
    if len(files) == 1:
        (place / "0").rename(place / "model.safetensors")
        return
    where: dict[str, str] = {}
    for i, names in enumerate(files):
        file = f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        (place / f"{i}").rename(place / file)
        where |= dict.fromkeys(names, file)
    sizes = {"total_size": sum(sum(names.values()) for names in files)}
    (place / INDEX).write_text(json.dumps({"metadata": sizes, "weight_map": where}, indent=2))
