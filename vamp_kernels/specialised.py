"""What the warp-specialised GEMMs share: one group of warps loads, two or three others multiply.

A program is persistent and goes through its items, a block of columns of a tile each. Its loading warps fill
a ring of stages in shared memory; each of its PARTS multiplying groups of four warps owns 64 rows of the
tile. Stage s has two barriers: ``full[s]`` completes when the loads of a step have arrived, ``empty[s]`` when
all PARTS groups have let go of it.

Why no one waits for ever: loading and multiplying warps go through the same items and the same steps of each,
as both are counted from the same tile table, so that the n-th use of a stage is the same step for everyone.
In every step the loading warps wait for ``empty`` once and complete ``full`` once, and every group waits for
``full`` once and arrives at ``empty`` once, also a group that has no rows in the tile (``skip``). No warp
signals before the four of its group have passed their wait, so that none is ever more than one phase of a
barrier behind, which is what a parity can tell apart; the wait of the loading warps starts one phase ahead
because stages are empty at first. No item, no step: no wait. The registers of all warps (``REGISTERS``) are
what the program was started with, and those who give some up do so before they wait for anyone.

The stage that a group lets go of has to be carried through the loop: Triton takes a variable that enters a
loop as another's alias and is assigned from that one in it for a constant, which would release one stage for
ever.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vamp_kernels.launch import PART_ROWS, GatherLaunch, SpecialisedLaunch, device_limits
from vamp_kernels.tiles import Routing

ROWS = gl.constexpr(PART_ROWS)
LOAD_WARPS = gl.constexpr(4)
# Of a thread that multiplies and of one that loads, by PARTS. A program starts with 168 and 128 for each of
# its 384 and 512 threads, and 2 * 232 + 40 = 3 * 168, 3 * 152 + 56 = 4 * 128.
REGISTERS = {2: (232, 40), 3: (152, 56)}


@gluon.constexpr_function
def store_layout(columns):
    """64 rows over 4 warps as the matrix unit leaves them, but 8 columns in a row in each thread."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    column = 32
    while column < columns:
        registers.append([0, column])
        column *= 2
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, columns])


@gluon.jit
def share(
    tile_count,
    copy_count,
    blocks,
    HOST_PROGRAMS: gl.constexpr,
    COPYING: gl.constexpr,
    STAGED: gl.constexpr,
):
    """First item, end and step of this program; item i is block i % ``blocks`` of tile i // it.

    The programs of a STAGED launch share the tiles of staged experts. In any other, up to HOST_PROGRAMS share
    the tiles in host memory, if there are any, and the rest all others. While experts are copied, COPYING
    processors have no room for such a program: the last ones, which would come late, leave at once.
    """
    program = gl.program_id(0)
    step = gl.num_programs(0)
    if copy_count is not None:
        step = gl.where(gl.load(copy_count) > 0, step - COPYING, step)
    late = program >= step
    if STAGED:
        first = gl.load(tile_count + 1) * blocks + program
        end = gl.load(tile_count + 2) * blocks
    elif HOST_PROGRAMS == 0:
        first = program
        end = gl.load(tile_count) * blocks
    else:
        host = gl.load(tile_count) * blocks
        apart = gl.minimum(host, HOST_PROGRAMS)
        if program < apart:
            first = program
            end = host
            step = apart
        else:
            first = host + program - apart
            end = gl.load(tile_count + 1) * blocks
            step = step - apart
    return first, gl.where(late, first, end), step


@gluon.jit
def read_item(tiles, max_tiles, item, blocks, BLOCK_N: gl.constexpr):
    """Slot, first row, end row and first column."""
    at = tiles + item // blocks
    n0 = (item % blocks) * BLOCK_N
    return gl.load(at), gl.load(at + 2 * max_tiles), gl.load(at + 3 * max_tiles), n0


@gluon.jit
def start_barriers(STAGES: gl.constexpr, PARTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """``full``, which expects ARRIVALS of the loading warps, and ``empty``."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=PARTS)
    fence_async_shared()
    return full, empty


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next stage and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def skip(full, empty, stage, phase, steps, STAGES: gl.constexpr):
    """Go past the steps of a tile that has no rows for this group."""
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        gl.barrier()  # all four warps have seen the phase
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def multiply_rows(
    a_ring,
    w_ring,
    full,
    empty,
    stage,
    phase,
    steps,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    FENCE: gl.constexpr,
):
    """The products of this group's rows with ``COLUMNS`` rows of weights, ``[64, COLUMNS]`` float32.

    FENCE orders loads that were not the copy engine's before the matrix unit's reads.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if FENCE:
            fence_async_shared()
        w = w_ring.index(stage).reshape([COLUMNS, BLOCK_K]).permute([1, 0])
        total = warpgroup_mma(a_ring.index(stage * PARTS + PART), w, total, is_async=True)
        total = warpgroup_mma_wait(num_outstanding=0, deps=[total])
        gl.barrier()  # all four warps have read
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
    return total, stage, phase


def descriptor(tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A tensor descriptor whose blocks lie in shared memory as the matrix unit reads them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(tensor, shape, strides, block, layout)


def launch_options(
    launch: SpecialisedLaunch, routing: Routing, weight_rows: int, staged: bool
) -> tuple[int, dict[str, Any]]:
    """Programs, and the last arguments that both GEMMs take; a step reads ``weight_rows`` rows."""
    programs = device_limits(routing.tiles.device).processors
    host_programs = launch.host_programs(2 * weight_rows * launch.block_k) if routing.by_tier else 0
    registers, load_registers = REGISTERS[launch.parts]
    return programs, {
        "PARTS": launch.parts,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
        "STAGES": launch.num_stages,
        "REGISTERS": registers,
        "LOAD_REGISTERS": load_registers,
        "copy_count": None if staged else routing.copy_count,
        "HOST_PROGRAMS": min(host_programs, programs // 2),
        "COPYING": min(GatherLaunch().programs, programs // 2),
        "STAGED": staged,
        "num_warps": 4,
    }
