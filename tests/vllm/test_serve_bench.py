"""The serving benchmark, whole, with a tiny model: what it writes and that it can be continued."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.engine import run_scenario
from support.scenarios import EAGER

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def run(out: Path, tiny_model: Path) -> Any:
    """Runs a sub-command, and gives its exit code and the rows by kind that the part has then."""
    caches = out / "caches"
    caches.mkdir()
    (caches / "tiny").symlink_to(tiny_model)

    def run(part: str, *arguments: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
        common = [
            "--tiny",
            "--measure",
            "3",
            "--out",
            str(out),
            "--caches",
            str(caches),
            "--batches",
            "1",
            "2",
        ]
        done = run_scenario("serve_benchmark", tiny_model, argv=[part, *common, *arguments])
        files = {path.name.split("-")[3]: path for path in out.glob(f"*-{part}*.json")}
        return done["code"], {kind: json.loads(path.read_text())["rows"] for kind, path in files.items()}

    return run


def test_one_unmodified_engine_stands_for_two_pools(run: Any, out: Path) -> None:
    code, rows = run("plain", "--sessions", "5", "--shares", "0")
    plain, upper = rows["replay"]
    assert code == 0
    assert (plain["arm"], upper["arm"]) == ("vllm", "upper_bound")
    assert plain["blocks_withheld"] > 0 and plain["kv_gib"] < upper["kv_gib"] and not upper["blocks_withheld"]
    assert plain["blocks_max"] == plain["blocks_min"] < upper["blocks_min"]
    assert [row["batch"] for row in rows["decode_step"]] == [1, 2]
    record = json.loads(next(out.glob("*-replay-plain.json")).read_text())
    assert record["anchor"] == "this file" and any("withheld" in note for note in record["notes"])


def test_arms_of_vamp_share_an_engine_and_a_second_run_measures_nothing_again(run: Any, out: Path) -> None:
    arguments = ["--sessions", "5", "--arms", "vamp_paper_0.10", "vamp_direct_0.25", "vamp_fixed_0.25"]
    arguments += ["--shares", "0", "0.25", "--growths", "2", "--policy", EAGER]
    code, rows = run("vamp", *arguments)
    assert code == 0
    paper, direct, fixed = rows["replay"]
    assert paper["level_max"] == 3 and paper["bytes_moved"] > 0 and paper["moves"] > 0
    assert direct["level_max"] > 3 and direct["decisions_expand"] > 0
    assert fixed["level_mean"] == fixed["level_max"] == 8 and fixed["moves"] == 0
    assert len({row["kv_gib"] for row in rows["replay"]}) == 1
    assert [(row["level"], row["batch"]) for row in rows["decode_step"]] == [(0, 1), (0, 2), (8, 1), (8, 2)]
    assert [bool(row["host_bytes"]) for row in rows["decode_step"]] == [False, False, True, True]
    assert [row["level_after"] for row in rows["growth"]] == [1, 2]
    assert all(row["total_ms"] > 0 and len(row["series_ms"]) > 90 for row in rows["growth"])

    assert run("vamp", *arguments) == (0, rows)
    events = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    again = events[-(len(rows["replay"]) + len(rows["decode_step"]) + len(rows["growth"]) + 1) :]
    assert {event["event"] for event in again} == {"kept", "end"}


def test_what_there_is_no_time_for_is_named_and_left_out(run: Any, out: Path) -> None:
    code, rows = run("upper", "--sessions", "5", "--budget-s", "5")
    assert code == 3 and rows == {}
    last = json.loads((out / "progress.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "end" and last["left_out"] == ["upper_bound demo 5 vllm 3.0"]
