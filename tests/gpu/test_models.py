"""Every family of models on the GPU engine, bf16 and fp8 in blocks: moves change no token, wrong bytes would.

Some in a process, which `pytest -n` runs beside others, and without graphs, which test_engine.py has. Against
vLLM alone, or for VAMP's own kernel against itself without moves.
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


def parts(checkpoints: dict[str, tuple[str, str]], size: int = 4) -> list[dict[str, tuple[str, str]]]:
    """So many at most in a process: importing vLLM takes longer than proving one of them."""
    names = list(checkpoints)
    return [{name: checkpoints[name] for name in names[at : at + size]} for at in range(0, len(names), size)]


def check_all(checkpoints: dict[str, tuple[str, str]], root: Path, kernel: str) -> None:
    write_families(root, checkpoints, SIZES)
    runs = run_scenario("families", root, work=WORK, vamp={"moe_kernel": kernel}, **ENGINE)
    wrong = {}
    for name in checkpoints:
        try:
            check_proof(runs[name])
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {why}" for name, why in wrong.items())


@pytest.mark.parametrize("some", parts(VLLM_KERNEL), ids=" ".join)
def test_moves_leave_every_token(some: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    check_all(some, tmp_path, "vllm")


@pytest.mark.parametrize("some", parts(OWN_KERNEL), ids=" ".join)
def test_moves_leave_every_token_of_our_kernel(some: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    check_all(some, tmp_path, "vamp")
