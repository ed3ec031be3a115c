"""A rank that votes in a process of its own, which imports this module and no test."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

GRACE = timedelta(seconds=1)  # less than the product's, so that the suite need not wait for that
GROUP_TIMEOUT = timedelta(minutes=30)  # gloo's own, which must not be what ends the wait


def rank_process(rank: int, ranks: int, store: str, orders: Connection) -> None:
    """Votes as told, until told ``None``: ``(answer or name of the error, seconds)`` for each vote."""
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    from vamp_integration import agreement

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT
    )
    group: Any = SimpleNamespace(world_size=ranks, ranks=list(range(ranks)))
    parallel_state.get_tp_group = lambda: group
    agreement.TIMEOUT = GRACE
    seat = agreement.make_agreement()
    assert isinstance(seat, agreement.GroupAgreement)
    orders.send("ready")
    while (vote := orders.recv()) is not None:
        started = time.monotonic()
        try:
            answer: object = seat.all_agree(vote)
        except Exception as error:
            answer = type(error).__name__
        orders.send((answer, time.monotonic() - started))
