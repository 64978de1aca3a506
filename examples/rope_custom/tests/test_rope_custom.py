"""Holds rope_custom to its card: values, gradients, odd sizes, strides, every dtype."""

from pathlib import Path

from opsmith.authoring.project.checks import verify_project


def test_the_operator_keeps_its_card() -> None:
    failed = [str(finding) for finding in verify_project(Path(__file__).parents[1]) if not finding.ok]
    assert failed == []
