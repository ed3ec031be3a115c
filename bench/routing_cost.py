"""What simulated routing costs: one launch a layer, in every arm that uses it.

    python bench/routing_cost.py

Prints microseconds on the device, under a CUDA graph, beside those of vLLM's own routing of the same tokens.
"""

from __future__ import annotations

from functools import partial

import torch
from device_time import timed

from vamp_integration.lognormal import LogNormal
from vamp_kernels.lognormal_routing import route_lognormal

REPETITIONS = 50
TOKENS = (1, 16, 64, 256, 2048, 8192)
MODELS = {"Qwen3-Next": (512, 10), "DeepSeek-V3": (256, 8), "Qwen3-30B-A3B": (128, 8)}


def main() -> None:
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    print(f"{'model':16}{'tokens':>8}{'simulated us':>14}{'vLLM us':>10}")
    for name, (experts, top_k) in MODELS.items():
        table = torch.from_numpy(LogNormal().inverse(0, experts)).cuda()
        for tokens in TOKENS:
            logits = torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
            simulated = timed([partial(route_lognormal, logits, table, 7, top_k)], REPETITIONS)
            real = timed([partial(fused_topk, logits, logits, top_k, True)], REPETITIONS)
            print(f"{name:16}{tokens:8}{simulated.median:14.1f}{real.median:10.1f}")


if __name__ == "__main__":
    main()
