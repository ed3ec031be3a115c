"""Plots of the serving benchmark: sessions against TTFT and turns/s, decode steps, growths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from serve_record import KEYS
from serve_rows import File, Row, Rows, engine

# Okabe and Ito's palette, told apart under all common kinds of colour blindness.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vP*X"
GRID = "#d8dde3"


def save(files: list[File], folder: Path) -> list[str]:
    """Write what there are rows for; the names of the files."""
    replays, steps, growth = (Rows(files, kind, KEYS[kind]) for kind in KEYS)
    drawn: list[tuple[str, Figure]] = []
    for workload in sorted({row["workload"] for row in replays.rows.values()}):
        drawn.append((f"serve_{workload}.png", serving(replays.where(workload=workload))))
    if steps.rows:
        drawn.append(("serve_decode_step.png", decode(list(steps.rows.values()))))
    if growth.rows:
        drawn.append(("serve_growth.png", growths(list(growth.rows.values()))))
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn:
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
    return [name for name, _ in drawn]


def serving(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(11, 4.2))
    left, right = figure.subplots(1, 2)
    for axes, key, label in ((left, "ttft_s_p90", "TTFT p90, s"), (right, "turns_per_s", "turns/s")):
        _curves(axes, rows, lambda r: r["arm"], "sessions", key)
        axes.set(xlabel="sessions", ylabel=label)
    left.set_yscale("log")
    left.axhline(1.0, color=GRID, linewidth=1.5, zorder=0)
    right.legend(fontsize=8, frameon=False)
    return figure


def decode(rows: list[Row]) -> Figure:
    figure = Figure(figsize=(6.5, 4.2))
    axes = figure.subplots()
    _curves(axes, rows, lambda r: f"{r['arm']}, {100 * r['level_share']:.0f} % out", "batch", "ms_median")
    axes.set(xlabel="sequences", ylabel="decode step, ms", xscale="log", yscale="log")
    axes.legend(fontsize=8, frameon=False)
    return figure


def growths(rows: list[Row]) -> Figure:
    """The steps around each growth, one curve a repeat."""
    arms = sorted({engine(row) for row in rows})
    figure = Figure(figsize=(6.5, 2.8 * len(arms)))
    for axes, arm in zip(figure.subplots(len(arms), squeeze=False)[:, 0], arms, strict=True):
        for number, row in enumerate(r for r in rows if engine(r) == arm):
            axes.plot(row["series_ms"], color=PALETTE[number % len(PALETTE)], linewidth=1.0)
        axes.set(title=arm, xlabel="step", ylabel="ms", ylim=(0, None))
        axes.grid(color=GRID, linewidth=0.6)
    figure.tight_layout()
    return figure


def _curves(axes: Axes, rows: list[Row], name: Callable[[Row], str], x: str, y: str) -> None:
    for number, label in enumerate(sorted({name(row) for row in rows})):
        points = sorted((r[x], r[y]) for r in rows if name(r) == label and r[y] is not None)
        style = {"color": PALETTE[number % len(PALETTE)], "marker": MARKERS[number % len(MARKERS)]}
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=label, markersize=4, **style)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
