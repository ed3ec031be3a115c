"""Hook: ``vllm/distributed/kv_transfer/kv_connector/v1/offloading_connector.py``, the scheduler's half.

What: says which blocks a copy to or from host memory still reads or writes, and which cached content host
memory holds too. Why: copies go by address and outlive their request; vLLM waits for one only where its block
is allocated again, which a block that is to be unmapped never is. How: ``adopt`` changes the class of the
live connector; a job counts from the step that carries it until every rank has reported it, whatever vLLM's
own books say (a reset empties them while copies run on). It goes when connectors tell which blocks they use.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash, get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vamp_integration.log import logger
from vamp_runtime.errors import ConfigError
from vamp_runtime.transfers import Transfers


class VampOffloadingConnector(OffloadingConnector):
    """An ``OffloadingConnector`` that knows what it has under way, for the scheduler's thread only.

    Attributes:
        load_block_s: seconds to copy one block from host memory to each rank's device.
        copies_known: whether ``holds`` can tell; otherwise it knows of no copy.
        host_blocks: blocks that host memory has room for; 0 unless ``copies_known``.
    """

    transfers: Transfers
    load_block_s: float
    copies_known: bool
    host_blocks: int
    _loading: tuple[str, int]

    @classmethod
    def adopt(cls, connector: Any, load_block_s: float) -> VampOffloadingConnector:
        """Turn the live ``connector`` of the scheduler into one that can be asked, in place."""
        if type(connector) is not OffloadingConnector:
            raise ConfigError(
                f"--kv-transfer-config kv_connector: {type(connector).__name__} is not vLLM's "
                "OffloadingConnector; leave kv_connector_module_path out, or use no connector"
            )
        connector.__class__ = cls
        assert isinstance(connector, cls)
        config = connector.scheduler.config
        connector.transfers = Transfers(config.num_workers)
        connector.load_block_s, connector._loading = load_block_s, ("", 0)
        manager: Any = connector.scheduler.manager
        # Other managers answer a lookup by fetching from their tiers. A chunk of several blocks has one key.
        connector.copies_known = type(manager) is CPUOffloadingManager and config.blocks_per_chunk == 1
        connector.host_blocks = manager._num_chunks if connector.copies_known else 0
        logger.info(
            "VAMP: KV offloading to host, room for %d blocks, %.3f ms to load one",
            connector.host_blocks,
            load_block_s * 1e3,
        )
        if not connector.copies_known:
            logger.warning(
                "VAMP: which blocks host memory holds is not known for %s with %d blocks a chunk: "
                "decisions price them as lost, and none is called a spill",
                type(manager).__name__,
                config.blocks_per_chunk,
            )
        return connector

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingConnectorMetadata:
        meta = super().build_connector_meta(scheduler_output)
        assert isinstance(meta, OffloadingConnectorMetadata)
        for job_id, job in meta.store_jobs.items():
            self.transfers.store(job_id, _block_ids(job.src_spec))
        for job_id, job in meta.load_jobs.items():
            self.transfers.load(job_id, _block_ids(job.dst_spec))
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, OffloadingWorkerMetadata):
            self.transfers.reported(meta.completed_jobs)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._loading = request.request_id, num_external_tokens

    def loading(self, request: Request) -> int:
        """Tokens of ``request`` that come from host memory, where it is the one admitted last."""
        request_id, tokens = self._loading
        return tokens if request_id == request.request_id else 0

    def holds(self, content: BlockHashWithGroupId) -> bool:
        """Whether host memory holds ``content`` or is about to.

        A copy under way counts: vLLM waits for it before the block is used again, and so does a shrink.
        """
        if not self.copies_known:
            return False
        manager: OffloadingManager = self.scheduler.manager
        key = make_offload_key(get_block_hash(content), get_group_id(content))
        return manager.lookup(key, _NOBODY) is not LookupResult.MISS

    def uses(self, limit: int) -> bool:
        """Whether a copy of a block from ``limit`` on is under way, or will begin in the next step.

        The last blocks of a request are stored in the step after it has finished, from blocks that are free
        by then.
        """
        if self.transfers.reach(limit):
            return True
        ended = (s for s in self.scheduler._req_status.values() if s.req.is_finished())
        return any(
            max(group.block_ids, default=0) >= limit
            for status in ended
            if not status.finished_signaled
            for group in status.group_states
        )

    def forget(self, limit: int) -> None:
        """Make sure that no later copy starts at a block from ``limit`` on, which is to be unmapped.

        A running request has given back blocks behind its window, or all of them where it was preempted, and
        vLLM keeps their ids until they are allocated again. Id 0 is its own word for "not there any more". A
        chunk is left out whole, as it is where its last block is not there.
        """
        chunk = self.scheduler.config.blocks_per_chunk
        for status in self.scheduler._req_status.values():
            for group in status.group_states:
                ids = group.block_ids
                for index in [i for i, block_id in enumerate(ids) if block_id >= limit]:
                    ids[index] = 0
                    last = index - index % chunk + chunk - 1
                    if last < len(ids):
                        ids[last] = 0


_NOBODY = ReqContext(req_id="")


def _block_ids(spec: Any) -> list[int]:
    """Ids of a job's blocks on the device; ``spec`` is a ``GPULoadStoreSpec``."""
    ids: list[int] = spec.block_ids.tolist()
    return ids
