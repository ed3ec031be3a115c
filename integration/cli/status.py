"""``vamp status``: what a running server's memory is doing, from its ``/metrics`` page."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vamp_integration.replay.report import bytes_text, cell
from vamp_integration.server_figures import ServerFigures, read_server


def status(
    url: Annotated[
        str, typer.Argument(help="The server, as in http://localhost:8000.")
    ] = "http://localhost:8000",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    watch: Annotated[
        float | None, typer.Option(min=0.1, help="Print again every so many seconds, until interrupted.")
    ] = None,
) -> None:
    """Print level, pages, KV blocks, moves, decisions and costs of a running server.

    Ends with status 2 where no server answers, or one without VAMP.
    """
    console = Console()
    while True:
        figures = read_server(url)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(figures)))
        else:
            console.print(table(figures))
        if watch is None:
            return
        try:
            time.sleep(watch)
        except KeyboardInterrupt:
            return


def table(figures: ServerFigures) -> Table:
    """Two columns: what, and its figures; sums are since the server's start."""
    grid = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows(figures):
        grid.add_row(name, value)
    return grid


def rows(figures: ServerFigures) -> list[tuple[str, str]]:
    """The rows of the table."""
    vamp, vllm = figures.vamp, figures.vllm
    if not vamp["page_bytes"]:
        return [("VAMP", "no request yet: figures come with the first step")]
    blocks, page = vamp["kv_blocks"], vamp["page_bytes"]
    pages = {owner: bytes_text(count * page) for owner, count in vamp["pages"].items() if count}
    share = vamp["experts_offloaded"] / vamp["experts"] if vamp["experts"] else 0
    cordon = "; a tail is cordoned" if vamp["cordon_active"] else ""
    moves = _kinds(vamp["moves"]) or "none"
    return [
        ("level", f"{vamp['level']} of {vamp['level_max']} ({cell('share', share)} of the experts)"),
        ("memory", ", ".join(f"{owner} {size}" for owner, size in pages.items())),
        (
            "KV blocks",
            f"{sum(blocks.values())} of at most {vamp['kv_blocks_max']} ({_kinds(blocks)}){cordon}",
        ),
        ("KV usage", f"{cell('share', vllm['kv_cache_usage'])} of the pool"),
        ("requests", f"{vllm['requests_running']} running, {vllm['requests_waiting']} waiting"),
        (
            "prefix hit rate",
            f"{cell('share', vllm['prefix_hit_rate'])}, evicted {vamp['evicted_blocks']} blocks",
        ),
        (
            "mean TTFT, TPOT",
            f"{cell('seconds', vllm['ttft_mean_s'])}, {cell('seconds', vllm['tpot_mean_s'])}",
        ),
        (
            "moves",
            f"{moves}; failed {vamp['moves_failed']}, restores given up {vamp['cordons_given_up']}",
        ),
        ("moved", _amounts(vamp["moved_bytes"])),
        ("copied", _amounts(vamp["copied_bytes"])),
        (
            "host copies of KV",
            f"spilled {vamp['spilled_blocks']} blocks, loaded {vamp['loaded_blocks']}, "
            f"copying {vamp['copying_blocks']}; steps a restore waited {vamp['steps_waited_for_copies']}",
        ),
        ("host reads", f"{bytes_text(vamp['moe_host_read_bytes'])} by MoE layers (estimated)"),
        *_peer_rows(vamp),
        ("staging", f"{bytes_text(vamp['staged_bytes'])} copied; {_seconds(vamp['staging_seconds'])}"),
        ("decisions", _kinds(vamp["decisions"]) or "none"),
        ("predicted cost", _seconds(vamp["predicted_cost_seconds"])),
        ("realized cost", _seconds(vamp["realized_cost_seconds"])),
        ("preemptions", str(vllm["preemptions"])),
    ]


def _peer_rows(vamp: dict[str, Any]) -> list[tuple[str, str]]:
    homes = vamp["home_pages"].get("peer", 0) * vamp["page_bytes"]
    reads = f"{bytes_text(vamp['moe_peer_read_bytes'])} by MoE layers (estimated)"
    return [("peer reads", f"{reads}; {bytes_text(homes)} of homes there")] if homes else []


def _kinds(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _amounts(amounts: dict[str, float]) -> str:
    return ", ".join(f"{way.replace('_', ' ')} {bytes_text(amount)}" for way, amount in amounts.items())


def _seconds(costs: dict[str, float]) -> str:
    return ", ".join(f"{name} {cell('seconds', cost)}" for name, cost in costs.items() if cost) or "none"
