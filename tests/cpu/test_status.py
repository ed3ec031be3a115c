"""`vamp status` on recorded pages and on servers that are not what they should be."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vamp_integration.cli.main import main
from vamp_integration.cli.status import rows
from vamp_integration.metrics import METRICS
from vamp_integration.server_figures import exported, metrics_url, parse

OTHER = """\
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} 400.0
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:time_to_first_token_seconds_sum{engine="0"} 3.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:num_requests_running{engine="0"} 2.0
"""
VALUES = {
    ("level", ""): 3,
    ("level_max", ""): 8,
    ("experts", ""): 32,
    ("experts_offloaded", ""): 6,
    ("page_bytes", ""): 65536,
    ("pages", "expert"): 100,
    ("kv_blocks", "pool"): 90,
    ("kv_blocks", "reserve"): 10,
    ("kv_blocks_max", ""): 176,
    ("decisions", "expand"): 4,
    ("moves", "offload"): 3,
    ("predicted_cost_seconds", "expand"): 0.25,
    ("moved_bytes", "experts_to_kv"): 3 << 20,
    ("staged_bytes", ""): 5 << 30,
    ("staging_seconds", "hidden"): 0.125,
}


def page(values: dict[tuple[str, str], float] = VALUES) -> str:
    lines = []
    for metric in METRICS:
        lines.append(f"# TYPE {exported(metric)} {'counter' if metric.counter else 'gauge'}")
        for value in metric.values:
            own = f',{metric.label}="{value}"' if value else ""
            lines.append(f'{exported(metric)}{{engine="0"{own}}} {values.get((metric.name, value), 0)}')
    return "\n".join(lines) + "\n" + OTHER


@contextmanager
def answering(body: str, code: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            """Nothing on the tests' output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vamp", "status", *argv])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_the_table_says_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with answering(page()) as url:
        assert run(monkeypatch, url) == 0
    out = capsys.readouterr().out
    for text in (
        "3 of 8 (18.8 % of the experts)",
        "100 of at most 176 (pool 90, reserve 10)",
        "75.0 %",
        "750.0 ms",
        "expand 4",
        "expand 250.0 ms",
        "experts to kv 3.0 MiB",
        "offload 3; failed 0",
        "5.00 GiB copied; hidden 125.0 ms",
    ):
        assert text in out, out


def test_homes_in_a_peer_have_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not [name for name, _ in rows(parse(page())) if name == "peer reads"]
    values = VALUES | {("home_pages", "peer"): 32, ("moe_peer_read_bytes", ""): 5 << 20}
    (text,) = [value for name, value in rows(parse(page(values))) if name == "peer reads"]
    assert text == "5.0 MiB by MoE layers (estimated); 2.0 MiB of homes there"


def test_json_has_every_metric(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(page()) as url:
        assert run(monkeypatch, url, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["vamp"].keys() == {metric.name for metric in METRICS}
    assert figures["vamp"]["kv_blocks"] == {"pool": 90, "reserve": 10, "withdrawn": 0}
    assert figures["vllm"]["prefix_hit_rate"] == 0.75 and figures["vllm"]["tpot_mean_s"] is None


def test_before_the_first_step_there_is_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(page({})) as url:
        assert run(monkeypatch, url) == 0
    assert "no request yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (OTHER, 200, "has no VAMP metrics; start the server with `vamp serve`"),
        ("<html>hello</html>\n", 200, "is no page of Prometheus metrics"),
        ("", 200, "has no VAMP metrics"),
        ("gone", 404, "answers 404"),
    ],
)
def test_another_server_is_one_line_and_status_2(
    body: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(body, code) as url:
        assert run(monkeypatch, url) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("vamp: error: URL: ") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "http://", "no scheme at all"])
def test_no_server_is_one_line_and_status_2(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, url) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("vamp: error: URL: nothing answers at ") and err.count("\n") == 1


def test_addresses_may_leave_things_out() -> None:
    wanted = "http://localhost:8000/metrics"
    for url in ("localhost:8000", "http://localhost:8000/", "localhost:8000/metrics"):
        assert metrics_url(url) == wanted


def test_numbers_by_label_are_told_apart() -> None:
    vamp = parse(page()).vamp
    assert vamp["decisions"]["expand"] == 4 and vamp["decisions"]["evict"] == 0 and vamp["level"] == 3
