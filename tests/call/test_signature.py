"""What is read from a signature."""

from __future__ import annotations

from functools import cached_property

from opsmith.call.signature import Input, Number, Output, Signature


def test_nothing_is_left_to_be_cached_while_dynamo_traces() -> None:
    """Up to Python 3.11 a cached property takes a lock, at which Dynamo breaks the graph."""
    signature = Signature("scaled", (Input("x", "... N"), Number("by", float)), (Output("y", "... N"),))
    for one in (signature, *signature.tensors, *signature.results):
        cached = {name for name, p in vars(type(one)).items() if isinstance(p, cached_property)}
        assert cached
        assert cached <= vars(one).keys()
