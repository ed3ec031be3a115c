"""The down product for a few tokens: each token sums its own pairs; see ``gate_up_gemv``."""

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
def _down_token(
    operands,
    token,
    n0,
    hidden,
    intermediate,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVICTION: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    INTERPRET: tl.constexpr,
    PDL: tl.constexpr,
):
    """Columns from ``n0`` of ``out`` for ``token``; ``operands`` are those of the kernel."""
    act, w2, w_stride_slot, w_stride_row, out, out_stride, w_scale, router_weights, topk_ids, slot_table = (
        operands
    )
    columns = n0 + tl.arange(0, BLOCK_N)
    n = tl.minimum(columns, hidden - 1)[:, None]
    k = tl.arange(0, BLOCK_K)
    GROUPS: tl.constexpr = BLOCK_K if w_scale is None else BLOCK_K // _GROUP
    groups = intermediate // _GROUP
    if w_scale is not None:
        n = n[:, :, None]
        k = (tl.arange(0, GROUPS) * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    total = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    for k0 in range(0, intermediate, BLOCK_K):
        group = k0 // _GROUP + tl.arange(0, GROUPS)
        # Weights and ids are older than the kernel before this one, so their loads need not wait for it.
        weights = ()
        scales = ()
        for choice in tl.static_range(TOP_K):
            expert = tl.load(topk_ids + token * TOP_K + choice).to(tl.int32)
            slot = tl.maximum(expert, 0)
            if slot_table is not None:
                slot = tl.load(slot_table + slot)
            at = w2 + slot.to(tl.int64) * w_stride_slot + n * w_stride_row + k0 + k[None]
            inside = expert >= 0
            if not EVEN_K:
                inside = inside & (k0 + k < intermediate)[None]
            # Triton knows no starred expression.
            w = tl.load(at, mask=inside, other=0.0, eviction_policy=EVICTION)
            weights = weights + (w,)  # type: ignore[assignment] # noqa: RUF005
            if w_scale is not None:
                rows = tl.maximum(expert, 0) * (hidden // _GROUP) + n0 // _GROUP
                scale = tl.load(w_scale + rows * groups + group, mask=group < groups, other=0.0)
                scales = scales + (scale,)  # type: ignore[assignment] # noqa: RUF005
        if PDL:
            tl.extra.cuda.gdc_wait()
        for choice in tl.static_range(TOP_K):
            pair = token * TOP_K + choice
            chosen = tl.load(topk_ids + pair) >= 0
            inside = chosen & (k0 + k < intermediate)
            a = tl.load(act + pair.to(tl.int64) * intermediate + k0 + k, mask=inside, other=0.0).to(
                tl.float32
            )
            if w_scale is None:
                if not WEIGHT_ON_INPUT:
                    a *= tl.load(router_weights + pair).to(tl.float32)
                total += weights[choice].to(tl.float32) * a[None, :]
            else:
                a, scale = quantize_groups(a, INTERPRET)
                if not WEIGHT_ON_INPUT:
                    scale *= tl.load(router_weights + pair).to(tl.float32)
                a = a.to(tl.float32)[None]
                total += tl.sum(weights[choice].to(tl.float32) * a, 2) * (scales[choice] * scale)[None]
    y = tl.sum(total, 1)
    tl.store(
        out + token.to(tl.int64) * out_stride + columns, y.to(out.dtype.element_ty), mask=columns < hidden
    )


@triton.jit(do_not_specialize=["num_pairs"])
def _down_token_kernel(
    act,
    w2,
    w_stride_slot,
    w_stride_row,
    out,
    out_stride,
    w_scale,  # of fp8 weights, else None
    router_weights,
    topk_ids,
    slot_table,
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
    token = tl.program_id(1)
    tokens = 1
    EVICTION: tl.constexpr = "evict_first" if host_experts is None else ""
    if host_experts is not None:
        other = tl.arange(0, PAIRS)
        ids = tl.load(topk_ids + other, mask=other < num_pairs, other=-1).to(tl.int32)
        hosted = tl.load(host_experts + ids, mask=ids >= 0, other=0) != 0
        # Several pairs have such an expert, perhaps the same: the first token's program works for all tokens.
        several = tl.sum(hosted.to(tl.int32), 0) > 1
        tokens = tl.where(several, tl.where(token == 0, tl.num_programs(1), 0), 1)
    operands = (
        act,
        w2,
        w_stride_slot,
        w_stride_row,
        out,
        out_stride,
        w_scale,
        router_weights,
        topk_ids,
        slot_table,
    )
    for i in tl.range(0, tokens, disable_licm=True):
        _down_token(
            operands,
            token + i,
            tl.program_id(0) * BLOCK_N,
            hidden,
            intermediate,
            TOP_K,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            EVICTION,
            WEIGHT_ON_INPUT,
            INTERPRET,
            PDL,
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@ranged("down")
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
    w2_scale: torch.Tensor | None = None,
    host_experts: torch.Tensor | None = None,
) -> None:
    """Write ``out`` (``[M, H]``): each token's sum over its choices, in float32, rounded once.

    With ``host_experts`` (``[E]`` bool), and several pairs that have such experts, programs go through all
    tokens. With fp8 weights, whose scales are given, ``act`` is float32 and quantised here.
    """
    tokens, top_k = topk_ids.shape
    hidden, intermediate = out.shape[1], act.shape[1]
    blocks = triton.cdiv(hidden, launch.block_n)
    _down_token_kernel[(blocks, tokens)](
        act,
        w2,
        w2.stride(0),
        w2.stride(1),
        out,
        out.stride(0),
        w2_scale,
        topk_weights,
        topk_ids,
        slot_table,
        host_experts,
        topk_ids.numel(),
        hidden,
        intermediate,
        TOP_K=top_k,
        PAIRS=power_of_two(topk_ids.numel()),
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN_K=intermediate % launch.block_k == 0,
        WEIGHT_ON_INPUT=weight_on_input,
        INTERPRET=interpreted(),
        PDL=dependent_launch,
        num_warps=launch.num_warps,
        launch_pdl=dependent_launch,
    )
