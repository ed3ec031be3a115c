"""A few tokens: no routing, no tiles; each pair reads its expert's rows, and each token sums its own pairs.

For up to a handful of tokens nearly every pair has its own expert, and the time is that of starting kernels
and of getting enough bytes in flight: two launches, every program with all its loads outstanding at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import GemvLaunch, power_of_two


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_pair_kernel(
    x,
    x_stride,
    w13,
    w_stride_slot,
    w_stride_row,
    act,  # [pairs, I]
    router_weights,
    topk_ids,
    slot_table,
    hits,
    num_pairs,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_HITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    expert = tl.load(topk_ids + pair).to(tl.int32)
    if expert < 0:
        return
    slot = expert
    if HAS_SLOTS:
        slot = tl.load(slot_table + expert)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(columns, intermediate - 1)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (pair // TOP_K).to(tl.int64) * x_stride + k
    gate_at = w13 + slot.to(tl.int64) * w_stride_slot + n[:, None] * w_stride_row + k[None, :]
    up_at = gate_at + intermediate * w_stride_row
    gate_sum = tl.zeros([BLOCK_N], tl.float32)
    up_sum = tl.zeros([BLOCK_N], tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        if EVEN_K:
            gate = tl.load(gate_at + k0)
            up = tl.load(up_at + k0)
            a = tl.load(x_at + k0)
        else:
            inside = k0 + k < hidden
            gate = tl.load(gate_at + k0, mask=inside[None, :], other=0.0)
            up = tl.load(up_at + k0, mask=inside[None, :], other=0.0)
            a = tl.load(x_at + k0, mask=inside, other=0.0)
        a = a.to(tl.float32)[None, :]
        gate_sum += tl.sum(gate.to(tl.float32) * a, 1)
        up_sum += tl.sum(up.to(tl.float32) * a, 1)
    if WEIGHT_ON_INPUT:
        scale = tl.load(router_weights + pair).to(tl.float32)
        gate_sum *= scale
        up_sum *= scale
    y = gate_sum * tl.sigmoid(gate_sum) * up_sum
    act_at = act + pair.to(tl.int64) * intermediate + columns
    tl.store(act_at, y.to(act.dtype.element_ty), mask=columns < intermediate)
    if HAS_HITS and tl.program_id(0) == 0:
        # The first pair of an expert counts for all of them, so that each counter has one writer.
        other = tl.arange(0, PAIRS)
        ids = tl.load(topk_ids + other, mask=other < num_pairs, other=-1).to(tl.int32)
        same = (ids == expert).to(tl.int32)
        if tl.sum(tl.where(other < pair, same, 0), 0) == 0:
            tl.store(hits + expert, tl.load(hits + expert) + tl.sum(same, 0))


@triton.jit
def _down_token_kernel(
    act,
    w2,
    w_stride_slot,
    w_stride_row,
    out,
    out_stride,
    router_weights,
    topk_ids,
    slot_table,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(columns, hidden - 1)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for k0 in range(0, intermediate, BLOCK_K):
        # Weights and ids are older than the kernel before this one, so their loads need not wait for it.
        weights = ()
        for choice in tl.static_range(TOP_K):
            expert = tl.load(topk_ids + token * TOP_K + choice).to(tl.int32)
            slot = tl.maximum(expert, 0)
            if HAS_SLOTS:
                slot = tl.load(slot_table + slot)
            at = w2 + slot.to(tl.int64) * w_stride_slot + n[:, None] * w_stride_row + k0 + k[None, :]
            inside = expert >= 0
            if not EVEN_K:
                inside = inside & (k0 + k < intermediate)[None, :]
            # Triton knows no starred expression.
            weights = weights + (tl.load(at, mask=inside, other=0.0),)  # type: ignore[assignment] # noqa: RUF005
        if PDL:
            tl.extra.cuda.gdc_wait()
        for choice in tl.static_range(TOP_K):
            pair = token * TOP_K + choice
            chosen = tl.load(topk_ids + pair) >= 0
            inside = chosen & (k0 + k < intermediate)
            a = tl.load(act + pair.to(tl.int64) * intermediate + k0 + k, mask=inside, other=0.0).to(
                tl.float32
            )
            if not WEIGHT_ON_INPUT:
                a *= tl.load(router_weights + pair).to(tl.float32)
            total += weights[choice].to(tl.float32) * a[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    y = tl.sum(total, 1)
    tl.store(
        out + token.to(tl.int64) * out_stride + columns, y.to(out.dtype.element_ty), mask=columns < hidden
    )


def gate_up_pairs(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    act: torch.Tensor,
    launch: GemvLaunch,
    slot_table: torch.Tensor | None = None,
    hits: torch.Tensor | None = None,
    weight_on_input: bool = False,
    dependent_launch: bool = False,
) -> None:
    """Write the rows of ``act`` (``[M * K, I]``, pair order) that are not padding; count into ``hits``."""
    pairs, hidden, intermediate = topk_ids.numel(), hidden_states.shape[1], act.shape[1]
    _gate_up_pair_kernel[(triton.cdiv(intermediate, launch.block_n), pairs)](
        hidden_states,
        hidden_states.stride(0),
        w13,
        w13.stride(0),
        w13.stride(1),
        act,
        topk_weights,
        topk_ids,
        slot_table,
        hits,
        pairs,
        hidden,
        intermediate,
        TOP_K=topk_ids.shape[1],
        PAIRS=power_of_two(pairs),
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_K=hidden % launch.block_k == 0,
        WEIGHT_ON_INPUT=weight_on_input,
        HAS_SLOTS=slot_table is not None,
        HAS_HITS=hits is not None,
        PDL=dependent_launch,
        num_warps=launch.num_warps,
        launch_pdl=dependent_launch,
    )


def down_tokens(
    act: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    launch: GemvLaunch,
    slot_table: torch.Tensor | None = None,
    weight_on_input: bool = False,
    dependent_launch: bool = False,
) -> None:
    """Write ``out`` (``[M, H]``): each token's sum over its choices, in float32, rounded once."""
    tokens, top_k = topk_ids.shape
    hidden, intermediate = out.shape[1], act.shape[1]
    _down_token_kernel[(triton.cdiv(hidden, launch.block_n), tokens)](
        act,
        w2,
        w2.stride(0),
        w2.stride(1),
        out,
        out.stride(0),
        topk_weights,
        topk_ids,
        slot_table,
        hidden,
        intermediate,
        TOP_K=top_k,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_K=intermediate % launch.block_k == 0,
        WEIGHT_ON_INPUT=weight_on_input,
        HAS_SLOTS=slot_table is not None,
        PDL=dependent_launch,
        num_warps=launch.num_warps,
        launch_pdl=dependent_launch,
    )
