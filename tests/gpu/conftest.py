"""What several of the GPU tests need."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_model import write_small, write_wide


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``support.small_model``, written once."""
    return write_small(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``support.small_model`` with 512 experts, written once."""
    return write_wide(tmp_path_factory.mktemp("model"))
