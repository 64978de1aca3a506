"""Attributes that are others for a while are their own again, whatever happened."""

from types import SimpleNamespace

import pytest

from opsmith.compiler.meanwhile import meanwhile


def test_each_object_gets_its_own_value_back() -> None:
    one, other = SimpleNamespace(mode="a"), SimpleNamespace(mode="b")
    with meanwhile([one, other], "mode", "c"):
        assert (one.mode, other.mode) == ("c", "c")
    assert (one.mode, other.mode) == ("a", "b")


def test_an_error_inside_leaves_no_trace() -> None:
    one = SimpleNamespace(mode="a")
    with pytest.raises(ZeroDivisionError), meanwhile([one], "mode", "c"):
        raise ZeroDivisionError
    assert one.mode == "a"


def test_an_object_without_the_attribute_changes_no_other() -> None:
    one = SimpleNamespace(mode="a")
    with pytest.raises(AttributeError), meanwhile([one, SimpleNamespace()], "mode", "c"):
        pass
    assert one.mode == "a"
