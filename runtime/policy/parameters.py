"""The constants of the cost model, with units. Integration fills them from a policy and a model profile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vamp_runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CostParameters:
    """Every constant of the paper's cost model (arXiv 2609.13537); the paper's symbol is in brackets.

    Attributes:
        alpha: [alpha] dimensionless, 0 to 1: how far the hit rate is trusted as a chance of reuse.
        tau_s: [tau] seconds: age at which the chance of reuse has halved.
        t_prefill_s: [t_prefill] seconds per prefilled token, all layers.
        t_sched_s: [t_sched] seconds to schedule a request again.
        t_queue_s: [t_queue] seconds such a request waits in the queue.
        c_eff_s: [c_eff] seconds that one shard offloaded from every layer adds to a decode step.
        horizon_steps: [w] decode steps over which offloading is charged.
        max_offload_ratio: [E_buffer / E] share of each layer's experts that may be out of HBM, 0 to 1.

    Raises:
        ConfigError: a value that is not finite or out of its range.
    """

    alpha: float
    tau_s: float
    t_prefill_s: float
    t_sched_s: float
    t_queue_s: float
    c_eff_s: float
    horizon_steps: int
    max_offload_ratio: float

    def __post_init__(self) -> None:
        share = "a share from 0 to 1, such as 0.5"
        _require(0 <= self.alpha <= 1, "alpha", self.alpha, share)
        _require(0 < self.tau_s < math.inf, "tau_s", self.tau_s, "seconds over 0, such as 40")
        _require(0 < self.t_prefill_s < math.inf, "t_prefill_s", self.t_prefill_s, "over 0, such as 1.2e-5")
        for name in ("t_sched_s", "t_queue_s", "c_eff_s"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "seconds from 0 up, such as 0.001")
        whole = isinstance(self.horizon_steps, int) and not isinstance(self.horizon_steps, bool)
        _require(
            whole and self.horizon_steps >= 1, "horizon_steps", self.horizon_steps, "1 or more, such as 100"
        )
        _require(0 <= self.max_offload_ratio <= 1, "max_offload_ratio", self.max_offload_ratio, share)

    def max_level(self, experts: int, shards_per_group: int) -> int:
        """Levels that ``max_offload_ratio`` allows: groups of ``shards_per_group`` out of ``experts``."""
        # 0.29 * 100 is just under 29 in binary; a ratio written in decimals must not lose a level to that.
        return math.floor(self.max_offload_ratio * experts / shards_per_group + 1e-9)


@dataclass(frozen=True, kw_only=True)
class RestoreParameters:
    """When levels go back to the experts. Not in the paper, which only expands.

    Attributes:
        dead_zone: dimensionless, 1 or more: how many times the loss the saving must be, against oscillation.
        min_dwell_s: seconds without a move before levels go back.

    Raises:
        ConfigError: a value that is not finite or out of its range.
    """

    dead_zone: float
    min_dwell_s: float

    def __post_init__(self) -> None:
        _require(1 <= self.dead_zone < math.inf, "dead_zone", self.dead_zone, "1 or more, such as 2")
        _require(
            0 <= self.min_dwell_s < math.inf, "min_dwell_s", self.min_dwell_s, "seconds from 0 up, such as 10"
        )


def _require(holds: bool, name: str, value: object, works: str) -> None:
    if not holds:
        raise ConfigError(f"{name} = {value!r}: must be {works}")
