"""A routing profile of simulated routing: what `vamp profile-routing` would count, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from vamp_integration.lognormal import parse
from vamp_integration.routing_profile import write_profile
from vamp_runtime.errors import ConfigError

# Tokens that the expected counts are of: enough that experts are told apart.
TOKENS = 10_000_000


def write(model: str, layers: int, routing: str, out: Path) -> int:
    """Write the profile of ``layers`` MoE layers of ``model`` (0 for all); how many there are.

    Raises:
        ConfigError: the routing is none that is known beforehand, or the configuration says too little.
    """
    path = Path(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        experts, top_k = int(config["num_experts"]), int(config["num_experts_per_tok"])
        layers = layers or int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {model}: config.json has no MoE layers to order ({error})") from None
    if not routing:
        raise ConfigError("--routing '': the model's own routing is not known; try vamp_lognormal:sigma=1.06")
    simulated = parse(routing)
    hits = []
    for layer in range(layers):
        weights = 1.0 / simulated.inverse(layer, experts).astype(np.float64)
        by_topic = weights / weights.sum(axis=1, keepdims=True)
        hits.append([round(TOKENS * top_k * share) for share in by_topic.mean(axis=0)])
    write_profile(out, hits, {"simulated": routing, "layers": layers, "experts": experts})
    return layers
