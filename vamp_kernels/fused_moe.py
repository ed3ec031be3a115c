"""The routed part of an MoE layer: the op, and what it computes as a plain torch reference."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from vamp_kernels.arguments import (
    MoeArguments,
    check,
    check_for_kernels,
    check_values,
    specialised_misfit,
)
from vamp_kernels.launch import (
    FP8,
    SCALE_BLOCK,
    STAGE_ALL_ROWS,
    GemmLaunch,
    GemvLaunch,
    MoeLaunch,
    SpecialisedLaunch,
    check_launch,
    check_specialised,
    choose_launch,
    device_limits,
)
from vamp_kernels.ranges import ranged
from vamp_kernels.workspace import Workspace


@ranged("layer")
def fused_moe(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    slot_table: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    hits: torch.Tensor | None = None,
    host_experts: torch.Tensor | None = None,
    staging_slots: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    launch: MoeLaunch | None = None,
    after_wait: bool = False,
) -> torch.Tensor:
    """``fused_moe_torch`` in Triton, with bf16, fp16 or fp8 products accumulated in float32.

    Nothing is read back to the host, so it can be captured in a CUDA graph; with a workspace and ``out``, the
    second call of a shape allocates nothing. The result does not depend on the slots, nor on where they lie
    (in this device's memory, a peer's or the host's), bit for bit.

    With ``host_experts``, what lies in host memory crosses the link once, while the rest of the layer goes
    on: experts of at most one tile (``block_m`` rows, a choice of ``launch``) are read in place by a few
    programs that start first, and larger ones are copied to ``staging_slots``; from ``STAGE_ALL_ROWS`` rows a
    tile on, all of them are. Where slots do not suffice, the rest are read in place, once for each tile or
    part of one that a program multiplies. Up to ``GEMV_TOKENS`` tokens (in fp8 ``GEMV_TOKENS_FP8``), one
    program reads the same rows for all pairs in turn, from its cache after the first. Without
    ``host_experts`` an expert may lie anywhere as well; host memory is then slower than it need be.

    Args:
        hidden_states: ``[M, H]``, bf16 or fp16, rows contiguous; M may be 0.
        w13: ``[S, 2 * I, H]``, gate rows, then up rows; the last dimension contiguous, else any strides. The
            dtype of ``hidden_states``, or ``float8_e4m3fn`` with scales, where H and I are multiples of 128.
        w2: ``[S, H, I]``, dtype of ``w13``; the last dimension contiguous, else any strides.
        topk_weights: ``[M, K]``, floating point, contiguous; K at most 16.
        topk_ids: ``[M, K]``, int32 or int64, contiguous, values in -1..E-1, where -1 is padding. They are not
            checked; nor are those of ``slot_table``.
        slot_table: ``[E]``, int32 or int64, contiguous, the slot of each expert; None means slot = expert id.
            E is at most 1024.
        apply_router_weight_on_input: scale the expert's input instead of its output.
        w13_scale: ``[E, 2 * I / 128, H / 128]`` float32, contiguous, by expert (not by slot): what a block of
            128 by 128 fp8 weights is multiplied by, ``weight_scale_inv`` of a checkpoint.
        w2_scale: ``[E, H / 128, I / 128]``, the same for ``w2``.
        out: ``[M, H]``, dtype of ``hidden_states``, rows contiguous; may be ``hidden_states`` itself.
        hits: ``[E]``, int32 or int64, contiguous; the pairs routed to each expert are added to it.
        host_experts: ``[E]`` bool, contiguous, the experts whose slot lies in host memory. Its values may
            change between replays of a graph; peer memory counts as this device's.
        staging_slots: ``[C]`` int32, contiguous, slots of ``w13`` and ``w2`` in this device's memory that
            nothing else reads: scratch, like the workspace. C may be 0, and the last of them -1, which is no
            slot: so a captured graph can be given fewer later. The slots of ``w13`` and ``w2`` must then be
            contiguous and their addresses, strides and sizes multiples of 16 bytes.
        workspace: scratch to reuse between calls in one stream's order.
        launch: what to launch, instead of ``choose_launch``.
        after_wait: the stream was just made to wait for another, which writes what is read here: no kernel is
            launched early, as a dependent of the one before the wait.

    Returns:
        ``[M, H]``, ``out`` if given.

    Raises:
        ValueError: naming the argument whose shape, dtype, device or strides do not fit, or that the device
            cannot take: fp8 needs compute capability 8.9.
        ImportError: where Triton is not installed.
    """
    a = MoeArguments(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        slot_table,
        apply_router_weight_on_input,
        w13_scale,
        w2_scale,
        torch.empty_like(hidden_states) if out is None else out,
        hits,
        host_experts,
        staging_slots,
    )
    check(a)
    check_for_kernels(a)
    if hidden_states.shape[0] == 0:
        return a.out
    launch = _checked_launch(a, launch)
    workspace = workspace or Workspace(hidden_states.device)
    _check_device(hidden_states.device, workspace)
    up, down, pdl = launch.gate_up, launch.down, launch.dependent_launch and not after_wait
    if isinstance(up, GemvLaunch) and isinstance(down, GemvLaunch):
        _by_pair(a, up, down, pdl, workspace)
    elif not isinstance(up, GemvLaunch) and not isinstance(down, GemvLaunch):
        _by_tile(a, up, down, pdl, workspace)
    return a.out


def _checked_launch(a: MoeArguments, launch: MoeLaunch | None) -> MoeLaunch:
    """``launch``, or a choice; raises ``ValueError`` where the arguments or the device are not for it."""
    limits, misfit = device_limits(a.hidden_states.device), specialised_misfit(a)
    (tokens, top_k), (hidden, intermediate) = a.topk_ids.shape, a.w2.shape[1:]
    if launch is None:
        limits = replace(limits, specialised=limits.specialised and not misfit)
        return choose_launch(tokens, hidden, intermediate, a.experts, top_k, a.w13.dtype, limits)
    check_launch(launch, a.w13.dtype)
    check_specialised(launch, hidden, intermediate, limits)
    if misfit and any(isinstance(stage, SpecialisedLaunch) for stage in (launch.gate_up, launch.down)):
        raise ValueError(misfit)
    return launch


def _check_device(device: torch.device, workspace: Workspace) -> None:
    """Raise ``ValueError`` where kernels do not run on ``device``, or ``workspace`` is of another."""
    from vamp_kernels.operands import interpreted

    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        expected = "cuda, or cpu with TRITON_INTERPRET=1 set before Triton is imported"
        raise ValueError(f"hidden_states is on {device}, expected {expected}")
    if workspace.device.type != device.type or workspace.device.index not in (None, device.index):
        raise ValueError(f"workspace is on {workspace.device}, expected {device}, as hidden_states")


def _by_pair(
    a: MoeArguments, up_launch: GemvLaunch, down_launch: GemvLaunch, pdl: bool, workspace: Workspace
) -> None:
    from vamp_kernels import down_gemv, gate_up_gemv

    dtype = torch.float32 if a.w13.dtype == FP8 else a.w13.dtype
    act = workspace.take("act", (a.topk_ids.numel(), a.w2.shape[2]), dtype)
    slots, on_input = a.slot_table, a.weight_on_input
    hosts = a.host_experts if len(a.topk_ids) > 1 else None  # one token reads every expert once
    router = (a.topk_weights, a.topk_ids)
    gate_up_gemv.gate_up_pairs(
        a.hidden_states, a.w13, *router, act, up_launch, slots, a.hits, on_input, pdl, a.w13_scale, hosts
    )
    down_gemv.down_tokens(act, a.w2, *router, a.out, down_launch, slots, on_input, pdl, a.w2_scale, hosts)


def _by_tile(
    a: MoeArguments,
    up_launch: GemmLaunch | SpecialisedLaunch,
    down_launch: GemmLaunch | SpecialisedLaunch,
    pdl: bool,
    workspace: Workspace,
) -> None:
    from vamp_kernels import combine, down, gate_up, quantize, residency, route

    (tokens, hidden), pairs, intermediate = a.hidden_states.shape, a.topk_ids.numel(), a.w2.shape[2]
    act = workspace.take("act", (pairs, intermediate), a.w13.dtype)
    partial = workspace.take("partial", (pairs, hidden), a.hidden_states.dtype)
    x, x_scale, act_scale = a.hidden_states, None, None
    if a.w13_scale is not None:
        x = workspace.take("x", (tokens, hidden), FP8)
        x_scale = workspace.take("x_scale", (tokens, hidden // SCALE_BLOCK), torch.float32)
        act_scale = workspace.take("act_scale", (pairs, intermediate // SCALE_BLOCK), torch.float32)
        quantize.quantize(a.hidden_states, x, x_scale, dependent_launch=pdl)
    block_m, staging = up_launch.block_m, a.staging_slots
    hosts, stage_all = a.host_experts, block_m >= STAGE_ALL_ROWS
    if staging is not None and not (staging.numel() and (stage_all or tokens > block_m)):
        staging = None  # none can be staged, or no expert has two tiles
    stage_all = stage_all and staging is not None
    routing = route.route(
        a.topk_ids, a.experts, block_m, workspace, a.slot_table, a.hits, pdl, hosts, staging, stage_all
    )
    up_product = functools.partial(
        gate_up.gate_up,
        x,
        a.w13,
        a.topk_weights,
        routing,
        act,
        up_launch,
        a.weight_on_input,
        x_scale=x_scale,
        w13_scale=a.w13_scale,
        act_scale=act_scale,
    )
    down_product = functools.partial(
        down.down,
        act,
        a.w2,
        a.topk_weights,
        routing,
        partial,
        down_launch,
        a.weight_on_input,
        act_scale=act_scale,
        w2_scale=a.w2_scale,
    )
    if staging is not None:
        staged_up, staged_down = (functools.partial(f, staged=True) for f in (up_product, down_product))
        residency.run_staged(a.w13, a.w2, routing, staged_up, staged_down, workspace)
    up_product(dependent_launch=pdl)
    down_product(dependent_launch=pdl)
    if staging is None:
        combine.combine(partial, a.topk_ids, a.out, pdl)
    elif not stage_all:
        residency.join(workspace)
        combine.combine(partial, a.topk_ids, a.out)  # waits for two streams, so no dependent launch
    else:
        combine.combine(partial, a.topk_ids, a.out, host_experts=hosts, hosted=False)
        residency.join(workspace)
        combine.combine(partial, a.topk_ids, a.out, host_experts=hosts, hosted=True)


def fused_moe_torch(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    slot_table: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over a token's experts of ``weight * (silu(x @ gate.T) * (x @ up.T)) @ down.T``.

    The arithmetic is float32 throughout and rounded once, at the end. Experts are visited by id, so the
    result does not depend on the slots they lie in, bit for bit. A router weight on the input multiplies the
    first product. With fp8 weights, what is multiplied is the value of the weights times their scales, and of
    ``x`` and the activation as quantised by row and group of 128 columns.

    Args:
        hidden_states: ``[M, H]``, bf16, fp16 or fp32; M may be 0.
        w13: ``[S, 2 * I, H]``, dtype of ``hidden_states``, or ``float8_e4m3fn`` with scales; gate rows, then
            up rows, of the expert in each slot. Any strides, as of a view over interleaved records.
        w2: ``[S, H, I]``, dtype of ``w13``; any strides.
        topk_weights: ``[M, K]``, floating point.
        topk_ids: ``[M, K]``, int32 or int64, expert ids; -1 is padding and contributes nothing.
        slot_table: ``[E]``, int32 or int64, the slot to read each expert from; None means slot = expert id.
        apply_router_weight_on_input: scale the expert's input instead of its output.
        w13_scale: ``[E, 2 * I / 128, H / 128]`` float32, by expert.
        w2_scale: ``[E, H / 128, I / 128]`` float32, by expert.

    Returns:
        ``[M, H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: naming the argument whose shape, dtype or values do not fit.
        ImportError: where Triton is not installed.
    """
    a = MoeArguments(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        slot_table,
        apply_router_weight_on_input,
        w13_scale,
        w2_scale,
        out=hidden_states,
    )
    check(a)
    check_values(a)
    from vamp_kernels import combine, down, gate_up

    shape = (*topk_ids.shape, hidden_states.shape[1])
    pairs = torch.zeros(shape, dtype=torch.float32, device=hidden_states.device)
    for expert in range(a.experts):
        rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        slot = expert if slot_table is None else int(slot_table[expert])
        scales = [None if s is None else s[expert] for s in (w13_scale, w2_scale)]
        weight = topk_weights[rows, choices, None].float()
        on_input, on_output = (weight, 1.0) if apply_router_weight_on_input else (None, weight)
        act = gate_up.gate_up_torch(hidden_states[rows], w13[slot], scales[0], on_input)
        pairs[rows, choices] = down.down_torch(act, w2[slot], scales[1]) * on_output
    return combine.combine_torch(pairs.flatten(0, 1), topk_ids).to(hidden_states.dtype)
