"""``gate_up`` with warps that load and warps that multiply, for many rows an expert; see ``specialised``.

The reference is ``gate_up_torch``.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from vamp_kernels.launch import SpecialisedLaunch
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
    """Rows of ``x`` come by ordinary copies of 16 bytes, as they lie apart; weights by the copy engine."""
    rings, items, x, x_stride, w13, top_k = loaded
    a_ring, w_ring, full, empty = rings
    pairs, tiles, max_tiles, first_item, end_item, step, blocks, hidden = items
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [LOAD_WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    stage = 0
    phase = 1
    for item in range(first_item, end_item, step):
        slot, first, end, n0 = read_item(tiles, max_tiles, item, blocks, BLOCK_N)
        offsets = ()
        live = ()
        for part in gl.static_range(PARTS):
            inside = first + part * ROWS + row < end
            pair = gl.load(pairs + first + part * ROWS + row, mask=inside, other=0)
            offsets = offsets + ((pair // top_k) * x_stride,)  # type: ignore[assignment] # noqa: RUF005
            live = live + (inside,)  # type: ignore[assignment] # noqa: RUF005
        for k0 in range(0, hidden, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), w13.nbytes_per_cta)
            tma.async_copy_global_to_shared(w13, [slot, 0, n0, k0], full.index(stage), w_ring.index(stage))
            for part in gl.static_range(PARTS):
                if first + part * ROWS < end:
                    async_copy.async_copy_global_to_shared(
                        a_ring.index(stage * PARTS + part),
                        (x + k0) + (offsets[part][:, None] + k[None, :]),
                        mask=live[part][:, None],
                    )
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
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
    rings, items, act, router_weights, intermediate = multiplied
    a_ring, w_ring, full, empty = rings
    pairs, tiles, max_tiles, first_item, end_item, step, blocks, hidden = items
    out: gl.constexpr = store_layout(BLOCK_N)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, out)) + PART * ROWS
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, out))
    steps = hidden // BLOCK_K
    stage = 0
    phase = 0
    for item in range(first_item, end_item, step):
        _slot, first, end, n0 = read_item(tiles, max_tiles, item, blocks, BLOCK_N)
        if first + PART * ROWS < end:
            total, stage, phase = multiply_rows(
                a_ring,
                w_ring,
                full,
                empty,
                stage,
                phase,
                steps,
                PART,
                PARTS,
                2 * BLOCK_N,
                BLOCK_K,
                STAGES,
                FENCE=True,
            )
            gate, up = total.reshape([ROWS, 2, BLOCK_N]).permute([0, 2, 1]).split()
            if WEIGHT_ON_INPUT:
                own = first + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gate.type.layout))
                pair = gl.load(pairs + own, mask=own < end, other=0)
                scale = gl.load(router_weights + pair, mask=own < end, other=0.0).to(gl.float32)
                gate *= scale[:, None]
                up *= scale[:, None]
            y = (gate / (1.0 + gl.exp(-gate)) * up).to(act.dtype.element_ty)
            at = act + (first + row).to(gl.int64)[:, None] * intermediate + (n0 + column)[None, :]
            gl.store(at, gl.convert_layout(y, out), mask=(first + row < end)[:, None])
        else:
            stage, phase = skip(full, empty, stage, phase, steps, STAGES)


@gluon.jit(do_not_specialize=["max_tiles"])
def _gate_up_ws_kernel(
    x,
    x_stride,
    w13,  # a descriptor of [S, 2, I, H]
    act,  # [pairs, I], in the order of `pairs`
    router_weights,
    pairs,
    tiles,
    tile_count,
    max_tiles,
    hidden,
    intermediate,
    copy_count,
    TOP_K: gl.constexpr,
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
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], x.dtype.element_ty)
    a_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * PARTS, ROWS, BLOCK_K], rows)
    w_ring = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES, 1, 2, BLOCK_N, BLOCK_K], w13.layout)
    full, empty = start_barriers(STAGES, PARTS, 32 * LOAD_WARPS + 1)  # every thread's copies, and the engine
    blocks = intermediate // BLOCK_N
    first_item, end_item, step = share(tile_count, copy_count, blocks, HOST_PROGRAMS, COPYING, STAGED)
    rings = (a_ring, w_ring, full, empty)
    items = (pairs, tiles, max_tiles, first_item, end_item, step, blocks, hidden)
    loaded = (rings, items, x, x_stride, w13, TOP_K)
    multiplied = (rings, items, act, router_weights, intermediate)
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


def gate_up_ws(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    act: torch.Tensor,
    launch: SpecialisedLaunch,
    weight_on_input: bool = False,
    staged: bool = False,
) -> None:
    """What ``gate_up`` does, for a specialised launch and arguments that it fits."""
    hidden, intermediate = hidden_states.shape[1], act.shape[1]
    slot, row, _ = w13.stride()
    block = [1, 2, launch.block_n, launch.block_k]
    operand = descriptor(
        w13, [w13.shape[0], 2, intermediate, hidden], [slot, intermediate * row, row, 1], block
    )
    programs, options = launch_options(launch, routing, 2 * launch.block_n, staged)
    _gate_up_ws_kernel[(programs,)](
        hidden_states,
        hidden_states.stride(0),
        operand,
        act,
        topk_weights,
        routing.pairs,
        routing.tiles,
        routing.tile_count,
        routing.tiles.shape[1],
        hidden,
        intermediate,
        TOP_K=topk_weights.shape[1],
        WEIGHT_ON_INPUT=weight_on_input,
        **options,
    )
