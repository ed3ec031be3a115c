"""Simulated routing, for benchmarks of models with random weights: skewed as real routers are, and seeded.

Every token draws ``top_k`` experts without replacement with the probabilities of a table, by an exponential
race: expert ``e`` arrives at ``-log(u_e) / p_e``, and the first ones are taken. ``u_e`` is a hash of the
token's router logits, bit by bit, so that equal logits are routed alike and nothing is drawn at run time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vamp_kernels.launch import power_of_two

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B1  # odd, so that no bit of a logit is lost
LANES_PER_WARP = 512


@triton.jit
def _mix(x):
    """The finaliser of MurmurHash3: every bit of ``x`` reaches every bit of the result."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["seed"])
def _lognormal_kernel(
    logits,
    stride_token,
    inverse,  # [topics, experts], 1 / p
    padding,
    weights,
    ids,
    seed,
    experts,
    topics,
    TOP_K: tl.constexpr,
    LANES: tl.constexpr,
    CHOICES: tl.constexpr,
):
    token = tl.program_id(0)
    lane, choice = tl.arange(0, LANES), tl.arange(0, CHOICES)
    inside, golden = lane < experts, tl.full([LANES], 0x9E3779B1, tl.uint32)
    row = tl.load(logits + token.to(tl.int64) * stride_token + lane, mask=inside, other=0.0)
    if row.dtype.primitive_bitwidth == 16:
        bits = row.to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        bits = row.to(tl.uint32, bitcast=True)
    terms = bits * ((2 * lane + 1).to(tl.uint32) * golden)
    key = _mix(tl.sum(tl.where(inside, terms, 0), 0).to(tl.uint32) ^ seed.to(tl.uint32))
    hashed = _mix(key + (lane + 1).to(tl.uint32) * golden)
    uniform = ((hashed >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    score = row.to(tl.float32)
    # A row that only fills a graph up may hold anything, and an argmax over NaN may be any lane.
    topic = tl.argmax(tl.where((lane < topics) & (score == score), score, float("-inf")), 0)
    arrival = -tl.log(uniform) * tl.load(inverse + topic * experts + lane, mask=inside, other=0.0)
    arrival = tl.where(inside, arrival, float("inf"))
    picked = tl.zeros([CHOICES], tl.int32)
    taken = tl.full([CHOICES], float("-inf"), tl.float32)
    for i in range(TOP_K):
        first = tl.argmin(arrival, 0)
        arrival = tl.where(lane == first, float("inf"), arrival)
        picked = tl.where(choice == i, first, picked)
        taken = tl.where(choice == i, tl.sum(tl.where(lane == first, score, 0.0), 0), taken)
    share = tl.exp(taken - tl.max(taken, 0))
    share = share / tl.sum(share, 0)
    if padding is not None:
        real = tl.load(padding + token).to(tl.int32) == 0
        picked = tl.where(real, picked, -1)
        share = tl.where(real, share, 0.0)
    at, used = token.to(tl.int64) * TOP_K + choice, choice < TOP_K
    tl.store(ids + at, picked, mask=used)
    tl.store(weights + at, share, mask=used)


def route_lognormal(
    logits: torch.Tensor,
    inverse: torch.Tensor,
    seed: int,
    top_k: int,
    padding: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``route_lognormal_torch`` in one launch, without a host sync, so it can be captured."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=ids_dtype, device=logits.device)
    lanes = power_of_two(experts)
    if tokens:
        _lognormal_kernel[(tokens,)](
            logits,
            logits.stride(0),
            inverse,
            padding,
            weights,
            ids,
            seed,
            experts,
            inverse.shape[0],
            TOP_K=top_k,
            LANES=lanes,
            CHOICES=power_of_two(top_k),
            num_warps=max(1, lanes // LANES_PER_WARP),
        )
    return weights, ids


def route_lognormal_torch(
    logits: torch.Tensor,
    inverse: torch.Tensor,
    seed: int,
    top_k: int,
    padding: torch.Tensor | None = None,
    ids_dtype: torch.dtype = torch.int32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw experts for every token and weigh them as the router would.

    Args:
        logits: ``[tokens, experts]``, bf16, fp16 or fp32, rows contiguous; the router's.
        inverse: float32 ``[topics, experts]``, the reciprocal of each expert's probability, up to a factor. A
            token's topic is the largest of its first ``topics`` logits, NaN counting for nothing.
        seed: 0 to 2**31 - 1; draws of different seeds are independent.
        top_k: experts of a token.
        padding: bool ``[tokens]``, rows that are no tokens: ids -1, weights 0.

    Returns:
        float32 weights ``[tokens, top_k]``, a softmax over the logits of the experts drawn, and their ids.
    """
    topics, experts = inverse.shape
    lane = torch.arange(experts, device=logits.device)
    narrow = logits.element_size() == 2
    bits = logits.view(torch.int16 if narrow else torch.int32).long() & (0xFFFF if narrow else WORD)
    terms = bits * ((2 * lane + 1) * GOLDEN & WORD) & WORD
    key = _mix_torch(terms.sum(1, keepdim=True) & WORD ^ seed)
    hashed = _mix_torch(key + (lane + 1) * GOLDEN & WORD)
    uniform = ((hashed >> 9).float() + 0.5) * (1.0 / (1 << 23))
    score = logits.float()
    head = score[:, :topics].masked_fill(score[:, :topics].isnan(), float("-inf"))
    largest = torch.where(head == head.amax(1, keepdim=True), lane[:topics], topics - 1)
    arrival = -uniform.log() * inverse[largest.amin(1)]
    picked = arrival.topk(top_k, dim=1, largest=False).indices
    weights = score.gather(1, picked).softmax(1)
    if padding is not None:
        picked = picked.masked_fill(padding[:, None], -1)
        weights = weights.masked_fill(padding[:, None], 0.0)
    return weights, picked.to(ids_dtype)


def _mix_torch(x: torch.Tensor) -> torch.Tensor:
    # 32-bit words in int64, whose products wrap around: the low word is right all the same.
    x = (x ^ (x >> 16)) * 0x85EBCA6B & WORD
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & WORD
    return x ^ (x >> 16)
