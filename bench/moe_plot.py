"""Plots of a record of ``moe_layer.py``: time against tokens, or against experts in host memory.

python bench/moe_plot.py bench/results/h200/DATE-moe_layer.json -o docs/moe_layer.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Row = dict[str, Any]

# Okabe and Ito's palette, told apart under all common kinds of colour blindness.
COLOURS = {
    "vamp": "#D55E00",
    "vllm": "#0072B2",
    "vllm_swept": "#56B4E9",
    "torch_grouped_mm": "#009E73",
    "vamp_no_table": "#E69F00",
    "torch_reference": "#CC79A7",
}
MARKERS = {"vamp": "o", "vllm": "s", "vllm_swept": "D", "torch_grouped_mm": "^", "vamp_no_table": "v"}
INK, GRID = "#22272e", "#d8dde3"
MOST_COLUMNS = 3


def draw(record: dict[str, Any]) -> Figure:
    """Against experts in host memory where the record moves any, else against tokens."""
    rows = record["rows"]
    if any(row.get("bound_us") for row in rows):
        return _figure(record, _groups(rows, ("model", "dtype", "tp", "tokens")), _against_host)
    return _figure(record, _groups(rows, ("model", "dtype", "tp")), _against_tokens)


def read(path: Path) -> dict[str, Any]:
    """The record at ``path``; ``ValueError`` naming it and what is wrong."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not (isinstance(record, dict) and record.get("rows")):
            raise ValueError("no rows")
        draw(record)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    except KeyError as error:
        raise ValueError(f"{path}: no {error} in it or in one of its rows") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a record of moe_layer.py ({error})") from error
    return record


def check_suffix(path: Path) -> None:
    """Raise ``ValueError`` where the suffix of ``path`` names no format that can be written."""
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"{path}: no format to plot in, expected one of {', '.join(sorted(formats))}")


def save(record: dict[str, Any], path: Path) -> None:
    """Write the plot of ``record``; the suffix of ``path`` names the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(record).savefig(path, dpi=120, bbox_inches="tight")


def _groups(rows: list[Row], names: tuple[str, ...]) -> dict[str, list[Row]]:
    words = {"tp": "TP {}", "tokens": "{} tokens"}
    found: dict[str, list[Row]] = {}
    for row in rows:
        title = ", ".join(words.get(name, "{}").format(row[name]) for name in names)
        found.setdefault(title, []).append(row)
    return found


def _figure(record: dict[str, Any], panels: dict[str, list[Row]], fill: Any) -> Figure:
    """One panel for each group of rows, one legend for all."""
    columns = min(len(panels), MOST_COLUMNS)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(0.6 + 4.4 * columns, 0.6 + 3.9 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    handles: dict[str, Any] = {}
    for at, (title, rows) in zip(axes, panels.items(), strict=False):
        fill(at, rows)
        at.set_title(title, fontsize=11)
        at.set_ylabel("microseconds")
        at.grid(True, color=GRID, linewidth=0.6)
        at.set_axisbelow(True)
        at.spines[["top", "right"]].set_visible(False)
        handles |= dict(zip(*reversed(at.get_legend_handles_labels()), strict=True))
    for at in axes[len(panels) :]:
        at.set_visible(False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, frameon=False)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    figure.suptitle(f"{record['device']}, {record['date']}, {versions}", fontsize=9)
    return figure


def _against_tokens(axes: Axes, rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: row["tokens"])
    for arm in dict.fromkeys(row["arm"] for row in rows):
        _line(axes, [row for row in rows if row["arm"] == arm], "tokens", arm)
    bound = {row["tokens"]: row["roofline_us"] for row in rows}
    if all(bound.values()):
        axes.plot(list(bound), list(bound.values()), "--", color=INK, linewidth=1.2, label="roofline")
    axes.set_xlabel("tokens")
    _logarithmic(axes)


def _against_host(axes: Axes, rows: list[Row]) -> None:
    rows = sorted((row for row in rows if row["bound_us"]), key=lambda row: row["host_experts"])
    for arm in dict.fromkeys(row["arm"] for row in rows):
        _line(axes, [row for row in rows if row["arm"] == arm], "host_experts", arm)
    ours = [row for row in rows if row["arm"] == "vamp"]
    at = [row["host_experts"] for row in ours]
    for name, style, label in (("bound_us", "--", "bound"), ("resident_us", ":", "vamp, all in HBM")):
        axes.plot(at, [row[name] for row in ours], style, color=INK, linewidth=1.2, label=label)
    axes.set_xlabel("experts in host memory that are touched")
    _logarithmic(axes)


def _line(axes: Axes, rows: list[Row], x: str, arm: str) -> None:
    at = [row[x] for row in rows]
    style = {"color": COLOURS.get(arm, "#555555"), "marker": MARKERS.get(arm, "."), "markersize": 4}
    axes.plot(at, [row["us_median"] for row in rows], linewidth=1.4, label=arm, **style)
    low, high = ([row[name] for row in rows] for name in ("us_p10", "us_p90"))
    axes.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _logarithmic(axes: Axes) -> None:
    """Both axes, with plain numbers; 1, 2 and 5 of every decade of time."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE.png")
    arguments = parser.parse_args()
    try:
        check_suffix(arguments.out)
        save(read(arguments.record), arguments.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
