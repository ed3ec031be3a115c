"""Popularity of experts as measured in real mixture-of-experts models: log-normal, and different by domain.

In layer ``l`` and domain ``d`` the probability of expert ``e`` is ``p_e = exp(sigma_l * x_e)`` up to a
factor, ``x_e = sqrt(shared) * g_e + sqrt(1 - shared) * h_e(d)``, with ``g`` and ``h(d)`` standard normal:
``shared`` is the correlation of two domains' log-popularities. A token's topic adds ``tilt`` times a normal
draw of its own.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from vamp_runtime.errors import ConfigError

#: vLLM's variable that names a routing strategy (vllm/envs.py). Whoever sets it wants simulated routing.
VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
NAME = "vamp_lognormal"
TOPICS = 16
EXAMPLE = f"{NAME}:sigma=1.06,seed=0"


@dataclass(frozen=True)
class LogNormal:
    """One simulated model.

    Attributes:
        sigma: standard deviation of ``ln p`` in a layer; with ``sigma_to`` each layer draws its own between.
        tilt: standard deviation of what a topic adds to ``ln p``.
        shared: 0 to 1, what the domains have in common.
        domain: the domain at start.
        seed: of everything that is drawn.
    """

    sigma: float = 1.06
    sigma_to: float | None = None
    tilt: float = 0.5
    shared: float = 0.3
    domain: int = 0
    seed: int = 0

    def layer_sigma(self, layer: int) -> float:
        if self.sigma_to is None:
            return self.sigma
        return float(_draw(self.seed, 0, layer).uniform(self.sigma, self.sigma_to))

    def inverse(self, layer: int, experts: int, domain: int | None = None) -> NDArray[np.float32]:
        """``[topics, experts]``, ``1 / p`` of every expert for a token of each topic, up to a factor."""
        domain = self.domain if domain is None else domain
        g, h = (_normal(experts, self.seed, *key, layer) for key in ((1,), (2, domain)))
        x = _standard(math.sqrt(self.shared) * g + math.sqrt(1 - self.shared) * h)
        topics = min(TOPICS, experts)
        t = _draw(self.seed, 3, layer).standard_normal((topics, experts))
        return np.exp(-(self.layer_sigma(layer) * x + self.tilt * t)).astype(np.float32)

    def hash_seed(self, layer: int) -> int:
        """Seed of the tokens' draws in ``layer``, 0 to 2**31 - 1."""
        return int(_draw(self.seed, 4, layer).integers(1 << 31))


def parse(text: str) -> LogNormal:
    """Read ``vamp_lognormal:sigma=1.06,tilt=0.5,...``; ``sigma=0.85-1.3`` is a range over layers.

    Raises:
        ConfigError: naming the variable, the part that does not fit, and what would.
    """
    name, _, rest = text.partition(":")
    if name != NAME:
        raise ConfigError(f"{VARIABLE}: {text} is not VAMP's; try {EXAMPLE}")
    values: dict[str, float | int] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        match = re.fullmatch(r"(\d+\.?\d*)(?:-(\d+\.?\d*))?", value)
        known = [field.name for field in fields(LogNormal) if field.name != "sigma_to"]
        if key not in known or match is None or (match[2] and key != "sigma"):
            raise ConfigError(f"{VARIABLE}: {pair} is none of {'=, '.join(known)}= a number; try {EXAMPLE}")
        if key in ("domain", "seed") and not value.isdecimal():
            raise ConfigError(f"{VARIABLE}: {pair} is no whole number; try {key}=0")
        values[key] = int(value) if key in ("domain", "seed") else float(match[1])
        if match[2]:
            values["sigma_to"] = float(match[2])
    model = LogNormal(**values)  # type: ignore[arg-type]
    if not 0 <= model.shared <= 1:
        raise ConfigError(f"{VARIABLE}: shared={model.shared:g} is outside 0..1; try shared=0.3")
    if model.sigma_to is not None and model.sigma_to < model.sigma:
        raise ConfigError(
            f"{VARIABLE}: sigma={model.sigma:g}-{model.sigma_to:g} runs downwards; try sigma=0.85-1.3"
        )
    return model


def _draw(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def _normal(count: int, *key: int) -> NDArray[np.float64]:
    return _standard(_draw(*key).standard_normal(count))


def _standard(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean 0 and standard deviation 1 exactly, so that what was asked for is what one gets."""
    standard: NDArray[np.float64] = (x - x.mean()) / max(float(x.std()), 1e-12)
    return standard
