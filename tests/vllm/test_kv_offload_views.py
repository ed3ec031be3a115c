"""The ranks' half of vLLM's OffloadingConnector on a KV region of which only the head is backed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.base import CanonicalKVCaches
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.geometry import KVGeometry
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.ledger import PageLedger
from vamp_runtime.memory.tensor import tensor_at
from vamp_runtime.memory.transaction import Transaction

pytestmark = pytest.mark.vllm

PAGE, LAYERS, MAPPED, VIRTUAL = 4096, ["a", "b"], 3, 8
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
PART = SPEC.page_size_bytes


def canonical(caches: dict[str, torch.Tensor], config: KVCacheConfig) -> CanonicalKVCaches:
    """What vLLM makes of the views at start."""
    seen: list[CanonicalKVCaches] = []
    spec: Any = SimpleNamespace(
        replicated_layout=False,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
        get_worker=seen.append,
    )
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            world_size=1,
            rank=0,
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 1),
    )
    OffloadingConnectorWorker(spec, engine, config).register_kv_caches(caches)
    (caches_seen,) = seen
    return caches_seen


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.LBHNC])
def test_addresses_of_copies_are_right_for_blocks_that_come_later(layout: KVCacheLayout) -> None:
    outermost = layout is KVCacheLayout.BLHNC
    positions, stride = (1, len(LAYERS) * PART) if outermost else (len(LAYERS), PART)
    geometry = KVGeometry(positions, stride, VIRTUAL * stride, VIRTUAL, PAGE)
    driver = HostDriver(PAGE, {Tier.HBM: 64 * PAGE})
    ledger = PageLedger(PAGE)
    region = KVRegion(driver, ledger, geometry, geometry.pages_for_blocks(MAPPED))
    assert region.blocks == MAPPED
    raw = tensor_at(region.address(0), (region.nbytes,), torch.int8, torch.device("cpu"))
    placed = KVCacheTensor(
        size=region.nbytes,
        layers=LAYERS,
        layer_stride=PART if outermost else VIRTUAL * PART,
        block_stride=stride,
    )
    views = create_kv_cache_views(raw, SPEC, VIRTUAL, layout, placed)
    config = KVCacheConfig(VIRTUAL, [placed], [KVCacheGroupSpec(LAYERS, SPEC)])
    caches = canonical(dict(zip(LAYERS, views, strict=True)), config)
    # Block-outermost: one tensor of whole blocks. Else one for each layer.
    assert len(caches.tensors) == positions
    assert all(t.tensor.shape == (VIRTUAL, stride) for t in caches.tensors)

    last = VIRTUAL - 1
    with Transaction() as tx:
        more = geometry.pages_for_blocks(VIRTUAL) - region.pages
        region.push(tx, region._create(tx, more))
        driver.synchronize()
        tx.commit()
    assert region.blocks == VIRTUAL
    for number, view in enumerate(views, 1):
        view[last].fill_(number)
    read = b""
    for tensor in caches.tensors:
        address = np.zeros(1, dtype=np.uint64)
        compute_sub_block_ptrs(np.array([last]), 1, address, tensor.tensor)
        read += ctypes.string_at(int(address[0]), tensor.page_size_bytes)
    expected = b"".join(view[last].contiguous().view(torch.int8).numpy().tobytes() for view in views)
    assert read == expected and len(set(read)) > 1
    region.close()
    driver.close()
