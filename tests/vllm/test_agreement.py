"""The vote of ranks in processes of their own, over a real gloo group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.voting import GRACE, rank_process

from vamp_runtime.memory.agreement import Vote

pytestmark = pytest.mark.vllm

HANGS_S = 60.0  # upper limit for what takes a second or two; importing vLLM is the most of it


class Ranks:
    """Two rank processes, told what to vote."""

    def __init__(self, store: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_process, args=(rank, 2, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        assert [self._answer(rank) for rank in range(2)] == ["ready", "ready"]

    def vote(self, *votes: Vote | None) -> list[Any]:
        """Answer and seconds of every rank that votes, ``None`` of one that does not."""
        for pipe, vote in zip(self.pipes, votes, strict=True):
            if vote is not None:
                pipe.send(vote)
        return [None if vote is None else self._answer(rank) for rank, vote in enumerate(votes)]

    def alive(self, rank: int) -> bool:
        return self.processes[rank].is_alive()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _answer(self, rank: int) -> Any:
        assert self.pipes[rank].poll(HANGS_S), f"rank {rank} hangs"
        return self.pipes[rank].recv()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path_factory.mktemp("agreement") / "store")
    yield ranks
    ranks.close()


def answers(found: list[Any]) -> list[object]:
    return [answer for answer, _ in found]


def test_equal_votes_agree_again_and_again(ranks: Ranks) -> None:
    for epoch in range(1, 4):
        vote = Vote(epoch, True, (1 << 63) - epoch)
        assert answers(ranks.vote(vote, vote)) == [True, True]


@pytest.mark.parametrize(
    "other",
    [Vote(5, False, 0), Vote(5, False, 77), Vote(5, True, 78), Vote(6, True, 77)],
    ids=["against", "against with a digest", "other groups", "another epoch"],
)
def test_one_vote_that_differs_refuses_on_both(ranks: Ranks, other: Vote) -> None:
    mine = Vote(5, True, 77)
    assert answers(ranks.vote(mine, other)) == [False, False]
    assert answers(ranks.vote(other, mine)) == [False, False]


def test_two_votes_against_refuse(ranks: Ranks) -> None:
    against = Vote(5, False, 0)
    assert answers(ranks.vote(against, against)) == [False, False]


def test_a_rank_that_lives_and_never_votes_costs_the_state(ranks: Ranks) -> None:
    """The last test of the module: what gloo makes of the group after a timeout is nobody's promise."""
    (found, silent) = ranks.vote(Vote(9, True, 1), None)
    answer, seconds = found
    assert answer == "StateLost" and silent is None and ranks.alive(1)
    assert GRACE.total_seconds() * 0.9 <= seconds < HANGS_S
