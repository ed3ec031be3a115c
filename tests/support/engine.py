"""Runs a scenario on the real CPU engine in a process of its own, since vLLM's state is per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


# The works whose tokens several tests compare with; one unmodified engine computes them all.
WORKS: dict[str, dict[str, int]] = {
    "moves": {"seed": 1, "count": 4, "length": 500, "max_tokens": 110},
    "corruption": {"seed": 2, "count": 1, "length": 600, "max_tokens": 32},
    "order": {"seed": 4, "count": 1, "length": 500, "max_tokens": 64},
}


def run_scenario(name: str, model: Path, **spec: Any) -> dict[str, Any]:
    """What ``support.scenarios.<name>(model, **spec)`` returns, from a process of its own."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "support.scenarios", name, str(model), json.dumps(spec)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (
        f"{name}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
