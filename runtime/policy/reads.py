"""How many host-backed experts a step would read at every level: the log-normal prior, then counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from vamp_runtime.policy.measured import blended, expected_touched, layer_s, lognormal_shares

# What was counted keeps this share of its weight at every further look, as in ``reselect.py``.
DECAY = 0.8
# Steps after which the sizes and times of steps count half.
HALF_LIFE = 500.0
# A longer pause between two steps is an idle engine, not a long step.
LONGEST_STEP_S = 2.0


@lru_cache(maxsize=1024)
def prior_by_level(
    experts: int, group: int, max_level: int, top_k: int, sigma: float, tokens: float
) -> tuple[float, ...]:
    """By level, experts of the coldest groups that a step of ``tokens`` reads, by the prior."""
    shares = lognormal_shares(experts, sigma)
    groups = (shares[start : start + group] for start in range(0, max_level * group, group))
    return tuple(accumulate((expected_touched(cold, tokens, top_k) for cold in groups), initial=0.0))


class LevelReads:
    """Sizes and times of the steps taken, and what they read of the coldest groups.

    Args:
        experts, group, max_level: of a layer on a rank: experts, experts of a group, groups that may be out.
        top_k: experts that a token is routed to.
        sigma: of the log-normal prior.
        prior_steps: counted steps that weigh as much as the prior.
        ordered: the groups that leave first are the coldest before any count, too. Else they are average ones
            until then.
    """

    def __init__(
        self,
        *,
        experts: int,
        group: int,
        max_level: int,
        top_k: int,
        sigma: float,
        prior_steps: float,
        ordered: bool = False,
    ) -> None:
        self._shape = (experts, group, max_level, top_k)
        self._sigma, self._ordered = sigma, ordered
        self._most = [float(group * level) for level in range(max_level + 1)]
        self._prior_steps = prior_steps
        self._sizes: dict[int, float] = {}  # weight by bit length of the step's tokens
        self._counted = [0.0] * (max_level + 1)
        self._counted_steps = 0.0
        self._step_s, self._step_weight = 0.0, 0.0
        self._last_at: float | None = None
        self._lookups = 0.0
        self._factors: list[float] | None = None

    def looked_up(self) -> None:
        """A request is admitted."""
        self._lookups += 1

    def step(self, now_s: float, tokens: int) -> None:
        """A step of ``tokens`` tokens is sent off; one of 0 tells nothing."""
        if tokens <= 0:
            self._last_at = None
            return
        decay = 0.5 ** (1 / HALF_LIFE)
        if self._last_at is not None and now_s - self._last_at <= LONGEST_STEP_S:
            self._step_s = decay * self._step_s + max(0.0, now_s - self._last_at)
            self._step_weight = decay * self._step_weight + 1
        self._last_at = now_s
        self._sizes = {size: decay * weight for size, weight in self._sizes.items()}
        size = tokens.bit_length()
        self._sizes[size] = self._sizes.get(size, 0.0) + 1
        self._lookups *= decay
        self._factors = None

    def counted(self, reads: Sequence[float], steps: int) -> None:
        """Take over counts: by level, experts that each of ``steps`` steps read on average."""
        assert len(reads) == len(self._counted) and steps > 0
        total = (DECAY * before + now * steps for before, now in zip(self._counted, reads, strict=True))
        self._counted, self._counted_steps = list(total), DECAY * self._counted_steps + steps
        self._factors = None

    @property
    def steps_per_s(self) -> float:
        """Steps a second while the engine is busy; 0 before two of them."""
        return self._step_weight / self._step_s if self._step_s else 0.0

    @property
    def steps_per_lookup(self) -> float:
        """Steps for each request admitted, of late; 0 before the first."""
        return sum(self._sizes.values()) / self._lookups if self._lookups else 0.0

    def per_layer_s(
        self,
        expert_bytes: int,
        bandwidth: float,
        hidden: Callable[[float], float],
        tokens: tuple[float, float] = (0, math.inf),
        largest_gone: float = 0.0,
    ) -> list[float]:
        """By level, seconds that it adds to one layer and step, over the sizes of steps taken.

        Args:
            bandwidth: of the link, in bytes/s.
            hidden: by the tokens of a step, seconds of the transfer that its layer hides.
            tokens: only steps of more than the first and up to the second; the others count as nothing.
            largest_gone: share of the steps, from the largest down, that count for nothing.
        """
        left = []
        for size, share in self._shares():
            gone = min(share, largest_gone)
            largest_gone -= gone
            if tokens[0] < size <= tokens[1]:
                left.append((size, share - gone))
        return self._seconds(left, expert_bytes, bandwidth, hidden)

    def step_s(
        self, tokens: int, expert_bytes: int, bandwidth: float, hidden: Callable[[float], float]
    ) -> list[float]:
        """The same for a step of ``tokens`` tokens."""
        return self._seconds([(float(tokens), 1.0)], expert_bytes, bandwidth, hidden)

    def _shares(self) -> list[tuple[float, float]]:
        """Tokens of steps taken, from the largest down, and their shares of all."""
        total = sum(self._sizes.values())
        sizes = sorted(self._sizes.items(), reverse=True)
        return [(1.5 * 2.0 ** (size - 1) if size > 1 else 1.0, weight / total) for size, weight in sizes]

    def _seconds(
        self,
        sizes: Sequence[tuple[float, float]],
        expert_bytes: int,
        bandwidth: float,
        hidden: Callable[[float], float],
    ) -> list[float]:
        if self._factors is None:
            self._factors = self._over_prior()
        priors = [(tokens, share, self._prior(tokens)) for tokens, share in sizes]
        seconds = []
        for most, factor, level in zip(self._most, self._factors, range(len(self._most)), strict=True):
            reads = [(tokens, share, min(factor * prior[level], most)) for tokens, share, prior in priors]
            added = (share * layer_s(read, expert_bytes, bandwidth, hidden(n)) for n, share, read in reads)
            seconds.append(sum(added))
        # Counts of one level may come out below those of the level before; a level more never costs less.
        return list(accumulate(seconds, max))

    def _prior(self, tokens: float) -> tuple[float, ...]:
        """By level, experts that a step reads as far as is known without counting them."""
        sigma = self._sigma if self._ordered or self._counted_steps else 0.0
        return prior_by_level(*self._shape, sigma, tokens)

    def _over_prior(self) -> list[float]:
        """By level, what was counted as a multiple of what the prior gives for the same steps."""
        if not self._counted_steps:
            return [1.0] * len(self._most)
        priors = [(share, self._prior(tokens)) for tokens, share in self._shares()]
        factors = []
        for level, counted in enumerate(self._counted):
            prior, measured = sum(share * of[level] for share, of in priors), counted / self._counted_steps
            weighed = blended(prior, measured, self._counted_steps, self._prior_steps)
            factors.append(weighed / prior if prior else 1.0)
        return factors
