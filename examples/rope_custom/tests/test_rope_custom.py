"""Holds rope_custom to its card: values, gradients, odd sizes, strides, every dtype."""

from pathlib import Path

from opsmith.authoring import project


def test_the_operator_keeps_its_card() -> None:
    failed = [str(finding) for finding in project.verify(Path(__file__).parents[1]) if not finding.ok]
    assert failed == []
