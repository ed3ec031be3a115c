"""The best configuration of vLLM's Triton experts for one point, from a small grid of its own parameters.

vLLM ships tables of such configurations for some shapes and devices; where it has none it takes a default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

Config = dict[str, int]  # empty: vLLM's own choice

GROUPS = (1, 32)


@dataclass(frozen=True)
class Found:
    """The configuration of the least time, that time, and how many were timed, failed, or left undone."""

    config: Config
    us: float
    timed: int
    failed: int
    left: int


def grid(rows: float, block_k: int) -> list[Config]:
    """vLLM's own choice, and 18 configurations for ``rows`` rows per expert that is hit.

    Tiles of three heights near the rows, 64 or 128 columns, and three depths of pipeline.
    """
    many = rows > 40
    return [{}] + [
        _config(m, n, block_k, GROUPS[many], warps, stages)
        for m in ((32, 64, 128) if many else (16, 32, 64))
        for n in (64, 128)
        for warps, stages in ((4, 3), (4, 5), (8, 4))
    ]


def neighbours(config: Config) -> list[Config]:
    """Four more around the best of a grid: other grouping, wider, one stage less, other number of warps."""
    m, n, k = (config[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    group, warps, stages = config["GROUP_SIZE_M"], config["num_warps"], config["num_stages"]
    return [
        _config(m, n, k, GROUPS[group == GROUPS[0]], warps, stages),
        _config(m, 2 * n, k, group, 8, 3),
        _config(m, n, k, group, warps, stages - 1),
        _config(m, n, k, group, 12 - warps, stages),
    ]


def sweep(time_us: Callable[[Config], float | None], configs: list[Config], seconds: float) -> Found | None:
    """The best of ``configs`` and of the neighbours of their best; None where none of them runs.

    Args:
        time_us: microseconds under a configuration, None where it does not run.
        seconds: after which no further configuration is tried.
    """
    end = time.monotonic() + seconds
    times: list[tuple[float, Config]] = []
    failed = left = 0
    queue, refined = list(configs), False
    while queue:
        config = queue.pop(0)
        if time.monotonic() > end:
            left += 1
        elif (us := time_us(config)) is None:
            failed += 1
        else:
            times.append((us, config))
        tiled = [found for found in times if found[1]]
        if not queue and tiled and not refined:
            queue = [near for near in neighbours(_best(tiled)[1]) if near not in configs]
            refined = True
    if not times:
        return None
    us, config = _best(times)
    return Found(config, us, len(times), failed, left)


def under_vllm_config(config: Config, run: Callable[[], float]) -> float | None:
    """``run()`` with vLLM's kernel configured so; None, and a line that says why, where it does not run."""
    from triton.errors import TritonError
    from vllm.model_executor.layers.fused_moe import override_config

    with override_config(config):  # an exception that left the block would leave the configuration in force
        try:
            return run()
        except (TritonError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"vllm_swept: {config} does not run: {reason}", file=sys.stderr)
            return None


def _best(times: list[tuple[float, Config]]) -> tuple[float, Config]:
    return min(times, key=lambda found: found[0])


def _config(m: int, n: int, k: int, group: int, warps: int, stages: int) -> Config:
    sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group, "SPLIT_K": 1}
    return {**sizes, "num_warps": warps, "num_stages": stages}
