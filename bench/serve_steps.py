"""Decode steps by batch and level, and what a growth does to the steps around it."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from serve_engine import PointFailed, ServeEngine

from vamp_integration.replay.figures import percentile
from vamp_kernels import ranges

PROMPT_TOKENS = 64
SETTLE_STEPS = 16
STEPS_AROUND = 48
#: Most steps that a growth may take to settle, and what it maps ahead of the next one to end.
MOST_STEPS = 400
#: A step that the host has seen late leaves the device less to do in the next: both count, or none.
CATCH_UP_STEPS = 3
_numbers = itertools.count()


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        steps: steps of each point, fewer where ``point_s`` seconds are up.
        warm_prompts, warm_tokens: prompts that warm the counters, and their length.
        warm_batch: sequences that then decode for the same purpose.
        growth_bytes, growth_batch: size of a growth, and sequences that decode meanwhile.
    """

    steps: int = 100
    point_s: float = 6.0
    warm_prompts: int = 8
    warm_tokens: int = 8000
    warm_batch: int = 64
    growth_bytes: int = 1 << 30
    growth_batch: int = 16


def _submit(engine: ServeEngine, count: int, tokens: int, output_tokens: int) -> list[str]:
    number = next(_numbers)
    draw, vocabulary = random.Random(number), engine.engine.vllm_config.model_config.get_vocab_size()
    names = [f"steps-{number}-{index}" for index in range(count)]
    for name in names:
        engine.submit(name, [draw.randrange(vocabulary) for _ in range(tokens)], output_tokens)
    return names


@contextmanager
def decoding(engine: ServeEngine, batch: int, output_tokens: int) -> Iterator[Callable[[], float]]:
    """``batch`` sequences past their prefill; gives a function that makes one step and returns its end."""
    names = _submit(engine, batch, PROMPT_TOKENS, output_tokens + SETTLE_STEPS + 8)
    started: set[str] = set()
    while len(started) < batch:
        started |= {progress.request_id for progress in engine.step() if progress.tokens}

    def step() -> float:
        # Scheduling is asynchronous: a call may return nothing, or what an earlier one began.
        while not any(progress.tokens for progress in engine.step()):
            pass
        return time.monotonic()

    for _ in range(SETTLE_STEPS):
        step()
    try:
        yield step
    finally:
        engine.abort(names)


def decode_times(engine: ServeEngine, batch: int, steps: int, budget_s: float) -> list[float]:
    """Seconds between the ends of consecutive steps of ``batch`` sequences."""
    with decoding(engine, batch, steps + MOST_STEPS + STEPS_AROUND) as step:
        _settle(engine, step)
        began = last = time.monotonic()
        times: list[float] = []
        while len(times) < steps and (last - began < budget_s or len(times) < 5):
            now = step()
            times.append(now - last)
            last = now
    return times[1:]


def _settle(engine: ServeEngine, step: Callable[[], float]) -> None:
    """Steps until no page is being mapped ahead of the next growth, as after a level that went back."""
    if engine.part.vamp:
        from vamp_integration import configure

        if engine.rpc(configure.rested_at) is None:
            steps_until_rest(engine, step)


def warm_up(engine: ServeEngine, plan: Plan) -> None:
    """Run tokens through the routers; with VAMP, let the homes hold what proved coldest, at level 0."""
    _submit(engine, plan.warm_prompts, plan.warm_tokens, 2)
    while engine.busy():
        engine.step()
    engine.drain()
    decode_times(engine, plan.warm_batch, plan.steps, plan.point_s)
    if engine.part.vamp:
        from vamp_integration import configure

        engine.rpc(configure.follow_coldest)


def step_figures(times: list[float]) -> dict[str, Any]:
    ms = [1e3 * value for value in times]
    return {
        "ms_median": statistics.median(ms),
        "ms_p99": percentile(ms, 0.99),
        "ms_mean": statistics.fmean(ms),
        "steps": len(ms),
    }


def measure_steps(engine: ServeEngine, plan: Plan, share: float, batch: int) -> dict[str, Any]:
    """One row's level and figures."""
    row: dict[str, Any] = {"batch": batch, "level_share": share, "level": 0, "host_bytes": 0.0}
    if not engine.part.vamp or not engine.scheduler.arbiter.levels.held:
        engine.reset(None)
    if engine.part.vamp:
        from vamp_integration import configure

        level = engine.levels(share)
        if engine.scheduler.arbiter.controller.level != level:
            engine.to_level(level)
        top_k = engine.engine.vllm_config.model_config.hf_text_config.num_experts_per_tok
        read = engine.rpc(configure.host_bytes, batch, top_k)
        row |= {
            "level": level,
            "host_bytes": sum(read),
            "host_bytes_by_layer": [round(size) for size in read],
        }
    return row | step_figures(decode_times(engine, batch, plan.steps, plan.point_s))


