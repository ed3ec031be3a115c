"""`vamp serve` as a user runs it: a process, a port, a signal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import START_S, VAMP, Server, environment, serving

pytestmark = pytest.mark.vllm

STOP_S = 90


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vLLM cache of this file's own: empty at first, since a filled one hides missing packages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(tiny_model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ["--max-model-len", "2048", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20)]
    folder = tmp_path_factory.mktemp("server")
    with serving(tiny_model, cache, folder, "--max-offload-ratio", "0.5", *limits) as server:
        yield server


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

    status, metrics = server.get("/metrics")
    assert status == 200 and b"vllm:prompt_tokens_total" in metrics

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
