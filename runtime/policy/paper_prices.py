"""Prices of the actions at one allocation, by the paper's cost model."""

from __future__ import annotations

from dataclasses import dataclass

from vamp_runtime.policy.cost import combined_cost, evict_cost, offload_cost, preempt_cost, spill_cost
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.situation import Situation


@dataclass(frozen=True)
class PaperPrices:
    """``decide.Prices`` in one situation."""

    s: Situation
    parameters: CostParameters

    def evict(self, blocks: int) -> float:
        return evict_cost(self._tokens(blocks), self.s.evictable_age_s, self.s.r_hit, self.parameters)

    def spill(self, blocks: int) -> float:
        s, copied = self.s, sum(self.s.copied[:blocks])
        rates = s.load_block_s, s.evictable_age_s, s.r_hit, self.parameters
        return spill_cost(copied, blocks - copied, s.tokens_per_block, *rates)

    def offload(self, levels: int) -> float:
        return offload_cost(levels * self.s.shards_per_group, self.s.experts, self.parameters)

    def combined(self, levels: int, blocks: int) -> float:
        s, shards, tokens = self.s, levels * self.s.shards_per_group, self._tokens(blocks)
        return combined_cost(shards, s.experts, tokens, s.evictable_age_s, s.r_hit, self.parameters)

    def queue(self) -> float | None:
        return None

    def preempt(self) -> float:
        return preempt_cost(self.s.needed_blocks, self.s.partial_tokens, self.parameters)

    def _tokens(self, blocks: int) -> int:
        return min(blocks * self.s.tokens_per_block, self.s.evictable_tokens)
