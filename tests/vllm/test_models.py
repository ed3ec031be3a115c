"""Every family of models on the CPU engine, with bf16 weights: moves change no token, wrong bytes would."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from support.engine import run_scenario
from support.families import check_proof, write_families

from vamp_integration.tiny_families import FAMILIES

pytestmark = pytest.mark.vllm

# An expert is 32 and 16 KiB, and a group by itself.
SIZES = {"experts": 16, "top_k": 4, "hidden": 128, "intermediate": 64}
ENGINE = {"max_model_len": 256, "kv_mib": 2, "language_model_only": True, "vamp": {"granule_kib": 16}}
WORK = {"seed": 21, "count": 2, "length": 100, "max_tokens": 28}

#: vLLM's file of this model imports its image processor too.
NEEDS_TORCHVISION = "qwen3-5-moe"
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process serves them all, one after the other."""
    names = [name for name in FAMILIES if HAS_TORCHVISION or name != NEEDS_TORCHVISION]
    root = write_families(tmp_path_factory.mktemp("families"), {name: (name, "") for name in names}, SIZES)
    return run_scenario("families", root, work=WORK, **ENGINE)


@pytest.mark.parametrize("family", FAMILIES)
def test_moves_leave_every_token(family: str, runs: dict[str, Any]) -> None:
    if family == NEEDS_TORCHVISION and not HAS_TORCHVISION:
        pytest.skip("torchvision is not installed, which vLLM's model needs")
    check_proof(runs[family])
