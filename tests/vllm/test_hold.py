"""A request that waits for levels is held for one scheduling pass, not longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.scenarios import EAGER

from vamp_runtime.controller import Capacity
from vamp_runtime.memory.boundary import MoveKind

pytestmark = pytest.mark.vllm


def test_a_hold_ends_with_the_step_and_its_levels_are_asked_for() -> None:
    """A finished request frees its blocks only while nothing is held (``_free_request_blocks``)."""
    from vllm.v1.core.block_pool import BlockPool

    from vamp_integration.arbiter import Arbiter
    from vamp_integration.commands import Report
    from vamp_integration.costs import engine_costs
    from vamp_integration.pool import VampBlockPool
    from vamp_integration.settings import VampSettings
    from vamp_integration.tiny_model import TinyShape

    shape = TinyShape()
    config = SimpleNamespace(num_hidden_layers=shape.layers)
    costs = engine_costs(VampSettings(policy=EAGER, model="tiny-qwen3-next"), config)
    pool = VampBlockPool.adopt(BlockPool(8, enable_caching=True, hash_block_size=16))
    arbiter = Arbiter(pool, costs, tokens_per_block=16, resize=lambda blocks: None, max_bubble_s=0.03)
    arbiter.settle(Report(capacity=Capacity((8, 12), experts=32, group=2, level_bytes=1)))
    pool.get_new_blocks(6)
    request: Any = SimpleNamespace(num_computed_tokens=20)

    arbiter.begin_step()
    assert arbiter.weigh(3, [], 0, request, running=True) > pool.num_gpu_blocks, "not this step"
    assert arbiter.holding
    command = arbiter.command()
    assert command is not None and command.move is not None and command.move.kind is MoveKind.OFFLOAD
    assert not arbiter.holding

    arbiter.begin_step()
    assert arbiter.weigh(1, [], 0, request, running=True) == 1 and not arbiter.holding
