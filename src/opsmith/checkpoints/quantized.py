"""Hugging Face folders whose layers are in few bits, as others quantized them: their numbers as packed layers.

What a method calls its tensors, and how it lays four bits into words, is known here; nothing of its own library runs.

Source: the checkpoints of AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors, DeepSeek-V3 (fp8), and GPT-OSS (mxfp4).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from opsmith.checkpoints import compressed
from opsmith.checkpoints.compressed import Parts, from_words
from opsmith.checkpoints.empty import model_of, put, put_experts
from opsmith.checkpoints.folder import one_line, refused
from opsmith.checkpoints.header import CheckpointError
from opsmith.compiler.modules.mixtures import PackedMixture, experts_of
from opsmith.ops import PackedExperts, PackedLinear

_LOG = logging.getLogger("opsmith")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight numbers that follow each other lies in a word

EXPERT = ("gate_proj", "up_proj", "down_proj")
MIXTRALS = ("w1", "w3", "w2")  # the same in Mixtral's folders

Make = Callable[[Parts, dict[str, Any]], PackedLinear]


def _gptq(parts: Parts, how: dict[str, Any]) -> PackedLinear:
    bits, group = how.get("bits"), how.get("group_size")
    if (form := how.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise ValueError(f"its checkpoint_format is {form!r}, where gptq and gptq_v2 are known")
    q, groups = from_words(parts["qweight"].t(), bits), parts.get("g_idx")
    zero = from_words(parts["qzeros"], bits, len(q)) + (form == "gptq")  # saved as one less
    if bits == 8:
        return compressed.eight_bits(q, parts["scales"].t(), zero, group, groups)
    return compressed.four_bits(q, parts["scales"], zero, group, groups)


def _awq(parts: Parts, how: dict[str, Any]) -> PackedLinear:
    if (bits := how.get("bits", how.get("w_bit"))) != 4:
        raise ValueError(f"it has {bits} bits, where 4 are known")
    if (version := str(how.get("version", "gemm")).lower()) != "gemm":
        raise ValueError(f"its version is {version!r}, where gemm is known")
    words = (from_words(parts[name], 4).unflatten(1, (-1, 8)) for name in ("qweight", "qzeros"))
    q, zero = (eights[..., _AWQ_ORDER].flatten(1) for eights in words)
    group = how.get("group_size", how.get("q_group_size"))
    return compressed.four_bits(q.t(), parts["scales"], zero, group, None)


def _mxfp4(parts: Parts, how: dict[str, Any]) -> PackedLinear:
    return PackedLinear.from_float4(parts["blocks"].flatten(1), parts["scales"])


# With the ends of names, and which says that it is one.
_METHODS: dict[str, tuple[Make, tuple[str, ...], str]] = {
    "gptq": (_gptq, ("qweight", "qzeros", "scales", "g_idx"), "qweight"),
    "awq": (_awq, ("qweight", "qzeros", "scales"), "qweight"),
    "mxfp4": (_mxfp4, ("blocks", "scales"), "blocks"),
    **dict.fromkeys(
        ("fp8", "fbgemm_fp8", "modelopt", "compressed-tensors"),
        (compressed.read, compressed.ENDS, "weight_scale"),
    ),
}


class _Files:
    """The tensors of all files of a folder, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, dict[str, tuple[Path, str]]()
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for of in opened.keys():  # noqa: SIM118  no mapping
                    if (name := of.removesuffix("_inv")) in self.file:  # which DeepSeek's scales end in
                        first = self.file[name][0].name
                        raise CheckpointError(f"{folder}: {name} is in {first} and in {file.name}")
                    self.file[name] = file, of
        self.unread = set(self.file)

    def get(self, name: str) -> Tensor | None:
        if name not in self.file:
            return None
        self.unread.discard(name)
        file, of = self.file[name]
        with safe_open(file, framework="pt") as opened:
            found: Tensor = opened.get_tensor(of)
        return found


