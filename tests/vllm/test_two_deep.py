"""Asynchronous scheduling on a CPU: a step is scheduled while the one before it is still to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engine import run_scenario

pytestmark = pytest.mark.vllm

COUNT = 60
# One request after the other, every fifth aborted while a level waits for its blocks, none of which stays.
# Eight at once, more than the highest level holds, with pauses in which levels go back.
ABORTS = {"length": 100, "max_tokens": 20, "kv_bytes": 200_000, "every": 16, "burst": 1, "reserve": 0}
BURSTS = {"length": 100, "max_tokens": 40, "kv_bytes": 130_000, "every": 100, "burst": 8, "reserve": 1}
ABORTED = range(3, COUNT, 5)


@pytest.fixture(scope="module", params=[False, True], ids=["no prefix cache", "prefix cache"])
def runs(request: pytest.FixtureRequest, tiny_model: Path) -> dict[str, Any]:
    works: dict[str, Any] = {"aborts": {**ABORTS, "aborted": ABORTED}, "bursts": {**BURSTS, "aborted": ()}}
    found = {}
    for name, work in works.items():
        spec = {**work, "count": COUNT, "caching": request.param}
        run = found[name] = run_scenario("two_deep.two_deep", tiny_model, **spec)
        assert run["beside"] and run["failed_moves"] == 0 and min(run["moves_by_kind"].values()) >= 2
    return found


def test_no_step_uses_a_block_that_its_command_and_those_before_leave_out(runs: dict[str, Any]) -> None:
    """From the step on that brings a restore, no request is given a block of the tail that goes."""
    for run in runs.values():
        claimed = run["initial"]
        for number, (said, highest) in enumerate(run["steps"]):
            claimed = claimed if said is None else said
            assert highest < claimed, f"step {number} uses block {highest} of {claimed}"


def test_of_the_steps_in_flight_only_requests_that_have_ended_use_what_a_restore_takes(
    runs: dict[str, Any],
) -> None:
    """An aborted request's last step may still be to run: the mark makes the pages wait for it."""
    for run in runs.values():
        assert not any(runs_on for users in run["tails"] for _, _, runs_on in users)
    assert any(runs["aborts"]["tails"])


def test_no_kernel_finds_a_block_otherwise_than_it_was_left(runs: dict[str, Any]) -> None:
    """Though every kernel runs as late as it may, and moves run beside steps."""
    for run in runs.values():
        assert run["wrong"] == []


def test_every_request_gets_the_tokens_that_it_gets_alone(runs: dict[str, Any]) -> None:
    aborts, bursts = runs["aborts"], runs["bursts"]
    assert bursts["preemptions"] > 0 and bursts["tokens"] == bursts["expected"]
    for number in range(COUNT):
        found, whole = aborts["tokens"][f"r{number}"], aborts["expected"][f"r{number}"]
        assert found == whole[: len(found)] and (len(found) < len(whole)) is (number in ABORTED)


def test_a_steps_report_is_applied_before_the_next_but_one_is_scheduled(runs: dict[str, Any]) -> None:
    for run in runs.values():
        order = {event: place for place, event in enumerate(run["order"])}
        steps = len(run["steps"])
        assert len(order) == len(run["order"]) == 2 * steps
        for number in range(steps - 2):
            assert order["applied", number] < order["scheduled", number + 2]
        ahead = sum(order["scheduled", n + 1] < order["applied", n] for n in range(steps - 1))
        assert ahead > steps // 2, "it was not two steps deep"
        assert len(run["outcomes"]) == run["moves"] and all(settled for _, settled in run["outcomes"])
