"""Routing: pairs (token, choice) by expert, and an unpadded table of tiles of at most ``block_m`` pairs.

The order is stable: by expert, then by pair. Up to ``ONE_LAUNCH_PAIRS`` pairs, one program per expert finds
its place by looking at all ids, and the last one to count writes the tiles. Beyond, blocks rank their own
ids, a second launch adds up the blocks, and a third puts every pair into its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import power_of_two
from vamp_kernels.workspace import Workspace

ONE_LAUNCH_PAIRS = 1280
BLOCK_PAIRS = 256


@triton.jit
def _write_tiles(
    tiles,
    tile_count,
    slot_table,
    counts,
    experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """The tile table from the pairs of every expert, one program writing it all."""
    bins = tl.arange(0, BINS)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.cumsum(needed, 0) - needed
    first_row = tl.cumsum(counts, 0) - counts
    slot = bins
    if HAS_SLOTS:
        slot = tl.load(slot_table + bins, mask=bins < experts, other=0).to(tl.int32)
    for i in range(0, tl.max(needed, 0)):
        at = tiles + first_tile + i
        row = first_row + i * BLOCK_M
        tl.store(at, slot, mask=i < needed)
        tl.store(at + max_tiles, bins, mask=i < needed)
        tl.store(at + 2 * max_tiles, row, mask=i < needed)
        tl.store(at + 3 * max_tiles, tl.minimum(row + BLOCK_M, first_row + counts), mask=i < needed)
    tl.store(tile_count, tl.sum(needed, 0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _route_by_expert_kernel(
    ids,
    slot_table,
    pairs,
    tiles,
    tile_count,
    hits,
    expert_counts,
    arrivals,
    num_pairs,
    experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_HITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    lower = tl.zeros([CHUNK], tl.int32)
    mine = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        chunk = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
        lower += ((chunk >= 0) & (chunk < expert)).to(tl.int32)
        mine += (chunk == expert).to(tl.int32)
    count = tl.sum(mine, 0)
    tl.store(expert_counts + expert, count)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
    if count > 0:
        if HAS_HITS:
            tl.store(hits + expert, tl.load(hits + expert) + count)
        row = tl.sum(lower, 0)
        for start in range(0, num_pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            chunk = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
            match = (chunk == expert).to(tl.int32)
            tl.store(pairs + row + tl.cumsum(match, 0) - 1, at, mask=match > 0)
            row += tl.sum(match, 0)
    if arrived == experts - 1:  # all counts are there
        tl.store(arrivals, 0)
        bins = tl.arange(0, BINS)
        counts = tl.load(expert_counts + bins, mask=bins < experts, other=0, volatile=True)
        _write_tiles(tiles, tile_count, slot_table, counts, experts, max_tiles, BLOCK_M, BINS, HAS_SLOTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _rank_kernel(
    ids,
    ranks,  # [pairs], how many earlier pairs of the block have the same expert
    block_counts,  # [blocks, BINS]
    num_pairs,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    local = tl.arange(0, BLOCK)
    at = block * BLOCK + local
    mine = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(mine, 0), BINS, mask=mine >= 0)
    tl.store(block_counts + block * BINS + tl.arange(0, BINS), counts)
    same = tl.zeros([BLOCK, STEP], tl.int32)
    for start in tl.static_range(0, BLOCK, STEP):
        before = start + tl.arange(0, STEP)
        other = block * BLOCK + before
        theirs = tl.load(ids + other, mask=other < num_pairs, other=-1).to(tl.int32)
        same += ((mine[:, None] == theirs[None, :]) & (before[None, :] < local[:, None])).to(tl.int32)
    tl.store(ranks + at, tl.sum(same, 1), mask=at < num_pairs)


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(
    block_counts,  # becomes the pairs of every expert in earlier blocks
    expert_counts,
    num_blocks,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    for start in range(0, num_blocks, ROWS):
        row = start + tl.arange(0, ROWS)
        at = block_counts + row[:, None] * BINS + column[None, :]
        counts = tl.load(at, mask=row[:, None] < num_blocks, other=0)
        earlier = tl.cumsum(counts, 0) - counts + total[None, :]
        tl.store(at, earlier, mask=row[:, None] < num_blocks)
        total += tl.sum(counts, 0)
    tl.store(expert_counts + column, total)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _scatter_kernel(
    ids,
    slot_table,
    ranks,
    earlier,
    expert_counts,
    pairs,
    tiles,
    tile_count,
    hits,
    num_pairs,
    experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_HITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(expert_counts + bins)
    if block == tl.num_programs(0) - 1:  # one program more than there are blocks of pairs
        _write_tiles(tiles, tile_count, slot_table, counts, experts, max_tiles, BLOCK_M, BINS, HAS_SLOTS)
        if HAS_HITS:
            hit = bins < experts
            tl.store(hits + bins, tl.load(hits + bins, mask=hit, other=0) + counts, mask=hit)
    else:
        first_row = tl.cumsum(counts, 0) - counts
        at = block * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(ids + at, mask=at < num_pairs, other=-1).to(tl.int32)
        rank = tl.load(ranks + at, mask=mine >= 0, other=0)
        rank += tl.load(earlier + block * BINS + mine, mask=mine >= 0, other=0)
        row = tl.gather(first_row, tl.maximum(mine, 0), 0) + rank
        tl.store(pairs + row, at, mask=mine >= 0)


@dataclass(frozen=True)
class Routing:
    """Pairs by expert and the tiles over them.

    Attributes:
        pairs: ``[M * K]`` int32, the pairs ``token * K + choice`` by expert; padding pairs are left out, so
            the end of it is undefined.
        tiles: ``[4, T]`` int32: slot, expert, first row and end row of each tile, rows indexing ``pairs``.
        tile_count: ``[1]`` int32, how many tiles there are; the rest of ``tiles`` is undefined.
        block_m: most rows of a tile.
    """

    pairs: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    block_m: int


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """The most tiles that ``pairs`` pairs can need, however they are routed."""
    return (pairs + min(pairs, experts) * (block_m - 1)) // block_m


def route(
    topk_ids: torch.Tensor,
    experts: int,
    block_m: int,
    workspace: Workspace,
    slot_table: torch.Tensor | None = None,
    hits: torch.Tensor | None = None,
    dependent_launch: bool = False,
) -> Routing:
    """Group ``topk_ids`` (``[M, K]``, int32 or int64, contiguous, -1 is padding) by expert; no host sync.

    Args:
        experts: number of experts, at most 1024.
        slot_table: ``[E]``, int32 or int64, the slot to put into the tiles; None means the expert's id.
        hits: ``[E]``, int32 or int64; the number of pairs of each expert is added to it.
    """
    num_pairs = topk_ids.numel()
    bins, limit = power_of_two(experts), max_tiles(num_pairs, experts, block_m)
    pairs = workspace.take("pairs", (num_pairs,), torch.int32)
    tiles = workspace.take("tiles", (4, limit), torch.int32)
    tile_count = workspace.take("tile_count", (1,), torch.int32)
    expert_counts = workspace.take("expert_counts", (bins,), torch.int32)
    flags = {
        "BLOCK_M": block_m,
        "BINS": bins,
        "HAS_SLOTS": slot_table is not None,
        "HAS_HITS": hits is not None,
        "PDL": dependent_launch,
        "launch_pdl": dependent_launch,
    }
    if num_pairs <= ONE_LAUNCH_PAIRS:
        chunk = min(max(power_of_two(num_pairs), 128), 2048)
        _route_by_expert_kernel[(experts,)](
            topk_ids,
            slot_table,
            pairs,
            tiles,
            tile_count,
            hits,
            expert_counts,
            workspace.counter("arrivals"),
            num_pairs,
            experts,
            limit,
            CHUNK=chunk,
            **flags,
        )
        return Routing(pairs, tiles, tile_count, block_m)
    blocks = triton.cdiv(num_pairs, BLOCK_PAIRS)
    ranks = workspace.take("ranks", (num_pairs,), torch.int32)
    block_counts = workspace.take("block_counts", (blocks, bins), torch.int32)
    pdl = {"PDL": dependent_launch, "launch_pdl": dependent_launch}
    _rank_kernel[(blocks,)](
        topk_ids, ranks, block_counts, num_pairs, BLOCK=BLOCK_PAIRS, STEP=32, BINS=bins, num_warps=8, **pdl
    )
    width = min(bins, 8)
    _scan_kernel[(bins // width,)](
        block_counts, expert_counts, blocks, ROWS=256, WIDTH=width, BINS=bins, num_warps=4, **pdl
    )
    _scatter_kernel[(blocks + 1,)](
        topk_ids,
        slot_table,
        ranks,
        block_counts,
        expert_counts,
        pairs,
        tiles,
        tile_count,
        hits,
        num_pairs,
        experts,
        limit,
        BLOCK=BLOCK_PAIRS,
        num_warps=4,
        **flags,
    )
    return Routing(pairs, tiles, tile_count, block_m)


def route_torch(
    topk_ids: torch.Tensor, experts: int, block_m: int, slot_table: torch.Tensor | None = None
) -> tuple[list[int], list[tuple[int, int, int, int]], list[int]]:
    """The same on the host: pairs by expert, tiles as (slot, expert, first row, end row), hits per expert."""
    flat = topk_ids.flatten().tolist()
    pairs: list[int] = []
    tiles, hits = [], []
    for expert in range(experts):
        mine = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        slot = expert if slot_table is None else int(slot_table[expert])
        end = len(pairs) + len(mine)
        tiles += [(slot, expert, row, min(row + block_m, end)) for row in range(len(pairs), end, block_m)]
        pairs += mine
        hits.append(len(mine))
    return pairs, tiles, hits
