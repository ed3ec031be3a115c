"""Capacity that would be lost, refused or out of step: sizes, resets under a cordon, levels nobody uses."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.scenarios import EAGER
from vllm.v1.core.block_pool import BlockPool

from vamp_integration import configure
from vamp_integration.arbiter import Arbiter
from vamp_integration.commands import Report
from vamp_integration.costs import engine_costs
from vamp_integration.kv_memory import region_geometry
from vamp_integration.pool import VampBlockPool
from vamp_integration.settings import VampSettings
from vamp_integration.shrink import Shrinker
from vamp_integration.tiny_model import TinyShape
from vamp_runtime.controller import Capacity
from vamp_runtime.memory.boundary import Outcome
from vamp_runtime.policy.restore import decide_restore

pytestmark = pytest.mark.vllm

PAGE = 65536


@dataclass
class FakeTensor:
    size: int
    block_stride: int
    layer_stride: int


@pytest.mark.parametrize("positions", [1, 2, 3])
@pytest.mark.parametrize("block_pages", [1, 2, 3, 4, 6, 7])
def test_the_region_has_room_for_every_page_it_was_asked_for(positions: int, block_pages: int) -> None:
    stride = block_pages * PAGE
    config: Any = SimpleNamespace(
        num_blocks=20, kv_cache_tensors=[FakeTensor(positions * 20 * stride, stride, 20 * stride)]
    )
    for pages in range(200, 230):
        assert region_geometry(config, PAGE, pages).max_pages >= pages


def test_the_prefix_cache_can_be_reset_under_a_cordon() -> None:
    pool = VampBlockPool.adopt(BlockPool(10, enable_caching=True, hash_block_size=16))
    used = pool.get_new_blocks(9)
    pool.cordon(6)
    pool.free_blocks(used)
    assert pool.parked
    assert pool.reset_prefix_cache()
    assert pool.cordon_limit is None and pool.get_num_free_blocks() == 9


def test_levels_whose_blocks_never_joined_the_pool_go_back() -> None:
    arbiter, shrinker = grown((8, 12))
    situation = shrinker._situation(1, shrinker._leaving(1), 0, arbiter.levels.last_growth_at + 1e3)
    assert decide_restore(situation, arbiter.costs.parameters, arbiter.costs.restore).levels == 1


def grown(blocks_at: tuple[int, ...]) -> tuple[Arbiter, Shrinker]:
    """At the highest level, with 8 blocks in the pool and everything else in the reserve."""
    settings = VampSettings(policy=EAGER, model="tiny-qwen3-next")
    costs = engine_costs(settings, SimpleNamespace(num_hidden_layers=TinyShape().layers))
    pool = VampBlockPool.adopt(BlockPool(8, enable_caching=True, hash_block_size=16))
    arbiter = Arbiter(pool, costs, 16, lambda blocks: None, 0.03)
    arbiter.settle(Report(capacity=Capacity(blocks_at, experts=32, group=2, level_bytes=1)))
    for level, blocks in enumerate(blocks_at[1:], 1):
        arbiter.levels.want(1)
        arbiter.command()
        arbiter.settle(Report(outcome=Outcome(level, True, level, blocks, 1, 0, 0.001, "")))
    return arbiter, Shrinker(arbiter, settings)


def test_a_lower_level_is_held_while_requests_are_still_in_the_tail() -> None:
    arbiter, shrinker = grown((10, 14, 18, 22, 26))
    arbiter.levels.draw(14)
    pool = arbiter.pool
    used = pool.get_new_blocks(21)
    assert arbiter.controller.reserve_blocks > arbiter.controller.reserve_target
    configure.hold(SimpleNamespace(arbiter=arbiter, shrinker=shrinker), 1)
    assert pool.cordon_limit is not None
    for _ in range(3):
        arbiter.levels.begin_step()
    assert pool.num_gpu_blocks == 22
    pool.free_blocks(used)
    assert pool.parked
