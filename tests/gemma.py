"""The real decoder, for tests: import the fixture `gemma` where one is needed."""

from pathlib import Path
from typing import Any

import pytest

from opsmith.cli.hf import load_with_tokenizer
from opsmith.cli.llm import gemma as real


@pytest.fixture(scope="session")
def gemma_folder() -> Path:
    """Gemma 3 270M as a Hugging Face folder, converted once for all sessions; skips where it is not installed."""
    if (name := real.missing()) is not None:
        pytest.skip(f"Gemma 3 270M needs {name}: {real.ADVICE}")
    return real.folder()


@pytest.fixture
def gemma(gemma_folder: Path) -> tuple[Any, Any]:
    """The model in float32, new for each test (its weights are mapped, not copied), and its tokenizer."""
    return load_with_tokenizer(gemma_folder)
