"""Routing profiles: from counts to the order of records, and the command that writes them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_integration.cli.main import main
from vamp_integration.record_order import read_order
from vamp_integration.routing_profile import coverage, read_prompts, record_order, write_profile
from vamp_runtime.errors import ConfigError


def test_the_most_used_expert_takes_the_first_record() -> None:
    assert record_order([[5, 0, 9, 5]]) == [[1, 3, 0, 2]]
    assert record_order([[0, 0, 0]]) == [[0, 1, 2]]


@given(st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=1, max_size=3))
def test_records_run_from_warm_to_cold(hits: list[list[int]]) -> None:
    for row, records in zip(hits, record_order(hits), strict=True):
        use = [row[records.index(record)] for record in range(6)]
        assert sorted(records) == list(range(6)) and use == sorted(row, reverse=True)


def test_coverage_in_numbers() -> None:
    found = coverage([[0] * 3 + [1] * 17, [1] * 20])
    assert (found.selections, found.unused_share) == (37, 3 / 40)
    assert found.cold_share == pytest.approx((0 + 3 / 20) / 2)


@pytest.mark.parametrize("hits", [[], [[1, 1], [0, 0]]])
def test_a_layer_without_tokens_is_no_profile(hits: list[list[int]]) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        coverage(hits)


def test_an_engine_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    hits = [[3, 1, 2], [0, 0, 7]]
    write_profile(path, hits, {"model": "m"})
    assert read_order(str(path), 2, 3) == record_order(hits) == [[0, 2, 1], [1, 2, 0]]
    assert json.loads(path.read_text())["model"] == "m" and json.loads(path.read_text())["hits"] == hits


def test_prompts_are_lines_or_rows(tmp_path: Path) -> None:
    text, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    text.write_text("one\n\ntwo\n")
    rows.write_text('{"prompt": "one"}\n\n{"prompt": [1, 2], "id": 7}\n')
    assert read_prompts(text) == ["one", "two"] and read_prompts(rows) == ["one", [1, 2]]


@pytest.mark.parametrize(
    "row", ["{", "[]", "{}", '{"prompt": ""}', '{"prompt": [1, "a"]}', '{"prompt": [-1]}']
)
def test_a_bad_row_is_named(tmp_path: Path, row: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row)
    with pytest.raises(ConfigError, match=f"^--prompts: {path}:2: prompt: "):
        read_prompts(path)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xff"])
def test_a_file_without_prompts_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^--prompts: {path}: "):
        read_prompts(path)


def refused(argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["vamp", "profile-routing", *argv])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("vamp: error: ")


@pytest.mark.parametrize(
    "argv", [[], ["m"], ["--prompts", "p"], ["m", "--server", "s"], ["m", "--prompts", "p", "--server", "s"]]
)
def test_it_takes_prompts_or_a_server(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(argv, monkeypatch, capsys).startswith("profile-routing: give MODEL and --prompts")


def test_settings_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("hello")
    argv = ["m", "--prompts", str(path), "--vamp-arg", "polici=paper"]
    assert refused(argv, monkeypatch, capsys).startswith("additional_config.vamp.polici: unknown")


@contextmanager
def serving(status: int, body: str) -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_running_server_is_asked_for_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "order.json"
    with serving(200, json.dumps({"results": [[[3, 1, 2], [0, 0, 7]], [[9, 9, 9]]]})) as (address, asked):
        monkeypatch.setattr(sys, "argv", ["vamp", "profile-routing", "--server", address, "-o", str(path)])
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == 0 and asked == [("/collective_rpc", {"method": "vamp_hits"})]
    assert read_order(str(path), 2, 3) == [[0, 2, 1], [1, 2, 0]]
    assert "2 layers of 3 experts, 13 selections" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body"), [(404, "{}"), (200, "no json"), (200, "{}"), (200, '{"results": []}')]
)
def test_a_server_that_does_not_tell_is_one_line(
    status: int,
    body: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "order.json"
    with serving(status, body) as (address, _):
        line = refused(["--server", address, "-o", str(path)], monkeypatch, capsys)
    assert line.startswith(f"--server: {address}: ") and "VLLM_SERVER_DEV_MODE=1" in line
    assert not path.exists()


@pytest.mark.parametrize("address", ["localhost", "http://127.0.0.1:9"])
def test_no_server_is_one_line(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["--server", address], monkeypatch, capsys).startswith(f"--server: {address}: ")
