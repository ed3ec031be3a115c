"""The GPU engine's worker over a stand-in for vLLM's: what warm-up finds, and block tables when blocks go."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpu_worker import (
    MAX_TOKENS,
    TOP_K,
    WIDTH,
    GPUEngineWorker,
    engine_config,
    kv_groups,
    small_slab,
    start,
)

from vamp_runtime.controller import StepCommand
from vamp_runtime.memory.boundary import Move, MoveKind
from vamp_runtime.memory.host import HostDriver
from vamp_runtime.memory.move import Swap

pytestmark = pytest.mark.vllm

KV_BYTES = 200_000


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(4096)
    yield driver
    driver.close()


@pytest.fixture
def rank(driver: HostDriver) -> Iterator[GPUEngineWorker]:
    rank = GPUEngineWorker(small_slab(driver), engine_config({}, KV_BYTES), kv_groups(), KV_BYTES)
    start(rank)
    yield rank
    rank._mover.close()


def sizes(rank: GPUEngineWorker) -> tuple[int, int | None]:
    """The numbers of blocks that vLLM's warm-up goes by: the runner's, and the cache configuration's."""
    return rank.model_runner.kv_cache_config.num_blocks, rank.cache_config.num_gpu_blocks


@pytest.mark.parametrize("fails", [False, True])
def test_warm_up_finds_the_blocks_of_the_pool_and_nothing_else_does(
    rank: GPUEngineWorker, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    region, seen = rank._boundary.region, []

    def warm_up(self: Any) -> str:
        seen.append(sizes(rank))
        if fails:
            raise RuntimeError("a kernel that does not compile")
        return "times"

    monkeypatch.setattr("support.gpu_worker.StandIn.compile_or_warm_up_model", warm_up)
    virtual, pool = sizes(rank)
    assert virtual == region.geometry.virtual_blocks and pool == region.claimed < region.blocks < virtual
    if fails:
        with pytest.raises(RuntimeError, match="a kernel that"):
            rank.compile_or_warm_up_model()
    else:
        assert rank.compile_or_warm_up_model() == "times"
    assert seen == [(pool, pool)]
    assert sizes(rank) == (virtual, pool)


@pytest.mark.parametrize("kv_bytes", [KV_BYTES, None], ids=["KV cache given", "KV cache from free memory"])
def test_our_kernel_is_warm_before_a_graph_can_be_captured(driver: HostDriver, kv_bytes: int | None) -> None:
    """Where the size of the KV cache is not given, vLLM captures graphs to learn what they take."""
    rank = GPUEngineWorker(small_slab(driver), engine_config({}, kv_bytes), kv_groups(), KV_BYTES)
    start(rank)
    rank.compile_or_warm_up_model()
    kernel = f"own kernel up to {MAX_TOKENS} tokens, top {TOP_K}"
    assert rank.events == ["load", kernel, "profile, with graphs captured", "warm up, capture"]
    rank._mover.close()


def step(rank: GPUEngineWorker, move: Move | None = None) -> None:
    """A step without tokens, which waits for the move that it brings."""
    command = None if move is None else StepCommand(move.claimed_blocks, move)
    rank.execute_model(SimpleNamespace(vamp=command, total_num_scheduled_tokens=0))


def fill(rank: GPUEngineWorker, blocks: int) -> list[torch.Tensor]:
    """Rows of the gathered block tables as an earlier step left them, with ids up to the last block's."""
    tables: list[torch.Tensor] = rank.model_runner.block_tables.input_block_tables
    for table in tables:
        table.copy_((blocks - 1 - torch.arange(table.numel()).view_as(table)) % blocks)
    assert max(int(table.max()) for table in tables) == blocks - 1
    return [table.clone() for table in tables]


def watch_tables(rank: GPUEngineWorker) -> list[list[torch.Tensor]]:
    """The gathered block tables as each move finds them when it is started."""
    found, begin = [], rank._mover.start

    def start_move(move: Move) -> None:
        found.append([table.clone() for table in rank.model_runner.block_tables.input_block_tables])
        begin(move)

    rank._mover.start = start_move  # type: ignore[method-assign]
    return found


def test_only_a_restore_clears_ids_of_the_tail_and_before_anything_moves(rank: GPUEngineWorker) -> None:
    rank.compile_or_warm_up_model()
    boundary, slab = rank._boundary, rank._boundary.slab
    region, found, claimed = boundary.region, watch_tables(rank), boundary.region.claimed
    before = fill(rank, claimed)
    step(rank, Move(1, MoveKind.OFFLOAD, 1, 0, claimed))
    assert slab.level == 1 and region.blocks > claimed
    grown = region.blocks
    before_swap = fill(rank, grown)
    out, (stays, *_) = slab.out(0)[0], slab.ready(0, 1)
    step(rank, Move(2, MoveKind.SWAP, 0, 1, grown, (Swap(0, leaving=stays, returning=out),)))
    assert slab.out(0) == (stays,)
    for tables, filled in zip(found, (before, before_swap), strict=True):
        assert all(map(torch.equal, tables, filled)), "a move that takes no block touched the tables"
    fill(rank, grown)
    step(rank, Move(3, MoveKind.RESTORE, 1, 1, claimed))
    assert slab.level == 0 and region.claimed == claimed
    assert len(found) == 3 and max(int(table.max()) for table in found[2]) < claimed
    boundary.check_integrity()
    slab.verify_all()


def test_a_step_without_a_move_leaves_the_tables(rank: GPUEngineWorker) -> None:
    rank.compile_or_warm_up_model()
    before = fill(rank, WIDTH)
    step(rank)
    command = StepCommand(rank._boundary.region.claimed)
    rank.execute_model(SimpleNamespace(vamp=command, total_num_scheduled_tokens=1))
    assert all(map(torch.equal, rank.model_runner.block_tables.input_block_tables, before))
