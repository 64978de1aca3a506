"""A decoder in a GGUF file as a transformers model, whose layers keep the blocks that the file holds.

transformers names the model and its sizes, the gguf package the tensors; opsmith reads blocks, one tensor at a time.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.checkpoints import header
from opsmith.checkpoints.empty import model_of, put, put_experts
from opsmith.checkpoints.folder import quiet, refused
from opsmith.checkpoints.header import CheckpointError, Header
from opsmith.compiler.modules.embeddings import factor_of
from opsmith.compiler.modules.mixtures import experts_of
from opsmith.ops import PackedExperts, PackedLinear
from opsmith.ops.packed_linear.gguf import BLOCKS
from opsmith.ops.packed_linear.module import PackedEmbedding

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SIZES = {  # of a configuration, that not every architecture's is passed on
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "norm_eps": "attention.layer_norm_epsilon",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
}
# Layers of the Gemmas of 27 billion weights, which scale attention by their width over their heads. No file says so:
# llama.cpp knows these models by their layers too.
_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_SCALED = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
_FREQUENCIES = "rope_freqs.weight"  # what the frequencies of a Llama 3.1 or later are divided by
_FACTORS = {f"{n}_factor": f"rope_factors_{n}.weight" for n in ("long", "short")}  # the same of Phi's


def _pairs_apart(config: Any, name: str, rows: Tensor) -> Tensor:
    """Rows of queries and keys, which the file has as pairs that are rotated together, as two halves of each head."""
    of = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    if (heads := of.get(name.split(".")[-2])) is None:
        return rows
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


# What a file's architecture does to the rows of its tensors.
_ROWS: dict[str, Callable[[Any, str, Tensor], Tensor]] = {
    "llama": _pairs_apart,
    **dict.fromkeys(
        ("gemma2", "gemma3", "nemotron"),
        # The weight of a norm, which the file has with the one that the model adds.
        lambda _, name, rows: rows - 1 if name.endswith("norm.weight") else rows,
    ),
    **dict.fromkeys(
        ("qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3", "starcoder2", "stablelm", "gpt-oss"),
        lambda _, name, rows: rows,
    ),
}


def load(file: Path, dtype: torch.dtype) -> nn.Module:
    """The model in a file, in eval mode: layers of few bits as the file has them, all else in a dtype.

    Raises:
        CheckpointError: the file is damaged, of an architecture that is not known, or not what its header says.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f'{error.name} is not installed: pip install "opsmith[llm]"') from error
    found = header.read(file)
    architecture = found.values.get("general.architecture")
    if architecture not in _ROWS:
        raise CheckpointError(
            f"{file}: its architecture is {str(architecture)[:64]!r}, of which the names are not known; there are: "
            f"{', '.join(sorted(_ROWS))}. transformers' from_pretrained(gguf_file=...) may know it: opsmith.optimize "
            "its model"
        )
    layers = found.values.get(f"{architecture}.block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(found.tensors):
        raise CheckpointError(f"{file}: it has {layers} layers and {len(found.tensors)} tensors")
    with refused(f"{file}: its values make no model"):
        config = _config(found)
        model = model_of(config, dtype)
    names = gguf.get_tensor_name_map(
        next(of for of, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    _Filling(found, config, _ROWS[architecture], dtype, names, set(found.tensors)).fill(model)
    return model.eval()  # type: ignore[no-any-return]


def _config(found: Header) -> Any:
    """What transformers makes of a file's values; it gets no tensors, and not the tokenizer, whose lists take long."""
    import transformers

    with quiet(), tempfile.TemporaryDirectory() as place:
        (Path(place) / "model.gguf").write_bytes(found.plain)
        config = transformers.AutoConfig.from_pretrained(place, gguf_file="model.gguf", local_files_only=True)
    if (table := found.tensors.get("token_embd.weight")) is not None:
        config.vocab_size = table.shape[0]
    architecture = found.values["general.architecture"]
    if architecture == "llama" and (experts := found.values.get("llama.expert_count")):
        used = found.values.get("llama.expert_used_count")
        its = {"num_local_experts": experts, "num_experts_per_tok": used}
        config = transformers.MixtralConfig(**config.to_dict() | its | {"model_type": "mixtral"})
    for name, key in _SIZES.items():
        size = found.values.get(f"{architecture}.{key}")
        if size and hasattr(config, name):
            setattr(config, name, size)
    if config.num_hidden_layers == _BY_WIDTH.get(architecture):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    _rotate(config, found, architecture)
    return config


def _rotate(config: Any, found: Header, architecture: str) -> None:
    """Have rotations as a file says, which not every architecture's are passed on; Gemma 3's layers that slide have
    frequencies of their own, which no file names.
    """
    values, own = found.values, config.rope_parameters.get("full_attention", config.rope_parameters)
    if (base := values.get(f"{architecture}.rope.freq_base")) is not None:
        own["rope_theta"] = base
    if (part := values.get(f"{architecture}.rope.dimension_count")) and "partial_rotary_factor" in own:
        own["partial_rotary_factor"] = part / (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
    said: Any = {n: values.get(f"{architecture}.rope.scaling.{n}") for n in ("type", *_SCALED.values())}
    if _FACTORS["long_factor"] in found.tensors:
        own |= {n: found.rows(of).view(torch.float32).flatten().tolist() for n, of in _FACTORS.items()}
        own["rope_type"] = "longrope"
    if said["type"] in (None, "none"):
        return
    if said["type"] not in ("linear", "yarn"):
        raise ValueError(f"rotations scaled by {said['type']!r}, where linear and yarn are known")
    if not 0 < said["factor"] < math.inf:
        raise ValueError(f"rotations scaled by a factor of {said['factor']}, where it is above 0")
    own["rope_type"] = said["type"]
    own |= {name: said[of] for name, of in _SCALED.items() if said[of] is not None}


@dataclass
class _Filling:
    """Gives a model without weights those of a file."""

    found: Header
    config: Any
    rows: Callable[[Any, str, Tensor], Tensor]
    dtype: torch.dtype
    names: Any
    unread: set[str]

    def fill(self, model: Any) -> None:
        """Every weight of a model.

        Raises:
            CheckpointError: the file lacks one or has others, or one has another shape.
        """
        tied: dict[str, PackedLinear] = {}  # by the file's name
        for path, module in list(model.named_modules()):
            of = self.of(path, "weight") if isinstance(module, nn.Linear | nn.Embedding) else None
            if of is None or self.found.tensors[of].type.lower() not in BLOCKS:
                continue
            if of not in tied:
                rows = self.read(of, module.weight)
                with refused(f"{self.found.file} does not load: {of}"):
                    tied[of] = PackedLinear.from_blocks(rows, format=self.found.tensors[of].type.lower())
            packed = tied[of]
            if isinstance(module, nn.Embedding):
                factor = factor_of(module)
                if factor is None:
                    raise self.wrong(f"{path} is an embedding that does more than to read rows")
                packed = PackedEmbedding(packed, factor=factor, dtype=self.dtype)  # type: ignore[assignment]
            elif module.bias is not None:
                packed.bias = self.floats(self.of(path, "bias"), f"{path}.bias", module.bias)
            put(model, path, packed)
        for path, module in list(experts_of(model)):
            put_experts(model, path, *self.experts(path, module))
        done: dict[str | None, nn.Parameter] = {}
        for path, parameter in list(model.named_parameters(remove_duplicate=False)):
            if not parameter.is_meta:  # a mixture's
                continue
            parent, _, name = path.rpartition(".")
            if (of := self.of(parent, name)) not in done:
                done[of] = nn.Parameter(self.floats(of, path, parameter), requires_grad=False)
            put(model, path, done[of])
        self.frequencies(model)
        if self.unread:
            raise self.wrong(
                f"{min(self.unread)} and {len(self.unread) - 1} other tensors belong to no layer"
            )

    def of(self, path: str, name: str) -> str | None:
        """The file's name of a module's parameter; None where the file has none of it."""
        if (known := self.names.get_name(f"{path}.{name}")) is not None:  # as sinks
            name = "weight"
        known = known or self.names.get_name(path)
        known = known or ("output" if path == "lm_head" else None)  # Gemma 2 has no name for it
        wanted = f"{known}.{name}"
        if known == "output" and wanted not in self.found.tensors:
            wanted = f"token_embd.{name}"  # which it is tied to
        return wanted if wanted in self.found.tensors else None

    def experts(self, path: str, module: Any) -> list[PackedExperts | nn.Parameter]:
        """Gate and up of a mixture together, and down: packed where the file has them in formats that stay."""
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        names = {one: [self.of(f"{path}.{name}", "weight") for name in of] for one, of in parts.items()}
        kinds = [{self.found.tensors[n].type.lower() if n else "" for n in its} for its in names.values()]
        packed = all(len(its) == 1 and its <= BLOCKS.keys() for its in kinds)
        made: list[PackedExperts | nn.Parameter] = []

        def together(these: Sequence[Tensor], dim: int) -> Tensor:
            if module.is_concatenated or len(these) == 1:
                return torch.cat(list(these), dim)
            return torch.stack(list(these), dim + 1).flatten(dim, dim + 1)  # gate and up take turns

        for (one, its), (kind, *_) in zip(names.items(), kinds, strict=True):
            held = getattr(module, one)
            e, n, k = (held.mT if module.is_transposed else held).shape
            wanted = torch.empty(e, n // len(its), k, device="meta")
            if module.has_bias:
                each = [
                    self.floats(self.of(f"{path}.{name}", "bias"), f"{path}.{one}_bias", wanted[..., 0])
                    for name in parts[one]
                ]
                put(module, f"{one}_bias", nn.Parameter(together(each, 1), requires_grad=False))
            if not packed:
                each = [self.floats(name, f"{path}.{one}", wanted) for name in its]
                rows = together(each, 1)
                rows = rows.mT.contiguous() if module.is_transposed else rows
                made.append(nn.Parameter(rows, requires_grad=False))
                continue
            each = [self.read(name, wanted).view(e, n // len(its), -1) for name in its if name]
            with refused(f"{self.found.file} does not load: {its[0]}"):
                them = (
                    PackedLinear.from_blocks(together(t, 0), format=kind) for t in zip(*each, strict=True)
                )
                made.append(PackedExperts.of(them, e))
        return made

    def floats(self, name: str | None, path: str, wanted: Tensor) -> Tensor:
        """A parameter's numbers; those of few bits that no layer keeps are unpacked."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        if name is None:
            raise self.wrong(f"it has no tensor for {path}")
        kind = self.found.tensors[name].type
        rows = self.read(name, wanted)
        if kind in _FLOATS:
            return rows.view(_FLOATS[kind]).view(wanted.shape).to(self.dtype)
        try:
            numbers = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[kind]))
        except NotImplementedError as error:
            raise self.wrong(f"{name} is of type {kind}, which nothing here unpacks") from error
        return numbers.view(wanted.shape).to(self.dtype)

    def read(self, name: str, wanted: Tensor) -> Tensor:
        """The bytes of a tensor's rows, in the model's order."""
        tensor = self.found.tensors[name]
        self.unread.discard(name)
        if tensor.shape not in (tuple(wanted.shape), tuple(wanted[0].shape) if len(wanted) == 1 else None):
            raise self.wrong(f"{name} is {list(tensor.shape)} where its values say {list(wanted.shape)}")
        rows = self.found.rows(name)
        if tensor.type in _FLOATS:
            numbers = rows.view(_FLOATS[tensor.type])
            rows = self.rows(self.config, name, numbers.view(wanted.shape)).contiguous().view(torch.uint8)
            return rows.view(-1, rows.shape[-1])
        return self.rows(self.config, name, rows)

    def frequencies(self, model: nn.Module) -> None:
        """Divide a rotation's frequencies by what the file has for that."""
        self.unread -= {_FREQUENCIES, *_FACTORS.values()}
        if _FREQUENCIES not in self.found.tensors:
            return
        by = self.found.rows(_FREQUENCIES).view(torch.float32).flatten()
        for module in model.modules():
            held: Any = getattr(module, "inv_freq", None)
            if isinstance(held, Tensor):
                if held.shape != by.shape or not bool((by > 0).all()):
                    raise self.wrong(f"{_FREQUENCIES} is not for {len(held)} frequencies")
                held.div_(by)

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.found.file} does not load: {what}")
