"""Shapes of MoE layers by model name, and problems to time: weights of several layers, routings, tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vamp_kernels.launch import FP8
from vamp_kernels.launch import SCALE_BLOCK as BLOCK

FP8_MAX = 448.0


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

    @property
    def weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.intermediate * self.hidden


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
        w13: ``[S, 2 * I, H]``; w2: ``[S, H, I]``; views over one slab of ``layers`` equal runs of slots, each
            beginning with the slots of its experts; bf16, or fp8 with scales.
        slots: ``[E]`` int32 for every layer, the slot to read each expert from.
        scales: for fp8, of every layer the float32 scales of w13, ``[E, 2 * I / 128, H / 128]``, and of w2,
            ``[E, H / 128, I / 128]``, by expert id.
        host_experts: ``[E]`` bool for every layer, whether an expert is read from host memory; None where no
            memory but the device's is involved.
        staging_slots: int32 for every layer, slots to bring experts into within a call.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    slots: list[torch.Tensor]
    scales: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    host_experts: list[torch.Tensor] | None = None
    staging_slots: list[torch.Tensor] | None = None

    @property
    def layers(self) -> int:
        return len(self.slots)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of a layer by id, in their own slots."""
        slots, experts = self.w13.shape[0] // self.layers, self.slots[0].numel()
        rows = slice(index * slots, index * slots + experts)
        return self.w13[rows], self.w2[rows]


