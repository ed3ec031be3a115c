"""Arms, their processes, and the command line's refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.replay_runs import arm_run, row, write_rows

from vamp_integration.cli.main import main
from vamp_integration.lognormal import VARIABLE
from vamp_integration.replay.arms import child_environment, engine_options, parse_arm, parse_engine_args
from vamp_integration.replay.child import ChildSpec
from vamp_integration.replay.run import ReplayConfig, child_spec, prepare, upper_bound_bytes
from vamp_integration.replay.runner import ArmFailed, run_arm
from vamp_runtime.errors import ConfigError


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which ``vamp replay`` refuses ``arguments``, with status 2."""
    monkeypatch.setattr(sys, "argv", ["vamp", "replay", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vamp: error: ")
    return line


@pytest.mark.parametrize("name", ["vllm", "upper_bound", "vamp_paper_0.15", "vamp_paper_.5"])
def test_arms_keep_their_names(name: str) -> None:
    assert parse_arm(name).name == name


@pytest.mark.parametrize(
    "name", ["", "vamp", "vamp_paper", "vamp_paper_1", "vamp_paper_0", "vamp_best_0.1", "sglang"]
)
def test_unknown_arms_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--arm is .*vamp_paper_0\.15"):
        parse_arm(name)


def test_arms_differ_in_nothing_but_vamp() -> None:
    base = {"model": "m", "additional_config": {"x": 1}}
    plain = engine_options(parse_arm("vllm"), base, 1 << 20, {"reserve": 2})
    vamp = engine_options(parse_arm("vamp_paper_0.25"), base, 1 << 20, {"reserve": 2})
    assert plain == {**base, "kv_cache_memory_bytes": 1 << 20}
    assert {k for k in vamp if vamp[k] != plain.get(k)} == {"load_format", "additional_config"}
    assert vamp["additional_config"] == {
        "x": 1,
        "vamp": {"max_offload_ratio": 0.25, "reserve": 2},
    }


def test_an_unmodified_engine_does_not_load_the_plugin() -> None:
    parent = {"VLLM_PLUGINS": "vamp,other", "OMP_NUM_THREADS": "7"}
    assert child_environment(parent, parse_arm("vllm"), 2)["VLLM_PLUGINS"] == ""
    assert child_environment(parent, parse_arm("vamp_paper_0.1"), 2)["VLLM_PLUGINS"] == "vamp"
    assert child_environment(parent, parse_arm("vllm"), 2)["OMP_NUM_THREADS"] == "7"
    assert child_environment({}, parse_arm("vllm"), 2)["OMP_NUM_THREADS"] == "2"


def test_simulated_routing_is_loaded_in_every_arm() -> None:
    def plugins(strategy: str, arm: str) -> str:
        return child_environment({VARIABLE: strategy}, parse_arm(arm), 2)["VLLM_PLUGINS"]

    assert plugins("vamp_lognormal:sigma=1", "vllm") == "vamp_benchmark_routing"
    assert plugins("vamp_lognormal:sigma=1", "vamp_paper_0.1") == "vamp,vamp_benchmark_routing"
    assert plugins("uniform_random", "vllm") == ""


def test_engine_args_are_json_or_text() -> None:
    pairs = ["enforce_eager=true", "dtype=bfloat16", 'hf_overrides={"num_hidden_layers": 4}']
    expected = {"enforce_eager": True, "dtype": "bfloat16", "hf_overrides": {"num_hidden_layers": 4}}
    assert parse_engine_args(pairs) == expected
    with pytest.raises(ConfigError, match="--engine-arg is enforce_eager; give key=value"):
        parse_engine_args(["enforce_eager"])


def config(path: Path, **changes: Any) -> ReplayConfig:
    arms = (parse_arm("vllm"), parse_arm("vamp_paper_0.25"))
    return ReplayConfig(**{"trace": path, "model": "m", "arms": arms, "kv_cache_bytes": 1 << 20} | changes)


def test_the_upper_bound_holds_the_budget_and_what_experts_can_give(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t.jsonl", [row(), row(turn=1)])
    assert upper_bound_bytes(config(path), [arm_run()]) == (1 << 20) + (1 << 20)
    assert upper_bound_bytes(config(path, upper_kv_bytes=5), []) == 5


def test_every_arm_gets_the_length_that_the_trace_needs(tmp_path: Path) -> None:
    settings = config(write_rows(tmp_path / "t.jsonl", [row(), row(turn=1, length=300)]))
    spec = child_spec(settings, prepare(settings), settings.arms[0], 1 << 20)
    assert spec.engine["max_model_len"] == 307
    assert spec.engine["enable_prefix_caching"] is True


def test_a_failing_process_shows_the_end_of_its_log(tmp_path: Path) -> None:
    spec = ChildSpec(trace=str(tmp_path / "gone.jsonl"), engine={}, concurrency=1)
    log = tmp_path / "arm.log"
    with pytest.raises(ArmFailed, match="arm vllm ended with status 1") as caught:
        run_arm(parse_arm("vllm"), spec, log, 1, lambda event: None)
    assert "gone.jsonl: cannot be read" in caught.value.tail


BAD_OPTIONS = [
    (["--arm", "sglang"], "--arm is sglang"),
    (["--concurrency", "0"], "--concurrency is 0"),
    (["--kv-cache-bytes", "0"], "--kv-cache-bytes is 0"),
    (["--scale-lengths", "-1"], "--scale-lengths is -1"),
    (["--skip-turns", "9"], "--skip-turns 9"),
    (["--warmup-turns", "2"], "--warmup-turns is 2 but the longest session has 2 turns; give 1 or less"),
    (["--max-model-len", "100"], "--max-model-len is 100 but a turn of t needs 207 tokens"),
    (["--arm", "vllm", "--check-tokens"], "--upper-kv-bytes is not given"),
    (["--arm", "vllm", "--arm", "vllm"], "give each arm once"),
    (["--engine-arg", "oops"], "--engine-arg is oops"),
    (["--format", "csv"], "unknown format 'csv'"),
    (["--max-seconds", "0"], "--max-seconds is 0"),
    (["--arm", "vamp_paper_0.5", "--vamp-arg", "granule_kib=5"], "granule_kib: 5 is not a multiple"),
    (["--arm", "vamp_paper_0.5", "--vamp-arg", "speed=5"], "additional_config.vamp.speed: unknown setting"),
    (["--arm", "vamp_paper_0.5", "--vamp-arg", "policy=none.toml"], "none.toml"),
    (["--arm", "vamp_paper_0.5", "--vamp-arg", "hardware=h200"], "hardware: h200 is for the cuda driver"),
    (["--arm", "vamp_paper_0.5", "--vamp-arg", "granule_kib=4096"], "granule_kib: 4096: "),
    (
        ["--arm", "vamp_paper_0.5", "--kv-cache-bytes", "1048576"],
        "kv_cache_memory_bytes: 1048576 is too small",
    ),
]

TINY = {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[" ".join(o) for o, _ in BAD_OPTIONS])
def test_bad_settings_end_with_status_2_one_line_and_no_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [row(), row(turn=1)])
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    base = [
        str(path),
        "--model",
        str(model),
        "--kv-cache-bytes",
        "1048576",
        "--out-dir",
        str(tmp_path / "out"),
    ]
    assert message in run(monkeypatch, capsys, *base, *options)
    assert not (tmp_path / "out").exists()


def test_a_bad_trace_ends_with_status_2_one_line_and_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "t.jsonl", [row(), row(turn=5)])
    base = [str(path), "--model", "m", "--kv-cache-bytes", "1048576", "--out-dir", str(tmp_path / "out")]
    assert "t.jsonl:2: field 'turn': is 5 after 0; give 1" in run(monkeypatch, capsys, *base)
    assert not (tmp_path / "out").exists()
