"""`vamp serve` as a user runs it: a process, a port, its metrics page and what reads that, a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dashboard import asked_for
from support.scenarios import EAGER, prompts
from support.server import START_S, VAMP, Page, Server, environment, scrape, serving

from vamp_integration import metrics

pytestmark = pytest.mark.vllm

STOP_S = 90
MIB = 1 << 20


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vLLM cache of this file's own: empty at first, since a filled one hides missing packages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(tiny_model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all of them, in the order that they are in; the last one stops it."""
    settings = [
        "--max-offload-ratio",
        "0.5",
        "--vamp-policy",
        EAGER,
        "--additional-config.vamp.restore",
        "false",
    ]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "2", "--kv-cache-memory-bytes", str(3 * MIB)]
    with serving(tiny_model, cache, tmp_path_factory.mktemp("server"), *settings, *limits) as server:
        yield server


def settled(server: Server, before: Page) -> Page:
    """The page once its figures are of one moment: they come at most ten times a second."""
    for _ in range(50):
        page = scrape(server)
        given = before["vamp:pages", "expert"] - page["vamp:pages", "expert"]
        if page["vamp:moved_bytes_total", "experts_to_kv"] == given * page["vamp:page_bytes", ""]:
            break
        time.sleep(0.2)
    return page


def names(metric: metrics.Metric) -> set[tuple[str, str]]:
    return {(f"vamp:{metric.name}{'_total' if metric.counter else ''}", value) for value in metric.values}


def test_the_page_follows_the_moves(server: Server) -> None:
    unused = scrape(server)
    assert {key for metric in metrics.METRICS for key in names(metric)} <= unused.keys()
    tokens = {"max_tokens": 24, "ignore_eos": True, "detokenize": False}
    server.complete(prompt=[5, 6, 7], **tokens)
    before = scrape(server)
    assert before["vamp:level", ""] == 0 and before["vamp:moves_total", "offload"] == 0
    for prompt in prompts(5, 9, 600):
        server.complete(prompt=prompt, **tokens)
    after = settled(server, before)

    level = after["vamp:level", ""]
    assert 0 < level <= after["vamp:level_max", ""] and after["vamp:moves_total", "offload"] > 0
    assert after["vamp:decisions_total", "expand"] > 0
    given = before["vamp:pages", "expert"] - after["vamp:pages", "expert"]
    assert given > 0 and given % level == 0
    in_hbm = [owner for owner in metrics.OWNERS if owner != "home"]
    assert sum(after["vamp:pages", o] - before["vamp:pages", o] for o in in_hbm) == 0
    assert after["vamp:moved_bytes_total", "experts_to_kv"] == given * after["vamp:page_bytes", ""]
    blocks = [
        sum(page["vamp:kv_blocks", s] for s in ("pool", "reserve", "withdrawn")) for page in (before, after)
    ]
    assert blocks[0] < blocks[1] <= after["vamp:kv_blocks_max", ""]
    assert after["vamp:experts_offloaded", ""] <= after["vamp:experts", ""] / 2
    assert after["vamp:moe_host_read_bytes_total", ""] > 0
    assert after["vamp:realized_cost_seconds_total", "offload"] > 0
    assert after["vllm:prompt_tokens_total", ""] == 9 * 600 + 3


def test_status_reads_the_page(server: Server) -> None:
    done = subprocess.run([VAMP, "status", server.url, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    figures, page = json.loads(done.stdout), scrape(server)
    assert figures["vamp"]["level"] == page["vamp:level", ""] > 0
    assert figures["vamp"]["decisions"]["expand"] == page["vamp:decisions_total", "expand"]
    assert 0 <= figures["vllm"]["prefix_hit_rate"] < 1 and figures["vllm"]["ttft_mean_s"] > 0


def test_the_page_has_everything_the_dashboard_asks_for(server: Server) -> None:
    families = text_string_to_metric_families(server.get("/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples]
    assert asked_for() <= {sample.name for sample in samples}
    assert all({"model_name", "engine"} <= s.labels.keys() for s in samples if s.name in asked_for())


def test_what_travels_does_not_show_up_in_vllms_metrics(server: Server) -> None:
    text = server.get("/metrics")[1].decode()
    assert "vllm:num_requests_running" in text
    assert not [line for line in text.splitlines() if line.startswith("vllm:") and "vamp:" in line]
    assert "KV fetch" not in server.log.read_text()


def test_serves_token_prompts_and_stops_on_sigterm(server: Server) -> None:
    prompt = [(7 * i) % 2000 + 2 for i in range(600)]
    body = {
        "prompt": prompt,
        "max_tokens": 8,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    first, second = server.complete(**body), server.complete(**body)
    assert first["usage"] == {
        **first["usage"],
        "prompt_tokens": 600,
        "completion_tokens": 8,
        "total_tokens": 608,
    }
    assert len(first["choices"][0]["token_ids"]) == 8
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]

    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=STOP_S) == 0, server.log.read_text()[-4000:]


def test_a_refused_option_is_one_line_and_nothing_is_written(
    tiny_model: Path, cache: Path, tmp_path: Path
) -> None:
    before = listing(tiny_model)
    done = subprocess.run(
        [VAMP, "serve", tiny_model, "--skip-tokenizer-init", "--pipeline-parallel-size", "2"],
        cwd=tmp_path,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("vamp: error: --pipeline-parallel-size: 2 does not work with VAMP")
    assert done.stderr.count("\n") == 1
    assert listing(tmp_path) == [] and listing(tiny_model) == before


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))