def record_views(
    shape: Shape, slab: torch.Tensor, stride: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 and w2 of the records that lie in ``slab`` every ``stride`` elements (by default end to end)."""
    hidden, intermediate = shape.hidden, shape.intermediate
    stride = stride or shape.weights
    count = slab.numel() // stride
    w13 = slab.as_strided((count, 2 * intermediate, hidden), (stride, hidden, 1))
    first = 2 * intermediate * hidden
    return w13, slab.as_strided((count, hidden, intermediate), (stride, intermediate, 1), first)


def make_weights(
    shape: Shape, layers: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Weights:
    """Random weights, scaled so that activations stay near one."""
    count = layers * shape.experts
    slab = torch.empty(count * shape.weights, dtype=dtype, device=device)
    w13, w2 = record_views(shape, slab)
    ids = torch.arange(count, dtype=torch.int32, device=device)
    slots = list(ids.split(shape.experts))
    return fill(shape, Weights(w13, w2, slots), seed)


def fill(shape: Shape, weights: Weights, seed: int = 0) -> Weights:
    """``weights`` with random values in every expert's own slot, and scales if they are fp8."""
    device = weights.w13.device
    generator = torch.Generator(device).manual_seed(seed)
    scales = []
    for index in range(weights.layers):
        found = []
        for weight, width in zip(weights.layer(index), (shape.hidden, shape.intermediate), strict=True):
            values = torch.empty(weight.shape[1:], dtype=torch.float32, device=device)
            of_weight = []
            for expert in weight:
                values.normal_(std=width**-0.5, generator=generator)
                if weight.dtype == FP8:
                    quantised, scale = quantise(values)
                    expert.copy_(quantised)
                    of_weight.append(scale)
                else:
                    expert.copy_(values)
            found.append(of_weight)
        if weights.w13.dtype == FP8:
            scales.append((torch.stack(found[0]), torch.stack(found[1])))
    return replace(weights, scales=scales or None)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and float32 scales, one per block of 128 by 128, of a float32 ``[N, K]``."""
    blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, weight.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp_min(1e-12) / FP8_MAX
    return (blocks / scale[:, None, :, None]).to(FP8).view(weight.shape), scale


@dataclass(frozen=True)
class Step:
    """The input of one call: ``[M, H]`` tokens, ``[M, K]`` weights and ids."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def recorded_hits(path: Path, experts: int, top_k: int) -> torch.Tensor:
    """Hit counts of a recording, ``[layers, E]``: JSON ``{"hits": [[count of expert 0, ...], ...]}``.

    ``ValueError`` names the file and the layer that does not fit.
    """
    try:
        layers = json.loads(path.read_text(encoding="utf-8"))["hits"]
        hits = torch.tensor(layers, dtype=torch.float64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f'{path}: not {{"hits": [[count of expert 0, ...], ...]}} ({error})') from error
    if hits.dim() != 2 or hits.shape[1] != experts:
        raise ValueError(f"{path}: hits is {list(hits.shape)}, expected [layers, {experts}]")
    for layer, counts in enumerate(hits):
        if not bool(((counts >= 0) & counts.isfinite()).all()) or int((counts > 0).sum()) < top_k:
            raise ValueError(f"{path}: hits[{layer}] needs {top_k} experts above 0, none below, all finite")
    return hits


def popularity(
    shape: Shape, routing: str, count: int, generator: torch.Generator, device: torch.device
) -> list[torch.Tensor]:
    """Log of how likely each expert is, up to a constant, ``[E]`` for each of ``count`` calls.

    ``routing`` is ``uniform``; ``lognormal:SIGMA``, experts' popularity being log-normal and drawn anew for
    each call; or ``recorded:FILE``, in proportion to the counts of a recording, whose layers take turns.
    """
    kind, _, rest = routing.partition(":")
    if kind == "uniform" and not rest:
        return [torch.zeros(shape.experts, device=device)] * count
    if kind == "lognormal":
        try:
            sigma = float(rest)
        except ValueError as error:
            raise ValueError(f"--routing {routing}: SIGMA is no number, try lognormal:1.06") from error
        if not 0 <= sigma < math.inf:
            raise ValueError(f"--routing {routing}: expected a SIGMA of 0 or more, try lognormal:1.06")
        draw = torch.randn(count, shape.experts, generator=generator, device=device)
        return list(sigma * draw)
    if kind == "recorded" and rest:
        logs = recorded_hits(Path(rest), shape.experts, shape.top_k).log().float().to(device)
        return [logs[call % len(logs)] for call in range(count)]
    raise ValueError(f"--routing {routing}: expected uniform, lognormal:SIGMA or recorded:FILE")


def make_steps(
    shape: Shape, tokens: int, count: int, routing: str, device: torch.device, seed: int = 1
) -> list[Step]:
    """Different inputs for ``count`` calls; ``routing`` as in ``popularity``."""
    generator = torch.Generator(device).manual_seed(seed)
    steps = []
    for likely in popularity(shape, routing, count, generator, device):
        # The largest k of log p plus Gumbel noise are k draws without replacement.
        noise = torch.rand(tokens, shape.experts, generator=generator, device=device).clamp_min(1e-20)
        score = likely - (-noise.log()).log()
        logits, ids = score.topk(shape.top_k, dim=1)
        states = torch.randn(tokens, shape.hidden, generator=generator, device=device).bfloat16()
        steps.append(Step(states, logits.softmax(dim=1), ids.to(torch.int32)))
    return steps


def layers_beyond_cache(shape: Shape, cache_bytes: int, itemsize: int = 2) -> int:
    """Layers to take turns, so that what one call read has left the cache before it is read again."""
    layer_bytes = itemsize * shape.experts * shape.weights
    return max(2, math.ceil(4 * cache_bytes / layer_bytes))


@dataclass(frozen=True)
class Work:
    """Mean bytes of a call by the memory they lie in, and its floating-point operations."""

    hbm_bytes: float
    host_bytes: float
    peer_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.hbm_bytes + self.host_bytes + self.peer_bytes


def work(
    shape: Shape,
    steps: list[Step],
    dtype: torch.dtype = torch.bfloat16,
    host: torch.Tensor | None = None,
    peer: torch.Tensor | None = None,
) -> Work:
    """The least that the layer has to do.

    Bytes: the weights of every expert that is hit, once, and its scales in fp8; tokens read; activation and
    one bf16 partial sum per pair written and read; output written. Operations: those of the pairs, without
    padding.

    Args:
        host: ids of experts that are read from host memory; peer: from another device's.
    """
    pairs = sum(int((step.topk_ids >= 0).sum()) for step in steps) / len(steps)
    hit = [step.topk_ids[step.topk_ids >= 0].unique() for step in steps]

    def touched(ids: torch.Tensor | None) -> float:
        return 0.0 if ids is None else sum(int(torch.isin(h, ids).sum()) for h in hit) / len(hit)

    tokens = steps[0].hidden_states.shape[0]
    expert = dtype.itemsize * shape.weights
    scales = 0.0
    if dtype == FP8:
        scales = 4.0 * shape.weights / BLOCK**2
    moved = pairs * (2 * dtype.itemsize * shape.intermediate + 4 * shape.hidden) + 4 * tokens * shape.hidden
    on_host, on_peer = touched(host), touched(peer)
    count = sum(h.numel() for h in hit) / len(hit)
    here = (count - on_host - on_peer) * expert + count * scales + moved
    return Work(here, on_host * expert, on_peer * expert, 2 * pairs * shape.weights)
