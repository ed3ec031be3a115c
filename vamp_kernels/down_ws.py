"""``down`` with warps that load and warps that multiply, for many rows an expert; see ``specialised``.

The reference is ``down_torch``.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from vamp_kernels.launch import PART_ROWS, SpecialisedLaunch
from vamp_kernels.specialised import (
    LOAD_WARPS,
    ROWS,
    descriptor,
    following,
    launch_options,
    multiply_rows,
    read_item,
    share,
    skip,
    start_barriers,
    store_layout,
)
from vamp_kernels.tiles import Routing


@gluon.jit
def _load(
    loaded,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copy engine loads both; of a tile, only the groups' rows that there are."""
    rings, items, act, w2 = loaded
    a_ring, w_ring, full, empty = rings
    _pairs, tiles, max_tiles, first_item, end_item, step, blocks, intermediate = items
    stage = 0
    phase = 1
    for item in range(first_item, end_item, step):
        slot, first, end, n0 = read_item(tiles, max_tiles, item, blocks, BLOCK_N)
        parts = (end - first + ROWS - 1) // ROWS
        for k0 in range(0, intermediate, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            gl.barrier()  # all four warps have seen the phase
            for n in gl.static_range(1, PARTS + 1):
                mbarrier.expect(
                    full.index(stage), w2.nbytes_per_cta + n * act.nbytes_per_cta, pred=parts == n
                )
            tma.async_copy_global_to_shared(w2, [slot, n0, k0], full.index(stage), w_ring.index(stage))
            for part in gl.static_range(PARTS):
                tma.async_copy_global_to_shared(
                    act,
                    [first + part * ROWS, k0],
                    full.index(stage),
                    a_ring.index(stage * PARTS + part),
                    pred=part < parts,
                )
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def _multiply(
    multiplied,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
):
    rings, items, partial, router_weights, hidden = multiplied
    a_ring, w_ring, full, empty = rings
    pairs, tiles, max_tiles, first_item, end_item, step, blocks, intermediate = items
    out: gl.constexpr = store_layout(BLOCK_N)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out)) + PART * ROWS
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, out))
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma)) + PART * ROWS
    steps = intermediate // BLOCK_K
    stage = 0
    phase = 0
    for item in range(first_item, end_item, step):
        _slot, first, end, n0 = read_item(tiles, max_tiles, item, blocks, BLOCK_N)
        if first + PART * ROWS < end:
            live = first + row < end
            pair = gl.load(pairs + first + row, mask=live, other=0)
            if not WEIGHT_ON_INPUT:
                own = first + mma_row
                choice = gl.load(pairs + own, mask=own < end, other=0)
                scale = gl.load(router_weights + choice, mask=own < end, other=0.0).to(gl.float32)
            y, stage, phase = multiply_rows(
                a_ring,
                w_ring,
                full,
                empty,
                stage,
                phase,
                steps,
                PART,
                PARTS,
                BLOCK_N,
                BLOCK_K,
                STAGES,
                FENCE=False,
            )
            if not WEIGHT_ON_INPUT:
                y *= scale[:, None]
            at = partial + pair.to(gl.int64)[:, None] * hidden + (n0 + column)[None, :]
            gl.store(at, gl.convert_layout(y.to(partial.dtype.element_ty), out), mask=live[:, None])
        else:
            stage, phase = skip(full, empty, stage, phase, steps, STAGES)


@gluon.jit(do_not_specialize=["max_tiles"])
def _down_ws_kernel(
    act,  # a descriptor of [pairs, I], in the order of `pairs`
    w2,  # a descriptor of [S, H, I]
    partial,  # [pairs, H], in the order of the tokens
    router_weights,
    pairs,
    tiles,
    tile_count,
    max_tiles,
    hidden,
    intermediate,
    copy_count,
    PARTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    WEIGHT_ON_INPUT: gl.constexpr,
    HOST_PROGRAMS: gl.constexpr,
    COPYING: gl.constexpr,
    STAGED: gl.constexpr,
):
    a_ring = gl.allocate_shared_memory(act.dtype, [STAGES * PARTS, ROWS, BLOCK_K], act.layout)
    w_ring = gl.allocate_shared_memory(act.dtype, [STAGES, 1, BLOCK_N, BLOCK_K], w2.layout)
    full, empty = start_barriers(STAGES, PARTS, 1)
    blocks = hidden // BLOCK_N
    first_item, end_item, step = share(tile_count, copy_count, blocks, HOST_PROGRAMS, COPYING, STAGED)
    rings = (a_ring, w_ring, full, empty)
    items = (pairs, tiles, max_tiles, first_item, end_item, step, blocks, intermediate)
    loaded = (rings, items, act, w2)
    multiplied = (rings, items, partial, router_weights, hidden)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_multiply, (multiplied, 0, PARTS, BLOCK_N, BLOCK_K, STAGES, WEIGHT_ON_INPUT)),
                (_multiply, (multiplied, 1, PARTS, BLOCK_N, BLOCK_K, STAGES, WEIGHT_ON_INPUT)),
                (_load, (loaded, PARTS, BLOCK_N, BLOCK_K, STAGES)),
            ],
            [4, LOAD_WARPS],
            [REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (multiplied, 0, PARTS, BLOCK_N, BLOCK_K, STAGES, WEIGHT_ON_INPUT)),
                (_multiply, (multiplied, 1, PARTS, BLOCK_N, BLOCK_K, STAGES, WEIGHT_ON_INPUT)),
                (_multiply, (multiplied, 2, PARTS, BLOCK_N, BLOCK_K, STAGES, WEIGHT_ON_INPUT)),
                (_load, (loaded, PARTS, BLOCK_N, BLOCK_K, STAGES)),
            ],
            [4, 4, LOAD_WARPS],
            [REGISTERS, REGISTERS, LOAD_REGISTERS],
        )


def down_ws(
    act: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    partial: torch.Tensor,
    launch: SpecialisedLaunch,
    weight_on_input: bool = False,
    staged: bool = False,
) -> None:
    """What ``down`` does, for a specialised launch and arguments that it fits."""
    hidden, intermediate = partial.shape[1], act.shape[1]
    rows = descriptor(act, list(act.shape), list(act.stride()), [PART_ROWS, launch.block_k])
    operand = descriptor(w2, list(w2.shape), list(w2.stride()), [1, launch.block_n, launch.block_k])
    programs, options = launch_options(launch, routing, launch.block_n, staged)
    _down_ws_kernel[(programs,)](
        rows,
        operand,
        partial,
        topk_weights,
        routing.pairs,
        routing.tiles,
        routing.tile_count,
        routing.tiles.shape[1],
        hidden,
        intermediate,
        WEIGHT_ON_INPUT=weight_on_input,
        **options,
    )
