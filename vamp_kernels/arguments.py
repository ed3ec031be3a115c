"""The arguments of ``fused_moe`` and of its reference, and what has to hold of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vamp_kernels.launch import FP8, SCALE_BLOCK

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*KERNEL_DTYPES, torch.float32)
ID_DTYPES = (torch.int32, torch.int64)
MAX_EXPERTS, MAX_TOP_K = 1024, 16
COPY_BYTES = 16  # what a gather copy moves is a multiple of it


@dataclass(frozen=True)
class MoeArguments:
    """What ``fused_moe`` takes, under its names."""

    hidden_states: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    slot_table: torch.Tensor | None
    weight_on_input: bool
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    out: torch.Tensor
    hits: torch.Tensor | None = None
    host_experts: torch.Tensor | None = None
    staging_slots: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return self.w13.shape[0] if self.slot_table is None else self.slot_table.shape[0]


def check(a: MoeArguments) -> None:
    """Raise ``ValueError`` naming the argument whose shape or dtype does not fit; reads no tensor data."""
    _require(a.hidden_states.dim() == 2, "hidden_states", a.hidden_states, "[M, H]")
    _require(a.hidden_states.dtype in FLOAT_DTYPES, "hidden_states", a.hidden_states, "bf16, fp16 or fp32")
    tokens, hidden = a.hidden_states.shape
    _require(a.w13.dim() == 3 and a.w13.shape[1] % 2 == 0, "w13", a.w13, f"[S, 2 * I, {hidden}]")
    _require(a.w13.shape[2] == hidden, "w13", a.w13, f"[S, 2 * I, {hidden}]")
    slots, intermediate = a.w13.shape[0], a.w13.shape[1] // 2
    _require(a.w2.shape == (slots, hidden, intermediate), "w2", a.w2, f"[{slots}, {hidden}, {intermediate}]")
    _require(
        a.topk_ids.dim() == 2 and a.topk_ids.shape[0] == tokens, "topk_ids", a.topk_ids, f"[{tokens}, K]"
    )
    _require(a.topk_ids.dtype in ID_DTYPES, "topk_ids", a.topk_ids, "int32 or int64")
    shape = a.topk_ids.shape
    _require(a.topk_weights.shape == shape, "topk_weights", a.topk_weights, f"{list(shape)}")
    _require(a.topk_weights.is_floating_point(), "topk_weights", a.topk_weights, "floating point")
    if a.slot_table is not None:
        _require(a.slot_table.dim() == 1, "slot_table", a.slot_table, "[E]")
        _require(a.slot_table.dtype in ID_DTYPES, "slot_table", a.slot_table, "int32 or int64")
    scaled = a.w13_scale is not None or a.w2_scale is not None
    dtype = FP8 if scaled else a.hidden_states.dtype
    expected = f"{dtype}, as there are scales" if scaled else f"{dtype}, as hidden_states"
    for name, weight in (("w13", a.w13), ("w2", a.w2)):
        _require(weight.dtype == dtype, name, weight, expected)
    if scaled:
        _check_scales(a, hidden, intermediate)


def _check_scales(a: MoeArguments, hidden: int, intermediate: int) -> None:
    multiples = hidden % SCALE_BLOCK == 0 and intermediate % SCALE_BLOCK == 0
    _require(multiples, "w13", a.w13, f"H and I that are multiples of {SCALE_BLOCK} for fp8")
    columns, rows = hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK
    for name, scale, shape in (
        ("w13_scale", a.w13_scale, (a.experts, 2 * rows, columns)),
        ("w2_scale", a.w2_scale, (a.experts, columns, rows)),
    ):
        if scale is None:
            raise ValueError(f"{name} is None, expected {list(shape)} float32, as the other scale is given")
        _require(scale.shape == shape and scale.dtype == torch.float32, name, scale, f"{list(shape)} float32")


def check_values(a: MoeArguments) -> None:
    """Raise ``ValueError`` naming what has ids or slots out of range; reads both back to the host."""
    for name, values, low, high in (
        ("topk_ids", a.topk_ids, -1, a.experts),
        ("slot_table", a.slot_table, 0, a.w13.shape[0]),
    ):
        if values is not None and not bool(((values >= low) & (values < high)).all()):
            raise ValueError(f"{name} has values outside {low}..{high - 1}")


def check_for_kernels(a: MoeArguments) -> None:
    """What the kernels need beyond ``check``."""
    hidden_states, experts = a.hidden_states, a.experts
    _require(hidden_states.dtype in KERNEL_DTYPES, "hidden_states", hidden_states, "bf16 or fp16")
    _require(len(a.w13) >= 1, "w13", a.w13, "one slot or more")
    counted = ("w13", a.w13) if a.slot_table is None else ("slot_table", a.slot_table)
    _require(1 <= experts <= MAX_EXPERTS, *counted, f"1..{MAX_EXPERTS} experts")
    _require(1 <= a.topk_ids.shape[1] <= MAX_TOP_K, "topk_ids", a.topk_ids, f"[M, 1..{MAX_TOP_K}]")
    _require(a.out.shape == hidden_states.shape, "out", a.out, f"{list(hidden_states.shape)}")
    _require(a.out.dtype == hidden_states.dtype, "out", a.out, f"{hidden_states.dtype}, as hidden_states")
    if len(a.out) > 1 and a.out.stride(0) < a.out.shape[1]:
        raise ValueError(f"out has strides {a.out.stride()}, expected rows that do not overlap")
    if a.hits is not None:
        fits = a.hits.shape == (experts,) and a.hits.dtype in ID_DTYPES
        _require(fits, "hits", a.hits, f"[{experts}] int32 or int64")
    if a.host_experts is not None:
        fits = a.host_experts.shape == (experts,) and a.host_experts.dtype == torch.bool
        _require(fits, "host_experts", a.host_experts, f"[{experts}] bool")
    if a.staging_slots is not None:
        fits = a.staging_slots.dim() == 1 and a.staging_slots.dtype == torch.int32
        _require(fits, "staging_slots", a.staging_slots, "[C] int32")
        if a.host_experts is None:
            raise ValueError("staging_slots is given, expected host_experts with it")
    _check_places(a)
    if a.staging_slots is not None:
        check_records("w13", a.w13)
        check_records("w2", a.w2)


def _check_places(a: MoeArguments) -> None:
    """Devices and strides."""
    with_strides = ("hidden_states", "w13", "w2", "out")
    for name, tensor in vars(a).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device != a.hidden_states.device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected {a.hidden_states.device}, as hidden_states"
            )
        if name in with_strides and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, expected 1 in the last dimension")
        if name not in with_strides and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, expected a contiguous tensor")


def check_records(name: str, records: torch.Tensor) -> None:
    """Raise ``ValueError`` naming the argument ``name`` unless a gather copy can move its slots."""
    item = records.element_size()
    if not (records.dim() >= 2 and records[0].is_contiguous()):
        raise ValueError(f"{name} has strides {records.stride()}, expected slots that are contiguous to copy")
    sizes = {
        "address": records.data_ptr(),
        "slot stride": records.stride(0) * item,
        "slot": records[0].numel() * item,
    }
    for what, nbytes in sizes.items():
        if nbytes % COPY_BYTES:
            raise ValueError(
                f"{name} has a {what} of {nbytes} bytes, expected a multiple of {COPY_BYTES} to copy"
            )


def specialised_misfit(a: MoeArguments) -> str:
    """What keeps the specialised GEMMs from these arguments, as a line for an error; else an empty string.

    Weights come by the copy engine, rows of ``hidden_states`` by copies of 16 bytes at 32-bit offsets.
    """
    x = a.hidden_states
    if misfit := _addresses_misfit("hidden_states", x, 32) or weights_misfit(a.w13, a.w2):
        return misfit
    if x.stride(0) * len(x) >= 1 << 31:
        return "hidden_states spans 2**31 elements or more, expected fewer to be specialised"
    return ""


def weights_misfit(w13: torch.Tensor, w2: torch.Tensor) -> str:
    """The same for the weights alone, whatever the step."""
    return _addresses_misfit("w13", w13, COPY_BYTES) or _addresses_misfit("w2", w2, COPY_BYTES)


def _addresses_misfit(name: str, tensor: torch.Tensor, multiple: int) -> str:
    strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
    if tensor.data_ptr() % COPY_BYTES or any(stride % multiple for stride in strides):
        found = f"address {tensor.data_ptr():#x} and strides of {strides} bytes"
        return f"{name} has {found}, expected multiples of {multiple} to be specialised"
    return ""


def _require(holds: bool, name: str, tensor: torch.Tensor, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, expected {expected}")
