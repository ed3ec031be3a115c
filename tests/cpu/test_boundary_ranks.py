from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from support.boundary_suite import EVERY_CALL, OFFLOAD, RESTORE, move, reverse_coldness
from support.faulty import FaultyDriver
from support.ranks import ThreadRanks
from support.rigs import DENSE, EVERYTHING, Rig, build_rig

from vamp_runtime.errors import StateLost
from vamp_runtime.memory.agreement import SoleRank, Vote
from vamp_runtime.memory.boundary import MoveKind, Outcome
from vamp_runtime.memory.host import HostDriver

TIMEOUT = 20.0  # of a vote; no test waits for it unless a rank is silent


@contextmanager
def open_ranks(
    n: int, timeout: float = TIMEOUT, homes: int = EVERYTHING
) -> Iterator[tuple[ThreadRanks, list[Rig]]]:
    """``n`` ranks with other weights each, at level 1 where homes allow."""
    ranks = ThreadRanks(n, timeout)
    with ExitStack() as stack:
        rigs = []
        for rank in range(n):
            inner = HostDriver(4096)
            stack.callback(inner.close)
            faulty = FaultyDriver(inner)
            faulty.counted = EVERY_CALL
            rigs.append(build_rig(faulty, DENSE, ranks.seat(rank), homes=homes, seed=rank))
        if homes == EVERYTHING:
            assert all(outcome.ok for outcome in ranks.run(lambda rank: rigs[rank].boundary.offload(1)))
        yield ranks, rigs


def check_all_abandoned(outcomes: list[Outcome], level: int) -> None:
    assert not any(outcome.ok for outcome in outcomes)
    assert len({(outcome.epoch, outcome.level, outcome.blocks) for outcome in outcomes}) == 1
    assert outcomes[0].level == level


def test_sole_rank_agrees_with_itself() -> None:
    assert SoleRank().all_agree(Vote(1, True, 5))
    assert not SoleRank().all_agree(Vote(1, False, 5))


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_move_together(n: int) -> None:
    with open_ranks(n) as (ranks, rigs):
        for walk in (lambda rig: rig.boundary.offload(2), lambda rig: rig.boundary.restore(3)):
            outcomes = ranks.run(lambda rank, walk=walk: rigs[rank].moved(walk(rigs[rank])))
            assert len({(outcome.epoch, outcome.level, outcome.blocks) for outcome in outcomes}) == 1


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("kind", list(MoveKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("call", ["mark", "wait", "unmap", "map", "set_access", "synchronize"])
def test_refused_call_on_one_rank_abandons_on_all(n: int, kind: MoveKind, call: str) -> None:
    with open_ranks(n) as (ranks, rigs):
        before = [rig.snapshot() for rig in rigs]
        victim = rigs[n - 1].driver
        victim.counted = frozenset({call})
        victim.arm(1)
        outcomes = ranks.run(lambda rank: rigs[rank].boundary.run(move(rigs[rank].boundary, kind, 1)))
        check_all_abandoned(outcomes, level=1)
        assert f"{call}: refused on purpose" in outcomes[n - 1].reason
        assert all("another rank" in outcome.reason for outcome in outcomes[: n - 1])
        assert [rig.snapshot() for rig in rigs] == before
        outcomes = ranks.run(
            lambda rank: rigs[rank].moved(rigs[rank].boundary.run(move(rigs[rank].boundary, kind, 1)))
        )
        assert len({outcome.level for outcome in outcomes}) == 1


def disagree_on_groups(rig: Rig) -> None:
    reverse_coldness(rig)
    rig.slab.refresh_homes(EVERYTHING)


def miss_an_epoch(rig: Rig) -> None:
    rig.boundary.epoch -= 1


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("spoil", [disagree_on_groups, miss_an_epoch])
def test_ranks_that_differ_abandon(n: int, spoil: Callable[[Rig], None]) -> None:
    with open_ranks(n) as (ranks, rigs):
        spoil(rigs[1])
        before = [rig.snapshot() for rig in rigs]
        asked = move(rigs[0].boundary, OFFLOAD, 1)
        check_all_abandoned(ranks.run(lambda rank: rigs[rank].boundary.run(asked)), level=1)
        assert [rig.snapshot() for rig in rigs] == before
        # Restores do not depend on coldness, and the epochs are even again.
        asked = move(rigs[0].boundary, RESTORE, 1)
        assert all(outcome.ok for outcome in ranks.run(lambda rank: rigs[rank].boundary.run(asked)))


def test_refusal_on_one_rank_abandons_on_all() -> None:
    with open_ranks(2, homes=0) as (ranks, rigs):
        rigs[0].slab.refresh_homes(EVERYTHING)
        outcomes = ranks.run(lambda rank: rigs[rank].boundary.offload(1))
        check_all_abandoned(outcomes, level=0)
        assert "valid home" in outcomes[1].reason and "another rank" in outcomes[0].reason


@pytest.mark.parametrize("n", [2, 4])
def test_silent_rank_loses_the_state_in_time(n: int) -> None:
    with open_ranks(n, timeout=1.0) as (ranks, rigs):

        def walk(rank: int) -> str:
            if rank == 0:
                return "silent"
            try:
                rigs[rank].boundary.offload(1)
            except StateLost:
                return "lost"
            return "moved"

        started = time.monotonic()
        assert ranks.run(walk) == ["silent"] + ["lost"] * (n - 1)
        assert time.monotonic() - started < TIMEOUT