def measure_growth(engine: ServeEngine, plan: Plan, afresh: bool) -> dict[str, Any]:
    """Grow by ``plan.growth_bytes`` while ``plan.growth_batch`` sequences decode, as a need would.

    Args:
        afresh: begin at level 0, not where the growth before has ended.

    Raises:
        PointFailed: a move failed, or there is no level left.
    """
    from vamp_integration import configure

    if afresh or not engine.scheduler.arbiter.levels.held:
        engine.reset(None)
    configure.configure(engine.scheduler, {"restore": False})
    arbiter = engine.scheduler.arbiter
    controller = arbiter.controller
    levels = -(-plan.growth_bytes // controller.capacity.level_bytes)
    target = controller.level + levels
    if target > controller.capacity.max_level:
        raise PointFailed(f"level {target} is above {controller.capacity.max_level}: too many growths")
    moves, failed = sum(arbiter.journal.moves.values()), arbiter.journal.failed_moves
    ends: list[float] = []
    with decoding(engine, plan.growth_batch, 4 * STEPS_AROUND + 2 * MOST_STEPS) as step, phases() as spent:
        configure.release(engine.scheduler)
        covered = engine.rpc(configure.rested_at) is not None
        ends += [step() for _ in range(STEPS_AROUND)]
        requested = time.monotonic()
        arbiter.levels.want(levels)
        while controller.level < target and len(ends) < STEPS_AROUND + MOST_STEPS:
            ends.append(step())
        settled = time.monotonic()
        arbiter.levels.hold()
        later, rested = steps_until_rest(engine, step)
        ends += later + [step() for _ in range(STEPS_AROUND)]
    if controller.level != target or arbiter.journal.failed_moves > failed:
        raise PointFailed(f"level {target} was not reached, {controller.level} was; the log says why")
    return {
        "batch": plan.growth_batch,
        "levels": levels,
        "level_after": target,
        "growth_gib": levels * controller.capacity.level_bytes / 2**30,
        "moves": sum(arbiter.journal.moves.values()) - moves,
        "total_ms": 1e3 * (settled - requested),
        "covered": covered,
        "phases_ms": {name: round(1e3 * seconds, 3) for name, seconds in spent.items()},
        **bubble(ends, requested, settled, max(rested, settled)),
    }


def steps_until_rest(engine: ServeEngine, step: Callable[[], float]) -> tuple[list[float], float]:
    """Steps until nothing more is mapped ahead of the next growth; their ends, and when that was.

    Raises:
        PointFailed: it goes on for too long.
    """
    from vamp_integration import configure

    ends: list[float] = []
    while len(ends) < MOST_STEPS:
        ends += [step() for _ in range(STEPS_AROUND)]
        rested = engine.rpc(configure.rested_at)
        if rested is not None:
            return ends, rested
    raise PointFailed(f"pages were still being mapped ahead after {len(ends)} steps")


@contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Inside, the seconds of every phase of a move that this process makes, on whatever thread, summed."""
    spent: dict[str, float] = {}

    @contextmanager
    def clocked(name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            if name in ranges.MOVE:
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin

    ranges.install(clocked)
    try:
        yield spent
    finally:
        ranges.install(None)


def bubble(ends: list[float], requested: float, settled: float, rested: float) -> dict[str, Any]:
    """What a move cost the steps from its request on, also while the next one's pages are mapped ahead.

    Args:
        ends: ends of consecutive steps, with undisturbed ones before ``requested`` and after ``rested``.

    Returns:
        ``bubble_ms``: time of the steps until ``settled`` beyond that of as many undisturbed ones before the
        request, and ``bubble_ms_ahead``, part of it, of those until ``rested`` and of the next
        ``CATCH_UP_STEPS`` beyond later ones; ``bubble_ms_largest``: of one step. ``series_ms``: every step.
    """
    steps = [(end - begin, end) for begin, end in itertools.pairwise(ends)]
    before = statistics.median(time for time, end in steps if end <= requested)
    after = statistics.median(time for time, end in steps if end - time >= rested)
    affected = [time for time, end in steps if end > requested and end - time < settled]
    meanwhile = [time for time, end in steps if settled <= end - time < rested]
    meanwhile += [time for time, end in steps if end - time >= rested][:CATCH_UP_STEPS]
    extra = [1e3 * (time - before) for time in affected]
    ahead = [1e3 * (time - after) for time in meanwhile]
    return {
        "bubble_ms": sum(extra) + sum(ahead),
        "bubble_ms_ahead": sum(ahead),
        "bubble_ms_largest": max(extra + ahead, default=0.0),
        "steps_affected": len(affected),
        "steps_ahead": len(ahead) - CATCH_UP_STEPS,
        "step_ms_before": 1e3 * before,
        "step_ms_after": 1e3 * after,
        "series_ms": [round(1e3 * time, 3) for time, _ in steps],
    }
