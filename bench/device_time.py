"""Time on a device under CUDA graphs, and what the device can do, measured in the same run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, 10th and 90th percentile over the repetitions."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second of a large copy (read plus written), operations per second of a large bf16 product."""

    bytes_per_s: float
    flops_per_s: float


def timed(calls: Sequence[Callable[[], object]], repetitions: int) -> Times:
    """Mean time of ``calls`` run one after the other, over ``repetitions`` graph replays.

    On a CPU, where kernels are interpreted, wall-clock time, which says nothing about a device.
    """
    if not torch.cuda.is_available():
        return _times([_wall(calls) for _ in range(repetitions)])
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for repetition in range(repetitions + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repetition >= 2:
            samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return _times(samples)


def ceilings(device: torch.device) -> Ceilings | None:
    """The rates of a 2 GiB copy and an 8192 cubed bf16 product on random data; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    # Not copy_: in a graph it becomes a copy engine's work, at two thirds of a kernel's rate.
    copy = timed([lambda: torch.neg(source, out=target)] * 4, 10)
    a, b = (source[i << 26 : (i + 1) << 26].view(8192, 8192) for i in range(2))
    product = torch.empty(8192, 8192, dtype=torch.bfloat16, device=device)
    dot = timed([lambda: torch.mm(a, b, out=product)] * 4, 10)
    return Ceilings(2 * source.nbytes / copy.median * 1e6, 2 * 8192**3 / dot.median * 1e6)


def driver_version() -> str:
    """The NVIDIA driver's version, or an empty string where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""


def _wall(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) * 1e6 / len(calls)


def _times(samples: list[float]) -> Times:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Times(ordered[len(ordered) // 2], ordered[round(0.1 * last)], ordered[round(0.9 * last)])
