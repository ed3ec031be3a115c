"""The scenario of ``tests/gpu/test_staging.py``: one engine, every way to stage."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from support.scenarios import MIB, Rig, prompts

LARGE_STEP = 16  # tokens: above those of a decode step, below those of a prompt


def staged(
    model: str,
    seed: int,
    count: int,
    length: int,
    max_tokens: int,
    kv_mib: int,
    moe_kernel: str,
    **options: Any,
) -> Any:
    """Tokens at level 0, and of every way to stage with NaN in all staging slots between any two steps.

    A level moves in every step, except in ``region``, which has the largest level throughout, since it runs
    without graphs only where something is out.
    """
    vamp = {"max_offload_ratio": 0.5, "restore": False, "moe_kernel": moe_kernel}
    rig = Rig(model, vamp=vamp, kv_cache_memory_bytes=kv_mib * MIB, enable_prefix_caching=False, **options)
    staging, geometry = rig.worker._memory.staging, rig.worker._memory.slab.geometry
    work = (prompts(seed, count, length), max_tokens)
    log: dict[str, Any] = {"staging_mib": geometry.staging_records * geometry.expert_bytes >> 20}
    log["still"] = _run(rig, "off", *work)["results"]
    with mock.patch.object(type(staging), "needs_host_code", True):
        log["still without graphs"] = _run(rig, "off", *work)["results"]
    shrinker = rig.scheduler.shrinker
    built = shrinker.settings
    shrinker.settings = dataclasses.replace(built, exercise_steps=1)
    modes = {"off": _run(rig, "off", *work)}
    for name, tokens in (("in the kernel", None), ("large steps ahead", LARGE_STEP)):
        with mock.patch.object(staging, "_decide", functools.partial(setattr, staging, "_from", tokens)):
            modes[name] = _run(rig, "auto", *work)
    shrinker.settings = built
    _rise(rig, work[0][0])
    modes["region"] = _run(rig, "region", *work)
    rig.check()
    return {**log, "modes": modes}


def _run(rig: Rig, mode: str, sessions: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Prompts one by one: tokens, steps, steps staged ahead, moves, whether staging slots were written."""
    from vamp_integration.staging import use_staging

    use_staging(rig.worker, mode)
    staging, result = rig.worker._memory.staging, {"steps": 0, "ahead": 0, "written": False}
    moves = rig.report()["moves"]
    enter: Callable[[int], None] = staging._copies.enter

    def count(layer: int) -> None:
        result["ahead"] += layer == 0
        enter(layer)

    def before_step(step: int) -> None:
        written = _poison(rig)
        result["written"] |= bool(step) and written

    execute = rig.worker.execute_model

    def step_with_tokens(output: Any) -> Any:
        result["steps"] += output.total_num_scheduled_tokens > 0
        return execute(output)

    _poison(rig)
    with (
        mock.patch.object(staging._copies, "enter", count),
        mock.patch.object(rig.worker, "execute_model", step_with_tokens),
    ):
        done = [rig.generate([session], max_tokens, before_step)[0] for session in sessions]
    rig.settle()
    result["written"] |= _poison(rig)
    return {**result, "results": done, "moves": rig.report()["moves"] - moves}


def _poison(rig: Rig) -> bool:
    """Fill the staging slots with NaN once all queued steps are done; whether anything had been written."""
    from vamp_runtime.memory.tensor import tensor_at

    slab = rig.worker._memory.slab
    nbytes = slab.geometry.staging_records * slab.geometry.expert_bytes
    torch.cuda.synchronize()
    slots = tensor_at(slab.address(0, 0, slab.geometry.own_slots), (nbytes,), torch.uint8, "cuda")
    written = bool((slots != 255).any())
    slots.fill_(255)
    torch.cuda.synchronize()
    return written


def _rise(rig: Rig, prompt: list[int]) -> None:
    """Go to the largest level."""
    arbiter = rig.scheduler.arbiter
    controller = arbiter.controller
    for _ in range(8):
        arbiter.levels.want(controller.max_level)
        rig.generate([prompt], 24, lambda _: arbiter.levels.draw(controller.reserve_blocks) and None)
        rig.settle()
        if controller.level == controller.max_level:
            return
    raise AssertionError(f"level {controller.level} of {controller.max_level}")
