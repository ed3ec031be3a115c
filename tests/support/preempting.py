"""More at once than the highest level holds, while levels come and go: ``support.engine`` runs this."""

from __future__ import annotations

from typing import Any

from support.scenarios import EAGER, MIB, Rig, prompts


def preempting(
    model: str, *, probe: dict[str, int], load: dict[str, int], kv_mib: int, ratio: float, **options: Any
) -> dict[str, Any]:
    """One sequence alone; ``load``, all at once, with levels taken back in the midst of it; the first again.

    ``probe`` and ``load`` are ``seed, count, length, max_tokens``. ``seen`` in the result is level and
    preemptions so far, before every step of the load.
    """
    vamp = {"max_offload_ratio": ratio, "policy": EAGER, "restore": False}
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, **options)
    arbiter, shrinker = rig.scheduler.arbiter, rig.scheduler.shrinker
    controller, journal, pool = arbiter.controller, arbiter.journal, arbiter.pool
    seen: list[tuple[int, int]] = []

    def disturb(step: int) -> None:
        seen.append((controller.level, journal.preemptions))
        _check_tables(rig)
        if step % 6 == 5 and controller.level and not controller.moving and pool.cordon_limit is None:
            shrinker.restore(1)
        if step % 40 == 39:
            rig.check()

    probes = [_alone(rig, **probe)]
    results = rig.generate(_prompts(load), load["max_tokens"], disturb)
    rig.settle()
    rig.check()
    probes.append(_alone(rig, **probe))
    while controller.level:
        assert shrinker.restore(1)
        rig.settle()
        rig.check()
    probes.append(_alone(rig, **probe))
    most = controller.max_level
    return {"probes": probes, "results": results, "seen": seen, "max_level": most, **rig.report()}


def _prompts(work: dict[str, int]) -> list[list[int]]:
    return prompts(work["seed"], work["count"], work["length"])


def _alone(rig: Rig, **work: int) -> list[list[int]]:
    """Tokens of each, one at a time, with nothing cached of them."""
    found = []
    for prompt in _prompts(work):
        rig.scheduler.reset_prefix_cache()
        found.append(rig.generate([prompt], work["max_tokens"])[0]["tokens"])
    return found


def _check_tables(rig: Rig) -> None:
    """Every block of a table is in the pool, held, and on pages that the ranks have."""
    manager = rig.scheduler.kv_cache_manager
    pool, mapped = manager.block_pool, rig.worker._boundary.region.blocks
    for single in manager.coordinator.single_type_managers:
        for blocks in single.req_to_blocks.values():
            for block in blocks:
                assert block.block_id < pool.num_gpu_blocks <= mapped
                assert block.is_null or (block.ref_cnt > 0 and block.block_id not in pool.parked)
