"""The examples in the docstrings of measure run as written."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name", ["checks", "comparison", "contestants", "machine", "memory", "pool", "roofs", "stats", "timing"]
)
def test_examples_run(name: str) -> None:
    import torch

    module = importlib.import_module(f"opsmith.measure.{name}")
    assert doctest.testmod(module, extraglobs={"torch": torch}).failed == 0
