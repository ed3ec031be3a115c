"""What several of the GPU tests need."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_model import write_small


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``support.small_model``, written once."""
    return write_small(tmp_path_factory.mktemp("model"))
