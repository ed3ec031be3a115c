"""Engine options that VAMP cannot work with, refused before anything is loaded.

Each rule reads one setting of the finished ``VllmConfig`` and says which values work, why the others do not,
and what to do instead. The first violated rule is reported, in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm.envs as envs

from vamp_integration.model_rules import ARCHITECTURE, NO_EXPERTS, QUANTIZATION, Refusal, refused_experts
from vamp_integration.settings import LOAD_FORMAT
from vamp_integration.supported import refused_architecture, refused_quantization
from vamp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: Formats whose loader fills the parameters that the model created. The sharded, tensorizer and IPC loaders
#: replace them or drop tensors that share a storage, as those of a slab do
#: (vllm/model_executor/model_loader/sharded_state_loader.py).
INNER_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "pt", "dummy"})

#: vLLM's kernels that take experts where they lie; "auto" is Triton on GPU and the native kernel on CPU.
MOE_BACKENDS = frozenset({"auto", "triton"})


class Rule(NamedTuple):
    """``setting`` (as the user writes it) may only have a ``value`` for which ``works`` holds."""

    setting: str
    value: Callable[[VllmConfig], Any]
    works: Callable[[Any], bool]
    reason: str
    remedy: str

    def message(self, config: VllmConfig) -> str | None:
        """The one-line complaint, or None where the rule is kept."""
        value = self.value(config)
        if self.works(value):
            return None
        return Refusal(self.setting, self.reason, self.remedy).message(value)


def check_engine(config: VllmConfig) -> None:
    """Raise ``ConfigError`` (one line) for the first rule that ``config`` violates."""
    for rule in RULES:
        if (message := rule.message(config)) is not None:
            raise ConfigError(message)


def _off(value: Any) -> bool:
    return not value


def _model_rule(refusal: Refusal, value: Callable[[VllmConfig], str]) -> Rule:
    """The rule of a refusal that ``vamp doctor`` makes too, from a model's ``config.json``."""
    return Rule(refusal.setting, value, _off, refusal.reason, refusal.remedy)


def _one(value: Any) -> bool:
    return bool(value == 1)


def _ours(value: Any) -> bool:
    return str(value).startswith("vamp_integration.")


def _class_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else str(cls)


def _inner_format(config: VllmConfig) -> str:
    extra = config.load_config.model_loader_extra_config
    return str(extra.get("inner", "auto")) if isinstance(extra, dict) else type(extra).__name__


def _attention_backends(config: VllmConfig) -> str:
    attention = config.attention_config
    chosen = [attention.backend, *attention.backend_per_kind.values()]
    return ",".join(backend.name for backend in chosen if backend is not None)


def _moe_backend(config: VllmConfig) -> str:
    backend, device = config.kernel_config.moe_backend, config.device_config.device_type
    return f"{backend} on a CPU" if device == "cpu" and backend != "auto" else backend


def _offload_gib(config: VllmConfig) -> float:
    return config.offload_config.uva.cpu_offload_gb


def _runner(config: VllmConfig) -> str:
    if config.device_config.device_type == "cpu" or config.use_v2_model_runner:
        return ""
    return "vLLM's first model runner"


def _connector(config: VllmConfig) -> str | None:
    transfer = config.kv_transfer_config
    return None if transfer is None else transfer.kv_connector


_EXPERT_SHARDS = "every rank must hold a shard of every expert"
_TENSOR = "use --tensor-parallel-size"
_OWN_MEMORY = "it moves the memory that VAMP places"

