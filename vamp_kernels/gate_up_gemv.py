"""A few tokens: no routing, no tiles; each pair reads its expert's rows, and each token sums its own pairs.

For up to a handful of tokens nearly every pair has its own expert, and the time is that of starting kernels
and of getting enough bytes in flight: two launches, every program with all its loads outstanding at once.
With fp8 weights a program quantises its input itself; groups of scales are a dimension of their own, so that
a thread's weights and inputs are of one group.

What is read from host memory is cached for the processor that reads it, but not for the device. With a mask
of host-backed experts, one program therefore goes through all pairs that have such an expert, so that they
cross the link once; the products are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import SCALE_BLOCK, GemvLaunch, power_of_two
from vamp_kernels.operands import interpreted
from vamp_kernels.quantize import quantize_groups
from vamp_kernels.ranges import ranged

_GROUP = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _products(
    x,
    gate_at,  # of the rows
    up_at,
    hidden,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """The products of ``x`` with rows of gate and up, ``[BLOCK_N]`` each."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + k
    gate_at = gate_at[:, None] + k[None, :]
    up_at = up_at[:, None] + k[None, :]
    gate_sum = tl.zeros([BLOCK_N], tl.float32)
    up_sum = tl.zeros([BLOCK_N], tl.float32)
    for k0 in range(0, hidden, BLOCK_K):
        if EVEN_K:
            gate = tl.load(gate_at + k0, eviction_policy=EVICTION)
            up = tl.load(up_at + k0, eviction_policy=EVICTION)
            a = tl.load(x_at + k0)
        else:
            inside = k0 + k < hidden
            gate = tl.load(gate_at + k0, mask=inside[None, :], other=0.0, eviction_policy=EVICTION)
            up = tl.load(up_at + k0, mask=inside[None, :], other=0.0, eviction_policy=EVICTION)
            a = tl.load(x_at + k0, mask=inside, other=0.0)
        a = a.to(tl.float32)[None, :]
        gate_sum += tl.sum(gate.to(tl.float32) * a, 1)
        up_sum += tl.sum(up.to(tl.float32) * a, 1)
    return gate_sum, up_sum


