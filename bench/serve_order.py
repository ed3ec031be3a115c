"""A routing profile of simulated routing: what `vamp profile-routing` would count, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from vamp_integration.lognormal import parse
from vamp_integration.moe_shape import moe_shape
from vamp_integration.routing_profile import write_profile
from vamp_runtime.errors import ConfigError

# Tokens that the expected counts are of: enough that experts are told apart.
TOKENS = 10_000_000


def write(model: str, layers: int, routing: str, out: Path) -> int:
    """Write the profile of the MoE layers among the first ``layers`` of ``model`` (0 for all); how many.

    Raises:
        ConfigError: the routing is none that is known beforehand, or the configuration says too little.
    """
    path = Path(model) / "config.json"
    try:
        config = SimpleNamespace(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--model {model}: config.json cannot be read ({error})") from None
    config.num_hidden_layers = layers or getattr(config, "num_hidden_layers", None)
    shape = moe_shape(config)
    if shape is None:
        raise ConfigError(f"--model {model}: config.json has no MoE layers to order")
    if not routing:
        raise ConfigError("--routing '': the model's own routing is not known; try vamp_lognormal:sigma=1.06")
    simulated = parse(routing)
    hits = []
    for layer in range(shape.moe_layers):
        weights = 1.0 / simulated.inverse(layer, shape.experts).astype(np.float64)
        by_topic = weights / weights.sum(axis=1, keepdims=True)
        hits.append([round(TOKENS * shape.top_k * share) for share in by_topic.mean(axis=0)])
    write_profile(out, hits, {"simulated": routing, "layers": shape.moe_layers, "experts": shape.experts})
    return shape.moe_layers
