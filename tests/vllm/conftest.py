from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-Next with random weights."""
    from vamp_integration.tiny_model import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
