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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vamp_integration import metrics

VAMP = Path(sys.executable).with_name("vamp")
# On a machine where the package is only on the search path there is no script.
COMMAND = (
    [str(VAMP)]
    if VAMP.exists()
    else [sys.executable, "-c", "from vamp_integration.cli.main import main; main()"]
)
START_S = 300
Page = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: Path

    def get(self, path: str) -> tuple[int, bytes]:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=60) as answer:
            return answer.status, answer.read()

    def post(self, path: str) -> int:
        request = urllib.request.Request(f"{self.url}{path}", b"")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)

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


@contextmanager
def serving(model: Path, cache: Path, folder: Path, *options: str) -> Iterator[Server]:
    """A server that is up, started in ``folder`` with vLLM's ``cache``; it is gone after the block."""
    port = free_port()
    common = ["--skip-tokenizer-init", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, "serve", str(model), *common, *options],
            cwd=folder,
            env=environment(cache),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server = Server(process, f"http://127.0.0.1:{port}", str(model), log)
        server.wait_until_up()
        yield server
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def scrape(server: Server) -> Page:
    """Values by name and VAMP's own label (empty where a metric has none)."""
    own = {metric.label for metric in metrics.METRICS} - {""}
    families = text_string_to_metric_families(server.get("/metrics")[1].decode())
    return {
        (
            sample.name,
            next((value for label, value in sample.labels.items() if label in own), ""),
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith(("vamp:", "vllm:kv_fetch", "vllm:prompt_tokens_total"))
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(cache: Path) -> dict[str, str]:
    """This process's environment with that cache, and nothing from the network."""
    own = {"VLLM_CACHE_ROOT": str(cache), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return {**os.environ, **own}
