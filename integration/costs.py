"""From profiles to the cost model: which files an engine uses, and the parameters they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vamp_integration.moe_shape import MoEShape, moe_shape
from vamp_integration.settings import VampSettings
from vamp_profiles import ModelProfile, PolicyProfile, Quantity, load_model, load_policy, shipped
from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.hit_rate import HitRate
from vamp_runtime.policy.measured import MeasuredParameters
from vamp_runtime.policy.parameters import CostParameters, RestoreParameters

# Profiles of measured models, which others are scaled from.
CPU_REFERENCE, GPU_REFERENCE = "tiny-qwen3-next", "qwen3-next-80b-a3b"


@dataclass(frozen=True)
class Costs:
    """Everything that prices a decision of one engine; ``measured`` where measurements do."""

    policy: PolicyProfile
    parameters: CostParameters
    restore: RestoreParameters
    measured: MeasuredParameters | None = None

    def hit_rate(self, ghost_blocks: int) -> HitRate:
        """An empty window; ``ghost_blocks`` evicted blocks are remembered for the reusable rate."""
        return HitRate(
            window_tokens=self.policy.hit_rate_window_tokens.value,
            window_s=self.policy.hit_rate_window.value,
            prior=self.policy.hit_rate_prior.value,
            prior_tokens=self.policy.hit_rate_prior_tokens.value,
            ghost_blocks=ghost_blocks,
        )


def model_profile(settings: VampSettings, hf_config: Any, on_cpu: bool = True) -> ModelProfile:
    """The model profile of an engine: the named one, or with ``auto`` the shipped one for ``hf_config``.

    Where none is shipped, the reference's prefill time is scaled by the weights that a token is multiplied
    with. Raises ``ConfigError`` where the configuration does not tell them; ``ProfileError`` where a file is
    bad.
    """
    if settings.model != "auto":
        return load_model(settings.model)
    shape = moe_shape(hf_config)
    if shape is None:
        raise ConfigError(
            "model: auto needs the sizes of the routed experts, which this model's configuration does not "
            f"name; give the path of a model profile (shipped: {', '.join(shipped('model'))})"
        )
    wanted = (shape.experts, shape.top_k, shape.hidden, shape.intermediate)
    for profile in map(load_model, shipped("model")):
        sizes = (profile.experts, profile.top_k, profile.hidden_size, profile.moe_intermediate_size)
        if tuple(size.value for size in sizes) == wanted:
            return profile
    return _scaled(load_model(CPU_REFERENCE if on_cpu else GPU_REFERENCE), shape)


def _scaled(reference: ModelProfile, shape: MoEShape) -> ModelProfile:
    """A profile for ``shape``, whose prefill takes time in proportion to the reference's."""
    measured = reference.prefill_layers.value
    weights = MoEShape(
        layers=measured,
        moe_layers=measured,
        experts=reference.experts.value,
        top_k=reference.top_k.value,
        hidden=reference.hidden_size.value,
        intermediate=reference.moe_intermediate_size.value,
    ).active_parameters
    prefill = reference.prefill.value * shape.active_parameters / weights

    def from_config(value: int, unit: str) -> Quantity[int]:
        return Quantity(value, unit, "configured", "the model's configuration")

    return ModelProfile(
        kind="model",
        name=f"scaled from {reference.name}",
        layers=from_config(shape.layers, "layer"),
        experts=from_config(shape.experts, "expert"),
        top_k=from_config(shape.top_k, "expert"),
        hidden_size=from_config(shape.hidden, "1"),
        moe_intermediate_size=from_config(shape.intermediate, "1"),
        weight_width=reference.weight_width,
        prefill=Quantity(prefill, "s/token", "configured", f"{reference.name}, by weights of a token"),
        prefill_layers=from_config(shape.layers, "layer"),
    )


def engine_costs(settings: VampSettings, hf_config: Any, on_cpu: bool = True) -> Costs:
    """Profiles of ``settings`` as parameters; the user's ratio replaces the policy's.

    Raises ``ConfigError`` or ``ProfileError`` where a profile is missing or bad.
    """
    by_device = "cpu" if on_cpu else "measured"
    policy = load_policy(by_device if settings.policy == "auto" else settings.policy)
    model = model_profile(settings, hf_config, on_cpu)
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
    return Costs(policy, parameters, restore, _measured(policy))


# What a profile has all of, or nothing of.
MEASURED = (
    "popularity_sigma",
    "popularity_prior_steps",
    "horizon_min",
    "horizon_max",
    "min_lookups",
    "fairness",
    "miss_weight",
    "reuse_prior_events",
    "reuse_half_life",
)


def _measured(policy: PolicyProfile) -> MeasuredParameters | None:
    """Parameters of the measured policy, or None where the profile is one of the paper's."""
    values = {name: getattr(policy, name) for name in MEASURED}
    missing = [name for name, quantity in values.items() if quantity is None]
    if len(missing) == len(MEASURED):
        return None
    if missing:
        raise ConfigError(
            f"policy: profile {policy.name} lacks {', '.join(missing)}; give them, as in the shipped profile "
            "measured, or none of its last nine for the paper's prices"
        )
    return MeasuredParameters(
        sigma=values["popularity_sigma"].value,
        prior_steps=values["popularity_prior_steps"].value,
        horizon_min_s=values["horizon_min"].value,
        horizon_max_s=values["horizon_max"].value,
        min_lookups=values["min_lookups"].value,
        fairness_s=values["fairness"].value,
        miss_weight=values["miss_weight"].value,
    )
