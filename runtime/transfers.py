"""Which KV blocks a copy to or from host memory still reads or writes, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass
class _Job:
    highest_id: int
    blocks: int
    reports_left: int


class Transfers:
    """Jobs under way: those that a step has carried to the ranks and not all of them have reported.

    Pure bookkeeping. A job number is used once.

    Args:
        ranks: ranks that report each job once.

    Attributes:
        loaded_blocks: blocks copied from host memory since start, those on their way included.
    """

    def __init__(self, ranks: int) -> None:
        assert ranks > 0
        self._ranks = ranks
        self._jobs: dict[int, _Job] = {}
        self.loaded_blocks = 0

    def store(self, job_id: int, block_ids: Collection[int]) -> None:
        """A step carries a copy of these blocks to host memory."""
        assert job_id not in self._jobs, job_id
        self._jobs[job_id] = _Job(max(block_ids, default=0), len(block_ids), self._ranks)

    def load(self, job_id: int, block_ids: Collection[int]) -> None:
        """A step carries a copy from host memory to these blocks."""
        self.store(job_id, block_ids)
        self.loaded_blocks += len(block_ids)

    def reported(self, counts: Mapping[int, int]) -> None:
        """By job, how many ranks have finished it since the last call."""
        for job_id, count in counts.items():
            job = self._jobs[job_id]
            job.reports_left -= count
            assert job.reports_left >= 0, (job_id, job)
            if not job.reports_left:
                del self._jobs[job_id]

    @property
    def blocks(self) -> int:
        """Blocks in jobs under way; one in two jobs counts twice."""
        return sum(job.blocks for job in self._jobs.values())

    def reach(self, limit: int) -> bool:
        """Whether a job under way touches a block from ``limit`` on."""
        return any(job.highest_id >= limit for job in self._jobs.values())
