"""The page of the serving benchmark: tables from results files, plots, and how to measure each again.

python bench/serve_report.py bench/results/h200 -o docs/results.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import serve_plot
import serve_targets as targets
from serve_record import KEYS
from serve_rows import File, Row, Rows, by_machine, engine, read

# Bytes a second at which a kernel reads experts in host memory in place (profiles/hardware/h200.toml).
LINK_RATE = 51e9
SERVING = (
    ("arm", "arm", "{}"),
    ("KV GiB", "kv_gib", "{:.2f}"),
    ("TTFT p50", "ttft_s_p50", "{:.2f} s"),
    ("p90", "ttft_s_p90", "{:.2f} s"),
    ("p99", "ttft_s_p99", "{:.2f} s"),
    ("TPOT p50", "tpot_ms_p50", "{:.1f} ms"),
    ("p90", "tpot_ms_p90", "{:.1f} ms"),
    ("turns/s", "turns_per_s", "{:.2f}"),
    ("hit rate", "hit_percent", "{:.1f} %"),
    ("preempted", "preemptions", "{}"),
    ("level mean", "level_mean", "{:.1f}"),
    ("max", "level_max", "{}"),
    ("moved", "moved_gib", "{:.2f} GiB"),
    ("turns", "turns", "{}"),
)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows] + [""]


def cell(row: Row, key: str, form: str) -> str:
    return "-" if row.get(key) is None else form.format(row[key])


def verdicts(found: Iterable[targets.Verdict]) -> list[str]:
    said = {True: "yes", False: "no", None: "-"}
    return table(
        ("figure", "target", "measured", "reached"),
        [(v.figure, v.target, v.measured, said[v.met]) for v in found],
    )


def serving(replays: Rows) -> Iterator[str]:
    points = sorted({(row["workload"], row["sessions"]) for row in replays.rows.values()})
    for workload, sessions in points:
        rows = replays.where(workload=workload, sessions=sessions)
        yield f"### {workload}, {sessions} sessions"
        yield ""
        shown = [
            (*(cell(_shown(row), key, form) for _, key, form in SERVING), _against(replays, row))
            for row in rows
        ]
        yield from table([*(heading for heading, _, _ in SERVING), "against its anchor"], shown)


def _shown(row: Row) -> Row:
    """The row with figures in the table's units."""
    scaled = (
        ("tpot_ms_p50", "tpot_s_p50", 1e3),
        ("tpot_ms_p90", "tpot_s_p90", 1e3),
        ("hit_percent", "prefix_hit_rate", 100.0),
        ("moved_gib", "bytes_moved", 2.0**-30),
    )
    return row | {name: row[key] * factor for name, key, factor in scaled if row.get(key) is not None}


def _against(replays: Rows, row: Row) -> str:
    anchor = replays.anchor(row)
    if anchor is None or row["arm"] == "vllm":
        return "-"
    lower = targets.ratio(anchor["ttft_s_p90"], row["ttft_s_p90"])
    return f"p90 {lower:.1f}x lower, {targets.ratio(row['turns_per_s'], anchor['turns_per_s']):.2f}x turns/s"


def decode(rows: Rows, resident_us: dict[int, float]) -> Iterator[str]:
    """Milliseconds by batch; levels against level 0, beside the bound."""
    zero = {arm: targets.level_zero(rows, arm) for arm in ("vllm", "vamp_vllm_kernel", "vamp")}
    shares = sorted({r["level_share"] for r in rows.where(arm="vamp") if r["level_share"]})
    head = ["batch", "vLLM", "its kernel over the slab", "our kernel, level 0"]
    lines = []
    for batch in sorted({row["batch"] for row in rows.rows.values()}):
        line = [str(batch), *(_ms(zero[arm].get(batch), zero["vllm"].get(batch)) for arm in zero)]
        for share in shares:
            found = rows.where(arm="vamp", batch=batch, level_share=share)
            line.append(_moved(found[-1], rows.at_level_zero(found[-1]), resident_us) if found else "-")
        lines.append(line)
    yield from table([*head, *(f"{100 * share:.0f} % out" for share in shares)], lines)


def _ms(value: float | None, plain: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} ms" + (f" ({100 * (value / plain - 1):+.1f} %)" if plain and value != plain else "")


