from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine import WORKS, run_scenario


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Next with random weights."""
    from vamp_integration.tiny_model import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> dict[str, list[dict[str, Any]]]:
    """Tokens of each of ``WORKS`` from unmodified vLLM: one sequence at a time, no prefix cache."""
    done = run_scenario("oracle", tiny_model, works=list(WORKS.values()), enable_prefix_caching=False)
    return dict(zip(WORKS, done["works"], strict=True))
