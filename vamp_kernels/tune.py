"""What else could be launched: times neighbours of ``choose_launch``'s answer on the present device.

    python -m vamp_kernels.tune --experts 512 --top-k 10 --hidden 2048 --intermediate 512 --tokens 1 64 4096

Each change is timed as the whole layer under a CUDA graph, so that what the launch of one product does to the
kernels beside it counts. Prints the choice, the best that was found and the gain, as lines for ``launch.py``;
writes nothing. Without CUDA it runs in Triton's interpreter, at tiny sizes, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from vamp_kernels.arguments import MAX_EXPERTS, MAX_TOP_K
from vamp_kernels.fused_moe import fused_moe
from vamp_kernels.launch import (
    FP8,
    SCALE_BLOCK,
    GemmLaunch,
    GemvLaunch,
    MoeLaunch,
    SpecialisedLaunch,
    choose_launch,
    device_limits,
)
from vamp_kernels.launch_search import Problem, Tuned, search
from vamp_kernels.workspace import Workspace

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8}
MOST_STEPS = 32


class Layer:
    """Random weights and inputs of a problem, and the time and result of the layer over them."""

    def __init__(self, problem: Problem, device: torch.device, steps: int, repetitions: int) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self._repetitions = repetitions
        experts, hidden, intermediate = problem.experts, problem.hidden, problem.intermediate
        fp8 = problem.dtype == FP8
        inputs = torch.bfloat16 if fp8 else problem.dtype
        weights = []
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
            weight = torch.empty(experts, rows, columns, dtype=problem.dtype, device=device)
            for expert in weight:
                expert.copy_(torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5)
            weights.append(weight)
        self._common: dict[str, Any] = {"w13": weights[0], "w2": weights[1]}
        if fp8:
            for name, weight in (("w13_scale", weights[0]), ("w2_scale", weights[1])):
                shape = (experts, weight.shape[1] // SCALE_BLOCK, weight.shape[2] // SCALE_BLOCK)
                self._common[name] = torch.ones(shape, device=device)
        self._steps: list[dict[str, Any]] = []
        for _ in range(steps):
            score = torch.rand(problem.tokens, experts, generator=generator, device=device)
            top, ids = score.topk(problem.top_k, dim=1)
            x = torch.randn(problem.tokens, hidden, generator=generator, device=device).to(inputs)
            self._steps.append(
                {"hidden_states": x, "topk_weights": top.softmax(1), "topk_ids": ids.to(torch.int32)}
            )
        self._out = torch.empty_like(self._steps[0]["hidden_states"])
        self._workspace = Workspace(device)
        self._want: torch.Tensor | None = None

    def time_us(self, launch: MoeLaunch) -> float | None:
        """Median time of a call; None, with a line that says why, where it does not run or is not right."""
        from triton.errors import TritonError

        try:
            result = self._call(0, launch).float()
            want = result if self._want is None else self._want
            self._want = want
            error = (result - want).square().mean().sqrt() / want.square().mean().sqrt()
            if not bool(error < 0.02):
                raise ValueError(f"its result is off by {float(error):.1e}")
            return self._cuda_us(launch) if result.is_cuda else self._wall_us(launch)
        except (TritonError, RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"  left out {launch}: {reason}", file=sys.stderr)
            return None

    def _call(self, step: int, launch: MoeLaunch) -> torch.Tensor:
        return fused_moe(
            **self._common, **self._steps[step], out=self._out, workspace=self._workspace, launch=launch
        )

    def _cuda_us(self, launch: MoeLaunch) -> float:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for step in range(len(self._steps)):
                self._call(step, launch)
        samples = []
        for repetition in range(self._repetitions + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repetition >= 2:
                samples.append(float(start.elapsed_time(end)) * 1e3 / len(self._steps))
        return statistics.median(samples)

    def _wall_us(self, launch: MoeLaunch) -> float:
        start = time.perf_counter()
        self._call(0, launch)
        return (time.perf_counter() - start) * 1e6


def steps_beyond_cache(problem: Problem, cache_bytes: int) -> int:
    """Calls with other tokens to take turns, so that few read an expert that is still in the cache."""
    hit = min(problem.tokens * problem.top_k, problem.experts)
    touched = 3 * problem.hidden * problem.intermediate * problem.dtype.itemsize * hit
    return min(max(4 * cache_bytes // touched, 2), MOST_STEPS)


def report(problem: Problem, tuned: Tuned) -> str:
    """The choice, and what was better, as lines to paste."""
    gain = tuned.chosen_us / tuned.best_us - 1
    lines = [f"{problem.tokens} tokens: chosen {tuned.chosen_us:.1f} us, best {tuned.best_us:.1f} us"]
    lines[0] += f" ({100 * gain:.1f} % faster), {tuned.timed} others timed, {tuned.failed} left out"
    for name in ("gate_up", "down", "dependent_launch"):
        now, best = getattr(tuned.chosen, name), getattr(tuned.best, name)
        lines.append(f"  {name:16} {as_code(now)}" + ("" if now == best else f"  ->  {as_code(best)}"))
    return "\n".join(lines)


def as_code(launch: GemmLaunch | SpecialisedLaunch | GemvLaunch | bool) -> str:
    """Python that makes ``launch``: the sizes by place, what is not the default by name."""
    if isinstance(launch, GemvLaunch):
        return f"GemvLaunch({launch.block_n}, {launch.block_k}, {launch.num_warps})"
    if isinstance(launch, SpecialisedLaunch):
        return f"SpecialisedLaunch({launch.block_m}, {launch.block_n}, {launch.num_stages})"
    if isinstance(launch, bool):
        return str(launch)
    names = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
    plain = GemmLaunch(*(getattr(launch, name) for name in names))
    sizes = [str(getattr(launch, name)) for name in names]
    fields = launch.__dataclass_fields__
    rest = [
        f"{name}={getattr(launch, name)}" for name in fields if getattr(launch, name) != getattr(plain, name)
    ]
    return f"GemmLaunch({', '.join(sizes + rest)})"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m vamp_kernels.tune", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for flag in ("--experts", "--top-k", "--hidden", "--intermediate"):
        parser.add_argument(flag, type=int, required=True, metavar="N")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, metavar="M")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument(
        "--rounds", type=int, default=2, help="how many changes to go from the choice at most"
    )
    parser.add_argument("--repetitions", type=int, default=10)
    a = parser.parse_args(argv)
    if min(a.experts, a.top_k, a.hidden, a.intermediate, *a.tokens) < 1 or a.top_k > a.experts:
        parser.error("sizes and --tokens must be 1 or more, and --top-k at most --experts")
    if a.experts > MAX_EXPERTS or a.top_k > MAX_TOP_K:
        parser.error(f"--experts must be at most {MAX_EXPERTS}, --top-k at most {MAX_TOP_K}")
    if a.repetitions < 1 or a.rounds < 0:
        parser.error("--repetitions must be 1 or more, --rounds 0 or more")
    if a.dtype == "fp8" and (a.hidden % SCALE_BLOCK or a.intermediate % SCALE_BLOCK):
        parser.error(f"--dtype fp8: --hidden and --intermediate must be multiples of {SCALE_BLOCK}")
    cuda = torch.cuda.is_available()
    if importlib.util.find_spec("triton") is None:
        parser.error("Triton is not installed")
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("no CUDA device; TRITON_INTERPRET=1 interprets the kernels on a CPU, at tiny sizes")
    device = torch.device("cuda" if cuda else "cpu")
    limits = device_limits(device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    for tokens in a.tokens:
        problem = Problem(tokens, a.experts, a.top_k, a.hidden, a.intermediate, DTYPES[a.dtype])
        sizes = (a.hidden, a.intermediate, a.experts, a.top_k)
        try:
            chosen = choose_launch(tokens, *sizes, problem.dtype, limits)
            layer = Layer(problem, device, steps_beyond_cache(problem, cache), a.repetitions)
            tuned = search(chosen, problem, limits, layer.time_us, a.rounds)
        except ValueError as error:
            parser.error(f"--tokens {tokens}: {error}")
        print(report(problem, tuned), flush=True)
    if not cuda:
        print("interpreted on a CPU: the times mean nothing", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
