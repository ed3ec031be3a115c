"""vLLM's KV offloading on a modelled device: the ranks' side of its connector, which copies nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

# An engine that waits for nothing but a copy looks again after so long.
LOOK_EVERY_S = 1e-3


class ModelledCopies:
    """Copies of blocks to and from host memory, each way one after the other at the rate of the link.

    As vLLM's worker has it, a load begins in the step that brings it and a store in the next one; what a
    preemption would overwrite is waited for (``kv_connector/v1/offloading/worker.py``).

    Args:
        block_bytes: of a block of any group.
        rate: bytes/s, each way.
        start_s: host time to begin a load.
    """

    def __init__(self, block_bytes: int, rate: float, start_s: float) -> None:
        self._block_s, self._start_s = block_bytes / rate, start_s
        self._free_at = {"load": 0.0, "store": 0.0}
        self._later: dict[int, int] = {}
        self._ends: dict[int, float] = {}
        self._loads: dict[int, str] = {}

    def begin(self, metadata: OffloadingConnectorMetadata, now: float) -> float:
        """Take over what a step brings; when the host goes on."""
        stores = {job: _blocks(each.src_spec) for job, each in metadata.store_jobs.items()}
        waited_for = metadata.jobs_to_flush or set()
        at_once = {job: blocks for job, blocks in stores.items() if job in waited_for}
        for job, blocks in {**self._later, **at_once}.items():
            self._copy(job, blocks, "store", now)
        self._later = {job: blocks for job, blocks in stores.items() if job not in waited_for}
        for job, each in metadata.load_jobs.items():
            now += self._start_s
            self._copy(job, _blocks(each.dst_spec), "load", now)
            self._loads[job] = each.req_id
        return max([now, *(self._ends[job] for job in waited_for if job in self._ends)])

    def until(self, now: float) -> float:
        """When an engine with nothing else to do at ``now`` should look again."""
        ends = [end for end in self._ends.values() if end > now]
        return min([now + LOOK_EVERY_S, *ends]) if ends or self._later else now

    def ended(self, now: float) -> KVConnectorOutput | None:
        """What has been copied at ``now`` and was not told before."""
        jobs = [job for job, end in self._ends.items() if end <= now]
        if not jobs:
            return None
        for job in jobs:
            del self._ends[job]
        received = {self._loads.pop(job) for job in jobs if job in self._loads}
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        return KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=done)

    def _copy(self, job: int, blocks: int, way: str, now: float) -> None:
        self._ends[job] = self._free_at[way] = max(now, self._free_at[way]) + blocks * self._block_s


def _blocks(spec: Any) -> int:
    """Blocks on the device of a job; ``spec`` is a ``GPULoadStoreSpec``."""
    return len(spec.block_ids)
