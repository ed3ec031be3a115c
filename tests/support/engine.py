"""Runs a scenario on the real CPU engine in a process of its own, since vLLM's state is per process.

Importing vLLM takes longer than most scenarios, so the processes are forked from one that has imported it.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import scenarios

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
TIMEOUT_S = 300.0

# The works whose tokens several tests compare with; one unmodified engine computes them all.
WORKS: dict[str, dict[str, int]] = {
    "moves": {"seed": 1, "count": 16, "length": 300, "max_tokens": 28},
    "corruption": {"seed": 2, "count": 1, "length": 600, "max_tokens": 32},
    "order": {"seed": 4, "count": 6, "length": 300, "max_tokens": 24},
}


def run_scenario(name: str, model: Path, **spec: Any) -> dict[str, Any]:
    """What ``support.scenarios.<name>(model, **spec)`` returns, from a process of its own."""
    # CUDA does not survive a fork, and importing some of vLLM's GPU modules starts it.
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    if not torch.cuda.is_available():
        context.set_forkserver_preload(["support.preload"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        process = context.Process(target=scenarios.child, args=(name, str(model), spec, sender, log.name))
        with mock.patch.dict(os.environ, ENVIRONMENT):
            process.start()
        sender.close()
        try:
            result: dict[str, Any] = receiver.recv() if receiver.poll(TIMEOUT_S) else {}
        except EOFError:
            result = {}
            process.join(10.0)
        # With the result here, the engine's orderly end would only cost time.
        process.kill()
        process.join()
        assert result, f"{name}: exit code {process.exitcode}\n{log.read()[-8000:]}"
    return result
