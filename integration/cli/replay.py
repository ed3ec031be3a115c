"""``vamp replay``: replay a recorded trace with and without VAMP and compare."""

from __future__ import annotations

import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vamp_integration.replay.arms import parse_arm, parse_engine_args
from vamp_integration.replay.page import write_page
from vamp_integration.replay.progress import ArmProgress
from vamp_integration.replay.report import summary, table, write_json
from vamp_integration.replay.run import ReplayConfig, replay_trace
from vamp_integration.replay.runner import ArmFailed
from vamp_integration.replay.scale import Scaling


def free_stem(folder: Path, stem: str) -> str:
    """``stem``, or with a number behind it where an earlier run has taken it."""
    taken = {path.name.partition(".")[0].removesuffix("-logs") for path in folder.glob(f"{stem}*")}
    names = [stem, *(f"{stem}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def run_replay(config: ReplayConfig, out_dir: Path, command: str, console: Console) -> Path:
    """Run the comparison, print the table, and write JSON, HTML and logs to ``out_dir``.

    Returns:
        Path of the HTML page.

    Raises:
        TraceError, ConfigError, ArmFailed: as ``replay_trace``.
    """
    stem = free_stem(out_dir, f"{datetime.now(UTC).date().isoformat()}-replay")
    logs = out_dir / f"{stem}-logs"
    comparison = replay_trace(config, logs, lambda name, turns: ArmProgress(console, name, turns))
    console.print(table(comparison))
    for line in summary(comparison):
        console.print(f"- {line}", highlight=False, markup=False)
    data, page = out_dir / f"{stem}.json", out_dir / f"{stem}.html"
    write_json(data, comparison, command)
    write_page(page, comparison, command)
    console.print(f"wrote {data} and {page}", highlight=False, soft_wrap=True)
    return page


def replay(
    trace: Annotated[
        Path, typer.Argument(help="Trace: session or Mooncake .jsonl, SWE-agent .traj, or one as .zst.")
    ],
    model: Annotated[str, typer.Option(help="Checkpoint folder or name.")],
    kv_cache_bytes: Annotated[int, typer.Option(help="KV pool at start, the same in every arm.")],
    arm: Annotated[
        list[str] | None,
        typer.Option(help="vllm or vamp_paper_<ratio>; may be repeated. Default: vllm, vamp_paper_0.15."),
    ] = None,
    check_tokens: Annotated[
        bool, typer.Option("--check-tokens", help="Also run upper_bound, and compare output tokens with it.")
    ] = False,
    upper_kv_bytes: Annotated[
        int | None,
        typer.Option(help="KV pool of upper_bound. Default: budget plus what the experts can give."),
    ] = None,
    format: Annotated[str | None, typer.Option(help="session, mooncake or traj. Default: found out.")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per hash id. Default: found out.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Sessions in flight.")] = 8,
    sessions: Annotated[int | None, typer.Option(help="Replay the first so many sessions.")] = None,
    turns: Annotated[int | None, typer.Option(help="Replay so many turns of each session.")] = None,
    skip_turns: Annotated[int, typer.Option(help="Leave out so many first turns of each session.")] = 0,
    min_turns: Annotated[int, typer.Option(help="Leave out sessions with fewer turns than this.")] = 1,
    scale_lengths: Annotated[float, typer.Option(help="Factor on prompt and output lengths.")] = 1.0,
    think_cap: Annotated[float | None, typer.Option(help="Longest delay between turns, seconds.")] = None,
    max_prompt: Annotated[int | None, typer.Option(help="Cut prompts at so many tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(help="Cap outputs at so many tokens.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="End each arm after so many seconds.")] = None,
    warmup_turns: Annotated[
        int, typer.Option(help="First turns of each session left out of the figures.")
    ] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Default: what the trace needs.")] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once; 1 makes tokens comparable.")
    ] = 1,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one engine step.")] = 2048,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="More engine arguments, key=value, value as JSON.")
    ] = None,
    vamp_arg: Annotated[
        list[str] | None, typer.Option(help="More settings of VAMP's arms, key=value.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of an engine. Default: all cores.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the engine.")] = 0,
    out_dir: Annotated[Path, typer.Option(help="Folder for the JSON file, the page and the logs.")] = Path(
        "out"
    ),
) -> None:
    """Replay a recorded multi-turn trace closed loop, with and without VAMP, and compare.

    Each arm starts an engine of its own with the same budget of memory.
    """
    try:
        config = ReplayConfig(
            trace=trace,
            model=model,
            arms=tuple(parse_arm(name) for name in arm or ["vllm", "vamp_paper_0.15"]),
            kv_cache_bytes=kv_cache_bytes,
            format=format,
            block_tokens=block_tokens,
            scaling=Scaling(
                scale_lengths, think_cap, sessions, turns, skip_turns, min_turns, max_prompt, max_output
            ),
            concurrency=concurrency,
            check_tokens=check_tokens,
            upper_kv_bytes=upper_kv_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            engine_args=parse_engine_args(engine_arg or []),
            vamp=parse_engine_args(vamp_arg or []),
            warmup_turns=warmup_turns,
            max_seconds=max_seconds,
            threads=os.cpu_count() or 1 if threads is None else threads,
            seed=seed,
        )
        run_replay(config, out_dir, shlex.join(["vamp", *sys.argv[1:]]), Console())
    except ArmFailed as error:
        typer.echo(f"{error.tail}\nvamp replay: {error}", err=True)
        raise typer.Exit(1) from None
