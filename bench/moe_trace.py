"""Trace a few calls of the layer with torch's profiler, under the names of its ranges.

python bench/moe_trace.py --tokens 64 --host 4 --output bench/results/h200/DATE-trace-64.json.gz

The file opens in https://ui.perfetto.dev or chrome://tracing. Calls are made from the host, without a graph,
as ranges surround launches. Some experts lie in host memory, so that `copy` is among the ranges. Without CUDA
the kernels are interpreted (TRITON_INTERPRET=1 and --model tiny) and the trace has the host's ranges only.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from moe_arms import vamp
from moe_cases import MODELS, make_steps
from moe_layer import open_driver
from moe_residency import PagedWeights, Placement, choose, touching
from torch.profiler import ProfilerActivity, profile, record_function

from vamp_kernels import ranges
from vamp_runtime.errors import ConfigError

Event = dict[str, Any]
KEPT = ("user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "ac2g")
LAUNCHES = ("cuda_runtime", "cuda_driver")
ARGUMENTS = ("correlation", "stream", "grid", "block", "registers per thread", "shared memory")


def traced(call: Callable[[], object], repetitions: int, path: Path) -> list[Event]:
    """Events of ``repetitions`` calls, after two that are not traced; overwrites ``path``, a .gz."""
    cuda = torch.cuda.is_available()
    for _ in range(2):
        call()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    ranges.install(record_function)
    try:
        with profile(activities=activities) as profiler:
            for _ in range(repetitions):
                call()
            if cuda:
                torch.cuda.synchronize()
    finally:
        ranges.install(None)
    profiler.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(json.load(file)["traceEvents"])


def essential(events: Sequence[Event]) -> list[Event]:
    """Ranges, kernels and what launched them, with the arguments that say something; times from 0 on."""
    launched = {e["args"]["correlation"] for e in events if e.get("cat") in KEPT and _correlation(e)}
    kept = [
        e
        for e in events
        if e.get("ph") == "M"
        or (e.get("cat") in KEPT and not e["name"].startswith("ProfilerStep"))
        or (e.get("cat") in LAUNCHES and _correlation(e) in launched)
    ]
    start = min((e["ts"] for e in kept if e.get("ph") == "X"), default=0)
    found = []
    for event in kept:
        if event.get("ph") != "M":
            args = {name: event["args"][name] for name in ARGUMENTS if name in event.get("args", {})}
            event = {**event, "ts": round(event["ts"] - start, 3), "args": args}
        found.append(event)
    return found


def _correlation(event: Event) -> int | None:
    found = event.get("args", {}).get("correlation")
    return None if found is None else int(found)


def kernels_by_range(events: Sequence[Event]) -> dict[str, list[Event]]:
    """The kernels that were launched inside each range, the innermost one counts; in order of time."""
    named = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in ranges.KERNELS]
    launches = {_correlation(e): e for e in events if e.get("cat") in LAUNCHES}
    found: dict[str, list[Event]] = {name: [] for name in ranges.KERNELS}
    for kernel in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"])):
        launch = launches.get(_correlation(kernel))
        if launch is None:
            continue
        around = [e for e in named if e["ts"] <= launch["ts"] <= e["ts"] + e["dur"]]
        if around:
            found[min(around, key=lambda e: float(e["dur"]))["name"]].append(kernel)
    return found


def summary(events: Sequence[Event], repetitions: int) -> list[str]:
    """A line for each range that was entered: times of a call on the host, and of its kernels."""
    lines = [f"{'range':9}{'host us':>9}{'device us':>11}  kernels of a call"]
    kernels = kernels_by_range(events)
    for name in ranges.KERNELS:
        entered = [e["dur"] for e in events if e.get("cat") == "user_annotation" and e["name"] == name]
        if not entered:
            continue
        host = statistics.median(entered) * len(entered) / repetitions
        own = kernels[name]
        device = f"{sum(k['dur'] for k in own) / repetitions:11.1f}" if own else f"{'-':>11}"
        names = [k["name"] for k in own[: len(own) // repetitions]]
        lines.append(f"{name:9}{host:9.1f}{device}  {', '.join(names)}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="moe_trace.py"
    )
    parser.add_argument("--model", default="qwen3-next", choices=sorted(MODELS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--host", type=int, default=4, metavar="N", help="experts in host memory")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json.gz")
    a = parser.parse_args(argv)
    shape, cuda = MODELS[a.model], torch.cuda.is_available()
    for name in ("tokens", "repetitions"):
        if getattr(a, name) < 1:
            parser.error(f"--{name} {getattr(a, name)}: expected 1 or more")
    if not 0 <= a.host <= shape.experts:
        parser.error(f"--host {a.host}: expected 0 to {shape.experts}")
    if not a.output.name.endswith(".json.gz") or not os.access(a.output.parent, os.W_OK):
        parser.error(f"--output {a.output}: expected a name that ends in .json.gz in a folder to write to")
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("no CUDA device: TRITON_INTERPRET=1 --model tiny interprets the kernels on a CPU")
    device = torch.device("cuda" if cuda else "cpu")
    try:
        driver = open_driver(argparse.Namespace(peer=0))
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    paged = PagedWeights(driver, shape, 1, device, torch.bfloat16, 0, max(a.host, 1))
    weights, placed = paged.place(Placement(a.host)), choose(Placement(a.host), shape.experts, device)
    steps = make_steps(shape, a.tokens, 1, "uniform", device)
    steps = [touching(step, shape.experts, placed.host, seed=0) for step in steps]
    call = vamp(shape, weights, steps)[0]
    events = essential(traced(call, a.repetitions, a.output))
    with gzip.GzipFile(a.output, "wb", mtime=0) as file:
        file.write(json.dumps({"traceEvents": events}, separators=(",", ":")).encode())
    print(f"{a.model}, bf16, {a.tokens} tokens, {a.host} experts in host memory: {a.output}")
    print("\n".join(summary(events, a.repetitions)))
    del weights, call
    paged.close()
    driver.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
