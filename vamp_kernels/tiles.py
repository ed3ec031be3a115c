"""The tile table: what tiles there are, in what order, and which program of a grouped GEMM takes which.

Tiles are ordered by expert. With a mask of host-backed experts, those read from host memory come first, by
expert, then those of resident experts, and last those of staged experts, which name their staging slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import GemmLaunch, device_limits


@triton.jit
def _place_by_tier(
    table, places, needed, slot, experts, staging, BINS: tl.constexpr, STAGE_ALL: tl.constexpr
):
    """First tile and slot of every expert: those read from host memory, then resident, then staged ones."""
    _, tile_count, copies, copy_count = table
    _, host_experts, staging_slots = places
    bins = tl.arange(0, BINS)
    host = tl.load(host_experts + bins, mask=bins < experts, other=0) != 0
    in_host = tl.where(host, needed, 0)
    staged = tl.zeros([BINS], tl.int32)
    if staging_slots is not None:
        wanted = (host & (needed > (0 if STAGE_ALL else 1))).to(tl.int32)
        rank = tl.cumsum(wanted, 0) - wanted
        target = tl.load(staging_slots + rank, mask=(wanted > 0) & (rank < staging), other=-1)
        chosen = target >= 0
        staged = tl.where(chosen, needed, 0)
        in_host -= staged
        tl.store(copies + rank, slot, mask=chosen)
        tl.store(copies + staging + rank, target, mask=chosen)
        tl.store(copy_count, tl.sum(chosen.to(tl.int32), 0))
        slot = tl.where(chosen, target, slot)
    resident = tl.where(host, 0, needed)
    host_end = tl.sum(in_host, 0)
    direct_end = host_end + tl.sum(resident, 0)
    tl.store(tile_count, host_end)
    tl.store(tile_count + 1, direct_end)
    tl.store(tile_count + 2, direct_end + tl.sum(staged, 0))
    among_host = tl.cumsum(in_host, 0) - in_host
    among_staged = direct_end + tl.cumsum(staged, 0) - staged
    among_resident = host_end + tl.cumsum(resident, 0) - resident
    return tl.where(host, tl.where(staged > 0, among_staged, among_host), among_resident), slot


@triton.jit
def write_tiles(
    table,
    places,
    counts,
    experts,
    staging,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    STAGE_ALL: tl.constexpr,
):
    """The tile table from the pairs of every expert, one program writing it all.

    ``table`` is what ``Routing`` holds of it, ``places`` the slot table, the mask of host-backed experts and
    the staging slots, each None where there is none.
    """
    tiles, tile_count, _, _ = table
    slot_table, host_experts, _ = places
    bins = tl.arange(0, BINS)
    needed = (counts + BLOCK_M - 1) // BLOCK_M
    first_row = tl.cumsum(counts, 0) - counts
    slot = bins
    if slot_table is not None:
        slot = tl.load(slot_table + bins, mask=bins < experts, other=0).to(tl.int32)
    if host_experts is None:
        first_tile = tl.cumsum(needed, 0) - needed
        tl.store(tile_count, tl.sum(needed, 0))
    else:
        first_tile, slot = _place_by_tier(table, places, needed, slot, experts, staging, BINS, STAGE_ALL)
    for i in range(0, tl.max(needed, 0)):
        at = tiles + first_tile + i
        row = first_row + i * BLOCK_M
        tl.store(at, slot, mask=i < needed)
        tl.store(at + max_tiles, bins, mask=i < needed)
        tl.store(at + 2 * max_tiles, row, mask=i < needed)
        tl.store(at + 3 * max_tiles, tl.minimum(row + BLOCK_M, first_row + counts), mask=i < needed)


@triton.jit
def tile_share(tile_count, blocks, HOST_PROGRAMS: tl.constexpr, STAGED: tl.constexpr):
    """First item, step and number of items of this program; item i is block i % ``blocks`` of tile i // it.

    The programs of a STAGED launch share the tiles of staged experts. In any other, the first HOST_PROGRAMS
    share the tiles in host memory, of which more at once would only keep processors waiting for the link, and
    every program behind them has one item.
    """
    program = tl.program_id(0)
    if STAGED:
        step = tl.num_programs(0)
        first = tl.load(tile_count + 1) * blocks + program
        end = tl.load(tile_count + 2) * blocks
    else:
        host = tl.load(tile_count) * blocks
        shares = program < HOST_PROGRAMS
        step = tl.where(shares, HOST_PROGRAMS, 1)
        first = tl.where(shares, program, host + program - HOST_PROGRAMS)
        end = tl.where(shares, host, tl.minimum(first + 1, tl.load(tile_count + 1) * blocks))
    return first, step, (tl.maximum(end - first, 0) + step - 1) // step


@triton.jit
def load_tile(tiles, max_tiles, tile):
    """Slot, expert, first row and end row."""
    slot = tl.load(tiles + tile)
    expert = tl.load(tiles + max_tiles + tile)
    first = tl.load(tiles + 2 * max_tiles + tile)
    end = tl.load(tiles + 3 * max_tiles + tile)
    return slot, expert, first, end


@dataclass(frozen=True)
class Routing:
    """Pairs by expert and the tiles over them.

    Attributes:
        pairs: ``[M * K]`` int32, the pairs ``token * K + choice`` by expert; padding pairs are left out, so
            the end of it is undefined.
        tiles: ``[4, T]`` int32: slot, expert, first row and end row of each tile, rows indexing ``pairs``.
        tile_count: int32, how many tiles there are; the rest of ``tiles`` is undefined. ``[1]``, or with a
            mask of host-backed experts ``[3]``: where the tiles read from host memory end, where those read
            in place end, and where those of staged experts end.
        block_m: most rows of a tile.
        copies: ``[2, C]`` int32, slots to copy from and to before the staged tiles are read; None without
            staging slots.
        copy_count: ``[1]`` int32, how many of them there are.
        stage_all: all host-backed experts with rows were to be staged, for as many as there are slots.
    """

    pairs: torch.Tensor
    tiles: torch.Tensor
    tile_count: torch.Tensor
    block_m: int
    copies: torch.Tensor | None = None
    copy_count: torch.Tensor | None = None
    stage_all: bool = False

    @property
    def by_tier(self) -> bool:
        return self.tile_count.numel() > 1

    @property
    def shares_host_tiles(self) -> bool:
        """Whether a few programs are to share the tiles in host memory.

        With ``stage_all`` only those are left that no slot was free for, and are not worth slower programs
        for all other tiles, which a loop over several makes them.
        """
        return self.by_tier and not self.stage_all


def max_tiles(pairs: int, experts: int, block_m: int) -> int:
    """The most tiles that ``pairs`` pairs can need, however they are routed."""
    return (pairs + min(pairs, experts) * (block_m - 1)) // block_m


def tile_programs(
    routing: Routing, blocks: int, launch: GemmLaunch, weight_bytes: int, staged: bool
) -> tuple[int, int]:
    """Programs of a launch over ``blocks`` blocks of every tile, and how many of them share host tiles.

    ``weight_bytes`` is what a program reads of the weights in a step.
    """
    items = routing.tiles.shape[1] * blocks
    if staged:
        return min(items, device_limits(routing.tiles.device).processors), 0
    host_programs = launch.host_programs(weight_bytes) if routing.shares_host_tiles else 0
    return items + host_programs, host_programs
