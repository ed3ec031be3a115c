"""Plots of a comparison as SVG text, drawn with matplotlib."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .figures import ArmRun, capacity, counted

# Okabe and Ito's palette, told apart under all common kinds of colour blindness.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)), ":")
MARKERS = ("o", "^", "s", "D", "v", "P")
INK, GRID = "#22272e", "#d8dde3"
STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.edgecolor": "#9aa4af",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "vamp",
}


def seconds(value: float, _: Any = None) -> str:
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def svg(figure: Figure) -> str:
    """The bare <svg> element, without metadata and name spaces, which HTML does not need."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    element = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", element)


def line_style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def log_seconds(axis: Axis) -> None:
    """Label 1, 2 and 5 of every decade of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(seconds))
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, borderaxespad=0.2)


def kv_capacity(runs: tuple[ArmRun, ...]) -> str:
    """KV blocks in the pool and in use over time, with VAMP's level below where an arm has one."""
    leveled = any(point.level for run in runs for point in capacity(run))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.4 if leveled else 3.6), layout="constrained")
        ratios = [2.2, 1] if leveled else [1]
        panels = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for index, run in enumerate(runs):
            points, style = capacity(run), line_style(index)
            times, blocks = [p.t for p in points], [p.blocks for p in points]
            panels[0].step(times, blocks, where="post", label=run.name, lw=2.2, **style)
            in_use = [s["used"] for s in run.samples]
            panels[0].plot([s["t"] for s in run.samples], in_use, color=style["color"], lw=0.9, alpha=0.7)
            if run.end["vamp"] is not None and leveled:
                panels[1].step(times, [p.level for p in points], where="post", lw=2.2, **style)
        panels[0].set_ylabel("KV blocks")
        panels[0].set_ylim(bottom=0)
        legend(panels[0])
        if leveled:
            panels[1].set_ylabel("level\n(groups out per layer)")
            panels[1].yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            panels[1].set_ylim(bottom=0)
        panels[-1].set_xlabel("seconds since the start of the arm's replay")
        return svg(figure)


def ttft_distribution(runs: tuple[ArmRun, ...], warmup_turns: int) -> str:
    """Cumulative share of turns over TTFT, logarithmic."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        axes = figure.subplots()
        for index, run in enumerate(runs):
            values = sorted(t["ttft_s"] for t in counted(run, warmup_turns))
            shares = [100 * (i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", label=run.name, lw=2.2, **line_style(index))
        for share in (50, 90):
            axes.axhline(share, color="#6b7580", lw=0.8, ls=":")
        axes.set_xscale("log")
        log_seconds(axes.xaxis)
        axes.set_xlabel("time to first token")
        axes.set_ylabel("turns with at most this TTFT, %")
        axes.set_ylim(0, 101)
        legend(axes)
        return svg(figure)


def ttft_over_time(runs: tuple[ArmRun, ...], warmup_turns: int) -> str:
    """TTFT of every turn at the time it was submitted; those left out of the figures open."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        axes = figure.subplots()
        for index, run in enumerate(runs):
            colour = line_style(index)["color"]
            style: dict[str, Any] = {"marker": MARKERS[index % len(MARKERS)], "s": 22, "edgecolors": colour}
            for counts in (False, True):
                turns = [t for t in run.turns if (t["turn"] >= warmup_turns) == counts]
                x, y = [t["submitted_s"] for t in turns], [t["ttft_s"] for t in turns]
                style |= {"facecolors": colour if counts else "none", "label": run.name if counts else None}
                axes.scatter(x, y, alpha=0.8, **style)
        axes.set_yscale("log")
        log_seconds(axes.yaxis)
        axes.set_xlabel("seconds since the start of the arm's replay, at submission")
        axes.set_ylabel("time to first token")
        legend(axes)
        return svg(figure)


def possible(decision: dict[str, Any], action: str) -> bool:
    """Whether ``action`` was rejected for its price alone."""
    cost = decision["rejected"].get(action, math.inf)
    return math.isfinite(cost) and action not in decision.get("infeasible", {})


def decision_costs(run: ArmRun) -> str | None:
    """Cost of every decision's chosen action, filled, and of the rejected ones, open; None without "
    "decisions."""
    log = (run.end["vamp"] or {}).get("decision_log", [])
    if not log:
        return None
    actions = sorted({d["action"] for d in log} | {a for d in log for a in d["rejected"] if possible(d, a)})
    colour = {action: COLOURS[index % len(COLOURS)] for index, action in enumerate(actions)}
    start = run.end["start"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        axes = figure.subplots()
        for action in actions:
            chosen = [(d["t"] - start, d["cost_s"]) for d in log if d["action"] == action]
            priced = [(d["t"] - start, d["rejected"][action]) for d in log if possible(d, action)]
            style: dict[str, Any] = {"edgecolors": colour[action], "linewidths": 1.1}
            x, y = [t for t, _ in chosen], [cost for _, cost in chosen]
            axes.scatter(x, y, facecolors=colour[action], s=34, label=action, **style)
            x, y = [t for t, _ in priced], [cost for _, cost in priced]
            axes.scatter(x, y, facecolors="none", s=20, alpha=0.7, **style)
        axes.set_yscale("symlog", linthresh=1e-4)
        axes.yaxis.set_major_formatter(FuncFormatter(seconds))
        axes.set_xlabel("seconds since the start of the arm's replay")
        axes.set_ylabel("predicted cost, seconds of work")
        legend(axes)
        return svg(figure)
