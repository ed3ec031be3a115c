"""Figures, results file and page from the events of arms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.replay_runs import REPORT, arm_run, small_trace, turn_event

from vamp_integration.replay.arms import parse_arm
from vamp_integration.replay.figures import compare_tokens, figures, percentile
from vamp_integration.replay.page import page
from vamp_integration.replay.report import cell, check_text, record, summary, table_rows, write_json
from vamp_integration.replay.run import Comparison, ReplayConfig

FIXED = {
    *(
        "trace",
        "sessions",
        "concurrency",
        "model",
        "layers",
        "tp",
        "arm",
        "kv_gib",
        "max_offload_ratio",
        "routing",
    ),
    *("ttft_s_p50", "ttft_s_p90", "ttft_s_p99", "tpot_s_p50", "tpot_s_p90", "turns_per_s", "prefix_hit_rate"),
    *("preemptions", "level_max", "bytes_moved", "seconds", "turns"),
}


def comparison(tmp_path: Path) -> Comparison:
    arms = (parse_arm("vllm"), parse_arm("vamp_paper_0.25"))
    config = ReplayConfig(tmp_path / "t.jsonl", "models/tiny", arms, 1 << 20, check_tokens=True)
    runs = (arm_run(), arm_run("vamp_paper_0.25", 0.25, REPORT), arm_run("upper_bound", 0.2))
    checks = tuple(compare_tokens(run, runs[-1]) for run in runs[:-1])
    return Comparison(config, small_trace(2, 3), runs, checks)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_percentiles_are_linear_between_ranks(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == pytest.approx(value)


def test_percentile_of_nothing_is_none() -> None:
    assert percentile([], 0.5) is None


def test_warmup_turns_are_left_out_of_every_figure() -> None:
    run = arm_run()
    after_one, all_turns = figures(run, 1), figures(run, 0)
    assert (after_one["turns"], all_turns["turns"]) == (4, 6)
    assert (after_one["ttft_s_p99"], after_one["ttft_s_p50"]) == (2.0, 2.0)
    assert all_turns["ttft_s_p99"] > 7.9
    assert (after_one["prefix_hit_rate"], all_turns["prefix_hit_rate"]) == (0.75, 0.5)
    assert (after_one["turns_per_s"], all_turns["turns_per_s"]) == (0.5, 0.75)


def test_levels_are_means_over_time_and_the_peak_between_samples() -> None:
    result = figures(arm_run("vamp_paper_0.25", 0.25, REPORT), 1)
    assert result["level_mean"] == pytest.approx((0 * 4 + 2 * 1 + 3 * 3) / 8)
    assert result["level_max"] == 3
    assert (result["blocks_min"], result["blocks_max"]) == (40, 64)
    assert (result["bytes_moved"], result["decisions"]) == (3 << 20, {"expand": 2, "evict": 5})


def test_figures_without_turns_are_none_not_an_error() -> None:
    result = figures(replace(arm_run(), turns=[]), 1)
    assert result["ttft_s_p90"] is None and result["prefix_hit_rate"] is None and result["turns"] == 0


def test_token_check_finds_the_first_difference() -> None:
    run, reference = arm_run("vamp_paper_0.25"), arm_run("upper_bound")
    assert compare_tokens(run, reference).first_difference is None
    changed = [turn_event(0, 1, 1.0, [1, 9, 3]), turn_event(1, 0, 1.0), turn_event(1, 2, 1.0, [1, 2])]
    check = compare_tokens(replace(run, turns=changed), reference)
    assert (check.turns, check.equal, check.first_difference) == (3, 1, (0, 1, 1))
    assert "identical in 1 of 3 turns; first difference in session 0, turn 1, token 1" in check_text(check)


def test_recorded_rows_are_flat_and_carry_the_fixed_names(tmp_path: Path) -> None:
    path = tmp_path / "out" / "r.json"
    write_json(path, comparison(tmp_path), "vamp replay t.jsonl")
    result = json.loads(path.read_text())
    assert [r["arm"] for r in result["rows"]] == ["vllm", "vamp_paper_0.25", "upper_bound"]
    for recorded in result["rows"]:
        assert set(recorded) >= FIXED
        assert not [v for v in recorded.values() if isinstance(v, dict | list)]
    assert result["rows"][1]["decisions_evict"] == 5
    assert result["device"] == "a <CPU>" and result["versions"]["vllm"] == "0.32.0"
    assert "first 1 turn of each session left out of the figures" in result["notes"]
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_the_table_has_a_column_per_arm_and_readable_cells(tmp_path: Path) -> None:
    heading, *body = table_rows(comparison(tmp_path))
    cells = {line[0]: line[1:] for line in body}
    assert heading == ["", "vllm", "vamp_paper_0.25", "upper_bound"]
    assert cells["TTFT p50"] == ["2.00 s", "250.0 ms", "200.0 ms"]
    assert cells["prefix hit rate"] == ["75.0 %"] * 3
    assert cells["moved"] == ["-", "3.0 MiB", "-"]
    assert cells["decisions"] == ["-", "evict 5, expand 2", "-"]
    assert cell("seconds", None) == "-"


def test_the_page_stands_alone_and_escapes_what_it_shows(tmp_path: Path) -> None:
    text = page(comparison(tmp_path), "vamp replay <t>")
    outside = re.findall(r"(?:src|href)\s*=\s*[\"'](?!#)[^\"']*|url\((?!#)[^)]*|@import", text)
    assert outside == [] and "://" not in text
    assert text.count("<svg") == 4
    assert "a &lt;CPU&gt;" in text and "vamp replay &lt;t&gt;" in text
    assert "Decisions of vamp_paper_0.25" in text


def test_a_page_without_vamp_has_no_level_and_no_decisions(tmp_path: Path) -> None:
    whole = comparison(tmp_path)
    alone = replace(whole, runs=whole.runs[:1], token_checks=())
    text = page(alone, "vamp replay t")
    assert text.count("<svg") == 3 and "Decisions of" not in text


def test_summary_says_how_tokens_compare(tmp_path: Path) -> None:
    lines: list[Any] = summary(comparison(tmp_path))
    assert "output tokens of vamp_paper_0.25 and upper_bound are identical in all 6 turns" in lines


def test_simulated_routing_is_named_first_and_in_every_row(tmp_path: Path) -> None:
    result = comparison(tmp_path)
    for run in result.runs:
        run.ready["simulated_routing"] = "vamp_lognormal:sigma=1.06"
    assert summary(result)[0].startswith("SIMULATED ROUTING (vamp_lognormal:sigma=1.06)")
    rows = record(result, "vamp replay")["rows"]
    assert [row["routing"] for row in rows] == ["vamp_lognormal:sigma=1.06"] * len(rows)
