"""VAMP's own MoE kernel in the place of vLLM's: reads every expert at the slot that the slab names.

Stands in for ``quant_method.apply`` of a modular kernel without data or expert parallelism
(``vllm/model_executor/layers/fused_moe/modular_kernel.py``): the result is a new tensor, this rank's partial
sum, which the runner reduces. The runner has launched the shared experts itself, and waits for them
(``.../runner/moe_runner.py`` ``_apply_quant_method``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from vamp_integration.staging import Staging
from vamp_kernels.arguments import MAX_EXPERTS, MAX_TOP_K, weights_misfit
from vamp_kernels.fused_moe import fused_moe
from vamp_kernels.launch import MoeLaunch, choose_launch, device_limits, warm_sizes
from vamp_kernels.workspace import Workspace
from vamp_runtime.memory.slab import ExpertSlab


class SlotTables:
    """The slab's slot table on the device, at addresses that captured graphs may hold.

    Attributes:
        slots: int32 ``[layers, experts]``, the slot of each expert.
        hosted: bool ``[layers, experts]``, whether that slot lies in host memory.
    """

    def __init__(self, slab: ExpertSlab, device: torch.device) -> None:
        shape = (slab.geometry.layers, slab.geometry.experts)
        self._slab = slab
        self.slots = torch.empty(shape, dtype=torch.int32, device=device)
        self.hosted = torch.empty(shape, dtype=torch.bool, device=device)
        on_gpu = device.type == "cuda"
        self._pinned = [
            torch.empty_like(t, device="cpu", pin_memory=on_gpu) for t in (self.slots, self.hosted)
        ]
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self.update()

    def update(self) -> None:
        """Take over the slab's table, for what is queued on the current stream from now on.

        Waits for no kernel, only for the copies that the update before has queued.
        """
        if self._copied is not None:
            self._copied.synchronize()
        slots, hosted = self._pinned
        # As bytes: a tensor of nested lists takes a millisecond of the step.
        table = bytearray().join(self._slab.slot_table)
        slots.copy_(torch.frombuffer(table, dtype=torch.int32).view_as(slots))
        # The reads through home aliases are those of redirected groups; own records are in HBM, and a peer's
        # HBM is read as quickly as the kernel asks.
        torch.ge(slots, self._slab.geometry.host_slot_base, out=hosted)
        self.slots.copy_(slots, non_blocking=True)
        self.hosted.copy_(hosted, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass(frozen=True)
class SlotKernel:
    """One layer's routed experts.

    Attributes:
        w13: ``[slots, 2 * intermediate, hidden]``, over all slots of the layer.
        w2: ``[slots, hidden, intermediate]``.
        slots: int32 ``[experts]``, and hosted: bool ``[experts]``, rows of the device's slot tables.
        hits: int64 ``[experts]``, counted by the kernel.
        weight_on_input: the router weight multiplies an expert's input instead of its output.
        workspace: shared by all layers, which run one after the other.
        dtype: of the activations.
        w13_scale, w2_scale: of fp8 weights in blocks of 128 by 128, by expert; else ``None``.
        staging, layer: what stages host-backed experts, and the index of this layer in it.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    slots: torch.Tensor
    hosted: torch.Tensor
    hits: torch.Tensor
    weight_on_input: bool
    workspace: Workspace
    dtype: torch.dtype
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    staging: Staging | None = None
    layer: int = 0

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]``, the dtype of ``x``; see ``vamp_kernels.fused_moe``."""
        router, staging = (x, topk_weights, topk_ids), self.staging
        if staging is None:
            return self._run(*router, self.slots, self.hosted, None)
        if not staging.wanted(x.shape[0]):
            return self._run(*router, self.slots, self.hosted, staging.fill(x.shape[0]))
        with staging.ahead(self.layer, x.shape[0]):
            slots, hosted = staging.slots[self.layer], staging.hosted[self.layer]
            return self._run(*router, slots, hosted, None, after_wait=True)

    def _run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        slots: torch.Tensor,
        hosted: torch.Tensor,
        free: torch.Tensor | None,
        after_wait: bool = False,
    ) -> torch.Tensor:
        return fused_moe(
            x,
            self.w13,
            self.w2,
            topk_weights,
            topk_ids,
            slots,
            self.weight_on_input,
            self.w13_scale,
            self.w2_scale,
            hits=self.hits,
            host_experts=hosted,
            staging_slots=free,
            workspace=self.workspace,
            after_wait=after_wait,
        )

    def warm_up(self, max_tokens: int, top_k: int) -> None:
        """Compile what steps of up to ``max_tokens`` tokens launch, before a request has to wait for it.

        The largest comes first, so that the workspace grows once.
        """
        device, experts, (hidden, intermediate) = self.slots.device, len(self.slots), self.w2.shape[1:]
        shape, limits = (hidden, intermediate, experts, top_k, self.w13.dtype), device_limits(device)
        limits = replace(limits, specialised=limits.specialised and not weights_misfit(self.w13, self.w2))

        def choose(tokens: int) -> MoeLaunch:
            return choose_launch(tokens, *shape, limits)

        for tokens in warm_sizes(max_tokens, choose):
            ids = torch.arange(tokens * top_k, dtype=torch.int32, device=device)
            ids = (ids % experts).view(tokens, top_k)
            x = torch.zeros(tokens, hidden, dtype=self.dtype, device=device)
            weights = torch.ones_like(ids, dtype=torch.float32)
            self(x, weights, ids)
            if self.staging is not None:  # once something is out, steps launch others
                self._run(x, weights, ids, self.slots, self.hosted, None, after_wait=True)
                if self.staging.fills(tokens):
                    self._run(x, weights, ids, self.slots, self.hosted, self.staging.free)


def misfit(layer: Any) -> str:
    """Why the kernel cannot compute this layer, for an error; else an empty string."""
    weight, config = layer.w13_weight, layer.moe_config
    kernel = getattr(layer.quant_method, "moe_kernel", None)  # none before the weights are read
    if layer.activation.value != "silu" or not config.is_act_and_mul or layer.swiglu_limit is not None:
        return f"its activation is {layer.activation.value}, not a plain SwiGLU"
    if config.experts_per_token > MAX_TOP_K or layer.local_num_experts > MAX_EXPERTS:
        return f"it has over {MAX_TOP_K} experts a token or {MAX_EXPERTS} experts"
    if config.has_bias or layer.expert_map is not None:
        return "it has biases or expert parallelism"
    if kernel is not None and kernel.can_overlap_shared_experts:
        return "it leaves the shared experts to its kernel"
    if weight.dtype == torch.float8_e4m3fn:
        # Smaller than the checkpoint's where vLLM has refined the scales to fit a shard.
        method = layer.quant_method
        blocks = list(getattr(method, "moe_block_shape", None) or method.weight_block_size or [])
        return "" if blocks == [128, 128] else f"its fp8 weights have scales of {blocks or 'another kind'}"
    return "" if weight.dtype in (torch.bfloat16, torch.float16) else f"its weights are {weight.dtype}"
