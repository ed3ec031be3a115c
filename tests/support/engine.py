"""Runs a scenario on a real engine in a process of its own, since vLLM's state is per process.

Importing vLLM takes longer than most scenarios, so on a CPU the processes are forked from one that has it.
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
    # Kernels tuned by time once and for all, so that engines compared with each other run the same ones.
    "TRITON_CACHE_AUTOTUNING": "1",
}
TIMEOUT_S = 300.0
# Compiling kernels and capturing graphs for the first time takes minutes.
GPU_TIMEOUT_S = 600.0

# The works whose tokens several tests compare with; one unmodified engine computes them all.
WORKS: dict[str, dict[str, int]] = {
    "moves": {"seed": 1, "count": 16, "length": 300, "max_tokens": 28},
    "corruption": {"seed": 2, "count": 1, "length": 600, "max_tokens": 32},
    "order": {"seed": 4, "count": 6, "length": 300, "max_tokens": 24},
}


def _path() -> dict[str, str]:
    """Where the fork server finds ``support``: it does not take over ``sys.path``, and passes over in silence
    what it cannot import."""
    tests = str(Path(__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH", ""))))}


def run_scenario(name: str, model: Path, **spec: Any) -> dict[str, Any]:
    """What ``support.scenarios.<name>(model, **spec)`` returns, from a process of its own."""
    # CUDA does not survive a fork, and importing some of vLLM's GPU modules starts it.
    on_gpu = torch.cuda.is_available()
    context = multiprocessing.get_context("spawn" if on_gpu else "forkserver")
    if not on_gpu:
        context.set_forkserver_preload(["support.preload"])
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        process = context.Process(target=scenarios.child, args=(name, str(model), spec, sender, log.name))
        with mock.patch.dict(os.environ, ENVIRONMENT | _path()):
            process.start()
        sender.close()
        try:
            arrived = receiver.poll(GPU_TIMEOUT_S if on_gpu else TIMEOUT_S)
            result: dict[str, Any] = receiver.recv() if arrived else {}
        except EOFError:
            result = {}
            process.join(10.0)
        # With the result here, the engine's orderly end would only cost time.
        process.kill()
        process.join()
        assert result, f"{name}: exit code {process.exitcode}\n{log.read()[-8000:]}"
    return result
