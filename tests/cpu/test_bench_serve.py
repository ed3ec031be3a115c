"""The parts of the serving benchmark that need no engine: arms, load, figures, results, page."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.replay_runs import sample, small_trace

from vamp_integration.replay.loop import TurnRecord
from vamp_integration.replay.scale import Scaling, scale
from vamp_integration.replay.trace import Turn
from vamp_integration.replay.workload import Prompts
from vamp_runtime.errors import ConfigError

BENCH = Path(__file__).parents[2] / "bench"
MODULES = ("arms", "load", "record", "steps", "rows", "targets", "report", "order", "h200")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The bench's modules by name; its folder is no package, so it is put on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield {name: importlib.import_module(f"serve_{name}") for name in MODULES}


# Arms and engines.


def test_an_arm_says_how_vamp_decides(bench: Any) -> None:
    parse = bench["arms"].parse_arm
    paper, direct = parse("vamp_paper_0.15", "measured"), parse("vamp_direct_0.1", "measured")
    assert (paper.ratio, paper.staging, paper.restore, paper.policy) == (0.15, "region", False, "paper")
    assert (direct.ratio, direct.staging, direct.restore, direct.policy) == (0.1, "off", True, "measured")
    assert not parse("vllm_host_kv", "auto").vamp
    for name in ("vamp", "vamp_paper", "vamp_paper_0", "vamp_paper_1.5", "vamp_odd_0.1", "vllm_0.1"):
        with pytest.raises(ConfigError, match=rf"--arms {name}: .*vamp_<kind>_<ratio>"):
            parse(name, "auto")


def machine(bench: Any) -> Any:
    sizes = {"kv_bytes": 8 << 30, "upper_bytes": 40 << 30, "host_kv_gib": 20.0, "max_ratio": 0.25}
    limits = {"max_model_len": 150_000, "max_num_seqs": 128, "max_num_batched_tokens": 8192}
    return bench["arms"].Machine(
        model="m",
        layers=24,
        random_weights=True,
        kernel="vamp",
        engine={"seed": 3},
        vamp={},
        **sizes,
        **limits,
    )


def test_parts_differ_in_what_they_name_only(bench: Any) -> None:
    arms = bench["arms"]
    options = {name: arms.engine_options(part, machine(bench)) for name, part in arms.PARTS.items()}
    assert options["offload"] == options["anchor"] | {"kv_offloading_size": 20.0}
    assert options["plain"] == options["upper"] == options["anchor"] | {"kv_cache_memory_bytes": 40 << 30}
    assert options["vamp"] == options["anchor"] | {
        "load_format": "vamp",
        "model_loader_extra_config": {"inner": "dummy"},
        "additional_config": {"vamp": {"max_offload_ratio": 0.25, "moe_kernel": "vamp"}},
    }
    spill = options["spill"]["additional_config"]["vamp"]
    assert spill == {"max_offload_ratio": 0.25, "moe_kernel": "vamp"}
    assert options["anchor"]["hf_overrides"] == {"num_hidden_layers": 24} and options["anchor"]["seed"] == 3


def test_kv_offloading_needs_room_in_shared_memory(bench: Any, tmp_path: Path) -> None:
    arms = bench["arms"]
    large = replace(machine(bench), host_kv_gib=1e9)
    arms.check_shared_memory(arms.PARTS["vamp"], large, str(tmp_path))
    with pytest.raises(ConfigError, match=r"--host-kv-gib 1e\+09: .*mount -o remount"):
        arms.check_shared_memory(arms.PARTS["spill"], large, str(tmp_path))


# The load and the window that counts.


def test_more_sessions_than_recorded_come_again_with_other_tokens(bench: Any) -> None:
    trace, take = small_trace(sessions=3), bench["load"].take
    assert take(trace, 2).sessions == trace.sessions[:2] and not take(trace, 3).notes
    twice = take(trace, 5)
    assert [session.session_id for session in twice.sessions] == ["s0", "s1", "s2", "s0#1", "s1#1"]
    prompts = Prompts(twice, 50_000)
    assert len(prompts.prompt(0, 2)) == len(prompts.prompt(3, 2)) and prompts.prompt(0, 2) != prompts.prompt(
        3, 2
    )
    assert "repeated" in twice.notes[-1]


def test_a_slim_trace_replays_as_the_whole_one(bench: Any, tmp_path: Path) -> None:
    load = bench["load"]
    turns = [Turn(64 * (i + 2) + 5, 9, tuple(range(i + 2)), i and 1.5) for i in range(12)]
    whole = tmp_path / "whole.jsonl"
    rows = [
        {"session_id": name, "turn": i, "input_length": t.input_length, "output_length": t.output_length}
        | {"hash_ids": list(t.hash_ids)}
        | ({"delay": 1500} if i else {"timestamp": 0})
        for name in ("a", "b")
        for i, t in enumerate(turns)
    ]
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = load.Workload("slim", Scaling(skip_turns=4, min_turns=2, think_cap_s=1.0), 4096)
    assert load.slim(whole, workload, 5, tmp_path / "slim.jsonl") == (2, 18)
    slim = load.read(workload, tmp_path)
    reference = scale(load.load_trace(whole), workload.scaling)
    assert slim.block_tokens == reference.block_tokens == 64
    assert [s.turns for s in slim.sessions] == [s.turns[:5] for s in reference.sessions]
    with pytest.raises(ConfigError, match=r"--traces .*none\.jsonl"):
        load.read(load.Workload("none", Scaling(), 1), tmp_path)


def recording(bench: Any) -> Any:
    made = bench["load"].Recording(2)
    for session, turn, end in ((0, 0, 2.0), (0, 1, 3.0), (1, 0, 4.0), (0, 2, 6.0), (1, 1, 8.0)):
        made.add(TurnRecord(session, turn, end - 1.0, 0.5 * end, 0.01, 1000, 900, [1, 2, 3]), end)
    made.window_from, made.counts = 4.0, (3, 70)
    made.samples = [sample(0.0), sample(3.5, 1), sample(6.0, 2), sample(9.0, 2)]
    return made


def test_the_window_begins_when_every_session_has_ended_its_first_turn(bench: Any) -> None:
    made, load = recording(bench), bench["load"]
    assert made.first_turns == {0, 1}
    end = {"seconds": 9.0, "start": 100.0, "preemptions": 4, "evictions": 80, "in_flight": 1}
    end |= {"sessions_ended": 0, "vamp": None}
    figures = load.row_figures(load.windowed("a", 0.0, made, end, {}), made, end)
    assert figures["turns"] == 2 and figures["turns_per_s"] == 2 / 5.0
    assert figures["ttft_s_p50"] == 3.5  # of turns that ended at 6 and 8, the first turns left out
    assert (figures["preemptions"], figures["evicted_blocks"]) == (1, 10)
    assert figures["level_mean"] == pytest.approx((2 * 1 + 3 * 2) / 5) and figures["level_max"] == 2
    assert figures["fill_s"] == 4.0 and figures["turns_per_s_with_fill"] == 3 / 9.0


def test_what_vamp_did_is_counted_from_the_start_of_the_replay(bench: Any) -> None:
    zero = {"bytes_moved": 5, "copied_bytes": 1, "move_seconds": 0.5, "moves": 2, "failed_moves": 0}
    before = zero | {"not_this_step": 1, "decisions": {"evict": 2}, "level": 1}
    after = {name: 3 * value for name, value in zero.items()} | {
        "not_this_step": 4,
        "decisions": {"evict": 3, "expand": 7},
        "level": 6,
    }
    done = bench["load"].since(before, after)
    assert (done["bytes_moved"], done["moves"], done["not_this_step"], done["level"]) == (10, 4, 3, 6)
    assert done["decisions"] == {"evict": 1, "expand": 7}
    assert bench["load"].since(None, None) is None


# Growth.


def test_a_bubble_is_what_the_steps_of_a_move_took_beyond_others(bench: Any) -> None:
    times = [0.010] * 20 + [0.013, 0.018, 0.009, 0.012] + [0.011] * 20
    ends = [0.0]
    for step in times:
        ends.append(ends[-1] + step)
    found = bench["steps"].bubble(ends, requested=0.2001, settled=0.2300, rested=0.2300)
    assert found["steps_affected"] == 2
    assert found["bubble_ms"] == pytest.approx(11.0 - 2.0 + 1.0) and found[
        "bubble_ms_largest"
    ] == pytest.approx(8.0)
    assert found["step_ms_before"] == pytest.approx(10.0) and found["step_ms_after"] == pytest.approx(11.0)
    assert len(found["series_ms"]) == 44


def test_a_bubble_lasts_until_nothing_is_mapped_ahead(bench: Any) -> None:
    times = [0.010] * 20 + [0.013, 0.018] + [0.012] * 10 + [0.020, 0.0115] + [0.011] * 20
    ends = [0.0]
    for step in times:
        ends.append(ends[-1] + step)
    found = bench["steps"].bubble(ends, requested=0.2001, settled=0.2305, rested=0.3600)
    assert (found["steps_affected"], found["steps_ahead"]) == (2, 11)
    assert found["bubble_ms_ahead"] == pytest.approx(10 * 1.0 + 9.0 + 0.5)
    assert found["bubble_ms"] == pytest.approx(11.0 + found["bubble_ms_ahead"])
    assert found["bubble_ms_largest"] == pytest.approx(9.0)
    assert found["step_ms_after"] == pytest.approx(11.0)


def test_a_growth_tells_how_long_its_phases_took(bench: Any) -> None:
    from vamp_kernels.ranges import ranged

    with bench["steps"].phases() as spent:
        ranged("publish")(time.sleep)(0.002)
        ranged("publish")(time.sleep)(0.002)
        ranged("staging")(time.sleep)(0.001)
    ranged("clear")(time.sleep)(0.0)
    assert spent.keys() == {"publish"} and spent["publish"] >= 0.004


# Results, time and processes.


def test_results_are_continued_and_name_the_commands_that_filled_them(bench: Any, tmp_path: Path) -> None:
    record = bench["record"]
    row = {"arm": "vllm", "batch": 4, "level_share": 0.0, "pass": 0, "ms_median": 3.0}
    first = record.Results(tmp_path, "decode_step", "anchor", {"commit": "a", "command": "one"})
    assert not first.has(row)
    first.add(row)
    second = record.Results(tmp_path, "decode_step", "anchor", {"commit": "b", "command": "two"})
    assert second.has({**row, "ms_median": 9.0}) and not second.has({**row, "batch": 8})
    second.add({**row, "batch": 8})
    (written,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.json"))
    assert [r["batch"] for r in written["rows"]] == [4, 8] and written["command"] == "two"
    assert [run["command"] for run in written["earlier"]] == ["one"]
    assert not record.Results(tmp_path, "decode_step", "upper", {"commit": "", "command": ""}).has(row)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The signals' handlers are put back afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_no_point_begins_that_would_end_too_late(bench: Any, own_signals: None) -> None:
    clock = bench["record"].Clock
    assert clock(None).allows(1e9) and clock(100.0).allows(50.0) and not clock(100.0).allows(101.0)
    stopped = clock(None)
    signal.raise_signal(signal.SIGTERM)
    assert stopped.stopped and not stopped.allows(0.0)


def test_a_detached_run_outlives_its_caller_and_can_be_waited_for(bench: Any, tmp_path: Path) -> None:
    """The detached process fails at once, for want of a trace; that it ran is in its log."""
    argv = ["anchor", "--detach", "--out", str(tmp_path / "run"), "--traces", str(tmp_path)]
    started = subprocess.run(
        [sys.executable, str(BENCH / "serve_h200.py"), *argv], capture_output=True, text=True
    )
    assert started.returncode == 0 and "process" in started.stdout
    assert bench["record"].wait(tmp_path / "run", 60.0, lambda line: None)
    assert "weka_long_peak140k.jsonl" in (tmp_path / "run" / "log").read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["anchor", "--arms", "upper_bound"], "--arms upper_bound: not in anchor"),
        (["vamp", "--arms", "odd"], "--arms odd: unknown"),
        (["anchor", "--workload", "odd"], "--workload odd: unknown; give one of peak140k"),
        (["anchor", "--traces", "/nowhere"], "--traces /nowhere: no weka_long_peak140k.jsonl"),
        (["stop", "--out", "/nowhere"], "--out /nowhere: no detached run"),
    ],
)
def test_bad_arguments_are_one_line(bench: Any, capsys: Any, argv: list[str], said: str) -> None:
    assert bench["h200"].main(argv) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


# The page.


def replay_row(arm: str, sessions: int, ttft: float, turns: float, **more: Any) -> dict[str, Any]:
    vamp = arm.startswith("vamp")
    settings = {
        "arm": arm,
        "sessions": sessions,
        "workload": "peak140k",
        "moe_kernel": "vamp",
        "measure_s": 90.0,
    }
    settings |= {
        "max_offload_ratio": float(arm.rpartition("_")[2]) if vamp else 0.0,
        "host_kv_gib": 0,
        "kv_gib": 8.0,
    }
    figures = {"ttft_s_p50": ttft / 2, "ttft_s_p90": ttft, "ttft_s_p99": ttft, "tpot_s_p50": 0.01}
    figures |= {"tpot_s_p90": 0.02, "turns_per_s": turns, "prefix_hit_rate": 0.95 if turns > 2 else 0.1}
    figures |= {
        "preemptions": 0,
        "level_mean": 10.0 * vamp,
        "level_max": 12 * vamp,
        "bytes_moved": vamp << 30,
    }
    return settings | figures | {"turns": 300, "routing": "SIMULATED x"} | more


def write(folder: Path, kind: str, part: str, rows: list[dict[str, Any]], **more: Any) -> None:
    about = {
        "name": kind,
        "date": "2026-12-01",
        "commit": "abc",
        "command": f"python bench/serve_h200.py {part}",
    }
    record = about | {
        "device": "NVIDIA H200",
        "versions": {},
        "notes": ["ROUTING IS SIMULATED"],
        "rows": rows,
    }
    record |= more
    (folder / f"{record['date']}-{kind}-{part}.json").write_text(json.dumps(record))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    plain = [replay_row("vllm", n, t, r) for n, t, r in ((8, 0.5, 1.3), (16, 9.0, 1.1), (28, 16.0, 0.84))]
    upper = [replay_row("upper_bound", n, 0.4, r) for n, r in ((8, 1.3), (16, 2.8), (28, 4.4))]
    vamp = [replay_row("vamp_direct_0.25", n, 0.8, r) for n, r in ((8, 1.3), (16, 2.7), (28, 4.1))]
    vamp += [replay_row("vamp_paper_0.10", n, t, r) for n, t, r in ((16, 0.85, 2.5), (28, 15.0, 0.9))]
    write(tmp_path, "replay", "plain", plain + upper, anchor="this file")
    write(tmp_path, "replay", "vamp", vamp, anchor="2026-12-01-replay-plain.json")
    base = {"routing": "SIMULATED x", "pass": 0, "host_bytes_by_layer": []}
    steps = [base | {"arm": "vllm", "batch": b, "level_share": 0.0, "ms_median": 10.0} for b in (16, 64)]
    steps += [base | {"arm": "vamp", "batch": b, "level_share": 0.0, "ms_median": 10.1} for b in (16, 64)]
    moved = {"arm": "vamp", "level_share": 0.1, "ms_median": 15.15, "host_bytes_by_layer": [51e6, 0.0]}
    steps += [base | moved | {"batch": b} for b in (16, 64)]
    steps += [
        base | {"arm": "vamp_peer", "batch": 64, "level_share": share, "ms_median": ms}
        for share, ms in ((0.0, 10.0), (0.1, 10.9))
    ]
    write(tmp_path, "decode_step", "both", steps)
    growth = {"arm": "vamp", "batch": 16, "growth_gib": 1.125, "levels": 8, "level_after": 8, "moves": 1}
    times = {"bubble_ms": 2.5, "bubble_ms_largest": 2.0, "step_ms_before": 8.0, "step_ms_after": 9.0}
    rows = [
        growth | times | {"repeat": n, "total_ms": total, "series_ms": [8.0, 9.0], "routing": "SIMULATED x"}
        for n, total in enumerate((30.0, 45.0))
    ]
    write(tmp_path, "growth", "vamp", rows)
    return tmp_path


def test_targets_are_held_against_the_anchor_that_a_part_names(bench: Any, results: Path) -> None:
    rows, targets, keys = bench["rows"], bench["targets"], bench["record"].KEYS
    files = rows.read(results)
    found = {kind: rows.Rows(files, kind, keys[kind]) for kind in keys}
    verdicts = [*targets.serving(found["replay"], "peak140k")]
    verdicts += [*targets.steps(found["decode_step"]), *targets.growths(found["growth"])]
    said = {verdict.figure: verdict for verdict in verdicts}
    best = said["28 sessions, best VAMP arm against unmodified"]
    assert best.met and best.measured == "vamp_direct_0.25: TTFT p90 20.0x lower, turns/s 4.88x"
    assert said["28 sessions, best VAMP arm against the upper bound"].met
    ten = said["16 sessions, host KV off, 10 % of experts moved"]
    assert ten.met and ten.measured.startswith("vamp_paper_0.10: TTFT p90 10.6x")
    boundary = said["sessions with TTFT p90 at most 1 s, host KV off, 25 % of experts out"]
    assert boundary.met and boundary.measured == "28 against 8"
    assert said[boundary.figure.replace("25 %", "10 %")].measured == "16 against 8"
    assert said["decode step, level 0, our kernel"].met
    over = [v for figure, v in said.items() if figure.startswith("decode step, 10 % off")]
    assert [(v.measured, v.met) for v in over] == [("1.50x", False), ("1.50x", True)]
    peer = said["decode step, 10 % in the HBM of another GPU, batch 64, against level 0"]
    assert (peer.measured, peer.met) == ("1.09x", True)
    growth = said["growth of 1.12 GiB, vamp"]
    assert growth.met is False and "total 45.0 ms" in growth.measured
    hits = [v for figure, v in said.items() if "hit rate" in figure]
    assert [v.met for v in hits] == [True, False, True]


def test_a_missing_measurement_is_no_verdict(bench: Any, tmp_path: Path) -> None:
    write(tmp_path, "replay", "vamp", [replay_row("vamp_direct_0.25", 28, 1.0, 4.0)], anchor=None)
    rows, targets = bench["rows"], bench["targets"]
    found = rows.Rows(rows.read(tmp_path), "replay", bench["record"].KEYS["replay"])
    verdicts = list(targets.serving(found, "peak140k"))
    assert verdicts and all(verdict.met is None for verdict in verdicts)


def test_the_page_says_that_routing_is_simulated_and_how_to_measure_again(bench: Any, results: Path) -> None:
    report = bench["report"]
    out = results / "page" / "results.md"
    out.parent.mkdir()
    text = report.page(bench["rows"].read(results), {16: 900.0, 64: 500.0}, ["serve_peak140k.png"])
    assert "**Routing: SIMULATED x.**" in text and "- ROUTING IS SIMULATED" in text
    assert "### peak140k, 28 sessions" in text and "`python bench/serve_h200.py vamp`" in text
    # A layer of 1 ms over the link instead of 0.9 ms (16 tokens) or 0.5 ms (64), the other one resident.
    assert "15.15 ms, 1.50x (bound 1.01x)" in text and "15.15 ms, 1.50x (bound 1.05x)" in text
    assert text.count("| vamp | 16 |") == 2


def test_the_newest_of_a_point_measured_twice_counts(bench: Any, results: Path) -> None:
    write(results, "replay", "anchor", [replay_row("vllm", 28, 20.0, 0.8)], date="2026-12-02")
    rows = bench["rows"]
    found = rows.Rows(rows.read(results), "replay", bench["record"].KEYS["replay"])
    assert [row["ttft_s_p90"] for row in found.where(arm="vllm", sessions=28)] == [20.0]
    with pytest.raises(ValueError, match=r"broken\.json: not a results file"):
        (results / "broken.json").write_text("{")
        rows.read(results)


def test_plots_are_written_for_what_there_is(bench: Any, results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("serve_plot")
    names = plot.save(bench["rows"].read(results), tmp_path / "plots")
    assert names == ["serve_peak140k.png", "serve_decode_step.png", "serve_growth.png"]
    assert all((tmp_path / "plots" / name).stat().st_size > 5000 for name in names)


def test_the_order_of_simulated_routing_puts_alike_experts_together(bench: Any, tmp_path: Path) -> None:
    from vamp_integration.lognormal import parse as simulation
    from vamp_integration.record_order import read_order

    (tmp_path / "config.json").write_text(
        '{"num_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 3,'
        ' "hidden_size": 64, "moe_intermediate_size": 32}'
    )
    routing, out = "vamp_lognormal:sigma=1.06,tilt=0,seed=5", tmp_path / "order.json"
    assert bench["order"].write(str(tmp_path), 0, routing, out) == 3
    order = read_order(str(out), layers=3, experts=64)
    assert order is not None
    for layer, records in enumerate(order):
        inverse = simulation(routing).inverse(layer, 64)[0]
        by_record = sorted(range(64), key=lambda expert: records[expert])
        assert by_record == sorted(range(64), key=lambda expert: inverse[expert])
    with pytest.raises(ConfigError, match="--model"):
        bench["order"].write(str(tmp_path / "none"), 0, routing, out)
    with pytest.raises(ConfigError, match="--routing"):
        bench["order"].write(str(tmp_path), 0, "", out)


def test_other_machines_have_tables_of_their_own(bench: Any) -> None:
    """A growth and a decode step of 48 layers on two GPUs do not stand for those of 24 on one."""

    def file(name: str, kind: str, layers: int, tp: int, **row: Any) -> Any:
        rows = [{"arm": "vamp", "batch": 16, "layers": layers, "tp": tp, "routing": "r", **row}]
        record = {"name": kind, "rows": rows, "notes": [], "device": "d", "commit": "c", "command": "x"}
        return bench["rows"].File(name, record)

    step = {"level_share": 0.0, "pass": 0}
    growth = {"repeat": 0, "growth_gib": 1.0, "level_after": 8, "moves": 1, "host_kv_gib": 0}
    growth |= {name: 1.0 for name in ("bubble_ms", "bubble_ms_largest", "step_ms_before", "step_ms_after")}
    files = [
        file("a.json", "decode_step", 24, 1, ms_median=6.0, **step),
        file("b.json", "growth", 24, 1, total_ms=25.0, **growth),
        file("c.json", "decode_step", 48, 2, ms_median=9.0, **step),
        file("d.json", "growth", 48, 2, total_ms=99.0, **growth),
    ]
    files += [file("e.json", "decode_step", 24, 1, ms_median=7.0, **step)]
    assert list(bench["rows"].by_machine(files)) == [(24, 1), (48, 2)]
    page = bench["report"].page(files, {}, [])
    main, _, other = page.partition("## 48 layers on 2 GPUs")
    assert "7.00 ms" in main and "9.00 ms" not in main and "99.00 ms" not in main
    assert "9.00 ms" in other and "99.00 ms" in other
