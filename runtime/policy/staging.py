"""From how many tokens on a step should stage host-backed experts ahead of every layer. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StagingCosts:
    """What one layer costs on one rank. Rates are measured ones, from a hardware profile.

    Attributes:
        experts: of the layer.
        top_k: experts that a token is routed to.
        expert_bytes: weights of one expert.
        weight_bytes: of one weight, 2 in bf16.
        hbm_rate, read_rate, copy_rate: bytes/s from HBM, from host memory in place, by the copy engine.
        compute_rate: FLOP/s.
        token_s: seconds of a prefilled token in this layer, attention and all.
        rows_per_read: tokens of an expert that one read of its weights serves; 0 where that is any number.
    """

    experts: int
    top_k: int
    expert_bytes: int
    weight_bytes: int
    hbm_rate: float
    read_rate: float
    copy_rate: float
    compute_rate: float
    token_s: float
    rows_per_read: int = 0

    def moe_s(self, tokens: int) -> float:
        """Seconds of the routed experts, all of them in HBM."""
        touched = self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)
        flops = 2 * tokens * self.top_k * self.expert_bytes / self.weight_bytes
        return max(touched * self.expert_bytes / self.hbm_rate, flops / self.compute_rate)

    def layer_s(self, tokens: int) -> float:
        """Seconds of the whole layer, all experts in HBM."""
        return max(tokens * self.token_s, self.moe_s(tokens))

    def direct_s(self, tokens: int, out: int, use: float) -> float:
        """Seconds where ``out`` experts are read from host memory when tokens are routed to them.

        ``use`` is the chance that a token is routed to one of them, by measured hits.
        """
        reads = 1 - (1 - use) ** tokens
        if self.rows_per_read:
            reads = max(reads, tokens * use / self.rows_per_read)
        moe = self.moe_s(tokens)
        return self.layer_s(tokens) - moe + max(moe, out * reads * self.expert_bytes / self.read_rate)

    def staged_s(self, tokens: int, out: int, staged: int, use: float) -> float:
        """Seconds where ``staged`` of ``out`` are copied while the layer before and attention run."""
        copied = staged * self.expert_bytes / self.copy_rate
        return max(copied, self.direct_s(tokens, out - staged, use))


def staged_from(costs: StagingCosts, out: int, staged: int, use: float, max_tokens: int) -> int | None:
    """Fewest tokens from which on staging ``staged`` of ``out`` experts ahead pays; None where it never does.

    Looked for among powers of two up to the first that is ``max_tokens`` or more.
    """
    if not staged:
        return None
    tokens, found = 1, None
    while True:
        pays = costs.staged_s(tokens, out, staged, use) < costs.direct_s(tokens, out, use)
        if not pays:
            found = None
        elif found is None:
            found = tokens
        if tokens >= max_tokens:
            return found
        tokens *= 2


def use_of(hits: Sequence[Sequence[int]], out: Sequence[Sequence[int]], top_k: int, experts: int) -> float:
    """Chance that a token is routed to one of the experts ``out[layer]``; uniform until there are hits.

    Args:
        hits: ``[layers][experts]``.
    """
    total, count = sum(map(sum, hits)), sum(map(len, out))
    if not total or not count:
        return top_k / experts
    taken = sum(row[expert] for row, gone in zip(hits, out, strict=True) for expert in gone)
    return min(taken / total * top_k * len(hits) / count, 1.0)
