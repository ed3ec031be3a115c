"""Two ranks in processes of their own: one level everywhere, and no rank goes on alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engine import run_scenario

pytestmark = pytest.mark.vllm


def test_moves_and_refusals_on_two_ranks_leave_every_token(tiny_model: Path) -> None:
    """Ranks that find unequal memory hold the same; a driver call refused on one rank makes both undo."""
    expected = run_scenario("two_ranks", tiny_model, fault="unmodified")
    run = run_scenario("two_ranks", tiny_model, fault="driver and memory")
    assert run["moves"] >= 10 and run["failed_moves"] >= 2
    assert run["results"] == expected["results"]


def test_a_rank_that_has_lost_its_state_ends_the_engine(tiny_model: Path) -> None:
    run = run_scenario("two_ranks", tiny_model, fault="lost")
    assert "error" in run and run["moves"] == 4
