"""From profiles to the cost model: which files an engine uses, and the parameters they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vamp_integration.settings import VampSettings
from vamp_profiles import ModelProfile, PolicyProfile, load_model, load_policy, shipped
from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.hit_rate import HitRate
from vamp_runtime.policy.parameters import CostParameters, RestoreParameters


@dataclass(frozen=True)
class Costs:
    """Everything that prices a decision of one engine."""

    policy: PolicyProfile
    parameters: CostParameters
    restore: RestoreParameters

    def hit_rate(self, ghost_blocks: int) -> HitRate:
        """An empty window; ``ghost_blocks`` evicted blocks are remembered for the reusable rate."""
        return HitRate(
            window_tokens=self.policy.hit_rate_window_tokens.value,
            window_s=self.policy.hit_rate_window.value,
            prior=self.policy.hit_rate_prior.value,
            prior_tokens=self.policy.hit_rate_prior_tokens.value,
            ghost_blocks=ghost_blocks,
        )


def model_profile(settings: VampSettings, hf_config: Any) -> ModelProfile:
    """The model profile of an engine: the named one, or with ``auto`` the shipped one for ``hf_config``.

    Raises ``ConfigError`` where none fits; ``ProfileError`` where a file is bad.
    """
    if settings.model != "auto":
        return load_model(settings.model)
    wanted = (getattr(hf_config, "hidden_size", None), getattr(hf_config, "moe_intermediate_size", None))
    for name in shipped("model"):
        profile = load_model(name)
        if (profile.hidden_size.value, profile.moe_intermediate_size.value) == wanted:
            return profile
    raise ConfigError(
        f"model: auto finds no shipped profile for hidden size {wanted[0]} and MoE intermediate size "
        f"{wanted[1]}; give the path of a model profile (shipped: {', '.join(shipped('model'))})"
    )


def engine_costs(settings: VampSettings, hf_config: Any, on_cpu: bool = True) -> Costs:
    """Profiles of ``settings`` as parameters; the user's ratio replaces the policy's.

    Raises ``ConfigError`` or ``ProfileError`` where a profile is missing or bad.
    """
    by_device = "cpu" if on_cpu else "paper"
    policy = load_policy(by_device if settings.policy == "auto" else settings.policy)
    model = model_profile(settings, hf_config)
    layers = getattr(hf_config, "num_hidden_layers", model.layers.value)
    parameters = CostParameters(
        alpha=policy.alpha.value,
        tau_s=policy.tau.value,
        t_prefill_s=model.prefill_s(layers),
        t_sched_s=policy.t_sched.value,
        t_queue_s=policy.t_queue.value,
        c_eff_s=policy.c_eff.value,
        horizon_steps=policy.horizon.value,
        max_offload_ratio=settings.max_offload_ratio,
    )
    restore = RestoreParameters(dead_zone=policy.dead_zone.value, min_dwell_s=policy.min_dwell.value)
    return Costs(policy, parameters, restore)
