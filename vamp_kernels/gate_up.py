"""The gate-up grouped GEMM with SwiGLU: ``silu(x @ gate.T) * (x @ up.T)`` for the rows of every tile."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from vamp_kernels.launch import SCALE_BLOCK, GemmLaunch, SpecialisedLaunch
from vamp_kernels.operands import gemm_launch, load_rows, load_weight, product, scaled_product, zeros
from vamp_kernels.quantize import dequantize_torch, quantize_groups, quantize_torch
from vamp_kernels.ranges import ranged
from vamp_kernels.tiles import Routing, load_tile, tile_share

_GROUP = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _gate_up_tile(
    operands,
    tile,
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
    """Columns from ``n0`` of ``act`` for the rows of ``tile``; ``operands`` are those of the kernel."""
    x, x_stride, w13, w_stride_slot, w_stride_row, act, x_scale, w_scale, act_scale, weights, pairs = operands
    slot, expert, first, end = tile
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
    if w_scale is not None:
        groups = hidden // _GROUP
        x_scale_at = x_scale + (pair // TOP_K) * groups
        gate_scale_at = w_scale + (expert * 2 * (intermediate // _GROUP) + n0 // _GROUP) * groups
        up_scale_at = gate_scale_at + intermediate // _GROUP * groups

    gate_sum = zeros(BLOCK_M, BLOCK_N, SWAP_AB)
    up_sum = zeros(BLOCK_M, BLOCK_N, SWAP_AB)
    for k0 in tl.range(0, hidden, BLOCK_K):
        a = load_rows(x_at + k0, live, k0 + k, hidden, EVEN_K)
        gate = load_weight(w13, gate_at, slot, n0, k0, k, hidden, BLOCK_N, BLOCK_K, EVEN_K, TMA)
        up = load_weight(w13, up_at, slot, intermediate + n0, k0, k, hidden, BLOCK_N, BLOCK_K, EVEN_K, TMA)
        if w_scale is None:
            gate_sum = product(a, gate, gate_sum, SWAP_AB, INTERPRET)
            up_sum = product(a, up, up_sum, SWAP_AB, INTERPRET)
        else:
            group = k0 // _GROUP
            a_scale = tl.load(x_scale_at + group, mask=live, other=0.0)
            gate_scale = tl.load(gate_scale_at + group)
            up_scale = tl.load(up_scale_at + group)
            gate_sum = scaled_product(a, gate, gate_sum, a_scale, gate_scale, SWAP_AB, INTERPRET)
            up_sum = scaled_product(a, up, up_sum, a_scale, up_scale, SWAP_AB, INTERPRET)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP_AB:
        gate_sum = gate_sum.T
        up_sum = up_sum.T
    if WEIGHT_ON_INPUT:
        scale = tl.load(weights + pair, mask=live, other=0.0).to(tl.float32)
        gate_sum *= scale[:, None]
        up_sum *= scale[:, None]
    y = gate_sum * tl.sigmoid(gate_sum) * up_sum
    columns = n0 + tl.arange(0, BLOCK_N)
    act_at = act + row.to(tl.int64)[:, None] * intermediate + columns[None, :]
    if w_scale is not None:
        y, y_scale = quantize_groups(y, INTERPRET)
        tl.store(act_scale + row * (intermediate // _GROUP) + n0 // _GROUP, y_scale, mask=live)
    tl.store(act_at, y.to(act.dtype.element_ty), mask=live[:, None] & (columns < intermediate)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def _gate_up_kernel(
    x,
    x_stride,
    w13,  # a pointer, or with TMA a descriptor of [S, 2 * I, H]
    w_stride_slot,
    w_stride_row,
    act,  # [pairs, I], in the order of `pairs`
    x_scale,  # scales of fp8 operands, else None
    w_scale,
    act_scale,
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
    BY_TIER: tl.constexpr,
    HOST_PROGRAMS: tl.constexpr,
    STAGED: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    operands = (
        x,
        x_stride,
        w13,
        w_stride_slot,
        w_stride_row,
        act,
        x_scale,
        w_scale,
        act_scale,
        router_weights,
        pairs,
    )
    blocks = tl.cdiv(intermediate, BLOCK_N)
    if STAGED or HOST_PROGRAMS > 0:
        first_item, step, items = tile_share(tile_count, blocks, HOST_PROGRAMS, STAGED)
    else:
        first_item, step, items = tl.program_id(0), 1, 1
        if first_item // blocks >= tl.load(tile_count + (1 if BY_TIER else 0)):
            return
    for i in tl.range(0, items, disable_licm=True):
        item = first_item + i * step
        n0 = (item % blocks) * BLOCK_N
        tile = load_tile(tiles, max_tiles, item // blocks)
        _, _, first, end = tile
        if SMALL_M > 0 and end - first <= SMALL_M:
            _gate_up_tile(
                operands,
                tile,
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
                operands,
                tile,
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


@ranged("up")
def gate_up(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    topk_weights: torch.Tensor,
    routing: Routing,
    act: torch.Tensor,
    launch: GemmLaunch | SpecialisedLaunch,
    weight_on_input: bool = False,
    dependent_launch: bool = False,
    x_scale: torch.Tensor | None = None,
    w13_scale: torch.Tensor | None = None,
    act_scale: torch.Tensor | None = None,
    staged: bool = False,
) -> None:
    """Write ``act`` (``[M * K, I]``), whose row r belongs to pair ``routing.pairs[r]``.

    With ``staged``, the rows of staged experts; otherwise all others. For fp8 all three scales are given, and
    those of ``act`` (``[M * K, I / 128]``) are written.
    """
    if isinstance(launch, SpecialisedLaunch):
        from vamp_kernels.gate_up_ws import gate_up_ws

        return gate_up_ws(hidden_states, w13, topk_weights, routing, act, launch, weight_on_input, staged)
    hidden, intermediate = hidden_states.shape[1], act.shape[1]
    blocks = triton.cdiv(intermediate, launch.block_n)
    operand, programs, flags = gemm_launch(
        w13, routing, launch, blocks, 2 * launch.block_n, weight_on_input, dependent_launch, staged
    )
    _gate_up_kernel[(programs,)](
        hidden_states,
        hidden_states.stride(0),
        operand,
        w13.stride(0),
        w13.stride(1),
        act,
        x_scale,
        w13_scale,
        act_scale,
        topk_weights,
        routing.pairs,
        routing.tiles,
        routing.tile_count,
        routing.tiles.shape[1],
        hidden,
        intermediate,
        TOP_K=topk_weights.shape[1],
        **flags,
    )


def gate_up_torch(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    input_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[R, I]`` float32 for rows ``x`` (``[R, H]``) of one expert's ``w13`` (``[2 * I, H]``).

    With scales (``[2 * I / 128, H / 128]``), ``x`` is quantised first; the result is not. ``input_weight``
    (``[R, 1]``) multiplies the product, before SwiGLU.
    """
    if w13_scale is None:
        x, w13 = x.float(), w13.float()
    else:
        x, w13 = dequantize_torch(*quantize_torch(x)), dequantize_torch(w13, w13_scale)
    y = x @ w13.T
    gate, up = (y if input_weight is None else y * input_weight).chunk(2, dim=1)
    return F.silu(gate) * up
