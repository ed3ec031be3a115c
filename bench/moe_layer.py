"""Time one MoE layer beside its peers.

python bench/moe_layer.py --model qwen3-next --tp 1 2 4 --json bench/results/h200/DATE-moe_layer.json

Every arm runs under a CUDA graph over the same weights, which take turns between layers so that none is read
from the cache. Without CUDA it runs in Triton's interpreter, at tiny sizes; its times mean nothing then:
TRITON_INTERPRET=1 python bench/moe_layer.py --model tiny --tokens 1 16
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from device_time import Ceilings, ceilings, driver_version, timed
from moe_arms import ARMS, COMPARABLE, missing
from moe_cases import MODELS, Shape, Step, Weights, layers_beyond_cache, make_steps, make_weights, work

from vamp_kernels.fused_moe import fused_moe_torch

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Point:
    """One row's settings."""

    model: str
    tp: int
    tokens: int
    routing: str
    shape: Shape


def measure(
    point: Point, weights: Weights, arms: list[str], limits: Ceilings | None, repetitions: int, check: bool
) -> list[dict[str, Any]]:
    """A row for every arm; figures that could not be had are None."""
    device = weights.w13.device
    calls = 16 if point.tokens <= 16 else 8 if point.tokens <= 512 else 4
    steps = make_steps(point.shape, point.tokens, calls, point.routing, device)
    moved, operations = work(point.shape, steps)
    roofline = max(moved / limits.bytes_per_s, operations / limits.flops_per_s) * 1e6 if limits else None
    want = reference(weights, steps[0]) if check else None
    rows = []
    for arm in arms:
        made = ARMS[arm](point.shape, weights, steps)
        largest, rms = errors(made[0](), want) if want is not None and arm in COMPARABLE else (None, None)
        times = timed(made, repetitions)
        row = {"model": point.model, "dtype": "bf16", "tp": point.tp, "tokens": point.tokens}
        row |= {"routing": point.routing, "arm": arm, "host_experts": 0, "staged_experts": 0}
        row |= {"us_median": times.median, "us_p10": times.p10, "us_p90": times.p90}
        row |= {"touched_bytes": moved, "host_bytes": 0, "flops": operations, "roofline_us": roofline}
        rows.append(row | {"max_error": largest, "rms_error": rms})
    return rows


def reference(weights: Weights, step: Step) -> torch.Tensor:
    """The layer in float32."""
    w13, w2 = weights.layer(0)
    return fused_moe_torch(step.hidden_states, w13, w2, step.topk_weights, step.topk_ids).float()


def errors(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Largest and RMS error, as shares of the RMS of ``want``."""
    scale = want.square().mean().sqrt()
    error = (got.float() - want) / scale
    return float(error.abs().max()), float(error.square().mean().sqrt())


def available(arms: list[str]) -> list[str]:
    """``arms`` without those that cannot run here, saying which and why."""
    reasons = {arm: missing(arm) for arm in arms}
    for arm, reason in reasons.items():
        if reason:
            print(f"without {arm}: {reason}", file=sys.stderr)
    return [arm for arm in arms if not reasons[arm]]


def line(row: dict[str, Any]) -> str:
    """A row of the table on the terminal."""
    us, roofline = row["us_median"], row["roofline_us"]
    share = f"{100 * roofline / us:4.0f} %" if roofline else "     -"
    rms = "       -" if row["rms_error"] is None else f"{row['rms_error']:8.1e}"
    return (
        f"{row['model']:>16} tp{row['tp']} {row['tokens']:>6} {row['arm']:>17} {us:9.1f} us"
        f" [{row['us_p10']:.1f}, {row['us_p90']:.1f}] {row['touched_bytes'] / us / 1e6:6.2f} TB/s"
        f" {row['flops'] / us / 1e6:6.1f} TFLOP/s {share} {rms}"
    )


def report(rows: list[dict[str, Any]], limits: Ceilings | None, commit: str) -> dict[str, Any]:
    """What is written as JSON."""
    versions = {name: _version(name) for name in ("torch", "triton", "vllm")} | {"driver": driver_version()}
    notes = [
        "routing is simulated",
        "under CUDA graphs, weights of several layers taking turns",
        "roofline: touched bytes with intermediates and operations over the rates measured in this run",
        "torch_grouped_mm: rows sorted and gathered beforehand, no combine",
        "errors: on the first step, as shares of the RMS of a float32 reference",
    ]
    if limits:
        rates = f"{limits.bytes_per_s / 1e12:.2f} TB/s copy, {limits.flops_per_s / 1e12:.0f} TFLOP/s bf16"
        notes.append(f"measured: {rates}")
    return {
        "name": "moe_layer",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreted",
        "versions": versions,
        "notes": notes,
        "rows": rows,
    }


def git_commit() -> str:
    """The commit of the repository that the script runs in, or an empty string."""
    command = ["git", "rev-parse", "--verify", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3-next"], choices=sorted(MODELS))
    parser.add_argument("--tp", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--routing", default="uniform", help="uniform or lognormal:SIGMA")
    parser.add_argument("--arm", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="what is measured, where the source lies outside its repository")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if not cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise SystemExit("no CUDA device: set TRITON_INTERPRET=1 to interpret the kernels at tiny sizes")
        print("interpreted on a CPU: the times below mean nothing", file=sys.stderr)
    limits = ceilings(device)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    arms, rows = available(arguments.arm), []
    for model in arguments.model:
        for tp in arguments.tp:
            shape = MODELS[model].shard(tp)
            weights = make_weights(shape, layers_beyond_cache(shape, cache), device)
            for tokens in arguments.tokens:
                point = Point(model, tp, tokens, arguments.routing, shape)
                repetitions = arguments.repetitions if cuda else 1
                new = measure(point, weights, arms, limits, repetitions, not arguments.no_check)
                rows += new
                print("\n".join(map(line, new)), flush=True)
            del weights
    if arguments.json:
        commit = arguments.commit or git_commit()
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report(rows, limits, commit), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
