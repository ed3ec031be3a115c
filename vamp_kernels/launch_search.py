"""Launches near a given one, and a search among them by time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from vamp_kernels.launch import (
    DeviceLimits,
    GemmLaunch,
    GemvLaunch,
    MoeLaunch,
    SpecialisedLaunch,
    check_launch,
    check_specialised,
    choose_launch,
)

STAGES = ("gate_up", "down", "both")


@dataclass(frozen=True)
class Problem:
    """One call: tokens and the shape of a layer's experts; ``dtype`` is that of the weights."""

    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Tuned:
    """The chosen and the best launch, microseconds of each, and how many others ran and failed."""

    chosen: MoeLaunch
    chosen_us: float
    best: MoeLaunch
    best_us: float
    timed: int
    failed: int


def neighbours(launch: MoeLaunch, stage: str, problem: Problem, limits: DeviceLimits) -> list[MoeLaunch]:
    """Launches that differ from ``launch`` in one choice of ``stage`` and fit the device.

    ``stage`` is ``gate_up``, ``down``, or ``both`` for what the two share: rows of a tile, dependent launch,
    and plain products in place of specialised ones.
    """
    if stage == "both":
        found = []
        if limits.has_dependent_launch:
            found.append(replace(launch, dependent_launch=not launch.dependent_launch))
        up, down = launch.gate_up, launch.down
        if isinstance(up, SpecialisedLaunch) or isinstance(down, SpecialisedLaunch):
            shape = (problem.hidden, problem.intermediate, problem.experts, problem.top_k)
            plainly = replace(limits, specialised=False)
            found = [choose_launch(problem.tokens, *shape, problem.dtype, plainly)]
        if isinstance(up, SpecialisedLaunch) and isinstance(down, SpecialisedLaunch):
            rows = 128 if up.block_m == 192 else 192
            found.append(MoeLaunch(replace(up, block_m=rows), replace(down, block_m=rows)))
        if isinstance(up, GemmLaunch) and isinstance(down, GemmLaunch):
            for half in (True, False):
                found.append(replace(launch, gate_up=_other_height(up, half), down=_other_height(down, half)))
        return [other for other in found if _fits(other, problem, limits)]
    now = launch.gate_up if stage == "gate_up" else launch.down
    others: Sequence[GemmLaunch | SpecialisedLaunch | GemvLaunch]
    if isinstance(now, GemvLaunch):
        others = _gemv_neighbours(now)
    elif isinstance(now, SpecialisedLaunch):
        others = _specialised_neighbours(now)
    else:
        others = _gemm_neighbours(now, stage == "down", limits)
    with_stage = [
        replace(launch, gate_up=other) if stage == "gate_up" else replace(launch, down=other)
        for other in others
    ]
    return [other for other in with_stage if _fits(other, problem, limits)]


def _other_height(now: GemmLaunch, half: bool) -> GemmLaunch:
    """``now`` with half as many rows, or twice as many."""
    rows = now.block_m // 2 if half else now.block_m * 2
    small = min(now.small_m, rows // 2)
    return replace(now, block_m=rows, small_m=small if small >= 16 else 0)


def _gemv_neighbours(now: GemvLaunch) -> list[GemvLaunch]:
    return [
        *(replace(now, block_n=n) for n in (now.block_n // 2, now.block_n * 2)),
        *(replace(now, block_k=k) for k in (now.block_k // 2, now.block_k * 2)),
        *(replace(now, num_warps=warps) for warps in (now.num_warps // 2, now.num_warps * 2)),
    ]


def _specialised_neighbours(now: SpecialisedLaunch) -> list[SpecialisedLaunch]:
    return [
        *(replace(now, block_n=n) for n in (now.block_n // 2, now.block_n * 2)),
        *(replace(now, num_stages=stages) for stages in (now.num_stages - 1, now.num_stages + 1)),
    ]


def _gemm_neighbours(now: GemmLaunch, down: bool, limits: DeviceLimits) -> list[GemmLaunch]:
    found = [
        *(replace(now, block_n=n) for n in (now.block_n // 2, now.block_n * 2)),
        *(replace(now, block_k=k) for k in (now.block_k // 2, now.block_k * 2)),
        *(replace(now, num_warps=warps) for warps in (now.num_warps // 2, now.num_warps * 2)),
        *(replace(now, num_stages=stages) for stages in (now.num_stages - 1, now.num_stages + 1)),
        replace(now, swap_ab=not now.swap_ab),
    ]
    if limits.has_tma:
        found.append(replace(now, tma=not now.tma))
    if down:
        found += [replace(now, span=span) for span in (now.span // 2, now.span * 2)]
        found += [replace(now, block_m=rows) for rows in (now.block_m // 2, now.block_m * 2)]
    heights = {0, now.block_m // 2, now.block_m // 4} - {now.small_m}
    return found + [replace(now, small_m=rows) for rows in sorted(heights)]


def _fits(launch: MoeLaunch, problem: Problem, limits: DeviceLimits) -> bool:
    """Whether sizes are ones that the kernels take, and operands fit into shared memory."""
    try:
        check_launch(launch, problem.dtype)
        check_specialised(launch, problem.hidden, problem.intermediate, limits)
    except ValueError:
        return False
    for stage, weight_rows in ((launch.gate_up, 2), (launch.down, 1)):
        if isinstance(stage, GemvLaunch):
            if not (1 <= stage.num_warps <= 8 and stage.block_n >= 1 and 16 <= stage.block_k <= 4096):
                return False
            continue
        sizes = (stage.block_m, stage.block_n, stage.block_k)
        if min(sizes) < 16 or max(sizes) > 256 or not 2 <= stage.num_stages <= 6:
            return False
        if isinstance(stage, GemmLaunch):
            if stage.num_warps not in (4, 8) or stage.small_m % 16:
                return False
            if not 1 <= stage.span <= max(problem.hidden // stage.block_n, 1):
                return False
        if stage.shared_bytes(weight_rows * stage.block_n, problem.dtype.itemsize) > limits.shared_bytes:
            return False
    return True


def search(
    chosen: MoeLaunch,
    problem: Problem,
    limits: DeviceLimits,
    time_us: Callable[[MoeLaunch], float | None],
    rounds: int,
    least_gain: float = 0.01,
) -> Tuned:
    """Go to the best neighbour, stage by stage, as long as that gains, at most ``rounds`` times.

    Args:
        time_us: microseconds of the layer under a launch, None where it does not run.
        least_gain: share of the time that a change has to save to be taken.

    Raises:
        ValueError: ``chosen`` itself does not run.
    """
    first = time_us(chosen)
    if first is None:
        raise ValueError(f"{chosen} does not run on this device")
    times: dict[MoeLaunch, float | None] = {chosen: first}
    best, best_us = chosen, first
    for _ in range(rounds):
        before = best_us
        for stage in STAGES:
            for other in neighbours(best, stage, problem, limits):
                if other not in times:
                    times[other] = time_us(other)
            reached = [(us, launch) for launch, us in times.items() if us is not None]
            us, launch = min(reached, key=lambda pair: pair[0])
            if us < best_us * (1.0 - least_gain):
                best, best_us = launch, us
        if best_us == before:
            break
    failed = sum(us is None for us in times.values())
    return Tuned(chosen, first, best, best_us, len(times) - 1 - failed, failed)
