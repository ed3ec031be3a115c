"""The gate-up grouped GEMM with SwiGLU: ``silu(x @ gate.T) * (x @ up.T)`` for the rows of every tile."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from vamp_kernels.launch import GemmLaunch
from vamp_kernels.operands import interpreted, weight_operand
from vamp_kernels.route import Routing


@triton.jit
def _gate_up_tile(
    x,
    x_stride,
    w13,  # a pointer, or with TMA a descriptor of [S, 2 * I, H]
    w_stride_slot,
    w_stride_row,
    act,  # [pairs, I], in the order of `pairs`
    router_weights,
    pairs,
    slot,
    first,
    end,
    n0,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    row = first + tl.arange(0, BLOCK_M)
    live = row < end
    pair = tl.load(pairs + row, mask=live, other=0)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    if TMA:
        gate_at = w13
        up_at = w13
    else:
        n = tl.minimum(n0 + tl.arange(0, BLOCK_N), intermediate - 1)
        gate_at = w13 + slot.to(tl.int64) * w_stride_slot + n[:, None] * w_stride_row + k[None, :]
        up_at = gate_at + intermediate * w_stride_row

    gate_sum = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    up_sum = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(0, hidden, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_at + k0, mask=live[:, None], other=0.0)
        else:
            a = tl.load(x_at + k0, mask=live[:, None] & (k0 + k < hidden)[None, :], other=0.0)
        if TMA:
            gate = w13.load([slot, n0, k0]).reshape(BLOCK_N, BLOCK_K)
            up = w13.load([slot, intermediate + n0, k0]).reshape(BLOCK_N, BLOCK_K)
        elif EVEN_K:
            gate = tl.load(gate_at + k0)
            up = tl.load(up_at + k0)
        else:
            gate = tl.load(gate_at + k0, mask=(k0 + k < hidden)[None, :], other=0.0)
            up = tl.load(up_at + k0, mask=(k0 + k < hidden)[None, :], other=0.0)
        if INTERPRET:  # the interpreter's bf16 dot is wrong
            a = a.to(tl.float32)
            gate = gate.to(tl.float32)
            up = up.to(tl.float32)
        if SWAP_AB:
            gate_sum = tl.dot(gate, a.T, gate_sum)
            up_sum = tl.dot(up, a.T, up_sum)
        else:
            gate_sum = tl.dot(a, gate.T, gate_sum)
            up_sum = tl.dot(a, up.T, up_sum)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP_AB:
        gate_sum = gate_sum.T
        up_sum = up_sum.T
    if WEIGHT_ON_INPUT:
        scale = tl.load(router_weights + pair, mask=live, other=0.0).to(tl.float32)
        gate_sum *= scale[:, None]
        up_sum *= scale[:, None]
    y = gate_sum * tl.sigmoid(gate_sum) * up_sum
    columns = n0 + tl.arange(0, BLOCK_N)
    act_at = act + row.to(tl.int64)[:, None] * intermediate + columns[None, :]
    tl.store(act_at, y.to(act.dtype.element_ty), mask=live[:, None] & (columns < intermediate)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_kernel(
    x,
    x_stride,
    w13,
    w_stride_slot,
    w_stride_row,
    act,
    router_weights,
    pairs,
    tiles,
    tile_count,
    max_tiles,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SMALL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    blocks = tl.cdiv(intermediate, BLOCK_N)
    tile = tl.program_id(0) // blocks
    if tile >= tl.load(tile_count):
        return
    n0 = (tl.program_id(0) % blocks) * BLOCK_N
    slot = tl.load(tiles + tile)
    first = tl.load(tiles + 2 * max_tiles + tile)
    end = tl.load(tiles + 3 * max_tiles + tile)
    if SMALL_M > 0 and end - first <= SMALL_M:
        _gate_up_tile(
            x,
            x_stride,
            w13,
            w_stride_slot,
            w_stride_row,
            act,
            router_weights,
            pairs,
            slot,
            first,
            end,
            n0,
            hidden,
            intermediate,
            TOP_K,
            SMALL_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            SWAP_AB,
            TMA,
            WEIGHT_ON_INPUT,
            INTERPRET,
            PDL,
        )
    else:
        _gate_up_tile(
            x,
            x_stride,
            w13,
            w_stride_slot,
            w_stride_row,
            act,
            router_weights,
            pairs,
            slot,
            first,
            end,
            n0,
            hidden,
            intermediate,
            TOP_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            SWAP_AB,
            TMA,
            WEIGHT_ON_INPUT,
            INTERPRET,
            PDL,
        )


def gate_up(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    act: torch.Tensor,
    launch: GemmLaunch,
    weight_on_input: bool = False,
    dependent_launch: bool = False,
) -> None:
    """Write ``act`` (``[M * K, I]``), whose row r belongs to pair ``routing.pairs[r]``."""
    hidden, intermediate = hidden_states.shape[1], act.shape[1]
    limit = routing.tiles.shape[1]
    operand: Any = weight_operand(w13, launch)
    _gate_up_kernel[(limit * triton.cdiv(intermediate, launch.block_n),)](
        hidden_states,
        hidden_states.stride(0),
        operand,
        w13.stride(0),
        w13.stride(1),
        act,
        topk_weights,
        routing.pairs,
        routing.tiles,
        routing.tile_count,
        limit,
        hidden,
        intermediate,
        TOP_K=topk_weights.shape[1],
        BLOCK_M=launch.block_m,
        SMALL_M=launch.small_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_K=hidden % launch.block_k == 0,
        SWAP_AB=launch.swap_ab,
        TMA=operand is not w13,
        WEIGHT_ON_INPUT=weight_on_input,
        INTERPRET=interpreted(),
        PDL=dependent_launch,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        launch_pdl=dependent_launch,
    )


def gate_up_torch(x: torch.Tensor, w13: torch.Tensor) -> torch.Tensor:
    """``[R, I]`` float32 for rows ``x`` (``[R, H]``) of one expert's ``w13`` (``[2 * I, H]``)."""
    gate, up = (x.float() @ w13.float().T).chunk(2, dim=1)
    return F.silu(gate) * up
