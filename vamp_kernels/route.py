"""Routing: pairs (token, choice) by expert, and an unpadded table of tiles of at most ``block_m`` pairs.

The order is stable: by expert, then by pair. Up to ``ONE_LAUNCH_PAIRS`` pairs, one program per expert finds
its place by looking at all ids, and the last one to count writes the tiles. Beyond, blocks rank their own
ids, a second launch adds up the blocks, and a third puts every pair into its place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import power_of_two
from vamp_kernels.ranges import ranged
from vamp_kernels.tiles import Routing, max_tiles, write_tiles
from vamp_kernels.workspace import Workspace

ONE_LAUNCH_PAIRS = 1280
BLOCK_PAIRS = 256


@triton.jit(do_not_specialize=["num_pairs", "staging", "max_tiles"])
def _route_by_expert_kernel(
    ids,
    slot_table,
    host_experts,
    staging_slots,
    pairs,
    tiles,
    tile_count,
    copies,
    copy_count,
    hits,
    expert_counts,
    arrivals,
    num_pairs,
    experts,
    staging,
    max_tiles,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    STAGE_ALL: tl.constexpr,
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
        if hits is not None:
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
        table = (tiles, tile_count, copies, copy_count)
        places = (slot_table, host_experts, staging_slots)
        write_tiles(table, places, counts, experts, staging, max_tiles, BLOCK_M, BINS, STAGE_ALL)


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


@triton.jit(do_not_specialize=["num_pairs", "staging", "max_tiles"])
def _scatter_kernel(
    ids,
    slot_table,
    host_experts,
    staging_slots,
    ranks,
    earlier,
    expert_counts,
    pairs,
    tiles,
    tile_count,
    copies,
    copy_count,
    hits,
    num_pairs,
    experts,
    staging,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    STAGE_ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(expert_counts + bins)
    if block == tl.num_programs(0) - 1:  # one program more than there are blocks of pairs
        table = (tiles, tile_count, copies, copy_count)
        places = (slot_table, host_experts, staging_slots)
        write_tiles(table, places, counts, experts, staging, max_tiles, BLOCK_M, BINS, STAGE_ALL)
        if hits is not None:
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


@ranged("route")
def route(
    topk_ids: torch.Tensor,
    experts: int,
    block_m: int,
    workspace: Workspace,
    slot_table: torch.Tensor | None = None,
    hits: torch.Tensor | None = None,
    dependent_launch: bool = False,
    host_experts: torch.Tensor | None = None,
    staging_slots: torch.Tensor | None = None,
    stage_all: bool = False,
) -> Routing:
    """Group ``topk_ids`` (``[M, K]``, int32 or int64, contiguous, -1 is padding) by expert; no host sync.

    Args:
        experts: number of experts, at most 1024.
        slot_table: ``[E]``, int32 or int64, the slot to put into the tiles; None means the expert's id.
        hits: ``[E]``, int32 or int64; the number of pairs of each expert is added to it.
        host_experts: ``[E]`` bool, experts whose slot lies in host memory; None means none, and not to sort
            the tiles by tier.
        staging_slots: ``[C]`` int32, slots that the first C host-backed experts of more than one tile, by id,
            are to be copied to and read from; -1 from some place on where there are fewer than C now. Only
            with ``host_experts``.
        stage_all: those of one tile as well, and the launches are without programs that share host tiles.
    """
    num_pairs = topk_ids.numel()
    staging = 0 if staging_slots is None else staging_slots.numel()
    copies = copy_count = None
    if staging_slots is not None:
        copies = workspace.take("copies", (2, staging), torch.int32)
        copy_count = workspace.take("copy_count", (1,), torch.int32)
    bins, limit = power_of_two(experts), max_tiles(num_pairs, experts, block_m)
    pairs = workspace.take("pairs", (num_pairs,), torch.int32)
    tiles = workspace.take("tiles", (4, limit), torch.int32)
    tile_count = workspace.take("tile_count", (1 if host_experts is None else 3,), torch.int32)
    routing = Routing(pairs, tiles, tile_count, block_m, copies, copy_count, stage_all)
    expert_counts = workspace.take("expert_counts", (bins,), torch.int32)
    flags = {
        "BLOCK_M": block_m,
        "BINS": bins,
        "STAGE_ALL": stage_all,
        "PDL": dependent_launch,
        "launch_pdl": dependent_launch,
    }
    if num_pairs <= ONE_LAUNCH_PAIRS:
        chunk = min(max(power_of_two(num_pairs), 128), 2048)
        _route_by_expert_kernel[(experts,)](
            topk_ids,
            slot_table,
            host_experts,
            staging_slots,
            pairs,
            tiles,
            tile_count,
            copies,
            copy_count,
            hits,
            expert_counts,
            workspace.counter("arrivals"),
            num_pairs,
            experts,
            staging,
            limit,
            CHUNK=chunk,
            **flags,
        )
        return routing
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
        host_experts,
        staging_slots,
        ranks,
        block_counts,
        expert_counts,
        pairs,
        tiles,
        tile_count,
        copies,
        copy_count,
        hits,
        num_pairs,
        experts,
        staging,
        limit,
        BLOCK=BLOCK_PAIRS,
        num_warps=4,
        **flags,
    )
    return routing


class RoutingLists(NamedTuple):
    """What ``route_torch`` returns.

    Attributes:
        tiles: slot, expert, first row and end row of each.
        tile_count: as in ``Routing``.
        copies: slots to copy from and to.
    """

    pairs: list[int]
    tiles: list[tuple[int, int, int, int]]
    hits: list[int]
    tile_count: list[int]
    copies: list[tuple[int, int]]


def route_torch(
    topk_ids: torch.Tensor,
    experts: int,
    block_m: int,
    slot_table: torch.Tensor | None = None,
    host_experts: torch.Tensor | None = None,
    staging_slots: torch.Tensor | None = None,
    stage_all: bool = False,
) -> RoutingLists:
    """The same on the host."""
    flat = topk_ids.flatten().tolist()
    slots = list(range(experts)) if slot_table is None else slot_table.tolist()
    free = [] if staging_slots is None else [slot for slot in staging_slots.tolist() if slot >= 0]
    pairs: list[int] = []
    hits, copies = [], []
    tiers: tuple[list[tuple[int, int, int, int]], ...] = ([], [], [])  # host memory, resident, staged
    for expert in range(experts):
        mine = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        slot, tier = slots[expert], 1
        if host_experts is not None and host_experts[expert]:
            tier = 2 if len(mine) > (0 if stage_all else block_m) and free else 0
        if tier == 2:
            copies.append((slot, free.pop(0)))
            slot = copies[-1][1]
        end = len(pairs) + len(mine)
        rows = range(len(pairs), end, block_m)
        tiers[tier].extend((slot, expert, row, min(row + block_m, end)) for row in rows)
        pairs += mine
        hits.append(len(mine))
    ends = [len(tiers[0]), len(tiers[0]) + len(tiers[1]), sum(map(len, tiers))]
    tiles = [tile for tier_tiles in tiers for tile in tier_tiles]
    return RoutingLists(pairs, tiles, hits, ends[2:] if host_experts is None else ends, copies)
