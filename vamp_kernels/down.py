"""The down grouped GEMM: each activation row times its expert's ``w2``, written to its pair's place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import SCALE_BLOCK, GemmLaunch, SpecialisedLaunch
from vamp_kernels.operands import gemm_launch, load_rows, load_weight, product, scaled_product, zeros
from vamp_kernels.quantize import dequantize_torch, quantize_torch
from vamp_kernels.ranges import ranged
from vamp_kernels.tiles import Routing, load_tile, tile_share

_GROUP = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _store_block(y, scale, partial_at, live, columns, hidden, SWAP_AB: tl.constexpr):
    if SWAP_AB:
        y = y.T
    y = (y * scale[:, None]).to(partial_at.dtype.element_ty)
    tl.store(partial_at + columns[None, :], y, mask=live[:, None] & (columns < hidden)[None, :])


@triton.jit
def _down_tile(
    operands,
    tile,
    n0,
    hidden,
    intermediate,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    KEEP_ROWS: tl.constexpr,  # which one step along the reduction covers
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """SPAN blocks of columns from ``n0`` for the rows of ``tile``; ``operands`` are those of the kernel."""
    act, w2, w_stride_slot, w_stride_row, partial, act_scale, w_scale, router_weights, pairs = operands
    slot, expert, first, end = tile
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    pair = tl.load(pairs + row, mask=live, other=0)
    if WEIGHT_ON_INPUT:
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        scale = tl.load(router_weights + pair, mask=live, other=0.0).to(tl.float32)
    k = tl.arange(0, BLOCK_K)
    act_at = act + row.to(tl.int64)[:, None] * intermediate + k[None, :]
    partial_at = partial + pair.to(tl.int64)[:, None] * hidden
    groups = intermediate // _GROUP
    w_at = w2 if TMA else w2 + slot.to(tl.int64) * w_stride_slot + k[None, :]

    if KEEP_ROWS:
        a = load_rows(act_at, live, k, intermediate, EVEN_K)
        if w_scale is not None:
            scale *= tl.load(act_scale + row * groups, mask=live, other=0.0)
    # Flattened, so that a block's first loads run ahead while the one before it is stored.
    for step in tl.range(0, SPAN, flatten=SPAN > 1 and not KEEP_ROWS):
        at = n0 + step * BLOCK_N
        columns = at + tl.arange(0, BLOCK_N)
        block_at = w_at
        if not TMA:
            block_at += tl.minimum(columns, hidden - 1)[:, None] * w_stride_row
        if w_scale is not None:
            row_block = expert * (hidden // _GROUP) + tl.minimum(at, hidden - 1) // _GROUP
            w_scale_at = w_scale + row_block * groups
        y = zeros(BLOCK_M, BLOCK_N, SWAP_AB)
        if KEEP_ROWS:
            w = load_weight(w2, block_at, slot, at, 0, k, intermediate, BLOCK_N, BLOCK_K, EVEN_K, TMA)
            y = product(a, w, y, SWAP_AB, INTERPRET)
            block_scale = scale
            if w_scale is not None:
                block_scale *= tl.load(w_scale_at)
            _store_block(y, block_scale, partial_at, live, columns, hidden, SWAP_AB)
        else:
            for k0 in tl.range(0, intermediate, BLOCK_K):
                a = load_rows(act_at + k0, live, k0 + k, intermediate, EVEN_K)
                w = load_weight(w2, block_at, slot, at, k0, k, intermediate, BLOCK_N, BLOCK_K, EVEN_K, TMA)
                if w_scale is None:
                    y = product(a, w, y, SWAP_AB, INTERPRET)
                else:
                    group = k0 // _GROUP
                    a_scale = tl.load(act_scale + row * groups + group, mask=live, other=0.0)
                    y = scaled_product(a, w, y, a_scale, tl.load(w_scale_at + group), SWAP_AB, INTERPRET)
            _store_block(y, scale, partial_at, live, columns, hidden, SWAP_AB)


@triton.jit(do_not_specialize=["max_tiles"])
def _down_kernel(
    act,  # [pairs, I], in the order of `pairs`
    w2,  # a pointer, or with TMA a descriptor of [S, H, I]
    w_stride_slot,
    w_stride_row,
    partial,  # [pairs, H], in the order of the tokens
    act_scale,  # scales of fp8 operands, else None
    w_scale,
    router_weights,
    pairs,
    tiles,
    tile_count,
    max_tiles,
    hidden,
    intermediate,
    BLOCK_M: tl.constexpr,
    SMALL_M: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile, BLOCK_M rows each
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    KEEP_ROWS: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
    BY_TIER: tl.constexpr,
    HOST_PROGRAMS: tl.constexpr,
    STAGED: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    operands = (act, w2, w_stride_slot, w_stride_row, partial, act_scale, w_scale, router_weights, pairs)
    columns = tl.cdiv(hidden, BLOCK_N * SPAN)
    blocks = columns * PARTS
    if STAGED or HOST_PROGRAMS > 0:
        first_item, step, items = tile_share(tile_count, blocks, HOST_PROGRAMS, STAGED)
    else:
        first_item, step, items = tl.program_id(0), 1, 1
        if first_item // blocks >= tl.load(tile_count + (1 if BY_TIER else 0)):
            return
    for i in tl.range(0, items, disable_licm=True):
        item = first_item + i * step
        n0 = (item // PARTS % columns) * BLOCK_N * SPAN
        slot, expert, first, end = load_tile(tiles, max_tiles, item // blocks)
        if PARTS > 1:
            first += item % PARTS * BLOCK_M
            end = tl.minimum(end, first + BLOCK_M)
        tile = (slot, expert, first, end)
        if PARTS == 1 or first < end:
            if SMALL_M > 0 and end - first <= SMALL_M:
                _down_tile(
                    operands,
                    tile,
                    n0,
                    hidden,
                    intermediate,
                    SMALL_M,
                    BLOCK_N,
                    BLOCK_K,
                    SPAN,
                    KEEP_ROWS,
                    EVEN_K,
                    SWAP_AB,
                    TMA,
                    WEIGHT_ON_INPUT,
                    INTERPRET,
                )
            else:
                _down_tile(
                    operands,
                    tile,
                    n0,
                    hidden,
                    intermediate,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    SPAN,
                    KEEP_ROWS,
                    EVEN_K,
                    SWAP_AB,
                    TMA,
                    WEIGHT_ON_INPUT,
                    INTERPRET,
                )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@ranged("down")
def down(
    act: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    partial: torch.Tensor,
    launch: GemmLaunch | SpecialisedLaunch,
    weight_on_input: bool = False,
    dependent_launch: bool = False,
    act_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    staged: bool = False,
) -> None:
    """Write the rows of ``partial`` (``[M * K, H]``) whose pair is not padding, times their router weight.

    With ``staged``, those of staged experts; otherwise all others. For fp8 both scales are given. ``block_m``
    of the launch divides that of the routing.
    """
    if isinstance(launch, SpecialisedLaunch):
        from vamp_kernels.down_ws import down_ws

        return down_ws(act, w2, topk_weights, routing, partial, launch, weight_on_input, staged)
    hidden, intermediate = partial.shape[1], act.shape[1]
    # Little is staged, and waited for at the end: more programs then, which keep rows where others do.
    span, parts = 1 if staged else launch.span, routing.block_m // launch.block_m
    blocks = triton.cdiv(hidden, launch.block_n * span) * parts
    operand, programs, flags = gemm_launch(
        w2, routing, launch, blocks, launch.block_n, weight_on_input, dependent_launch, staged
    )
    _down_kernel[(programs,)](
        act,
        operand,
        w2.stride(0),
        w2.stride(1),
        partial,
        act_scale,
        w2_scale,
        topk_weights,
        routing.pairs,
        routing.tiles,
        routing.tile_count,
        routing.tiles.shape[1],
        hidden,
        intermediate,
        PARTS=parts,
        SPAN=span,
        KEEP_ROWS=launch.span > 1 and launch.block_k >= intermediate,
        **flags,
    )


def down_torch(act: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor | None = None) -> torch.Tensor:
    """``[R, H]`` float32 for rows ``act`` (``[R, I]``) of one expert's ``w2`` (``[H, I]``).

    With scales (``[H / 128, I / 128]``), ``act`` is quantised first.
    """
    if w2_scale is None:
        return act.float() @ w2.float().T
    return dequantize_torch(*quantize_torch(act)) @ dequantize_torch(w2, w2_scale).T
