"""Changes what a running engine decides with, so that benchmarks compare policies in one engine.

What: policy, bound and restore of a live scheduler; a level that is held whatever the demand; a fresh start
of the hit rate; on workers, the order of the homes. Why: an engine takes minutes to start. How: functions on
the objects of an engine in this process; those on workers are for ``collective_rpc``. What the engine was
built with stays: homes for the largest ratio, the kernel, the KV budget.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform

from vamp_integration import settings
from vamp_integration.costs import engine_costs
from vamp_integration.host_reads import experts_in
from vamp_integration.measured import resolve_policy
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import Tier
from vamp_runtime.policy.reselect import coldest_first

CHANGEABLE = ("policy", "max_offload_ratio", "restore", "prefill_share")

# On the scheduler: between two steps, by the thread that steps the engine.


def configure(scheduler: Any, values: Mapping[str, Any]) -> None:
    """Let ``scheduler`` decide with these settings from now on; those not named are as at start.

    Raises:
        ConfigError: a setting that cannot change at run time, or a bound above the one that homes are for.
    """
    built = settings.of(scheduler.vllm_config)
    assert built is not None
    for name in values:
        if name not in CHANGEABLE:
            raise ConfigError(f"{name}: cannot change while the engine runs; use {', '.join(CHANGEABLE)}")
    chosen = settings.parse(dataclasses.asdict(built) | dict(values))
    if chosen.max_offload_ratio > built.max_offload_ratio:
        raise ConfigError(
            f"max_offload_ratio: {chosen.max_offload_ratio:g} is above what this engine has homes for; use "
            f"at most {built.max_offload_ratio:g}"
        )
    arbiter, capacity, on_cpu = scheduler.arbiter, _capacity(scheduler), current_platform.is_cpu()
    chosen = resolve_policy(chosen, scheduler.kv_cache_config, scheduler.block_size, on_cpu)
    hf_config = scheduler.vllm_config.model_config.hf_text_config
    arbiter.costs = engine_costs(chosen, hf_config, on_cpu)
    arbiter.controller.limit = arbiter.costs.parameters.max_level(capacity.experts, capacity.group)
    scheduler.shrinker.settings = chosen
    scheduler.paced.pace.share = chosen.prefill_share
    forget(scheduler)


def forget(scheduler: Any) -> None:
    """Start the window of the hit rate, the dwell and measurements anew; the journal goes on."""
    arbiter, capacity = scheduler.arbiter, _capacity(scheduler)
    arbiter.hit_rate = arbiter.costs.hit_rate(capacity.blocks_at[-1] - capacity.blocks_at[0] + 1)
    arbiter.levels.last_growth_at = time.monotonic()
    scheduler.measure()


def hold(scheduler: Any, level: int) -> None:
    """Go to ``level`` in one move and stay there until ``release``; the move takes steps to settle.

    On the way down, blocks that requests hold delay it; blocks that are only cached are lost.

    Raises:
        ConfigError: a level that there is not; a move that is under way.
    """
    arbiter, capacity = scheduler.arbiter, _capacity(scheduler)
    controller = arbiter.controller
    if not 0 <= level <= capacity.max_level:
        raise ConfigError(f"level: {level} is outside 0..{capacity.max_level}; use {capacity.max_level}")
    if controller.moving or arbiter.pool.cordon_limit is not None:
        raise ConfigError(f"level: {level} cannot be held while a move is under way; step the engine first")
    arbiter.levels.hold()
    controller.limit = None
    if level > controller.level:
        controller.request_offload(level - controller.level)
    elif level < controller.level:
        scheduler.shrinker.restore(controller.level - level)


def release(scheduler: Any) -> None:
    """Let the policy move levels again; ``configure`` sets its bound."""
    scheduler.arbiter.levels.held = False


def _capacity(scheduler: Any) -> Any:
    capacity = scheduler.arbiter.controller.capacity
    if capacity is None:
        raise ConfigError("vamp: the workers have not said what they can hold; let the engine make a step")
    return capacity


# On a worker, through ``collective_rpc``.


def follow_coldest(worker: Any) -> int:
    """Order groups by the hits counted so far and copy the coldest to their homes now; bytes copied."""
    slab, driver = worker._memory.slab, worker._memory.driver
    geometry = slab.geometry
    with worker._mover.paused():
        driver.wait(driver.mark())
        slab.refresh_homes(0)  # steps that read homes of groups that have come back have ended now
        for layer, hits in enumerate(worker._memory.hits.tolist()):
            movable = geometry.movable_groups
            use = [sum(hits[expert] for expert in slab.experts_of(layer, group)) for group in range(movable)]
            slab.set_coldness(layer, coldest_first(use, movable))
        copied: int = slab.refresh_homes(geometry.layers * geometry.home_slots * geometry.group_bytes)
    return copied


def rested_at(worker: Any) -> float | None:
    """When the worker's thread last ended covering ahead, by ``time.monotonic``; ``None`` while it does."""
    mover = worker._mover
    return None if mover.busy or mover.covering else mover.rested_at


def host_bytes(worker: Any, tokens: int, top_k: int) -> list[float]:
    """Bytes that each layer is expected to read from experts on the host in a step of ``tokens`` tokens.

    From the hits counted so far, tokens taken as independent of each other.
    """
    slab, result = worker._memory.slab, []
    record = sum(slab.geometry.part_bytes)
    for hits, experts in zip(worker._memory.hits.tolist(), experts_in(slab, Tier.HOST), strict=True):
        routed = max(sum(hits), 1) / top_k
        touched = sum(1 - (1 - min(1.0, hits[expert] / routed)) ** tokens for expert in experts)
        result.append(touched * record)
    return result
