"""Homes in another GPU's HBM: moves over them, and an engine whose tokens they leave as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.boundary_suite import BoundarySuite, FaultSuite, PeerSuite
from support.engine import WORKS, run_scenario
from support.hashed_moves import move_and_compare
from support.rigs import PEER_SHAPES, build_rig

from vamp_runtime.memory.cuda import CudaDriver
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.peer import Peer, find_peers

JOINED = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not JOINED, reason="needs two GPUs, the second in reach of the first"),
]

CUDA = torch.device("cuda", 0)
GIB = 1 << 30


@pytest.fixture
def driver() -> Iterator[CudaDriver]:
    driver = CudaDriver(0, peer=1)
    yield driver
    torch.cuda.synchronize()
    driver.close()


class TestPeerBoundary(PeerSuite, BoundarySuite):
    cycles = 50


class TestPeerFaults(PeerSuite, FaultSuite):
    step = 17


def test_the_second_gpu_is_found_and_keeps_its_memory() -> None:
    free = torch.cuda.mem_get_info(1)[0]
    first, *_ = find_peers(0, GIB)
    assert first == Peer(1, GIB)
    assert find_peers(0, 1 << 38)[0].room < free, "more than there is was promised"
    assert abs(free - torch.cuda.mem_get_info(1)[0]) < 64 << 20


@pytest.mark.parametrize("shape", PEER_SHAPES, ids=lambda shape: shape.name)
def test_a_thousand_moves_leave_every_expert(driver: CudaDriver, shape: Any) -> None:
    rig = build_rig(driver, shape)
    move_and_compare(rig, CUDA, moves=1000)
    assert driver.usage().tier_bytes[Tier.PEER] == rig.geometry.peer_home_bytes


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("kernel", ["vamp", "vllm"])
def test_moves_over_homes_on_both_sides_leave_every_token(model: Path, kernel: str) -> None:
    """Half of the groups may leave, half of those to the peer; each kernel is held against itself at rest.

    A level moves in every step, from none to all and back, and every expert is hashed after each prompt.
    """
    options = {
        "kv_mib": 96 + 96,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "max_num_batched_tokens": 1024,
        "gdn_prefill_backend": "triton",
        **WORKS["moves"],
    }
    level_gib = 4 * 6 / 1024  # four layers, a group of four experts in each
    vamp = {"moe_kernel": kernel, "peer_hbm_gib": 4 * level_gib}
    still = run_scenario("exercised", model, vamp={**vamp, "exercise_steps": 0}, **options)
    moved = run_scenario("exercised", model, vamp=vamp, **options)
    assert (moved["peer_homes"], moved["host_homes"]) == (4, 4)
    assert moved["tier_bytes"]["peer"] == moved["tier_bytes"]["host"] == 4 * level_gib * GIB
    assert still["moves"] == 0 and moved["moves"] >= 100 and moved["failed_moves"] == 0
    assert moved["results"] == still["results"]
