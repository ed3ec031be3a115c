"""What the user gives for the KV cache is what pool, reserve and staging take together, rounding aside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.gpu_worker import CPUEngineWorker, GPUEngineWorker, engine_config, kv_groups, small_slab, start
from vllm.v1.kv_cache_interface import KVCacheLayout

from vamp_integration import kv_memory
from vamp_integration.worker import VampWorkerMixin
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.ledger import OwnerKind

pytestmark = pytest.mark.vllm

# Odd sizes, so that neither pages nor blocks divide them.
SIZES = [123_457, 131_071, 150_001, 200_000, 222_223, 1_000_003, *range(300_000, 340_000, 1_237)]


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(4096)
    yield driver
    driver.close()


def kv_bytes(rank: VampWorkerMixin) -> int:
    """Bytes of the pages of pool and reserve."""
    ledger = rank._memory.ledger
    pages = sum(ledger.count(kind) for kind in (OwnerKind.KV, OwnerKind.RESERVE))
    assert pages == rank._boundary.region.pages
    return pages * ledger.page_bytes


@pytest.mark.parametrize("given", [True, False], ids=["kv_cache_memory_bytes", "from free memory"])
@pytest.mark.parametrize("staging", [0, 4], ids=["no staging", "staging"])
@pytest.mark.parametrize("reserve", [0, 1, 2])
def test_pool_reserve_and_staging_take_what_was_given_and_lose_only_to_rounding(
    driver: HostDriver, given: bool, staging: int, reserve: int
) -> None:
    for size in SIZES:
        memory = small_slab(driver, staging)
        config = engine_config({"reserve_levels": reserve}, size if given else None)
        rank = GPUEngineWorker(memory, config, kv_groups(), size)
        kv = start(rank)
        geometry = memory.slab.geometry
        # A figure from free memory is what loading, staging too, has left.
        extra = geometry.extra_hbm_bytes if given else 0
        assert bool(geometry.extra_hbm_bytes) == bool(staging)
        positions, block = kv_memory.layout(kv)
        assert positions == 1
        left = size - extra - kv_bytes(rank)
        assert 0 <= left < geometry.page_bytes + block, size
        free = rank._boundary.region.pages * geometry.page_bytes - kv.num_blocks * block
        level = geometry.pages_per_level * geometry.page_bytes
        assert reserve * level <= free < reserve * level + geometry.page_bytes, "the reserve is whole levels"
        rank._mover.close()
        rank._boundary.close()


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_cache_with_several_tails_takes_no_more_either(driver: HostDriver, layers: int) -> None:
    """The CPU engine's has one for each layer of a group, and each of them begins pages of its own."""
    for size in SIZES:
        memory = small_slab(driver)
        config = engine_config({}, size, KVCacheLayout.LBHNC)
        rank = CPUEngineWorker(memory, config, kv_groups(layers), size)
        kv = start(rank)
        positions, block = kv_memory.layout(kv)
        assert positions == layers
        left = size - kv_bytes(rank)
        assert 0 <= left < positions * (memory.slab.geometry.page_bytes + block), size
        rank._mover.close()
        rank._boundary.close()


def test_a_figure_from_an_earlier_start_is_one_from_free_memory(driver: HostDriver) -> None:
    """vLLM may put it into ``kv_cache_memory_bytes`` itself, where it does not profile again."""
    found = []
    for plan in (None, 300_000):
        rank = GPUEngineWorker(small_slab(driver, 4), engine_config({}, None), kv_groups(), 300_000)
        rank.plan = plan
        found.append(start(rank).num_blocks)
        rank._mover.close()
    assert found[0] == found[1]
