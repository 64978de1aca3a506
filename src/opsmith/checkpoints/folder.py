"""Local Hugging Face folders: what loads, and one clear line for each reason why one does not."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import nn

from opsmith.checkpoints.header import CheckpointError

INDEX = "model.safetensors.index.json"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
LOCAL = {"local_files_only": True, "trust_remote_code": False}


@contextlib.contextmanager
def quiet(*, file: bool = False) -> Iterator[None]:
    """Keeps transformers' progress bars and advice off the terminal; its errors still come.

    Of a GGUF `file` there is a bar that asks nobody, so that all of stderr is silent.
    """
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()) if file else contextlib.nullcontext():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """What is raised inside becomes one line behind `what`: transformers raises whatever a damaged file leads to."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: {one_line(error)}") from error


def configuration(folder: Path) -> Any:
    """The configuration of the model in a folder.

    Raises:
        CheckpointError: when there is no such folder, or no model in it.
    """
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError('transformers is not installed: pip install "opsmith[hf]"') from error
    check(folder)
    with quiet(), refused(f"{folder / 'config.json'}"):
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    if (folder / "hf_quant_config.json").is_file() and getattr(config, "quantization_config", None) is None:
        config.quantization_config = {"quant_method": "modelopt"}  # which has it in a file of its own
    return config


def load(folder: Path, config: Any = None) -> nn.Module:
    """The model in a folder, whose configuration may be known, in eval mode and in the dtype it was saved in.

    Nothing is downloaded, no code from the folder runs, and weights are read from safetensors only.

    Raises:
        CheckpointError: when there is no such folder, or no model in it that can be loaded.
    """
    if config is None:
        config = configuration(folder)
    import transformers

    with quiet():
        causal = any(name.endswith(_CAUSAL) for name in config.architectures or ())
        family = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        try:
            model, info = family.from_pretrained(
                folder,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **LOCAL,
            )
        except Exception as error:
            kept = getattr(config, "quantization_config", None) is not None
            hint = "; its layers are in few bits, which opsmith.load reads without that library" * kept
            raise CheckpointError(f"{folder} does not load: {one_line(error)}{hint}") from error
    if info["mismatched_keys"]:
        name, there, wanted = min(info["mismatched_keys"])
        raise CheckpointError(
            f"config.json and the weights in {folder} do not belong together: {name} is "
            f"{list(there)} in the file and {list(wanted)} by config.json"
        )
    if scales := [name for name in info["unexpected_keys"] if "weight_scale" in name]:
        raise CheckpointError(f"{folder} has {min(scales)}, but config.json no quantization_config for it")
    if missing := sorted(info["missing_keys"]):
        whole = len(missing) == len(model.state_dict())
        what = f"no weight in {folder} belongs to a {type(model).__name__}"
        if not whole:
            what = f"{folder} has no tensor for {missing[0]} and {len(missing) - 1} others of its model"
        if whole or causal:
            raise CheckpointError(f"{what}; are config.json and the weights of one model?")
        # A head that the folder's own model does without, as BERT's pooler.
        warnings.warn(f"{what}: their numbers are random", stacklevel=2)
    return model.eval()  # type: ignore[no-any-return]


def check(folder: Path) -> None:
    """What can be said of a folder before transformers looks at it."""
    from safetensors import SafetensorError, safe_open
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not folder.exists():
        raise CheckpointError(f"there is no folder {folder}; name one that save_pretrained wrote")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name the folder it lies in")
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(
            f"{folder} holds no model: config.json is missing; name a folder that save_pretrained wrote"
        )
    data = _json(config)
    if not isinstance(data.get("model_type"), str):
        raise CheckpointError(f"{config} names no model_type, so what model it is stays unknown")
    if data["model_type"] not in CONFIG_MAPPING:
        hint = "it runs code of its own, which is never loaded" if "auto_map" in data else "update it"
        raise CheckpointError(
            f"model type {data['model_type'][:64]!r} is unknown to the installed transformers: {hint}, "
            "or load the model yourself and call opsmith.optimize"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(
            f"{folder} has no *.safetensors, the only weights that are read; "
            "convert them with save_pretrained"
        )
    names = {file.name for file in weights}
    if "model.safetensors" not in names and (index := folder / INDEX).is_file():
        where = _json(index).get("weight_map")
        named = set(map(str, where.values())) if isinstance(where, dict) else set()
        if missing := sorted(named - names):
            raise CheckpointError(
                f"{folder} has no {missing[0][:64]!r}, which {INDEX} names, nor {len(missing) - 1} others; copy or "
                "download them again"
            )
    for file in weights:  # a damaged one is named before the model is built; only headers are read here
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} is damaged ({one_line(error)}); copy or download it again"
            ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{file} is no JSON object, but a {type(data).__name__}; copy or download it again"
        )
    return data


def one_line(error: Exception) -> str:
    return shorten(str(error), 240) or type(error).__name__
