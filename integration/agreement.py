"""Ranks agree over a CPU process group; a rank that stays silent ends the process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from vamp_runtime.errors import StateLost
from vamp_runtime.memory.agreement import Agreement, SoleRank, Vote

TIMEOUT = timedelta(seconds=5)


class GroupAgreement:
    """All-gathers every rank's vote over a gloo group.

    Raises ``StateLost`` where a rank does not answer within ``TIMEOUT``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def all_agree(self, vote: Vote) -> bool:
        mine = torch.tensor([vote.epoch, int(vote.ok), vote.digest], dtype=torch.int64)
        votes = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(votes, mine, group=self.group, async_op=True)
        try:
            work.wait(TIMEOUT)
        except RuntimeError as error:
            raise StateLost(f"epoch {vote.epoch}: a rank did not vote within {TIMEOUT.seconds} s") from error
        return all(bool(other[1]) and torch.equal(other, mine) for other in votes)


def make_agreement() -> Agreement:
    """The agreement for this worker's tensor-parallel group, over a process group of its own.

    Ranks vote on a thread beside the one that runs steps, and vLLM's group is that one's.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return SoleRank()
    return GroupAgreement(dist.new_group(group.ranks, backend="gloo", use_local_synchronization=True))
