"""What a user may say about a model: everything optional, in code or in `opsmith.toml`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Format = Literal["bf16", "int8", "int8_dynamic", "int4"]


class Config(BaseModel):
    """Choices for `opsmith.optimize`; see `docs/guide/optimize.md`.

    >>> Config(dtype="bfloat16", pin={"attention": "native"}, forbid={"linear": ["onednn"]})

    Attributes:
        dtype: the dtype to run in; None leaves the model's own.
        device: where the model is to run; None leaves it where it is.
        quantize: pack the weights of linear layers: "bf16", "int8", "int8_dynamic" or "int4"; see `packed_linear`.
        quantize_embedding: with `quantize`, embeddings read int8 rows too: of the packed output layer where the two are
            tied, so that one packed weight serves both, else of a packed table of their own.
        quantize_group: of int4, how many numbers share a scale: 32, 64 or 128.
        quantize_symmetric: of int4, whether 0 lies in the middle of a group's range, or each group has its own zero.
        quantize_formats: the format of some layers, by patterns of their names: `{"*v_proj": "int8"}`; the first that
            matches holds. Of a model that `quantize="int4"` packs, the output layer is int8 unless it is named here.
        quantize_release: give the packed layers' own weights back to the system once everything is proved; the model
            then cannot be restored, copied or saved, only used.
        quantize_skip: names of layers to leave alone; patterns such as "*lm_head" are allowed.
        mla_cache: how latent attention keeps its rows: "split", "joint", "tiled" or "int8_tiled" (see `MLACache`);
            "off" leaves such attention as it is.
        mla_block: tokens in a block of that cache, 1 to 256.
        cache: what a decoder that is called with an empty cache of transformers' keeps its keys and values in: "paged",
            blocks (see `PagedCache`); "paged_int8", blocks of int8 with scales; "off", that cache.
        cuda_graphs: on a GPU, replay a call of sizes seen before as one launch.
        pin: the implementation to use, by operator ("attention") or by site ("attention_3").
        forbid: implementations never to use, by operator or by site.
        inductor: let PyTorch's Inductor compete for the operators it generates code for; OPSMITH_INDUCTOR=0
            turns the default off.
        inductor_seconds: time its compilations may take in all; once it is spent none begins, and what would
            need one is reported as not tried.
        tune: measure the contestants; False takes the first that is able, in the card's order.
        verify: prove every site on the example inputs, and roll back what fails.
        frozen: promise that the model's code and attributes will not change, so that a call asks nothing about them;
            see `docs/guide/optimize.md` for what then goes unnoticed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None
    quantize: Format | None = None
    quantize_embedding: bool = False
    quantize_group: Literal[32, 64, 128] = 32
    quantize_symmetric: bool = True
    quantize_formats: dict[str, Format] = Field(default_factory=dict)
    quantize_release: bool = False
    quantize_skip: list[str] = Field(default_factory=list)
    mla_cache: Literal["split", "joint", "tiled", "int8_tiled", "off"] = "split"
    mla_block: int = Field(default=64, ge=1, le=256)
    cache: Literal["paged", "paged_int8", "off"] = "paged"
    cuda_graphs: bool = True
    pin: dict[str, str] = Field(default_factory=dict)
    forbid: dict[str, list[str]] = Field(default_factory=dict)
    inductor: bool = Field(default_factory=lambda: os.environ.get("OPSMITH_INDUCTOR") != "0")
    inductor_seconds: float = 10.0
    tune: bool = True
    verify: bool = True
    frozen: bool = False

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file; an unknown key or a wrong value is one clear error."""
        path = Path(path)
        try:
            data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"config: {path} can't be read: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"config: {path} is not valid TOML: {error}") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: dict[str, Any], origin: str = "config") -> Config:
        """A Config from a dictionary, with one line for the first thing that is wrong."""
        try:
            return cls(**data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(p) for p in first["loc"]) or "?"
            known = ", ".join(cls.model_fields)
            raise ValueError(f"{origin}: {field[:200]}: {first['msg']}; the fields are {known}") from None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return None if self.dtype is None else DTYPES[self.dtype]