def load(folder: Path, config: Any, dtype: torch.dtype) -> nn.Module:
    """The model in a folder whose configuration says how it was quantized, in eval mode.

    Raises:
        CheckpointError: a method, or a form of one, that is not known; tensors that are missing or do not fit.
    """
    how = config.quantization_config
    how = dict(how if isinstance(how, dict) else how.to_dict())
    method = str(how.get("quant_method"))
    if method not in _METHODS:
        raise CheckpointError(
            f"{folder} is quantized by {method[:64]!r}, which is not known; there are: {', '.join(_METHODS)}"
        )
    make, ends, says = _METHODS[method]
    del config.quantization_config  # so that transformers makes a plain model
    files = _Files(folder)
    with refused(f"{folder / 'config.json'} makes no model"):
        model = model_of(config, dtype)
    for path, buffer in model.named_buffers():  # as what DeepSeek's router adds to its scores
        if (its := files.get(path)) is not None and its.shape == buffer.shape:
            buffer.copy_(its)

    def parts_of(name: str) -> Parts:
        parts = {end: t for end in ends if (t := files.get(name + end)) is not None}
        scale, weight = parts.get("weight_scale"), parts.get("weight")
        if scale is not None and weight is not None and scale.shape in ((), (1,)) and weight.dim() == 2:
            parts["weight_scale"] = scale.reshape(1, 1).expand(len(weight), 1)  # one for the whole tensor
        return parts

    def layer(shape: tuple[int, ...], path: str, *more: str, parts: Parts | None = None) -> PackedLinear:
        try:
            parts = parts or parts_of(f"{path}.")
            if more:
                each = (parts, *(parts_of(f"{other}.") for other in more))
                parts = {end: _rows(end, [one.get(end) for one in each]) for end in parts}
            its = how.get("dynamic") or {}  # what GPTQModel says of some layers
            own = (its[at] for at in its if re.match(at.removeprefix("+:"), path))
            said = compressed.scheme_of(how, path) if method == "compressed-tensors" else how | next(own, {})
            packed = make(parts, said)
            if (got := (packed.out_features, packed.in_features)) != shape:
                raise ValueError(f"it is {list(got)} where the configuration says {list(shape)}")
        except Exception as error:  # whatever damaged tensors, or a configuration of others, lead to
            what = f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
            raise CheckpointError(f"{folder} does not load: {path}: {what}") from error
        return packed

    def stacked(path: str, module: Any) -> PackedExperts:
        e, *shape = getattr(module, path.rpartition(".")[2]).shape
        parts = parts_of(f"{path}_")
        if others := [list(t.shape) for t in parts.values() if len(t) != e]:
            raise CheckpointError(
                f"{folder} does not load: {path} has {others[0]}, where there are {e} experts"
            )
        shape = tuple(reversed(shape) if module.is_transposed else shape)
        each = ({end: t[i] for end, t in parts.items()} for i in range(e))
        return PackedExperts.of((layer(shape, path, parts=its) for its in each), e)

    for path, module in list(experts_of(model)):
        for at, gate, up, down in ((path, *EXPERT), (as_mixtral(path), *MIXTRALS)):
            if f"{at}.0.{down}.{says}" in files.file:
                e, n, k = module.gate_up_proj.shape
                each = [f"{at}.{i}" for i in range(e)]
                with refused(f"{folder} does not load: {at}"):
                    first = PackedExperts.of((layer((n, k), f"{i}.{gate}", f"{i}.{up}") for i in each), e)
                    last = PackedExperts.of((layer((k, n // 2), f"{i}.{down}") for i in each), e)
                put_experts(model, path, first, last)
        if f"{path}.down_proj_{says}" in files.file:  # all experts' together
            put_experts(model, path, *(stacked(f"{path}.{name}", module) for name in PackedMixture.weights))
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or f"{path}.{says}" not in files.file:
            continue
        packed = layer(tuple(module.weight.shape), path)
        if module.bias is not None:
            packed.bias = _float(files, f"{path}.bias", module.bias, dtype)
        put(model, path, packed)
    done: dict[int, nn.Parameter] = {}
    names = {module: f"{path}.weight" for path, module in model.named_modules()}
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        tied = path == "lm_head.weight" and config.get_text_config().tie_word_embeddings
        name = path if path in files.file or not tied else names[model.get_input_embeddings()]
        name = other if (other := as_mixtral(name)) in files.file else name
        if id(parameter) not in done:
            value = _float(files, name, parameter, dtype)
            done[id(parameter)] = nn.Parameter(value, requires_grad=False)
        put(model, path, done[id(parameter)])
    if scaled := [name for name in files.unread if name.endswith(".act.scales")]:  # by AWQ
        raise CheckpointError(f"{folder} does not load: {min(scaled)}: scales of activations are not known")
    if files.unread:
        _LOG.info("%s: %d tensors, as %s, belong to no layer", folder, len(files.unread), min(files.unread))
    return model.eval()  # type: ignore[no-any-return]


def _rows(end: str, parts: list[Any]) -> Tensor:
    """The tensors of gate and up as those of one layer of the rows of both."""
    if any(t is None for t in parts):
        raise KeyError(end)
    if end == "weight_shape":
        return torch.stack([sum(t[0] for t in parts), parts[0][1]])
    return parts[0] if "g_idx" in end else torch.cat(parts, int(end in ("qweight", "qzeros", "scales")))


def as_mixtral(name: str) -> str:
    """What Mixtral's folders call a parameter of a mixture."""
    return name.replace(".mlp.", ".block_sparse_moe.")


def _float(files: _Files, name: str, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    found = files.get(name)
    # Fewer bits are nothing without the scales that belong to them.
    if found is None or found.shape != wanted.shape or not found.is_floating_point() or found.itemsize < 2:
        got = "has no tensor" if found is None else f"has {list(found.shape)} {found.dtype}"
        raise CheckpointError(
            f"{files.folder} does not load: it {got} for {name}, where floats {list(wanted.shape)} of 16 bits or more, "
            "or fewer with their scales, are known"
        )
    return found.to(dtype)
