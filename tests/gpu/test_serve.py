"""`vamp serve` on a GPU, asked by OpenAI's client while memory moves."""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.scenarios import EAGER, prompts
from support.server import Server, scrape, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

OPTIONS = {
    "--max-offload-ratio": "0.5",
    "--vamp-policy": EAGER,
    "--max-model-len": "2048",
    "--max-num-seqs": "8",
    "--max-num-batched-tokens": "1024",
    "--kv-cache-memory-bytes": str(64 << 20),
    "--gpu-memory-utilization": "0.1",
    "--gdn-prefill-backend": "triton",
}
LULL_S = 60.0


def test_openais_client_is_answered_while_it_grows_and_restores(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions of more tokens than the pool holds, eight at a time; then their prefixes are dropped, and
    short prompts are asked until the level falls."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for the reset
    flat = [text for option in OPTIONS.items() for text in option]
    with serving(model, tmp_path / "cache", tmp_path, *flat) as server:
        ask_while_it_moves(server, prompts(5, 60, 1200))


def ask_while_it_moves(server: Server, sessions: list[list[int]]) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")

    def ask(prompt: list[int]) -> Any:
        own = {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
        return client.completions.create(
            model=server.model, prompt=prompt, max_tokens=24, temperature=0, extra_body=own
        )

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(ask, sessions))
    assert all(answer.usage.completion_tokens == 24 for answer in answers)
    page = scrape(server)
    grown = page["vamp:level", ""]
    assert grown > 0 and page["vamp:moves_total", "offload"] > 0

    assert server.post("/reset_prefix_cache") == 200
    until = time.monotonic() + LULL_S
    while scrape(server)["vamp:level", ""] >= grown and time.monotonic() < until:
        assert ask(sessions[0][:20]).usage.completion_tokens == 24
        time.sleep(0.1)
    page = scrape(server)
    assert page["vamp:level", ""] < grown, server.log.read_text()[-4000:]
    assert page["vamp:moves_failed_total", ""] == 0
