"""Which blocks are being copied, whatever the order in which ranks report."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vamp_runtime.transfers import Transfers

BLOCKS = 8


def test_a_job_counts_until_the_last_rank_has_reported_it() -> None:
    transfers = Transfers(ranks=2)
    transfers.store(0, [3, 5])
    assert transfers.reach(5) and not transfers.reach(6) and transfers.blocks == 2
    transfers.reported({0: 1})
    assert transfers.reach(5)
    transfers.reported({0: 1})
    assert not transfers.reach(0) and transfers.blocks == 0 and transfers.loaded_blocks == 0


def test_ranks_that_finish_in_one_step_are_counted_together() -> None:
    transfers = Transfers(ranks=2)
    transfers.load(7, [4])
    transfers.reported({7: 2})
    assert not transfers.reach(0) and transfers.loaded_blocks == 1


@pytest.mark.parametrize("counts", [{0: 2}, {1: 1}])
def test_a_report_too_many_is_an_error(counts: dict[int, int]) -> None:
    transfers = Transfers(ranks=1)
    transfers.store(0, [1])
    with pytest.raises((AssertionError, KeyError)):
        transfers.reported(counts)


class TransfersMachine(RuleBasedStateMachine):
    """Any jobs, reported rank by rank in any order, against a plain model."""

    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        self.ranks = ranks
        self.transfers = Transfers(ranks)
        self.jobs: dict[int, list[int]] = {}
        self.left: Counter[int] = Counter()
        self.sent = self.loaded = 0

    @rule(load=st.booleans(), ids=st.lists(st.integers(1, BLOCKS - 1), max_size=4, unique=True))
    def send(self, load: bool, ids: list[int]) -> None:
        (self.transfers.load if load else self.transfers.store)(self.sent, ids)
        self.jobs[self.sent], self.left[self.sent] = ids, self.ranks
        self.loaded += len(ids) if load else 0
        self.sent += 1

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.jobs)), min_size=1, unique=True))
        counts = {job: data.draw(st.integers(1, self.left[job])) for job in some}
        self.transfers.reported(counts)
        self.left -= Counter(counts)
        self.jobs = {job: ids for job, ids in self.jobs.items() if self.left[job]}

    @invariant()
    def agrees_with_the_model(self) -> None:
        under_way = [block for ids in self.jobs.values() for block in ids]
        for limit in range(1, BLOCKS + 1):
            assert self.transfers.reach(limit) == any(block >= limit for block in under_way)
        assert self.transfers.blocks == len(under_way)
        assert self.transfers.loaded_blocks == self.loaded


TransfersMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTransfers = TransfersMachine.TestCase