def _moved(row: Row, zero: float | None, resident_us: dict[int, float]) -> str:
    text = f"{row['ms_median']:.2f} ms"
    if zero is None:
        return text
    text += f", {row['ms_median'] / zero:.2f}x"
    layer_us = resident_us.get(row["batch"])
    if layer_us is None:
        return text
    # Of each layer the longer of its resident time and the link's time; of all else what level 0 took.
    extra_us = sum(max(0.0, 1e6 * size / LINK_RATE - layer_us) for size in row["host_bytes_by_layer"])
    return f"{text} (bound {1 + extra_us / 1e3 / zero:.2f}x)"


def growths(rows: Rows) -> Iterator[str]:
    names = ("bubble_ms", "bubble_ms_largest", "total_ms", "step_ms_before", "step_ms_after")
    head = (
        "arm",
        "batch",
        "GiB",
        "level after",
        "moves",
        "bubble",
        "of one step",
        "total",
        "step before",
        "after",
    )
    lines = [
        (
            engine(r),
            str(r["batch"]),
            f"{r['growth_gib']:.2f}",
            str(r["level_after"]),
            str(r["moves"]),
            *(f"{r[n]:.2f} ms" for n in names),
        )
        for r in rows.rows.values()
    ]
    yield from table(head, lines)


def resident(path: Path | None, model: str = "qwen3-next") -> dict[int, float]:
    """Microseconds of a resident layer by tokens, from a record of ``moe_layer.py``."""
    if path is None:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    chosen = {"model": model, "dtype": "bf16", "tp": 1, "arm": "vamp", "host_experts": 0}
    return {r["tokens"]: r["us_median"] for r in rows if all(r.get(k) == v for k, v in chosen.items())}


def page(files: list[File], resident_us: dict[int, float], plots: list[str]) -> str:
    (_, main), *others = by_machine(files).items()
    replays, steps, growth = (Rows(main, kind, KEYS[kind]) for kind in KEYS)
    workload = "peak140k"
    lines = ["# Serving results", ""]
    lines += [f"Made by `bench/serve_report.py` from {len(files)} results files.", ""]
    routings = {row["routing"] for rows in (replays, steps, growth) for row in rows.rows.values()}
    lines += [f"**Routing: {'; '.join(sorted(routings))}.**", ""]
    lines += ["## Targets", ""]
    lines += verdicts([*targets.serving(replays, workload), *targets.steps(steps), *targets.growths(growth)])
    lines += [f"![{Path(plot).stem}]({plot})\n" for plot in plots]
    if replays.rows:
        lines += ["## Recorded sessions", "", *serving(replays)]
    if steps.rows:
        lines += ["## Decode steps", "", *decode(steps, resident_us)]
    if growth.rows:
        lines += ["## Growth while sequences decode", "", *growths(growth)]
    for (layers, gpus), theirs in others:
        lines += [f"## {layers} layers on {gpus} GPUs", "", *_other_machine(theirs)]
    lines += ["## To measure again", ""]
    lines += ["What holds for all of them:", "", *_common_notes(files), ""]
    lines += table(("file", "device", "commit", "command", "anchor"), [_source(file) for file in files])
    return "\n".join(lines).rstrip() + "\n"


def _other_machine(files: list[File]) -> Iterator[str]:
    """Tables of a model of another size, or on more GPUs: held against its own unmodified arm."""
    replays, steps, growth = (Rows(files, kind, KEYS[kind]) for kind in KEYS)
    yield from serving(replays)
    if steps.rows:
        yield from decode(steps, {})
    if growth.rows:
        yield from growths(growth)


def _common_notes(files: list[File]) -> list[str]:
    notes: dict[str, int] = {}
    for file in files:
        for note in file.record["notes"]:
            notes[note] = notes.get(note, 0) + 1
    return [
        f"- {note}" + ("" if times == len(files) else f" ({times} files)") for note, times in notes.items()
    ]


def _source(file: File) -> tuple[str, ...]:
    record: dict[str, Any] = file.record
    commit = (record["commit"] or "-")[:10]
    return (
        file.name,
        record["device"],
        commit,
        f"`{record['command']}`",
        str(record.get("anchor") or "none"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/results.md"))
    parser.add_argument(
        "--moe-layer", type=Path, help="record of moe_layer.py, for the bound of decode steps"
    )
    arguments = parser.parse_args()
    try:
        files = read(arguments.folder)
        records = sorted(arguments.folder.glob("*moe_layer-bf16.json"))
        resident_us = resident(arguments.moe_layer or (records[-1] if records else None))
        plots = serve_plot.save(next(iter(by_machine(files).values())), arguments.out.parent)
        arguments.out.write_text(page(files, resident_us, plots), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"serve_report.py: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.out}, {len(plots)} plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
