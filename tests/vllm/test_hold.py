"""A request that waits for levels is held for one scheduling pass, not longer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.scenarios import EAGER

from vamp_runtime.controller import Capacity
from vamp_runtime.memory.boundary import MoveKind, Outcome

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
    arbiter = Arbiter(pool, costs, tokens_per_block=16, resize=lambda blocks: None, max_move_s=0.03)
    arbiter.settle(Report(capacity=Capacity((8, 12), experts=32, group=2, level_bytes=1)))
    pool.get_new_blocks(6)
    request: Any = SimpleNamespace(num_computed_tokens=20)

    arbiter.levels.begin_step()
    assert arbiter.weigh(3, [], 0, request, running=True) > pool.num_gpu_blocks, "not this step"
    assert arbiter.holding
    command = arbiter.command()
    assert command is not None and command.move is not None and command.move.kind is MoveKind.OFFLOAD
    assert not arbiter.holding

    arbiter.levels.begin_step()
    assert arbiter.weigh(1, [], 0, request, running=True) == 1 and not arbiter.holding


def test_moves_beside_steps_may_take_longer() -> None:
    from vllm.v1.core.block_pool import BlockPool

    from vamp_integration.arbiter import Arbiter
    from vamp_integration.commands import Report
    from vamp_integration.costs import engine_costs
    from vamp_integration.levels import BESIDE_STEPS_S
    from vamp_integration.pool import VampBlockPool
    from vamp_integration.settings import VampSettings
    from vamp_integration.tiny_model import TinyShape

    config = SimpleNamespace(num_hidden_layers=TinyShape().layers)
    costs = engine_costs(VampSettings(policy=EAGER, model="tiny-qwen3-next"), config)
    for beside, levels in ((False, 1), (True, 5)):
        pool = VampBlockPool.adopt(BlockPool(8, enable_caching=True, hash_block_size=16))
        arbiter = Arbiter(pool, costs, tokens_per_block=16, resize=lambda blocks: None, max_move_s=0.03)
        blocks = tuple(range(8, 29, 4))
        capacity = Capacity(blocks, experts=32, group=2, level_bytes=1, beside_steps=beside)
        arbiter.settle(Report(capacity=capacity))
        assert arbiter.levels.max_move_s == (BESIDE_STEPS_S if beside else 0.03)
        arbiter.levels.want(1)
        first = arbiter.command()
        assert first is not None and first.move is not None and first.move.levels == 1, "none is known yet"
        # Beside steps, what a move waited for says nothing about how long more levels would take.
        outcome = Outcome(
            first.move.epoch, True, 1, 12, 1, 0, 0.4 if beside else 0.04, "", pages_seconds=0.04
        )
        arbiter.settle(Report(outcome=outcome))
        arbiter.levels.want(4)
        second = arbiter.command()
        assert second is not None and second.move is not None
        assert second.move.levels == min(levels, 4), "as many as the time of the first allows"
