"""The down grouped GEMM: each activation row times its expert's ``w2``, written to its pair's place."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import GemmLaunch
from vamp_kernels.operands import interpreted, weight_operand
from vamp_kernels.route import Routing


@triton.jit
def _down_block(
    act_at,
    w2,
    w_at,
    w_stride_row,
    partial_at,
    live,
    scale,
    slot,
    n0,
    hidden,
    intermediate,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    columns = n0 + tl.arange(0, BLOCK_N)
    if not TMA:
        w_at += tl.minimum(columns, hidden - 1)[:, None] * w_stride_row
    y = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, intermediate, BLOCK_K):
        if EVEN_K:
            a = tl.load(act_at + k0, mask=live[:, None], other=0.0)
        else:
            a = tl.load(act_at + k0, mask=live[:, None] & (k0 + k < intermediate)[None, :], other=0.0)
        if TMA:
            w = w2.load([slot, n0, k0]).reshape(BLOCK_N, BLOCK_K)
        elif EVEN_K:
            w = tl.load(w_at + k0)
        else:
            w = tl.load(w_at + k0, mask=(k0 + k < intermediate)[None, :], other=0.0)
        if INTERPRET:  # the interpreter's bf16 dot is wrong
            a = a.to(tl.float32)
            w = w.to(tl.float32)
        y = tl.dot(w, a.T, y) if SWAP_AB else tl.dot(a, w.T, y)
    if SWAP_AB:
        y = y.T
    y = (y * scale[:, None]).to(partial_at.dtype.element_ty)
    tl.store(partial_at + columns[None, :], y, mask=live[:, None] & (columns < hidden)[None, :])


@triton.jit
def _down_tile(
    act,  # [pairs, I], in the order of `pairs`
    w2,  # a pointer, or with TMA a descriptor of [S, H, I]
    w_stride_slot,
    w_stride_row,
    partial,  # [pairs, H], in the order of the tokens
    router_weights,
    pairs,
    slot,
    first,
    end,
    n0,
    hidden,
    intermediate,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    pair = tl.load(pairs + row, mask=live, other=0)
    if WEIGHT_ON_INPUT:
        scale = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        scale = tl.load(router_weights + pair, mask=live, other=0.0).to(tl.float32)
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, BLOCK_N)
    act_at = act + row.to(tl.int64)[:, None] * intermediate + k[None, :]
    partial_at = partial + pair.to(tl.int64)[:, None] * hidden
    w_at = w2 if TMA else w2 + slot.to(tl.int64) * w_stride_slot + k[None, :]

    if WHOLE_K and SPAN > 1:  # one step along the reduction: the pipelined loop is the one over columns
        if EVEN_K:
            a = tl.load(act_at, mask=live[:, None], other=0.0)
        else:
            a = tl.load(act_at, mask=live[:, None] & (k < intermediate)[None, :], other=0.0)
        if INTERPRET:  # the interpreter's bf16 dot is wrong
            a = a.to(tl.float32)
        for step in tl.range(0, SPAN):
            columns = n0 + step * BLOCK_N + n
            if TMA:
                w = w2.load([slot, n0 + step * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_K)
            elif EVEN_K:
                w = tl.load(w_at + tl.minimum(columns, hidden - 1)[:, None] * w_stride_row)
            else:
                at = w_at + tl.minimum(columns, hidden - 1)[:, None] * w_stride_row
                w = tl.load(at, mask=(k < intermediate)[None, :], other=0.0)
            if INTERPRET:
                w = w.to(tl.float32)
            y = tl.dot(w, a.T).T if SWAP_AB else tl.dot(a, w.T)
            y = (y * scale[:, None]).to(partial.dtype.element_ty)
            tl.store(partial_at + columns[None, :], y, mask=live[:, None] & (columns < hidden)[None, :])
    elif SPAN > 1:  # flattened, so that a block's first loads run ahead while the one before it is stored
        for step in tl.range(0, SPAN, flatten=True):
            _down_block(
                act_at,
                w2,
                w_at,
                w_stride_row,
                partial_at,
                live,
                scale,
                slot,
                n0 + step * BLOCK_N,
                hidden,
                intermediate,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                EVEN_K,
                SWAP_AB,
                TMA,
                INTERPRET,
            )
    else:
        _down_block(
            act_at,
            w2,
            w_at,
            w_stride_row,
            partial_at,
            live,
            scale,
            slot,
            n0,
            hidden,
            intermediate,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            SWAP_AB,
            TMA,
            INTERPRET,
        )


@triton.jit(do_not_specialize=["max_tiles"])
def _down_kernel(
    act,
    w2,
    w_stride_slot,
    w_stride_row,
    partial,
    router_weights,
    pairs,
    tiles,
    tile_count,
    max_tiles,
    hidden,
    intermediate,
    BLOCK_M: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    WHOLE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(hidden, BLOCK_N * SPAN)
    tile = tl.program_id(0) // blocks
    if tile >= tl.load(tile_count):
        return
    n0 = (tl.program_id(0) % blocks) * BLOCK_N * SPAN
    slot = tl.load(tiles + tile)
    first = tl.load(tiles + 2 * max_tiles + tile)
    end = tl.load(tiles + 3 * max_tiles + tile)
    if SMALL_M > 0 and end - first <= SMALL_M:
        _down_tile(
            act,
            w2,
            w_stride_slot,
            w_stride_row,
            partial,
            router_weights,
            pairs,
            slot,
            first,
            end,
            n0,
            hidden,
            intermediate,
            SMALL_M,
            BLOCK_N,
            BLOCK_K,
            SPAN,
            WHOLE_K,
            EVEN_K,
            SWAP_AB,
            TMA,
            WEIGHT_ON_INPUT,
            INTERPRET,
        )
    else:
        _down_tile(
            act,
            w2,
            w_stride_slot,
            w_stride_row,
            partial,
            router_weights,
            pairs,
            slot,
            first,
            end,
            n0,
            hidden,
            intermediate,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            SPAN,
            WHOLE_K,
            EVEN_K,
            SWAP_AB,
            TMA,
            WEIGHT_ON_INPUT,
            INTERPRET,
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def down(
    act: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    partial: torch.Tensor,
    launch: GemmLaunch,
    weight_on_input: bool = False,
    dependent_launch: bool = False,
) -> None:
    """Write the rows of ``partial`` (``[M * K, H]``) whose pair is not padding, times their router weight."""
    hidden, intermediate = partial.shape[1], act.shape[1]
    limit = routing.tiles.shape[1]
    operand: Any = weight_operand(w2, launch)
    _down_kernel[(limit * triton.cdiv(hidden, launch.block_n * launch.span),)](
        act,
        operand,
        w2.stride(0),
        w2.stride(1),
        partial,
        topk_weights,
        routing.pairs,
        routing.tiles,
        routing.tile_count,
        limit,
        hidden,
        intermediate,
        BLOCK_M=launch.block_m,
        SMALL_M=launch.small_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        SPAN=launch.span,
        WHOLE_K=launch.block_k >= intermediate,
        EVEN_K=intermediate % launch.block_k == 0,
        SWAP_AB=launch.swap_ab,
        TMA=operand is not w2,
        WEIGHT_ON_INPUT=weight_on_input,
        INTERPRET=interpreted(),
        PDL=dependent_launch,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=dependent_launch,
    )


def down_torch(act: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """``[R, H]`` float32 for rows ``act`` (``[R, I]``) of one expert's ``w2`` (``[H, I]``)."""
    return act.float() @ w2.float().T
