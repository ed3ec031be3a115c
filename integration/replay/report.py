"""Results of a comparison as a table on the terminal and as a JSON file in the recorded form."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from .figures import ArmRun, TokenCheck, figures
from .run import Comparison


@dataclass(frozen=True)
class Column:
    """One figure of the table: key in ``figures``, heading, how to write it."""

    key: str
    heading: str
    kind: str


COLUMNS = (
    Column("ttft_s_p50", "TTFT p50", "seconds"),
    Column("ttft_s_p90", "TTFT p90", "seconds"),
    Column("ttft_s_p99", "TTFT p99", "seconds"),
    Column("tpot_s_p50", "TPOT p50", "seconds"),
    Column("tpot_s_p90", "TPOT p90", "seconds"),
    Column("turns_per_s", "turns/s", "number"),
    Column("prefix_hit_rate", "prefix hit rate", "share"),
    Column("preemptions", "preemptions", "count"),
    Column("evicted_blocks", "evicted blocks", "count"),
    Column("blocks_max", "KV blocks, most", "count"),
    Column("level_mean", "level, mean", "number"),
    Column("level_max", "level, max", "count"),
    Column("bytes_moved", "moved", "bytes"),
    Column("decisions", "decisions", "kinds"),
)


def bytes_text(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def cell(kind: str, value: Any) -> str:
    """A figure as a reader wants to see it."""
    if value is None or value == {}:
        return "-"
    match kind:
        case "seconds":
            return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
        case "number":
            return f"{value:.2f}"
        case "share":
            return f"{100 * value:.1f} %"
        case "bytes":
            return bytes_text(value) if value else "-"
        case "kinds":
            return ", ".join(f"{name} {count}" for name, count in sorted(value.items()))
    return f"{value:,}"


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Heading row, then one row per figure with a cell per arm."""
    results = [figures(run, comparison.config.warmup_turns) for run in comparison.runs]
    pools = [f"{bytes_text(run.ready['kv_bytes'])}" for run in comparison.runs]
    rows = [["", *(run.name for run in comparison.runs)], ["KV pool at start", *pools]]
    rows += [[c.heading, *(cell(c.kind, result[c.key]) for result in results)] for c in COLUMNS]
    return rows


def counted(number: int, noun: str) -> str:
    """``1 turn``, ``2 turns``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def summary(comparison: Comparison) -> list[str]:
    """What was measured, what was left out, and how the tokens compare: one line each."""
    config, trace = comparison.config, comparison.trace
    lines = [
        f"{trace.name}: {counted(len(trace.sessions), 'session')}, {counted(trace.num_turns, 'turn')}, "
        f"{counted(config.concurrency, 'session')} in flight, max_num_seqs {config.max_num_seqs}",
        f"{config.kv_cache_bytes / 2**20:.1f} MiB for the KV cache beside the same experts in every arm but "
        "upper_bound; VAMP keeps a part of it in reserve, outside its pool, until it is needed",
        f"first {counted(config.warmup_turns, 'turn')} of each session left out of the figures"
        if config.warmup_turns
        else "all turns are in the figures",
        "prompts are made-up tokens that share prefixes where the recorded ones did",
        "turns/s is the turns in the figures over the whole time of the replay",
        *trace.notes,
    ]
    routing = comparison.runs[0].ready["simulated_routing"]
    if routing:
        lines.insert(0, f"SIMULATED ROUTING ({routing}) in every arm: what the model says means nothing")
    if config.max_seconds is not None:
        lines.append(f"stopped after {config.max_seconds:g} s; turns in flight then are left out")
    return lines + [check_text(check) for check in comparison.token_checks]


def check_text(check: TokenCheck) -> str:
    if check.first_difference is None:
        return f"output tokens of {check.arm} and {check.against} are identical in all {check.turns} turns"
    session, turn, position = check.first_difference
    return (
        f"output tokens of {check.arm} and {check.against} are identical in {check.equal} of {check.turns} "
        f"turns; first difference in session {session}, turn {turn}, token {position}"
    )


def table(comparison: Comparison) -> Table:
    heading, *body = table_rows(comparison)
    result = Table(title=f"Replay of {comparison.trace.name}")
    result.add_column("")
    for name in heading[1:]:
        result.add_column(name, justify="right")
    for row in body:
        result.add_row(*row)
    return result


def git_commit(folder: Path) -> str | None:
    """Commit of the source tree around ``folder``; None where it is no git checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def settings_row(comparison: Comparison, run: ArmRun) -> dict[str, Any]:
    config, trace = comparison.config, comparison.trace
    return {
        "trace": trace.name,
        "sessions": len(trace.sessions),
        "concurrency": config.concurrency,
        "model": Path(config.model).name,
        "layers": run.ready["layers"],
        "tp": run.ready["tp"],
        "arm": run.name,
        "kv_gib": run.ready["kv_bytes"] / 2**30,
        "max_offload_ratio": run.max_offload_ratio,
        "routing": run.ready["simulated_routing"] or "random tokens",
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "warmup_turns": config.warmup_turns,
    }


def record(comparison: Comparison, command: str) -> dict[str, Any]:
    """The recorded-results object: one flat row per arm, decisions as ``decisions_<kind>``."""
    rows = []
    for run in comparison.runs:
        row = settings_row(comparison, run) | figures(run, comparison.config.warmup_turns)
        kinds = row.pop("decisions")
        rows.append(row | {f"decisions_{kind}": count for kind, count in kinds.items()})
    ready = comparison.runs[0].ready
    return {
        "name": "replay",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git_commit(Path(__file__).resolve().parent),
        "command": command,
        "device": ready["device"],
        "versions": ready["versions"],
        "notes": summary(comparison),
        "rows": rows,
    }


def write_atomically(path: Path, text: str) -> None:
    """Write ``path`` in one step: a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def write_json(path: Path, comparison: Comparison, command: str) -> None:
    write_atomically(path, json.dumps(record(comparison, command), indent=1) + "\n")
