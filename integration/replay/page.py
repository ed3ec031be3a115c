"""A comparison as one HTML page that needs nothing else to be read."""

from __future__ import annotations

from html import escape
from pathlib import Path

from .report import summary, table_rows, write_atomically
from .run import Comparison

CSS = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f6f8; color: #22272e; }
body { font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 0 0 .6rem; }
section { background: #fff; border: 1px solid #e1e6eb; border-radius: 10px; }
section { padding: 20px 24px; margin-top: 20px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px; border-bottom: 1px solid #e8ecf0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 500; }
td { max-width: 17rem; white-space: normal; }
thead th { border-bottom: 2px solid #c5cdd5; }
svg { width: 100%; height: auto; display: block; } figure { margin: 0; }
figcaption, .note { color: #4b5661; font-size: .95rem; margin-top: .7rem; }
ul { margin: .3rem 0 0; padding-left: 1.2rem; }
code { font-size: .9em; background: #eef1f4; padding: 1px 5px; border-radius: 4px; overflow-wrap: anywhere; }
"""

TABLE_GUIDE = (
    "Each column is one run of the same trace with its own engine. TTFT is the time to first token: how long "
    "a user waits before an answer starts; p50, p90 and p99 are the waits that 50, 90 and 99 of 100 turns "
    "stay below. TPOT is the time per output token after that. The prefix hit rate is the share of prompt "
    "tokens whose keys and values were still in the KV cache and were not computed again. Evicted blocks are "
    "cached blocks that were given up to make room. The level counts how many groups of experts of every "
    "layer are out; level and moved bytes are VAMP's, so other arms show none."
)
CAPACITY_GUIDE = (
    "Thick lines: how many KV blocks the engine's pool has at a time. An unmodified engine keeps what it "
    "started with. VAMP adds blocks when it moves experts out and gives them back when it brings experts in. "
    "Thin lines: blocks that requests hold at that moment; the rest of the pool keeps prefixes for coming "
    "turns. The lower panel, where there is one, is VAMP's level: groups of experts that are out, per layer."
)
CDF_GUIDE = (
    "For every waiting time (horizontal, logarithmic) the share of turns that waited no longer. A curve "
    "further to the left is better. Dotted lines mark the median and the 90th percentile. A curve that is "
    "far to the right everywhere is the cliff: prefixes are evicted just before they are needed and computed "
    "again."
)
TIME_GUIDE = (
    "One mark per turn. Filled marks are in the figures; open ones are the first turns of sessions, whose "
    "prompts nobody could have cached. Where an arm's filled marks stay at the height of its open ones, its "
    "cache gives nothing; where they drop, prefixes are found again."
)
COST_GUIDE = (
    "Every time a KV allocation does not fit, VAMP prices its possible actions in seconds of work and takes "
    "the cheapest. Filled: the action taken at that moment. Open: the price of an action that was rejected "
    "then; actions that were not possible at all are left out. A price of 0 means that nothing in use had to "
    "go. The axis is linear below 0.1 ms and logarithmic above."
)


ARMS_GUIDE = (
    "vllm is the unmodified engine; vamp_paper_R may move the share R of every layer's experts to host "
    "memory and gives their memory to the KV cache; upper_bound is unmodified, with all of that memory from "
    "the start."
)


def html_table(rows: list[list[str]]) -> str:
    heading, *body = rows
    head = "".join(f"<th>{escape(text)}</th>" for text in heading)
    cells = ("".join(f"<td>{escape(text)}</td>" for text in row) for row in body)
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def plot_section(title: str, drawing: str, guide: str) -> str:
    caption = f"<figcaption>{escape(guide)}</figcaption>"
    return f"<section><h2>{escape(title)}</h2><figure>{drawing}{caption}</figure></section>"


def page(comparison: Comparison, command: str) -> str:
    """The HTML text. Imports matplotlib, which nothing else of the package needs."""
    from . import plots

    runs, warmup = comparison.runs, comparison.config.warmup_turns
    ready = runs[0].ready
    software = ", ".join(f"{name} {version}" for name, version in ready["versions"].items())
    sections = [
        f"<section><h2>Figures</h2><div class='scroll'>{html_table(table_rows(comparison))}</div>"
        f"<p class='note'>{escape(ARMS_GUIDE)}</p><p class='note'>{escape(TABLE_GUIDE)}</p></section>",
        plot_section("KV capacity over time", plots.kv_capacity(runs), CAPACITY_GUIDE),
        plot_section("How long turns waited", plots.ttft_distribution(runs, warmup), CDF_GUIDE),
        plot_section("Every turn's wait", plots.ttft_over_time(runs, warmup), TIME_GUIDE),
    ]
    for run in runs:
        drawing = plots.decision_costs(run)
        if drawing is not None:
            sections.append(plot_section(f"Decisions of {run.name} and their costs", drawing, COST_GUIDE))
    notes = "".join(f"<li>{escape(line)}</li>" for line in summary(comparison))
    sections.append(
        f"<section><h2>How this was measured</h2><ul>{notes}<li>device: {escape(ready['device'])}</li>"
        f"<li>software: {escape(software)}</li><li>command: "
        f"<code>{escape(command)}</code></li></ul></section>"
    )
    title = f"Replay of {escape(comparison.trace.name)}"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width, "
        f"initial-scale=1'><style>{CSS}</style></head><body><main><h1>{title}</h1><p class='note'>A recorded "
        "multi-turn trace, replayed closed loop: every session sends its next turn a recorded delay after "
        "its last answer ended.</p>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def write_page(path: Path, comparison: Comparison, command: str) -> None:
    write_atomically(path, page(comparison, command))
