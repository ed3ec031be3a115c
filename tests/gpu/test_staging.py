"""Staging on a GPU: what layers read there is this step's, in streams and graphs, and no token changes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine import WORKS, run_scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]

CUDA = torch.device("cuda", 0)
# More for every expert than the tallest tile holds, so that all that is in host memory is staged.
MANY = 2000


@pytest.fixture
def rank() -> Iterator[Any]:
    from support.staged_layers import Sizes, build_rank

    from vamp_runtime.memory.cuda import CudaDriver

    driver = CudaDriver(0, compute_stream=lambda: torch.cuda.current_stream(CUDA).cuda_stream)
    yield build_rank(driver, Sizes(layers=5, experts=16, hidden=2048, intermediate=512), CUDA)
    torch.cuda.synchronize()
    driver.close()


def plain(x: Any, w13: Any, w2: Any, router: Any, ids: Any) -> torch.Tensor:
    """The layer in memory of torch, without slots and masks."""
    from vamp_kernels.fused_moe import fused_moe

    return fused_moe(x, w13, w2, router, ids)


def test_a_step_reads_what_it_copied(rank: Any) -> None:
    from support.staged_layers import check_steps

    check_steps(rank, rank.with_own_kernel(rank.staging("off")), plain, MANY)


def test_copies_are_timed_without_a_wait(rank: Any) -> None:
    staging = rank.staging("region")
    memory = rank.with_own_kernel(staging)
    assert staging.seconds.hidden == staging.seconds.exposed == 0
    assert rank.boundary.offload(6).ok
    memory.update_tables()
    arguments = rank.step(MANY)
    for _ in range(2):
        for layer in rank.layers:
            layer.slot_kernel(*arguments)
        torch.cuda.synchronize()
    assert 0 < staging.seconds.hidden + staging.seconds.exposed < 1


@pytest.mark.parametrize("tokens", [1, 4, 48, MANY])
@pytest.mark.parametrize("slow", ["copies", "layers"])
def test_neither_stream_runs_away_from_the_other(rank: Any, slow: str, tokens: int) -> None:
    """Steps queued without a wait: a read too early finds NaN, a copy too early another layer's experts."""
    staging = rank.staging("region")
    memory = rank.with_own_kernel(staging)
    assert rank.boundary.offload(6).ok
    memory.update_tables()
    driver_copy, cycles = rank.driver.copy, 2_000_000

    def copy_late(*arguments: Any) -> None:
        with torch.cuda.stream(staging._copies._stream):
            torch.cuda._sleep(cycles)
        driver_copy(*arguments)

    if slow == "copies":
        rank.driver.copy = copy_late
    arguments, found = rank.step(tokens), []
    for _ in range(6):
        rank.poison()
        for layer in rank.layers:
            if slow == "layers":
                torch.cuda._sleep(cycles)
            found.append(layer.slot_kernel(*arguments))
    wanted = [plain(arguments[0], *weights, *arguments[1:]) for weights in rank.weights] * 6
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_a_graph_follows_moves_and_modes(rank: Any) -> None:
    """Captured at level 0, replayed at others: the kernel fills staging slots itself, or with "off" none."""
    staging = rank.staging("auto")
    staging.wanted = lambda tokens: False
    memory = rank.with_own_kernel(staging)
    arguments = rank.step(MANY)

    def layers() -> list[torch.Tensor]:
        return [layer.slot_kernel(*arguments) for layer in rank.layers]

    wanted, graph = layers(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for level, mode in enumerate(["auto", "off", "auto"], start=1):
        assert rank.boundary.offload(1).ok
        memory.update_tables()
        staging.choose(mode)
        rank.poison()
        for tensor in found:
            tensor.fill_(float("nan"))
        for _ in range(3):
            graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)), mode
        assert rank.staged() == (0 if mode == "off" else level * rank.slab.geometry.group)


@pytest.mark.parametrize("kernel", ["vamp", "vllm"])
def test_staging_leaves_every_token(model: Path, kernel: str) -> None:
    """A quarter of the KV budget stages 32 experts of 1.5 MiB, twice. Prompts run without graphs."""
    work = {**WORKS["moves"], "count": 4, "length": 900}
    run = run_scenario(
        "staging_scenario.staged",
        model,
        moe_kernel=kernel,
        kv_mib=4 * 96,
        enforce_eager=False,
        max_num_batched_tokens=1024,
        gdn_prefill_backend="triton",
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
        **work,
    )
    assert run["staging_mib"] == 96
    modes = run["modes"]
    for name in ("off", "in the kernel", "large steps ahead"):
        assert modes[name]["moves"] >= 10 and modes[name]["results"] == run["still"], name
    assert modes["region"]["results"] == run["still without graphs"]
    assert modes["off"]["ahead"] == modes["in the kernel"]["ahead"] == 0
    assert work["count"] <= modes["large steps ahead"]["ahead"] < modes["large steps ahead"]["steps"]
    assert modes["region"]["ahead"] == modes["region"]["steps"] > 0
    written = {"large steps ahead", "region"} | ({"in the kernel"} if kernel == "vamp" else set())
    assert {name for name, mode in modes.items() if mode["written"]} == written