RULES: tuple[Rule, ...] = (
    Rule(
        "--load-format",
        lambda c: c.load_config.load_format,
        lambda v: v == LOAD_FORMAT,
        "the VAMP worker needs experts placed by its loader",
        f"use --load-format {LOAD_FORMAT}",
    ),
    Rule(
        "--model-loader-extra-config inner",
        _inner_format,
        lambda v: v in INNER_FORMATS,
        "this loader replaces the parameters or shares their storage",
        f"use one of {', '.join(sorted(INNER_FORMATS))}",
    ),
    Rule(
        "--worker-cls",
        lambda c: _class_name(c.parallel_config.worker_cls),
        _ours,
        "VAMP needs its own worker",
        "leave --worker-cls out, and vamp in VLLM_PLUGINS where that is set",
    ),
    Rule(
        "--scheduler-cls",
        lambda c: _class_name(c.scheduler_config.scheduler_cls),
        _ours,
        "VAMP needs its own scheduler",
        "leave --scheduler-cls out",
    ),
    _model_rule(NO_EXPERTS, lambda c: refused_experts(c.model_config.is_moe)),
    _model_rule(ARCHITECTURE, refused_architecture),
    _model_rule(QUANTIZATION, refused_quantization),
    Rule(
        "--enable-elastic-ep",
        lambda c: c.parallel_config.enable_elastic_ep,
        _off,
        _EXPERT_SHARDS,
        _TENSOR,
    ),
    Rule("--enable-eplb", lambda c: c.parallel_config.enable_eplb, _off, _EXPERT_SHARDS, _TENSOR),
    Rule(
        "--enable-expert-parallel",
        lambda c: c.parallel_config.enable_expert_parallel,
        _off,
        _EXPERT_SHARDS,
        _TENSOR,
    ),
    Rule(
        "--pipeline-parallel-size",
        lambda c: c.parallel_config.pipeline_parallel_size,
        _one,
        "a move must happen in the same step on every rank",
        _TENSOR,
    ),
    Rule(
        "--decode-context-parallel-size",
        lambda c: c.parallel_config.decode_context_parallel_size,
        _one,
        "ranks would hold different KV blocks",
        "use 1",
    ),
    Rule(
        "--prefill-context-parallel-size",
        lambda c: c.parallel_config.prefill_context_parallel_size,
        _one,
        "ranks would hold different KV blocks",
        "use 1",
    ),
    Rule(
        "--data-parallel-size",
        lambda c: c.parallel_config.data_parallel_size,
        _one,
        "replicas of an MoE model share its experts",
        "use 1 and start one server per replica",
    ),
    Rule(
        "--enable-dbo, --ubatch-size",
        lambda c: c.parallel_config.use_ubatching,
        _off,
        "two half-batches in flight would see different expert slots",
        "leave both out",
    ),
    Rule(
        "--enable-lora",
        lambda c: c.lora_config is not None,
        _off,
        "LoRA wraps the expert layers that VAMP replaces",
        "merge the adapter into the checkpoint",
    ),
    Rule(
        "--speculative-config",
        lambda c: c.speculative_config.method if c.speculative_config is not None else None,
        _off,
        "the drafter's experts and KV blocks are not accounted for",
        "leave it out",
    ),
    Rule(
        "--enable-sleep-mode",
        lambda c: c.model_config.enable_sleep_mode,
        _off,
        _OWN_MEMORY,
        "leave it out",
    ),
    Rule(
        "--enable-cumem-allocator",
        lambda c: c.model_config.enable_cumem_allocator,
        _off,
        _OWN_MEMORY,
        "leave it out",
    ),
    Rule(
        "--weight-transfer-config",
        lambda c: c.weight_transfer_config is not None,
        _off,
        "copies of experts in host memory would keep the old weights",
        "restart the server to change weights",
    ),
    Rule(
        "--cpu-offload-gb",
        _offload_gib,
        _off,
        "VAMP is itself the offloader of expert weights",
        "use 0 and set max_offload_ratio",
    ),
    Rule(
        "--offload-group-size",
        lambda c: c.offload_config.prefetch.offload_group_size,
        _off,
        "VAMP is itself the offloader of expert weights",
        "use 0 and set max_offload_ratio",
    ),
    Rule(
        "--kv-transfer-config kv_connector",
        _connector,
        lambda v: v in (None, "OffloadingConnector"),
        "it pins KV memory that VAMP remaps, or may copy from blocks that a restore takes",
        "use none, or OffloadingConnector",
    ),
    Rule(
        "--attention-config hisparse_config",
        lambda c: c.attention_config.hisparse_config is not None,
        _off,
        "it manages KV rows by itself",
        "leave it out",
    ),
    Rule(
        "--attention-backend",
        _attention_backends,
        lambda v: "FLEX_ATTENTION" not in v,
        "FlexAttention sizes its tables by the number of KV blocks, which changes",
        "leave it out",
    ),
    Rule(
        "VLLM_USE_V2_MODEL_RUNNER",
        _runner,
        _off,
        "stale ids in its block tables would outlive a block",
        "unset it, and leave out what vLLM names as not supported by the second runner",
    ),
    Rule(
        "--moe-backend",
        _moe_backend,
        lambda v: v in MOE_BACKENDS,
        "this kernel repacks the experts or copies them out of their slab",
        f"use {' or '.join(sorted(MOE_BACKENDS))}",
    ),
    Rule(
        "--enable-return-routed-experts",
        lambda c: c.aux_output_config.enable_return_routed_experts,
        _off,
        "expert ids are rewritten to slots before they are recorded",
        "leave it out",
    ),
    Rule(
        "VLLM_ENABLE_STARTUP_PLAN",
        lambda _: envs.VLLM_ENABLE_STARTUP_PLAN,
        _off,
        "a stored plan sizes the KV cache without the pages VAMP accounts for",
        "unset it or set it to 0",
    ),
)
