"""One point of the microbenchmark: every arm over the same inputs, and what bounds them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from device_time import Ceilings, Times, timed
from moe_arms import ARMS, Call, reference
from moe_cases import BLOCK, FP8, Shape, Step, Weights, Work, make_steps, work
from moe_report import Row
from moe_residency import LinkRates, Placement, choose, touching
from moe_sweep import Found, grid, sweep, under_vllm_config

DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}
NOMINAL = Ceilings(4.3e12, 790e12, 1400e12)  # an H200, as the targets have it


@dataclass(frozen=True)
class Point:
    """One row's settings."""

    model: str
    dtype: str
    tp: int
    tokens: int
    routing: str
    shape: Shape
    placement: Placement


@dataclass(frozen=True)
class Run:
    """What is the same for all rows of a run; ceilings and links are None and empty on a CPU."""

    limits: Ceilings | None
    links: dict[str, LinkRates]
    repetitions: int
    check: bool
    sweep_seconds: float


def measure(
    point: Point, weights: Weights, arms: list[str], run: Run, resident: dict[tuple[str, int], float]
) -> list[Row]:
    """A row for every arm; figures that could not be had are None.

    Args:
        resident: microseconds by arm and tokens with every expert in the device's memory; a point that moves
            no expert adds to it.
    """
    shape, moved = point.shape, point.placement
    calls = 16 if point.tokens <= 16 else 8 if point.tokens <= 512 else 4
    calls = calls if torch.cuda.is_available() else weights.layers
    steps = make_steps(shape, point.tokens, calls, point.routing, weights.w13.device)
    chosen = choose(moved, shape.experts, weights.w13.device)
    wanted = torch.cat([chosen.host, chosen.peer, chosen.staged])
    steps = [touching(step, shape.experts, wanted, seed) for seed, step in enumerate(steps)]
    least = work(shape, steps, DTYPES[point.dtype], chosen.host, chosen.peer)
    want = reference(weights, 0, steps[0]).float() if run.check else None
    rows = []
    for arm in arms:
        if point.tokens > ARMS[arm].most_tokens:
            continue
        made = ARMS[arm].calls(shape, weights, steps)
        time = _timer(made, want if ARMS[arm].comparable else None, run.repetitions, ARMS[arm].captured)
        found = _swept(made, shape, steps, point, run.sweep_seconds) if arm == "vllm_swept" else None
        timing = under_vllm_config(found.config, time) if found else time()
        if timing is None:
            print(f"without {arm} at {point.tokens} tokens: its best configuration failed", file=sys.stderr)
            continue
        times, largest, rms = timing
        if not moved.moved:
            resident[arm, point.tokens] = times.median
        row: Row = {"model": point.model, "dtype": point.dtype, "tp": point.tp, "tokens": point.tokens}
        row |= {"routing": point.routing, "arm": arm, "host_experts": moved.host, "peer_experts": moved.peer}
        row |= {"staged_experts": moved.staged}
        row |= {"us_median": times.median, "us_p10": times.p10, "us_p90": times.p90}
        row |= bounds(least, point, run, resident.get((arm, point.tokens)), times.median)
        row |= {"max_error": largest, "rms_error": rms}
        if found:
            row |= {"config": found.config, "configs_timed": found.timed, "configs_failed": found.failed}
            row |= {"configs_left": found.left}
        rows.append(row)
    return rows


def bounds(least: Work, point: Point, run: Run, resident_us: float | None, us: float) -> Row:
    """Bytes by tier, operations, and what they bound; ``bound_ratio`` is of a point that moves experts."""
    row: Row = {"touched_bytes": least.bytes, "hbm_bytes": least.hbm_bytes, "host_bytes": least.host_bytes}
    row |= {"peer_bytes": least.peer_bytes, "flops": least.flops}
    away = [("host", least.host_bytes), ("peer", least.peer_bytes)]
    read = [nbytes / run.links[tier].read * 1e6 for tier, nbytes in away if tier in run.links]
    copied = [nbytes / run.links[tier].copied * 1e6 for tier, nbytes in away if tier in run.links]
    here = roofline_us(least, point.dtype, run.limits) if run.limits else None
    row["roofline_us"] = None if here is None else max([here, *read])
    row["roofline_nominal_us"] = max([roofline_us(least, point.dtype, NOMINAL), *read])
    row |= {"resident_us": None, "bound_us": None, "bound_ratio": None, "bound_copy_engine_us": None}
    if point.placement.moved and resident_us is not None and run.links:
        row |= {"resident_us": resident_us, "bound_us": max([resident_us, *read])}
        row |= {"bound_ratio": us / row["bound_us"], "bound_copy_engine_us": max([resident_us, *copied])}
    return row


def roofline_us(least: Work, dtype: str, limits: Ceilings) -> float:
    """The longer of the bytes of the device's memory over its rate, and the operations over theirs."""
    flops = (limits.fp8_flops_per_s or limits.flops_per_s) if dtype == "fp8" else limits.flops_per_s
    return max(least.hbm_bytes / limits.bytes_per_s, least.flops / flops) * 1e6


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Largest and RMS error, as shares of the RMS of ``want``."""
    scale = want.square().mean().sqrt()
    error = (got.float() - want) / scale
    return float(error.abs().max()), float(error.square().mean().sqrt())


Timing = tuple[Times, float | None, float | None]


def _timer(
    made: list[Call], want: torch.Tensor | None, repetitions: int, captured: bool
) -> Callable[[], Timing]:
    def time() -> Timing:
        largest, rms = (None, None) if want is None else errors(made[0](), want)
        return timed(made, repetitions, captured), largest, rms

    return time


def _swept(made: list[Call], shape: Shape, steps: list[Step], point: Point, seconds: float) -> Found | None:
    """The best configuration of vLLM's kernel, by few repetitions of up to four of the calls."""
    hit = sum(step.topk_ids.unique().numel() for step in steps) / len(steps)
    configs = grid(point.tokens * shape.top_k / hit, BLOCK if point.dtype == "fp8" else BLOCK // 2)
    return sweep(
        lambda config: under_vllm_config(config, lambda: timed(made[:4], 3).median), configs, seconds
    )
