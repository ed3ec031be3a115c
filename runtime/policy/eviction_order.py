"""Which blocks are evicted first: those that are good for nothing, then whole chains; awaited ones last."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set

from vamp_runtime.policy.chains import Chain, Chains
from vamp_runtime.policy.measured import chain_rank
from vamp_runtime.policy.reuse import ReuseTimes


class EvictionOrder:
    """Chooses blocks among those of ``chains``, by what is known of their reuse and of who waits."""

    def __init__(self, chains: Chains, times: ReuseTimes, t_prefill_s: float) -> None:
        self.chains = chains
        self._times = times
        self._t_prefill_s = t_prefill_s
        self._awaited: Set[Chain] = frozenset()

    def wait(self, waiting: Iterable[Sequence[Hashable]]) -> list[int]:
        """Requests with these blocks wait for admission, so what they go on from is needed next.

        Returns:
            tokens that each of them would be given, about.
        """
        found = list(map(self.chains.match, waiting))
        self._awaited = {chain for chain, _ in filter(None, found)}
        return list(map(self._cached, found))

    def there(self, hashes: Sequence[Hashable]) -> int:
        """Tokens that a request with these blocks would be given, about."""
        return self._cached(self.chains.match(hashes))

    def victims(self, now_s: float, count: int, free: Collection[int]) -> list[int]:
        """Up to ``count`` blocks of ``free`` to evict, in that order.

        First those of no chain any more and old states; then chains, last those that a waiting request goes
        on from; then, in the order given, what requests under way have left: their sessions' newest states.
        """
        layout, awaited = self.chains.layout, self._awaited

        def rank(chain: Chain) -> tuple[bool, tuple[float, float]]:
            return chain in awaited, chain_rank(chain, layout, self._times, now_s, self._t_prefill_s)

        def all_of_them() -> Iterator[int]:
            yield from (block for block in self.chains.orphans if block in free)
            yield from (block for block in self.chains.old_states() if block in free)
            yield from self.chains.order(sorted(self.chains, key=rank), free)
            yield from free

        chosen: dict[int, None] = {}
        for block in all_of_them() if count > 0 else ():
            chosen[block] = None
            if len(chosen) == count:
                break
        return list(chosen)

    def _cached(self, found: tuple[Chain, int] | None) -> int:
        if found is None:
            return 0
        (chain, shared), layout = found, self.chains.layout
        return min(chain.usable(layout), shared * layout.block_tokens)
