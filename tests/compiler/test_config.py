"""`Config` reads what a user says, and answers what it can't read in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from opsmith.compiler import Config


def test_every_field_is_optional_and_every_field_is_read(tmp_path: Path) -> None:
    path = tmp_path / "opsmith.toml"
    path.write_text("")
    assert Config.load(path) == Config()
    path.write_text(
        'dtype = "bfloat16"\ndevice = "cpu"\ninductor = true\ninductor_seconds = 5\ntune = false\n'
        'verify = false\n[pin]\nattention = "native"\n[forbid]\nlinear_0 = ["onednn"]\n'
    )
    assert Config.load(str(path)) == Config(
        dtype="bfloat16",
        device="cpu",
        inductor=True,
        inductor_seconds=5,
        tune=False,
        verify=False,
        pin={"attention": "native"},
        forbid={"linear_0": ["onednn"]},
    )
    assert Config.load(path).torch_dtype is torch.bfloat16
    assert Config().torch_dtype is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype = ", "is not valid TOML"),
        ("x" * 5000 + " = 1", "toml: x{200}: Extra"),
        ("dtype = " + "[" * 50_000, "is not valid TOML"),
        ("mla_block = " + "1" * 5000, "is not valid TOML"),
        ('dtyp = "bfloat16"', "dtyp: .*; the fields are dtype, device"),
        ('dtype = "int8"', "dtype: .*'float32', 'bfloat16' or 'float16'"),
        ("pin = 3", "pin: .*dictionary"),
        ('[forbid]\nlinear = "onednn"', "forbid.linear: .*list"),
        ('inductor_seconds = "long"', "inductor_seconds: .*number"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "opsmith.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Config.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config: .*missing\.toml can't be read: No such file"):
        Config.load(tmp_path / "missing.toml")
    with pytest.raises(ValueError, match="can't be read"):
        Config.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not valid TOML"):
        Config.load(tmp_path / "binary.toml")
