"""Reading traces: three formats, and one clear line for every way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.replay_runs import row, write_rows

from vamp_integration.replay.load import load_trace
from vamp_integration.replay.trace import TraceError

STEP = {"action": "ls", "observation": "o" * 400, "response": "r" * 40, "execution_time": 0.5}
DEMO = Path(__file__).parents[2] / "bench" / "traces" / "miniswe_demo.jsonl"


def test_session_rows_may_be_interleaved(tmp_path: Path) -> None:
    rows = [row("a", 0), row("b", 0, 130), row("a", 1, 300), row("b", 1, 190)]
    trace = load_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert [s.session_id for s in trace.sessions] == ["a", "b"]
    assert [t.input_length for t in trace.sessions[0].turns] == [200, 300]
    assert [t.delay_s for t in trace.sessions[0].turns] == [0.0, 1.5]
    assert trace.block_tokens == 64
    assert trace.max_tokens == 307


def test_timestamps_stand_in_for_missing_delays(tmp_path: Path) -> None:
    rows = [row("a", 0, timestamp=1000), row("a", 1, 300, delay=..., timestamp=3500)]
    trace = load_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert trace.sessions[0].turns[1].delay_s == 2.5
    assert "start to start" in trace.notes[0]


def test_zst_and_plain_read_the_same(tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "t.jsonl", [row(), row(turn=1)])
    packed = tmp_path / "t.jsonl.zst"
    packed.write_bytes(zstandard.compress(plain.read_bytes()))
    assert load_trace(packed) == load_trace(plain)


def mooncake(stamp: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": stamp, "input_length": 512 * len(ids) - 12, "output_length": 9, "hash_ids": ids}


def test_mooncake_rows_chain_by_shared_leading_ids(tmp_path: Path) -> None:
    rows = [
        mooncake(0, [0, 1, 2, 3]),
        mooncake(100, [0, 9, 8]),
        mooncake(2000, [0, 1, 2, 4, 5]),
        mooncake(3000, [0, 1, 2, 6]),
        mooncake(5000, [0, 1, 2, 4, 7, 10]),
    ]
    trace = load_trace(write_rows(tmp_path / "m.jsonl", rows))
    assert [len(s.turns) for s in trace.sessions] == [3, 1, 1]
    assert [t.delay_s for t in trace.sessions[0].turns] == [0.0, 2.0, 3.0]
    assert trace.shared_ids and trace.block_tokens == 512


def test_traj_prompts_grow_by_response_and_observation(tmp_path: Path) -> None:
    history = [{"role": "system", "content": "s" * 800}, {"role": "assistant", "content": "x"}]
    path = tmp_path / "run.traj"
    path.write_text(json.dumps({"trajectory": [STEP, STEP, STEP], "history": history, "info": {}}, indent=1))
    (session,) = load_trace(path).sessions
    assert [t.input_length for t in session.turns] == [202, 312, 423]
    assert [t.output_length for t in session.turns] == [10, 10, 10]
    assert [t.delay_s for t in session.turns] == [0.0, 0.5, 0.5]
    for before, after in zip(session.turns, session.turns[1:], strict=False):
        assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids


def test_traj_takes_recorded_queries_as_they_are(tmp_path: Path) -> None:
    """A rewritten history shows as different ids from the rewritten place on."""
    head = {"role": "system", "content": [{"type": "text", "text": "s" * 1000}]}
    steps = [STEP | {"query": [head, {"role": "user", "content": c * 1000}]} for c in "ab"]
    path = tmp_path / "run.traj"
    path.write_text(json.dumps({"trajectory": steps}))
    first, second = load_trace(path).sessions[0].turns
    shared = [a == b for a, b in zip(first.hash_ids, second.hash_ids, strict=True)]
    assert shared == [True] * 15 + [False] * (len(shared) - 15)


def test_demo_trace_keeps_what_its_readme_says() -> None:
    trace = load_trace(DEMO)
    assert (len(trace.sessions), trace.num_turns, trace.block_tokens) == (8, 64, 64)
    assert trace.max_tokens < 4096


BAD_ROWS = [
    ([row(input_length=...)], "t.jsonl:1: field 'input_length': missing"),
    ([row(), row(turn=1, output_length=-3)], "t.jsonl:2: field 'output_length': is -3; give a whole number"),
    ([row(input_length=12.5)], "t.jsonl:1: field 'input_length': is 12.5; give a whole number of at least 1"),
    ([row(input_length=True)], "t.jsonl:1: field 'input_length': is true"),
    ([row(input_length="12")], "field 'input_length': is \"12\""),
    ([row(), row(turn=2)], "t.jsonl:2: field 'turn': is 2 after 0; give 1"),
    ([row(), row(turn=0)], "t.jsonl:2: field 'turn': is 0 after 0; give 1"),
    ([row(hash_ids=...)], "field 'hash_ids': missing"),
    ([row(hash_ids=[1, -2])], "field 'hash_ids': not a list of whole numbers"),
    ([row(hash_ids=[1] * 90)], "field 'hash_ids': 90 ids for 200 tokens fit no common block size"),
    ([row(session=3)], "field 'session_id': missing or not text"),
    ([row(), row(turn=1, delay=-1)], "t.jsonl:2: field 'delay': is -1; give milliseconds of at least 0"),
    ([row(timestamp=9), row(turn=1, delay=..., timestamp=3)], "field 'timestamp': is 3 after 9"),
    ([{"timestamp": 0, "hash_ids": [1]}], "t.jsonl:1: field 'input_length': missing"),
    ([{"prompt": "hello"}], "t.jsonl: unknown format"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS, ids=[m.split("field ")[-1][:32] for _, m in BAD_ROWS])
def test_a_bad_row_gives_one_line(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        load_trace(write_rows(tmp_path / "t.jsonl", rows))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


BAD_FILES = [
    ("t.jsonl", b"", "the file is empty"),
    ("t.jsonl", b"\n  \n", "the file is empty"),
    ("t.jsonl", json.dumps(row()).encode() + b"\n{broken\n", "t.jsonl:2: broken JSON"),
    ("t.jsonl", json.dumps(row()).encode() + b"\n[1]\n", "t.jsonl:2: a JSON list"),
    ("t.jsonl", b'{"turn": 1}\n\xff\xfe', "t.jsonl:2: not UTF-8"),
    ("t.jsonl.zst", b"not compressed", "not a zstd file"),
    ("t.traj", b"{\n 'a'", "t.traj:2: broken JSON"),
    ("t.traj", b'{"history": []}', "field 'trajectory': missing"),
    ("t.traj", b'{"trajectory": []}', "field 'trajectory': missing, empty"),
    (
        "t.traj",
        json.dumps({"trajectory": [STEP, {"action": "a"}]}).encode(),
        "field 'trajectory[1].observation'",
    ),
    (
        "t.traj",
        json.dumps({"trajectory": [STEP | {"execution_time": -1}]}).encode(),
        "execution_time': is -1",
    ),
    ("t.traj", b'[{"trajectory": 1}]', "field 'trajectory': missing"),
]


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES)
def test_a_bad_file_gives_one_line(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read"):
        load_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="unknown format 'csv'; give one of session, mooncake, traj"):
        load_trace(write_rows(tmp_path / "t.jsonl", [row()]), "csv")
