"""Gemma, converted once: what keeps the folder whole, and that the model is the file's."""

import json
import os
import tempfile
import threading
import time
from pathlib import Path

import pytest
from tests.gemma import gemma_folder  # noqa: F401

from opsmith.cli import CommandError
from opsmith.cli.llm import gemma as real


class Conversions:
    """Stands in for the conversion: counts, and writes two small files."""

    def __init__(self) -> None:
        self.count = 0
        self.fails: BaseException | None = None

    def __call__(self, place: Path) -> None:
        self.count += 1
        place.mkdir()
        (place / "config.json").write_text("{}")
        if self.fails is not None:
            raise self.fails
        time.sleep(0.05)  # so that a second thread comes while this one is at it
        (place / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Conversions:
    """A cache of the test's own, and a conversion that takes no time."""
    stand_in = Conversions()
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(real, "missing", lambda: None)
    monkeypatch.setattr(real, "_convert", stand_in)
    return stand_in


def test_converted_once(conversions: Conversions, tmp_path: Path) -> None:
    places = {real.folder() for _ in range(3)}
    assert places == {tmp_path / "cache/models/gemma-3-270m-q4_k_m"}
    assert conversions.count == 1


def test_two_at_a_time_convert_once(conversions: Conversions) -> None:
    threads = [threading.Thread(target=real.folder) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert conversions.count == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "no manifest", "manifest cut"])
def test_damage_is_noticed(damage: str, conversions: Conversions) -> None:
    weights = real.folder() / "model.safetensors"
    manifest = weights.with_name("opsmith.json")
    if damage == "gone":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "manifest cut":
        manifest.write_text(manifest.read_text()[:40])
    else:
        weights.write_bytes(b"weightz" if damage == "changed" else b"wei")
    assert (real.folder() / "model.safetensors").read_bytes() == b"weights"
    assert conversions.count == 2


def test_nothing_is_left_of_a_conversion_that_was_killed(conversions: Conversions, tmp_path: Path) -> None:
    conversions.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        real.folder()
    assert list((tmp_path / "cache/models").iterdir()) == []
    building = tmp_path / "cache/kernels/building"
    (building / "gemma-3-270m-q4_k_m.left").mkdir()  # by a process that could not even clean up
    conversions.fails = None
    assert json.loads((real.folder() / "opsmith.json").read_text()).keys() == {
        "config.json",
        "model.safetensors",
    }
    assert list(building.iterdir()) == []


def test_a_cache_that_cannot_be_written(
    conversions: Conversions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "file/cache"))  # below a file: also root cannot
    expected = tmp_path / f"opsmith-{os.getuid()}" / "models/gemma-3-270m-q4_k_m"
    assert real.folder() == real.folder() == expected
    assert conversions.count == 1


def test_a_full_disk_is_one_line(conversions: Conversions, tmp_path: Path) -> None:
    conversions.fails = OSError(28, "No space left on device")
    with pytest.raises(
        CommandError, match=r"No space left on device.*OPSMITH_CACHE to one with 1\.4 GB free"
    ):
        real.folder()
    assert conversions.count == 2  # in the cache, and in the temporary folder
    assert not list(tmp_path.rglob("config.json"))


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "PACKAGE", "no_such_package")
    with pytest.raises(CommandError, match=r'no_such_package is not installed: pip install "opsmith\[llm\]"'):
        real.folder()


def test_the_architecture_is_the_files(gemma_folder: Path) -> None:  # noqa: F811
    from transformers import AutoConfig
    from transformers.integrations.gguf import read_gguf_metadata

    config = AutoConfig.from_pretrained(gemma_folder)
    said, _ = read_gguf_metadata(str(gemma_folder / real.GGUF))
    names = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.layer_norm_rms_epsilon": pytest.approx(config.rms_norm_eps),
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
    }
    assert {name: said[f"gemma3.{name}"] for name in names} == names
    assert said["tokenizer.ggml.tokens"] == config.vocab_size
