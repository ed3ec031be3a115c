"""Qwen3-Next with half of its layers, the model of the benchmarks: what VAMP reads of its configuration."""

from __future__ import annotations

CONFIG = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
}
