"""Rows of a run of ``moe_layer.py`` as lines, as a summary, and as the record that is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch
from device_time import Ceilings, driver_version
from moe_residency import LinkRates

Row = dict[str, Any]

POINT = ("model", "dtype", "tp", "tokens", "routing", "host_experts", "peer_experts", "staged_experts")


def line(row: Row) -> str:
    """A row of the table on the terminal."""
    us, roofline, nominal = row["us_median"], row["roofline_us"], row["roofline_nominal_us"]
    share = f"{100 * roofline / us:3.0f} %" if roofline else "    -"
    rms = "      -" if row["rms_error"] is None else f"{row['rms_error']:7.1e}"
    text = (
        f"{row['model']:>14} {row['dtype']} tp{row['tp']} {row['tokens']:>5} {row['arm']:>16} {us:9.1f} us"
        f" [{row['us_p10']:.1f}, {row['us_p90']:.1f}] {row['touched_bytes'] / us / 1e6:6.3f} TB/s"
        f" {row['flops'] / us / 1e6:6.1f} TFLOP/s {share} of roofline ({100 * nominal / us:.0f} % nominal)"
        f" rms {rms}"
    )
    if row["host_experts"] or row["peer_experts"] or row["staged_experts"]:
        text += f"  host {row['host_experts']} peer {row['peer_experts']} staged {row['staged_experts']}"
    if row["bound_ratio"]:
        text += f", {row['bound_ratio']:.3f} x bound"
    return text


TIERS = ("host", "peer", "staged")
COMPARED = (
    ("vllm", "vamp"),
    ("vllm_swept", "vamp"),
    ("torch_grouped_mm", "vamp"),
    ("vamp", "vamp_no_table"),
)


def summary(rows: list[Row]) -> list[str]:
    """Lines that compare arms where all experts lie in the device's memory, and say how the others did."""
    lines = []
    here = [row for row in rows if not any(row[f"{tier}_experts"] for tier in TIERS)]
    for arm, to in COMPARED:
        groups: dict[tuple[str, str, Any], list[tuple[float, Row]]] = {}
        for ratio, row in ratios(here, arm, to):
            for tp in (row["tp"], "all"):
                groups.setdefault((row["model"], row["dtype"], tp), []).append((ratio, row))
        for (model, dtype, tp), found in groups.items():
            mean = geometric_mean(ratio for ratio, _ in found)
            (least, low), (most, high) = (pick(found, key=lambda pair: pair[0]) for pick in (min, max))
            lines.append(
                f"{arm} / {to}, {model} {dtype} tp {tp}: geometric mean {mean:.3f} over {len(found)} points,"
                f" from {least:.3f} ({_at(low)}) to {most:.3f} ({_at(high)})"
            )
    bound = [row for row in rows if row["bound_ratio"] and row["arm"] == "vamp"]
    if bound:
        worst = max(bound, key=lambda row: row["bound_ratio"])
        ratio = worst["bound_ratio"]
        lines.append(f"vamp / bound: at most {ratio:.3f} over {len(bound)} points ({_at(worst)})")
    return lines


def _at(row: Row) -> str:
    moved = [(row[f"{tier}_experts"], tier) for tier in TIERS]
    away = "".join(f", {count} {tier}" for count, tier in moved if count)
    return f"tp {row['tp']}, {row['tokens']} tokens{away}"


def ratios(rows: list[Row], arm: str, to: str) -> list[tuple[float, Row]]:
    """Time of ``arm`` over that of ``to`` wherever both were timed, with the row of ``to``."""
    times = {tuple(row[name] for name in POINT): row["us_median"] for row in rows if row["arm"] == arm}
    mine = [(tuple(row[name] for name in POINT), row) for row in rows if row["arm"] == to]
    return [(times[point] / row["us_median"], row) for point, row in mine if point in times]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def report(
    rows: list[Row], limits: Ceilings | None, links: dict[str, LinkRates], commit: str
) -> dict[str, Any]:
    """What is written as JSON."""
    versions = {name: _version(name) for name in ("torch", "triton", "vllm")} | {"driver": driver_version()}
    notes = [
        "under CUDA graphs, weights of several layers taking turns; torch_reference without a graph",
        "roofline: touched bytes with intermediates and operations over the rates measured in this run;"
        " nominal: over 4.3 TB/s and 790 TFLOP/s, 1400 in fp8",
        "torch_grouped_mm: rows sorted and gathered beforehand, no combine",
        "vllm_swept: vLLM's kernel under the best configuration found by bench/moe_sweep.py",
        "errors: on the first step, as shares of the RMS of a float32 reference, activations not quantised",
    ]
    if {row["routing"].partition(":")[0] for row in rows} - {"recorded"}:
        notes.insert(0, "routing is simulated")
    if limits:
        fp8 = f", {limits.fp8_flops_per_s / 1e12:.0f} TFLOP/s fp8" if limits.fp8_flops_per_s else ""
        rates = f"{limits.bytes_per_s / 1e12:.2f} TB/s copy, {limits.flops_per_s / 1e12:.0f} TFLOP/s bf16"
        notes.append(f"measured: {rates}{fp8}")
    for tier, rate in links.items():
        read, copied = rate.read / 1e9, rate.copied / 1e9
        notes.append(f"measured from {tier}: {read:.1f} GB/s by a kernel, {copied:.1f} by the copy engine")
    if links:
        notes += [
            "bound_us: the longer of the same call with all experts in HBM, and a link's bytes over what a"
            " kernel reads from it; bound_copy_engine_us: over the copy engine's rate",
            "every step hits all moved experts, or as many of them as it hits experts at all",
        ]
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
