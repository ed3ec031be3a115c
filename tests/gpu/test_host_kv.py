"""vLLM's KV offloading to host on memory that moves: its copies, and an engine that moves levels beside them.

The copies go by ``cuMemcpyBatchAsync`` over blocks that begin and end inside pages, each its own mapping.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from support.engine import run_scenario
from support.rigs import RECORDS, build_rig

from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.tensor import tensor_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


def test_copies_of_blocks_over_several_pages_old_and_new() -> None:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    driver = CudaDriver(0)
    rig = build_rig(driver, RECORDS)
    geometry = rig.region.geometry
    shape = geometry.virtual_blocks, geometry.block_stride
    blocks = tensor_at(rig.region.address(0), shape, torch.int8, torch.device("cuda", 0))
    worker = CPUOffloadingWorker(
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(blocks, geometry.block_stride)],
            [[CanonicalKVCacheRef(0, geometry.block_stride)]],
        ),
        blocks_per_chunk=1,
        num_cpu_chunks=geometry.virtual_blocks,
    )
    before = rig.region.blocks
    assert rig.boundary.offload(2).ok and rig.region.blocks > before
    count = rig.region.blocks
    rig.region.claim(count)
    ids = list(range(count))
    device, host = GPULoadStoreSpec(ids, [count], [0]), CPULoadStoreSpec(ids)
    expected = torch.randint(
        -128, 128, (count, geometry.block_stride), dtype=torch.int8, device=blocks.device
    )
    blocks[:count].copy_(expected)
    assert worker.submit_store(0, device, host)
    worker.wait({0})
    blocks[:count].zero_()
    assert worker.submit_load(1, host, device)
    worker.wait({1})
    torch.cuda.synchronize()
    assert torch.equal(blocks[:count], expected)
    assert {result.job_id for result in worker.get_finished()} == {0, 1}
    worker.shutdown()
    driver.close()


def test_an_engine_grows_and_restores_beside_copies(model: Path) -> None:
    """Copies are vLLM's own here, so a restore seldom finds one under way: that it waits for them is shown by
    ``tests/vllm/test_host_kv.py``. Here the memory is real: a copy from an unmapped page ends the engine."""
    work = {"seed": 21, "count": 60, "length": 900, "turns": 2, "kv_mib": 64, "host_mib": 512}
    options = {"max_num_batched_tokens": 1024, "gdn_prefill_backend": "triton", "late": False, "reserve": 0}
    for graphs in (False, True):
        done = run_scenario("host_copies", model, **work, **options, grow=True, enforce_eager=not graphs)
        assert done["moves_by_kind"]["offload"] > 0 and done["moves_by_kind"]["restore"] > 0
        assert done["failed_moves"] == 0 and done["left"] == 0
        spilled = run_scenario("host_copies", model, **work, **options, enforce_eager=not graphs, most=0)
        assert spilled["spilled_blocks"] > 0 and spilled["loaded_blocks"] > 0
        tokens = [[result["tokens"] for result in run["results"]] for run in (done, spilled)]
        assert tokens[0] == tokens[1]