@triton.jit
def _scaled_products(
    x,
    gate_at,
    up_at,
    gate_scale_at,
    up_scale_at,
    groups,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``_products`` of fp8 rows, GROUPS groups a step."""
    gate_sum = tl.zeros([BLOCK_N], tl.float32)
    up_sum = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, groups, GROUPS):
        group = first + tl.arange(0, GROUPS)
        k = (group * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
        inside = (group < groups) | EVEN_K
        gate = tl.load(gate_at[:, None, None] + k[None, :, :], mask=inside[None, :, None], other=0.0)
        up = tl.load(up_at[:, None, None] + k[None, :, :], mask=inside[None, :, None], other=0.0)
        gate_scale = tl.load(gate_scale_at + group, mask=inside, other=0.0)
        up_scale = tl.load(up_scale_at + group, mask=inside, other=0.0)
        a = tl.load(x + k, mask=inside[:, None], other=0.0)
        quantized, a_scale = quantize_groups(a.to(tl.float32), INTERPRET)
        a = quantized.to(tl.float32)[None, :, :]
        gate_sum += tl.sum(tl.sum(gate.to(tl.float32) * a, 2) * (a_scale * gate_scale)[None, :], 1)
        up_sum += tl.sum(tl.sum(up.to(tl.float32) * a, 2) * (a_scale * up_scale)[None, :], 1)
    return gate_sum, up_sum


@triton.jit
def _gate_up_pair(
    operands,
    pair,
    expert,
    block,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICTION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """A block of columns of ``act`` for ``pair``; ``operands`` are those of the kernel."""
    x, x_stride, w13, w_stride_slot, w_stride_row, act, w_scale, router_weights, slot_table = operands
    slot = expert
    if slot_table is not None:
        slot = tl.load(slot_table + expert)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    x += (pair // TOP_K).to(tl.int64) * x_stride
    gate_at = w13 + slot.to(tl.int64) * w_stride_slot + tl.minimum(columns, intermediate - 1) * w_stride_row
    up_at = gate_at + intermediate * w_stride_row
    if w_scale is None:
        gate_sum, up_sum = _products(x, gate_at, up_at, hidden, BLOCK_N, BLOCK_K, EVEN_K, EVICTION)
    else:
        groups, rows = hidden // _GROUP, intermediate // _GROUP
        gate_scale_at = w_scale + (expert * 2 * rows + block * BLOCK_N // _GROUP) * groups
        up_scale_at = gate_scale_at + rows * groups
        gate_sum, up_sum = _scaled_products(
            x,
            gate_at,
            up_at,
            gate_scale_at,
            up_scale_at,
            groups,
            BLOCK_N,
            BLOCK_K // _GROUP,
            EVEN_K,
            INTERPRET,
        )
    if WEIGHT_ON_INPUT:
        scale = tl.load(router_weights + pair).to(tl.float32)
        gate_sum *= scale
        up_sum *= scale
    y = gate_sum * tl.sigmoid(gate_sum) * up_sum
    act_at = act + pair.to(tl.int64) * intermediate + columns
    tl.store(act_at, y.to(act.dtype.element_ty), mask=columns < intermediate)


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_pair_kernel(
    x,
    x_stride,
    w13,
    w_stride_slot,
    w_stride_row,
    act,  # [pairs, I], float32 for fp8
    w_scale,  # of fp8 weights, else None
    router_weights,
    topk_ids,
    slot_table,
    hits,
    host_experts,
    num_pairs,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    pair = tl.program_id(1)
    expert = tl.load(topk_ids + pair).to(tl.int32)
    if expert < 0:
        return
    operands = (x, x_stride, w13, w_stride_slot, w_stride_row, act, w_scale, router_weights, slot_table)
    EVICTION: tl.constexpr = "evict_first" if host_experts is None else ""  # mostly read once
    other = tl.arange(0, PAIRS)
    ids = tl.load(topk_ids + other, mask=other < num_pairs, other=-1).to(tl.int32)
    same = ids == expert
    current, count = pair, 1
    if host_experts is not None:
        count = tl.full([], 1, tl.int32)
        # The first pair of a host-backed expert works for all of them, so that one program reads its rows.
        if tl.load(host_experts + expert) != 0:
            first = tl.min(tl.where(same, other, PAIRS), 0)
            count = tl.where(pair == first, tl.sum(same.to(tl.int32), 0), 0)
    for _ in tl.range(0, count, disable_licm=True):
        _gate_up_pair(
            operands,
            current,
            expert,
            block,
            hidden,
            intermediate,
            TOP_K,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            EVICTION,
            WEIGHT_ON_INPUT,
            INTERPRET,
        )
        if host_experts is not None:
            current = tl.min(tl.where(same & (other > current), other, PAIRS), 0)
    if hits is not None and block == 0:
        first = tl.min(tl.where(same, other, PAIRS), 0)
        if pair == first:  # counts for all of them, so that each counter has one writer
            tl.store(hits + expert, tl.load(hits + expert) + tl.sum(same.to(tl.int32), 0))


@ranged("up")
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
    w13_scale: torch.Tensor | None = None,
    host_experts: torch.Tensor | None = None,
) -> None:
    """Write the rows of ``act`` (``[M * K, I]``, pair order) that are not padding; count into ``hits``.

    With ``host_experts`` (``[E]`` bool) the rows of those experts are read once for all pairs. With fp8
    weights, whose scales are given, ``act`` is float32: a group of it is several programs' work.
    """
    pairs, hidden, intermediate = topk_ids.numel(), hidden_states.shape[1], act.shape[1]
    blocks = triton.cdiv(intermediate, launch.block_n)
    _gate_up_pair_kernel[(blocks, pairs)](
        hidden_states,
        hidden_states.stride(0),
        w13,
        w13.stride(0),
        w13.stride(1),
        act,
        w13_scale,
        topk_weights,
        topk_ids,
        slot_table,
        hits,
        host_experts,
        pairs,
        hidden,
        intermediate,
        TOP_K=topk_ids.shape[1],
        PAIRS=power_of_two(pairs),
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_K=hidden % launch.block_k == 0,
        WEIGHT_ON_INPUT=weight_on_input,
        INTERPRET=interpreted(),
        PDL=dependent_launch,
        num_warps=launch.num_warps,
        launch_pdl=dependent_launch,
    )
