"""Shapes of MoE layers by model name, and problems to time: weights of several layers, routings, tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """The routed part of one layer: experts, choices per token, hidden and intermediate size."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def shard(self, tp: int) -> Shape:
        """The shape of one of ``tp`` tensor-parallel ranks; ``ValueError`` where it does not divide."""
        if self.intermediate % tp:
            raise ValueError(f"--tp {tp}: intermediate size {self.intermediate} is not a multiple of it")
        return Shape(self.experts, self.top_k, self.hidden, self.intermediate // tp)


# From the models' config.json. gpt-oss runs here in bf16 and with SwiGLU: its dimensions, not its arithmetic.
MODELS = {
    "qwen3-next": Shape(512, 10, 2048, 512),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "qwen3-235b-a22b": Shape(128, 8, 4096, 1536),
    "deepseek-v3": Shape(256, 8, 7168, 2048),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880),
    "tiny": Shape(8, 2, 64, 32),
}


@dataclass(frozen=True)
class Weights:
    """Expert-major records of several layers, w13 then w2, at one stride.

    Attributes:
        w13: ``[layers * E, 2 * I, H]``; w2: ``[layers * E, H, I]``; views over one slab.
        slots: ``[E]`` int32 for every layer.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    slots: list[torch.Tensor]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        experts = self.slots[0].numel()
        rows = slice(index * experts, (index + 1) * experts)
        return self.w13[rows], self.w2[rows]


def make_weights(shape: Shape, layers: int, device: torch.device, seed: int = 0) -> Weights:
    """Random bf16 weights, scaled so that activations stay near one."""
    hidden, intermediate, count = shape.hidden, shape.intermediate, layers * shape.experts
    first, record = 2 * intermediate * hidden, 3 * intermediate * hidden
    slab = torch.empty(count * record, dtype=torch.bfloat16, device=device)
    w13 = slab.as_strided((count, 2 * intermediate, hidden), (record, hidden, 1))
    w2 = slab.as_strided((count, hidden, intermediate), (record, intermediate, 1), first)
    generator = torch.Generator(device).manual_seed(seed)
    for expert in range(count):
        w13[expert].normal_(std=hidden**-0.5, generator=generator)
        w2[expert].normal_(std=intermediate**-0.5, generator=generator)
    ids = torch.arange(count, dtype=torch.int32, device=device)
    return Weights(w13, w2, list(ids.split(shape.experts)))


@dataclass(frozen=True)
class Step:
    """The input of one call: ``[M, H]`` tokens, ``[M, K]`` weights and ids."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def make_steps(
    shape: Shape, tokens: int, count: int, routing: str, device: torch.device, seed: int = 1
) -> list[Step]:
    """Different inputs for ``count`` calls.

    ``routing`` is ``uniform``, or ``lognormal:SIGMA`` for experts whose popularity is log-normal with SIGMA.
    """
    generator = torch.Generator(device).manual_seed(seed)
    sigma = 0.0 if routing == "uniform" else float(routing.removeprefix("lognormal:"))
    steps = []
    for _ in range(count):
        popularity = sigma * torch.randn(shape.experts, generator=generator, device=device)
        # The largest k of log p plus Gumbel noise are k draws without replacement.
        noise = torch.rand(tokens, shape.experts, generator=generator, device=device).clamp_min(1e-20)
        score = popularity - (-noise.log()).log()
        logits, ids = score.topk(shape.top_k, dim=1)
        states = torch.randn(tokens, shape.hidden, generator=generator, device=device).bfloat16()
        steps.append(Step(states, logits.softmax(dim=1), ids.to(torch.int32)))
    return steps


def layers_beyond_cache(shape: Shape, cache_bytes: int) -> int:
    """Layers to take turns, so that what one call read has left the cache before it is read again."""
    layer_bytes = 6 * shape.experts * shape.intermediate * shape.hidden
    return max(2, math.ceil(4 * cache_bytes / layer_bytes))


def work(shape: Shape, steps: list[Step]) -> tuple[float, float]:
    """Mean bytes and floating-point operations of a call.

    Bytes: the weights of every expert that is hit, once; tokens read; activation and one partial sum per pair
    written and read; output written. Operations: those of the pairs, without padding.
    """
    pairs = sum(int((step.topk_ids >= 0).sum()) for step in steps) / len(steps)
    hit = sum(step.topk_ids.unique().numel() for step in steps) / len(steps)
    tokens = steps[0].hidden_states.shape[0]
    weights = 6 * hit * shape.intermediate * shape.hidden
    moved = 4 * pairs * (shape.intermediate + shape.hidden) + 4 * tokens * shape.hidden
    return weights + moved, 6 * pairs * shape.intermediate * shape.hidden
