"""Every family of models on the GPU engine, bf16 and fp8 in blocks: moves change no token, wrong bytes would.

Each in a process of its own, which `pytest -n` runs beside others, and without graphs, which test_engine.py
has. Against vLLM alone, or for VAMP's own kernel against itself without moves.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.engine import run_scenario
from support.families import check_proof, write_families

from vamp_integration.tiny_families import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

# An expert is 1.5 MiB in bf16 and half of that in fp8: four, or eight, are the three granules of a group.
SIZES = {"experts": 32, "top_k": 4, "hidden": 1024, "intermediate": 256}
ENGINE = {
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "kv_mib": 128,
    "language_model_only": True,
    "gdn_prefill_backend": "triton",
}
WORK = {"seed": 21, "count": 4, "length": 100, "max_tokens": 160}

QUANTIZED = {
    "qwen3-moe-fp8": ("qwen3-moe", "fp8"),
    "qwen3-next-fp8": ("qwen3-next", "fp8"),
    "deepseek-v3-fp8": ("deepseek-v3", "fp8"),
    "glm4-moe-compressed": ("glm4-moe", "compressed-tensors"),
}
VLLM_KERNEL = {**{name: (name, "") for name in FAMILIES}, **QUANTIZED}
OWN_KERNEL = {"mixtral": ("mixtral", ""), "deepseek-v3": ("deepseek-v3", ""), **QUANTIZED}


@pytest.fixture(scope="module", autouse=True)
def one_layout() -> Iterator[None]:
    """The unmodified engine lays its KV cache out as VAMP's does, so that both run the same kernels."""
    with mock.patch.dict(os.environ, {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}):
        yield


@pytest.mark.parametrize("name", VLLM_KERNEL)
def test_moves_leave_every_token(name: str, tmp_path: Path) -> None:
    root = write_families(tmp_path, {name: VLLM_KERNEL[name]}, SIZES)
    check_proof(run_scenario("families", root, work=WORK, vamp={"moe_kernel": "vllm"}, **ENGINE)[name])


@pytest.mark.parametrize("name", OWN_KERNEL)
def test_moves_leave_every_token_of_our_kernel(name: str, tmp_path: Path) -> None:
    root = write_families(tmp_path, {name: OWN_KERNEL[name]}, SIZES)
    check_proof(run_scenario("families", root, work=WORK, vamp={"moe_kernel": "vamp"}, **ENGINE)[name])
