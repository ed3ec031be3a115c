"""Expert groups exchanged under a running engine when the traffic changes: fewer host reads, equal tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine import run_scenario

from vamp_runtime.controller import Capacity, CapacityController
from vamp_runtime.memory.move import Move, Outcome, Swap
from vamp_runtime.policy.reselect import Candidate

pytestmark = pytest.mark.vllm

ROUTING = "vamp_lognormal:sigma=1.06,tilt=0,shared=0,seed=3"
WORK = {"seed": 4, "count": 4, "length": 400, "max_tokens": 48}


def reselecting(model: Path, rate: float, **options: Any) -> dict[str, Any]:
    vamp = {"max_offload_ratio": 0.34, "restore": False, "reselect_mib_per_s": rate}
    return run_scenario("reselecting", model, routing=ROUTING, work=WORK, vamp=vamp, kv_mib=3, **options)


@pytest.fixture(scope="module")
def unmodified(tiny_model: Path) -> list[dict[str, Any]]:
    done = run_scenario("reselecting", tiny_model, routing=ROUTING, work=WORK, vamp=None, kv_mib=64)
    results: list[dict[str, Any]] = done["results"]
    return results


def test_groups_follow_the_traffic_and_no_token_changes(
    tiny_model: Path, unmodified: list[dict[str, Any]]
) -> None:
    run = reselecting(tiny_model, rate=1000)
    assert run["results"] == unmodified
    assert run["moves_by_kind"]["swap"] >= 8 and run["failed_moves"] == 0
    assert run["level"] == run["max_level"] > 0
    assert run["first_share"] > 0.2 > 0.12 > run["last_share"]


def test_refused_swaps_leave_every_token(tiny_model: Path, unmodified: list[dict[str, Any]]) -> None:
    run = reselecting(tiny_model, rate=1000, refuse_every=2)
    assert run["results"] == unmodified
    assert run["failed_moves"] >= 3 and run["moves_by_kind"]["swap"] >= 3


def test_two_ranks_swap_the_same_groups(tiny_model: Path) -> None:
    work = {"seed": 4, "count": 2, "length": 300, "max_tokens": 48}
    vamp = {"max_offload_ratio": 0.34, "restore": False, "reselect_mib_per_s": 1000}
    plain, run = (
        run_scenario("two_ranks_swap", tiny_model, routing=ROUTING, vamp=each, **work)
        for each in (None, vamp)
    )
    assert run["results"] == plain["results"]
    assert run["moves_by_kind"]["swap"] >= 3 and run["failed_moves"] == 0


class Desk:
    """A reselector over a real controller at level 2, a clock of its own, and ranks that do as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float, layers: int = 4) -> None:
        from vamp_integration import reselect

        self.now = 100.0
        monkeypatch.setattr(reselect, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.controller = CapacityController(10)
        self.controller.announce(Capacity((13, 17, 21), 32, 1, layers << 20, layers))
        self.pool = SimpleNamespace(cordon_limit=None)
        levels = SimpleNamespace(swap_s=0.030, max_move_s=0.030)
        arbiter = SimpleNamespace(controller=self.controller, pool=self.pool, levels=levels)
        self.arbiter = arbiter
        self.reselector = reselect.Reselector(arbiter, rate)  # type: ignore[arg-type]
        self.controller.request_offload(2)
        self.settle()

    def settle(self, ok: bool = True) -> Move | None:
        """The move that the next step carries, carried out."""
        command = self.controller.take_command()
        if command is None or command.move is None:
            return None
        level = command.move.level_after if ok else command.move.level_before
        blocks = (13, 17, 21)[level]
        return self.controller.settle(Outcome(command.move.epoch, ok, level, blocks, 0, 0, 0.01, ""))

    def step(self, seconds: float, ok: bool = True) -> list[int]:
        """Layers swapped by a step ``seconds`` after the last."""
        self.now += seconds
        self.reselector.begin_step()
        move = self.settle(ok)
        return [swap.layer for swap in move.swaps] if move is not None else []


def offers(layers: Sequence[int] = (0, 1, 2, 3)) -> list[Candidate]:
    return [Candidate(Swap(layer, 5, 6), gain=10.0 + layer) for layer in layers]


def test_swaps_wait_for_the_budget_and_begin_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, rate=2.0)
    desk.reselector.offer(offers())
    assert desk.step(0.4) == [] and desk.step(0.2) == [3]
    desk.arbiter.levels.swap_s = 0.001
    assert desk.step(0.5) == [] and desk.step(0.5) == [2, 1] and desk.step(0.1) == []
    assert desk.step(9.0) == [0] and desk.step(9.0) == []


def test_a_refused_swap_is_not_asked_again_before_the_next_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, rate=100.0)
    desk.reselector.offer(offers([0]))
    assert desk.step(1.0, ok=False) == [0] and desk.step(1.0) == []
    desk.reselector.offer(offers([0]))
    assert desk.step(1.0) == [0]


def test_no_swap_beside_another_move_a_cordon_or_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, rate=100.0)
    desk.reselector.offer(offers())
    desk.pool.cordon_limit = 5
    assert desk.step(1.0) == []
    desk.pool.cordon_limit = None
    desk.controller.request_restore(1)
    assert desk.step(1.0) == [] and desk.controller.level == 1
    assert desk.step(1.0) == [], "what is out has changed since the offer"
    desk.reselector.offer(offers())
    assert desk.step(1.0) == [3]
