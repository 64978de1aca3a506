"""OPSMITH_VLLM: which parts are registered, and what a word that is none says."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import opsmith_vllm


def test_vllm_finds_the_plugin() -> None:
    (point,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "opsmith")
    assert point.load() is opsmith_vllm.register


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, list(opsmith_vllm.PARTS)),
        ("all", list(opsmith_vllm.PARTS)),
        ("off", []),
        ("auto", list(opsmith_vllm.PARTS)),
        ("", list(opsmith_vllm.PARTS)),
        ("norms", ["norms"]),
        (" rotary, attention ,", ["rotary", "attention"]),
    ],
)
def test_parts_are_asked_for_by_their_words(
    monkeypatch: pytest.MonkeyPatch, value: str | None, wanted: list[str]
) -> None:
    monkeypatch.delenv("OPSMITH_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("OPSMITH_VLLM", value)
    assert opsmith_vllm.parts() == wanted
    assert opsmith_vllm.measured() == (value in (None, "auto", ""))


@pytest.mark.parametrize("value", ["norm", "attention,off", "all,norms", "attention;norms"])
def test_an_unknown_word_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("OPSMITH_VLLM", value)
    with pytest.raises(
        ValueError, match=r"OPSMITH_VLLM: expected auto, all, off, or some of attention, .*, got '"
    ):
        opsmith_vllm.register()


def test_registering_again_adds_nothing() -> None:
    code = (
        "import opsmith_vllm; opsmith_vllm.register()\n"
        "from vllm.model_executor.custom_op import op_registry_oot as there\n"
        "before = dict(there); opsmith_vllm.register()\n"
        "assert there == before and len(before) == 10, before\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OPSMITH_VLLM": "all"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr


def test_off_imports_nothing_of_vllm() -> None:
    code = (
        "import sys, opsmith_vllm; opsmith_vllm.register(); assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    env = {**os.environ, "OPSMITH_VLLM": "off"}
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
