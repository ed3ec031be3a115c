"""Time on a device under CUDA graphs, and what the device can do, measured in the same run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

WARM_UP_S = 0.05


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, 10th and 90th percentile over the repetitions."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches.

    Attributes:
        bytes_per_s: of a large copy, read plus written.
        flops_per_s: operations per second of a large bf16 product.
        fp8_flops_per_s: of a large fp8 (e4m3) product; None where the device has none.
    """

    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float | None = None


def timed(calls: Sequence[Callable[[], object]], repetitions: int, captured: bool = True) -> Times:
    """Mean time of ``calls`` run one after the other, over ``repetitions``, after a warm-up of WARM_UP_S.

    On a CPU, where kernels are interpreted, wall-clock time, which says nothing about a device.

    Args:
        captured: replays of a CUDA graph; else, for calls that read from the device, calls from the host.
    """
    if not torch.cuda.is_available():
        return _times([_wall(calls) for _ in range(repetitions)])
    for call in calls:
        call()
    torch.cuda.synchronize()

    def once() -> None:
        for call in calls:
            call()

    run = once
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        run = graph.replay
    until = time.perf_counter() + WARM_UP_S  # an idle device takes a while to come to its clock
    while time.perf_counter() < until:
        run()
        torch.cuda.synchronize()
    samples = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(calls))
    return _times(samples)


def ceilings(device: torch.device) -> Ceilings | None:
    """The rates of a 2 GiB copy and of 8192 cubed products on random data; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    # Not copy_: in a graph it becomes a copy engine's work, at two thirds of a kernel's rate.
    copy = timed([lambda: torch.neg(source, out=target)] * 4, 10)
    a, b = (source[i << 26 : (i + 1) << 26].view(8192, 8192) for i in range(2))
    product = torch.empty(8192, 8192, dtype=torch.bfloat16, device=device)
    dot = timed([lambda: torch.mm(a, b, out=product)] * 4, 10)
    fp8 = None
    if torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

        def scaled() -> torch.Tensor:
            dtype = torch.bfloat16
            return torch._scaled_mm(a8, b8, one, one, out_dtype=dtype, use_fast_accum=True, out=product)

        fp8 = 2 * 8192**3 / timed([scaled] * 4, 10).median * 1e6
    return Ceilings(2 * source.nbytes / copy.median * 1e6, 2 * 8192**3 / dot.median * 1e6, fp8)


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
