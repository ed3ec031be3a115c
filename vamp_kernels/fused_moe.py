"""The routed part of an MoE layer: the op, and what it computes as a plain torch reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vamp_kernels.launch import GemvLaunch, MoeLaunch, choose_launch, device_limits
from vamp_kernels.workspace import Workspace

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_EXPERTS, MAX_TOP_K = 1024, 16
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ID_DTYPES = (torch.int32, torch.int64)


def fused_moe(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    slot_table: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    *,
    out: torch.Tensor | None = None,
    hits: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    launch: MoeLaunch | None = None,
) -> torch.Tensor:
    """``fused_moe_torch`` in Triton, with bf16 or fp16 products accumulated in float32.

    Nothing is read back to the host, so it can be captured in a CUDA graph; with a workspace and ``out``, the
    second call of a shape allocates nothing. The result does not depend on the slots, bit for bit.

    Args:
        hidden_states: ``[M, H]``, bf16 or fp16, rows contiguous; M may be 0.
        w13: ``[S, 2 * I, H]``, gate rows, then up rows; the last dimension contiguous, else any strides.
        w2: ``[S, H, I]``; the last dimension contiguous, else any strides.
        topk_weights: ``[M, K]``, floating point, contiguous; K at most 16.
        topk_ids: ``[M, K]``, int32 or int64, contiguous, values in -1..E-1, where -1 is padding. They are not
            checked; nor are those of ``slot_table``.
        slot_table: ``[E]``, int32 or int64, contiguous, the slot of each expert; None means slot = expert id.
            E is at most 1024.
        out: ``[M, H]``, dtype of ``hidden_states``, rows contiguous; may be ``hidden_states`` itself.
        hits: ``[E]``, int32 or int64, contiguous; the pairs routed to each expert are added to it.
        workspace: scratch to reuse between calls in one stream's order.
        launch: what to launch, instead of ``choose_launch``.

    Returns:
        ``[M, H]``, ``out`` if given.

    Raises:
        ValueError: naming the argument whose shape, dtype, device or strides do not fit.
        ImportError: where Triton is not installed.
    """
    check_arguments(hidden_states, w13, w2, topk_weights, topk_ids, slot_table)
    experts = _num_experts(w13, slot_table)
    out = torch.empty_like(hidden_states) if out is None else out
    _check_kernel_arguments(hidden_states, w13, w2, topk_weights, topk_ids, slot_table, out, hits, experts)
    tokens, top_k = topk_ids.shape
    if tokens == 0:
        return out
    from vamp_kernels import combine, down, gate_up, gemv, route

    hidden, intermediate = w2.shape[1:]
    device = hidden_states.device
    launch = launch or choose_launch(
        tokens, hidden, intermediate, experts, top_k, hidden_states.dtype, device_limits(device)
    )
    workspace = workspace or Workspace(device)
    on_input, pdl = apply_router_weight_on_input, launch.dependent_launch
    act = workspace.take("act", (tokens * top_k, intermediate), hidden_states.dtype)
    if isinstance(launch.gate_up, GemvLaunch) and isinstance(launch.down, GemvLaunch):
        ids = topk_ids
        gemv.gate_up_pairs(
            hidden_states, w13, topk_weights, ids, act, launch.gate_up, slot_table, hits, on_input, pdl
        )
        gemv.down_tokens(act, w2, topk_weights, ids, out, launch.down, slot_table, on_input, pdl)
        return out
    if isinstance(launch.gate_up, GemvLaunch) or isinstance(launch.down, GemvLaunch):
        raise ValueError("launch mixes GEMV and GEMM, expected one kind for both products")
    if launch.gate_up.block_m != launch.down.block_m:
        raise ValueError(
            f"launch has block_m {launch.gate_up.block_m} and {launch.down.block_m}, expected one"
        )
    partial = workspace.take("partial", (tokens * top_k, hidden), hidden_states.dtype)
    routing = route.route(topk_ids, experts, launch.gate_up.block_m, workspace, slot_table, hits, pdl)
    gate_up.gate_up(hidden_states, w13, topk_weights, routing, act, launch.gate_up, on_input, pdl)
    down.down(act, w2, topk_weights, routing, partial, launch.down, on_input, pdl)
    combine.combine(partial, topk_ids, out, pdl)
    return out


def fused_moe_torch(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    slot_table: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """Sum over a token's experts of ``weight * (silu(x @ gate.T) * (x @ up.T)) @ down.T``.

    The arithmetic is float32 throughout and rounded once, at the end. Experts are visited by id, so the
    result does not depend on the slots they lie in, bit for bit.

    Args:
        hidden_states: ``[M, H]``, bf16, fp16 or fp32; M may be 0.
        w13: ``[S, 2 * I, H]``, dtype of ``hidden_states``; gate rows, then up rows, of the expert in each
            slot. Any strides, such as those of a view over interleaved records.
        w2: ``[S, H, I]``, dtype of ``hidden_states``; any strides.
        topk_weights: ``[M, K]``, floating point.
        topk_ids: ``[M, K]``, int32 or int64, expert ids; -1 is padding and contributes nothing.
        slot_table: ``[E]``, int32 or int64, the slot to read each expert from; None means slot = expert id.
        apply_router_weight_on_input: scale the expert's input instead of its output.

    Returns:
        ``[M, H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: naming the argument whose shape, dtype or values do not fit.
    """
    check_arguments(hidden_states, w13, w2, topk_weights, topk_ids, slot_table)
    _check_values(topk_ids, slot_table, experts=_num_experts(w13, slot_table), slots=w13.shape[0])
    tokens, hidden = hidden_states.shape
    pairs = torch.zeros(tokens, topk_ids.shape[1], hidden, dtype=torch.float32, device=hidden_states.device)
    for expert in range(_num_experts(w13, slot_table)):
        rows, choices = (topk_ids == expert).nonzero(as_tuple=True)
        if rows.numel() == 0:
            continue
        slot = expert if slot_table is None else int(slot_table[expert])
        weight = topk_weights[rows, choices, None].float()
        x = hidden_states[rows].float()
        if apply_router_weight_on_input:
            x = x * weight
        gate, up = (x @ w13[slot].float().T).chunk(2, dim=1)
        y = (F.silu(gate) * up) @ w2[slot].float().T
        pairs[rows, choices] = y if apply_router_weight_on_input else y * weight
    return pairs.sum(dim=1).to(hidden_states.dtype)


def check_arguments(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    slot_table: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` naming the argument whose shape or dtype does not fit; reads no tensor data."""
    _require(hidden_states.dim() == 2, "hidden_states", hidden_states, "[M, H]")
    _require(hidden_states.dtype in FLOAT_DTYPES, "hidden_states", hidden_states, "bf16, fp16 or fp32")
    tokens, hidden = hidden_states.shape
    _require(w13.dim() == 3 and w13.shape[1] % 2 == 0, "w13", w13, f"[S, 2 * I, {hidden}]")
    _require(w13.shape[2] == hidden, "w13", w13, f"[S, 2 * I, {hidden}]")
    slots, intermediate = w13.shape[0], w13.shape[1] // 2
    _require(w2.shape == (slots, hidden, intermediate), "w2", w2, f"[{slots}, {hidden}, {intermediate}]")
    for name, weight in (("w13", w13), ("w2", w2)):
        _require(
            weight.dtype == hidden_states.dtype, name, weight, f"{hidden_states.dtype}, as hidden_states"
        )
    _require(topk_ids.dim() == 2 and topk_ids.shape[0] == tokens, "topk_ids", topk_ids, f"[{tokens}, K]")
    _require(topk_ids.dtype in ID_DTYPES, "topk_ids", topk_ids, "int32 or int64")
    _require(topk_weights.shape == topk_ids.shape, "topk_weights", topk_weights, f"{list(topk_ids.shape)}")
    _require(topk_weights.is_floating_point(), "topk_weights", topk_weights, "floating point")
    if slot_table is not None:
        _require(slot_table.dim() == 1, "slot_table", slot_table, "[E]")
        _require(slot_table.dtype in ID_DTYPES, "slot_table", slot_table, "int32 or int64")


def _check_kernel_arguments(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    slot_table: torch.Tensor | None,
    out: torch.Tensor,
    hits: torch.Tensor | None,
    experts: int,
) -> None:
    """What the kernels need beyond ``check_arguments``."""
    _require(hidden_states.dtype in KERNEL_DTYPES, "hidden_states", hidden_states, "bf16 or fp16")
    _require(
        1 <= experts <= MAX_EXPERTS, "w13" if slot_table is None else "slot_table", w13, "1..1024 experts"
    )
    _require(1 <= topk_ids.shape[1] <= MAX_TOP_K, "topk_ids", topk_ids, f"[M, 1..{MAX_TOP_K}]")
    _require(out.shape == hidden_states.shape, "out", out, f"{list(hidden_states.shape)}")
    _require(out.dtype == hidden_states.dtype, "out", out, f"{hidden_states.dtype}, as hidden_states")
    if hits is not None:
        _require(
            hits.shape == (experts,) and hits.dtype in ID_DTYPES, "hits", hits, f"[{experts}] int32 or int64"
        )
    tensors = {
        "hidden_states": hidden_states,
        "w13": w13,
        "w2": w2,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        "slot_table": slot_table,
        "out": out,
        "hits": hits,
    }
    rows = ("hidden_states", "w13", "w2", "out")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected {hidden_states.device}, as hidden_states"
            )
        if name in rows and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, expected 1 in the last dimension")
        if name not in rows and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


def _num_experts(w13: torch.Tensor, slot_table: torch.Tensor | None) -> int:
    return w13.shape[0] if slot_table is None else slot_table.shape[0]


def _check_values(topk_ids: torch.Tensor, slot_table: torch.Tensor | None, experts: int, slots: int) -> None:
    for name, values, low, high in (
        ("topk_ids", topk_ids, -1, experts),
        ("slot_table", slot_table, 0, slots),
    ):
        if values is not None and not bool(((values >= low) & (values < high)).all()):
            raise ValueError(f"{name} has values outside {low}..{high - 1}")


def _require(holds: bool, name: str, tensor: torch.Tensor, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {expected}")
