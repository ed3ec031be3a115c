"""`vamp serve` as a user runs it: a process, a port, a signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

VAMP = Path(sys.executable).with_name("vamp")
START_S, STOP_S = 300, 90


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: Path

    def get(self, path: str) -> tuple[int, bytes]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return answer.status, answer.read()

    def complete(self, **body: Any) -> dict[str, Any]:
        data = json.dumps({"model": self.model, "temperature": 0, **body}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.load(answer))

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        pytest.fail(f"no answer in {START_S} s\n{self.log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vLLM cache of this file's own: empty at first, since a filled one hides missing packages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def server(tiny_model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    options = [
        "--skip-tokenizer-init",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-offload-ratio",
        "0.5",
    ]
    limits = ["--max-model-len", "2048", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(32 << 20)]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [VAMP, "serve", tiny_model, *options, *limits],
            cwd=folder,
            env=environment(cache),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(process, f"http://127.0.0.1:{port}", str(tiny_model), log)
        server.wait_until_up()
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(cache: Path) -> dict[str, str]:
    """This process's environment with that cache, and nothing from the network."""
    own = {"VLLM_CACHE_ROOT": str(cache), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **own}


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
