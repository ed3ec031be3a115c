"""Prefixes that came to rest in the KV cache: which blocks hold them, and what they are good for together.

A *chain* is the prefix that one session's requests share and extend. It is lost or kept as a whole: an early
block that is gone makes the later ones useless, and so does the recurrent state of a hybrid model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# A request that begins with this share of a chain or more continues it; with less it is another session that
# begins alike (the same system prompt).
CONTINUES = 0.75
# So many states of a chain, the last ones, are worth keeping: what eviction from its end leaves, and a prompt
# that goes on from an earlier turn, needs one of them.
KEPT_STATES = 3


class Part(NamedTuple):
    """What one block holds: of KV cache group ``group``, the tokens or the state up to token ``end``."""

    group: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The KV cache groups of a model.

    Attributes:
        block_tokens: tokens of one block.
        attention: groups in which every block up to the hit must be there.
        state: groups in which the block at the end of the hit must be there, earlier ones need not.
    """

    block_tokens: int
    attention: frozenset[int]
    state: frozenset[int]


def usable_tokens(parts: Iterable[Part], layout: Layout) -> int:
    """Longest prefix that a request could be given from ``parts``, in tokens."""
    ends = _ends(parts, layout)
    reach = max((max(found, default=0) for found in ends.values()), default=0)
    for group in layout.attention:
        whole = 0
        while whole < reach and whole + layout.block_tokens in ends[group]:
            whole += layout.block_tokens
        reach = whole
    if not layout.state:
        return reach
    return max((end for end in _state_ends(ends, layout) if end <= reach), default=0)


def _ends(parts: Iterable[Part], layout: Layout) -> dict[int, set[int]]:
    """By group, the tokens up to which there is a block."""
    ends: dict[int, set[int]] = {group: set() for group in layout.attention | layout.state}
    for part in parts:
        if part.group in ends:
            ends[part.group].add(part.end)
    return ends


def _state_ends(ends: Mapping[int, set[int]], layout: Layout) -> set[int]:
    """Of ``_ends``, those after which the state of every group is there."""
    return set.intersection(*(ends[group] for group in layout.state)) if layout.state else set()


@dataclass(eq=False)
class Chain:
    """One prefix.

    Attributes:
        hashes: of its blocks, from the first on; they name a prefix each.
        used_at: when it was last used, in seconds.
        curable: tokens that a request would have been given had every block stayed.
        rested: blocks worth keeping when it came to rest.
        size: the same, and more in proportion since a longer prompt goes on from it: what keeping it takes.
        blocks: those still there, by id.
        under_way: requests that go on from it now.
    """

    hashes: Sequence[Hashable]
    used_at: float
    curable: int = 0
    rested: int = 0
    size: int = 0
    blocks: dict[int, Part] = field(default_factory=dict)
    under_way: set[Hashable] = field(default_factory=set)
    _usable: int | None = None
    _old: tuple[int, ...] | None = None

    def usable(self, layout: Layout) -> int:
        """Tokens that a request would be given now."""
        if self._usable is None:
            self._usable = usable_tokens(self.blocks.values(), layout)
        return self._usable

    def hold(self, blocks: Mapping[int, Part]) -> None:
        self.blocks, self._usable, self._old = dict(blocks), None, None

    def old_states(self, layout: Layout) -> tuple[int, ...]:
        """Blocks with states before the ``KEPT_STATES`` last at which all are there."""
        if self._old is None:
            ends = sorted(_state_ends(_ends(self.blocks.values(), layout), layout), reverse=True)
            kept = ends[KEPT_STATES - 1] if len(ends) > KEPT_STATES else 0
            states = ((block, part) for block, part in self.blocks.items() if part.group in layout.state)
            self._old = tuple(block for block, part in states if part.end < kept)
        return self._old

    def drop(self, block: int) -> None:
        del self.blocks[block]
        self._usable = self._old = None


class Lookup(NamedTuple):
    """What a request found of a chain: ``need`` blocks would have kept ``tokens`` of it for ``age_s``."""

    age_s: float
    need: int
    tokens: int


class Loss(NamedTuple):
    """What losing blocks takes from one chain.

    Attributes:
        tokens: no longer usable.
        used_at: when the chain was last used, in seconds.
        loadable: those of ``tokens`` that host memory would bring back, in ``loads`` blocks.
    """

    tokens: int
    used_at: float
    loadable: int = 0
    loads: int = 0


class Chains:
    """Every chain of late, the one used last at the end. Bookkeeping only.

    Args:
        most: chains to remember; the one unused for longest is forgotten.
        ended: called with the seconds it was unused when a chain is forgotten.

    Attributes:
        orphans: blocks that belonged to chains and are still there, but belong to none now.
    """

    def __init__(self, layout: Layout, most: int, ended: Callable[[float], None]) -> None:
        assert most > 0
        self.layout, self._most, self._ended = layout, most, ended
        self._chains: dict[Chain, None] = {}
        self._chain_of: dict[Hashable, Chain] = {}
        self._owners: dict[int, set[Chain]] = {}
        self._chain_under: dict[Hashable, Chain] = {}
        self.orphans: dict[int, None] = {}
        # Whether a request has ever left a prefix that is good for most of it: some models keep no states.
        self._kept_whole = False

    def __iter__(self) -> Iterator[Chain]:
        return iter(self._chains)

    def match(self, hashes: Sequence[Hashable]) -> tuple[Chain, int] | None:
        """The chain that ``hashes`` continue, and how many of its hashes they begin with."""
        for depth in range(len(hashes), 0, -1):
            chain = self._chain_of.get(hashes[depth - 1])
            if chain is not None:
                shared = min(depth, len(chain.hashes))
                return (chain, shared) if shared >= CONTINUES * len(chain.hashes) else None
        return None

    def looked_up(self, now_s: float, hashes: Sequence[Hashable], request: Hashable = None) -> Lookup | None:
        """``request`` with these blocks is admitted; None where it continues no chain."""
        found = self.match(hashes)
        if found is None:
            return None
        chain, shared = found
        chain.size = max(chain.size, chain.rested * len(hashes) // len(chain.hashes))
        chain.under_way.add(request)
        self._chain_under[request] = chain
        newer = 0
        for other in reversed(self._chains):
            if other is chain:
                break
            newer += other.size
        tokens = min(chain.curable, shared * self.layout.block_tokens)
        lookup = Lookup(max(0.0, now_s - chain.used_at), newer + chain.size, tokens)
        self._use(chain, now_s)
        return lookup

    def rest(
        self,
        now_s: float,
        hashes: Sequence[Hashable],
        blocks: Mapping[int, Part],
        request: Hashable = None,
    ) -> None:
        """``request`` has finished, ``hashes`` being of the blocks that it computed or was given.

        Args:
            blocks: those of its blocks that hold cached content.
        """
        went_on = self._chain_under.pop(request, None)
        if went_on is not None:
            went_on.under_way.discard(request)
        if not hashes or not blocks:
            return
        found = self.match(hashes)
        chain = found[0] if found else Chain(hashes, now_s)
        self._unlink(chain)
        chain.hold(blocks)
        chain.hashes = hashes
        chain.size = chain.rested = len(blocks) - len(chain.old_states(self.layout))
        chain.curable = chain.usable(self.layout)
        if self._kept_whole:
            # Under pressure the newest states may be gone already, though a prompt's last block had one.
            chain.curable = max(chain.curable, (len(hashes) - 1) * self.layout.block_tokens)
        self._kept_whole |= chain.usable(self.layout) >= CONTINUES * len(hashes) * self.layout.block_tokens
        for block in blocks:
            self._owners.setdefault(block, set()).add(chain)
            self.orphans.pop(block, None)
        for block_hash in hashes:
            self._chain_of[block_hash] = chain
        self._use(chain, now_s)
        while len(self._chains) > self._most:
            self.forget(next(iter(self._chains)), now_s)

    def lost(self, block: int) -> None:
        """``block`` no longer holds what it held."""
        self.orphans.pop(block, None)
        for chain in self._owners.pop(block, ()):
            chain.drop(block)

    def loss_of(self, blocks: Collection[int], on_host: Callable[[int], bool] | None = None) -> list[Loss]:
        """What losing ``blocks`` takes, per chain.

        Args:
            on_host: whether host memory holds the content of a block too; None where it holds none.
        """
        losses = []
        for chain in {chain: None for block in blocks for chain in self._owners.get(block, ())}:
            left = (part for block, part in chain.blocks.items() if block not in blocks)
            there = usable_tokens(left, self.layout)
            reach, loads = (there, 0) if on_host is None else self._loadable(chain, there, on_host)
            losses.append(Loss(chain.usable(self.layout) - there, chain.used_at, reach - there, loads))
        return losses

    def forget(self, chain: Chain, now_s: float) -> None:
        """Stop remembering ``chain``; its blocks are then worth nothing by themselves."""
        self._unlink(chain)
        del self._chains[chain]
        self._ended(max(0.0, now_s - chain.used_at))

    def forget_unused(self, now_s: float, after_s: float) -> None:
        """Forget what was not used for ``after_s`` seconds."""
        while self._chains and now_s - next(iter(self._chains)).used_at > after_s:
            self.forget(next(iter(self._chains)), now_s)

    def old_states(self) -> Iterator[int]:
        """Blocks with old states that only one chain has, the chain unused for longest first."""
        for chain in self._chains:
            yield from (block for block in chain.old_states(self.layout) if len(self._owners[block]) == 1)

    @property
    def size_under_way(self) -> int:
        """Blocks that chains hold which requests go on from now."""
        return sum(chain.size for chain in self._chains if chain.under_way)

    def owned(self, block: int) -> bool:
        """Whether a chain has ``block``."""
        return block in self._owners

    def order(self, ranked: Iterable[Chain], free: Container[int]) -> Iterator[int]:
        """Free blocks of ``ranked`` chains, the cheapest chain first and in it the deepest block first.

        A block that several chains share comes with the last of them.
        """
        done: set[Chain] = set()
        for chain in ranked:
            done.add(chain)
            for block in sorted(chain.blocks, key=lambda block: (-chain.blocks[block].end, block)):
                if block in free and self._owners[block] <= done:
                    yield block

    def check_integrity(self) -> None:
        """Owners and chains agree, and every chain is good for what its blocks say."""
        for chain in self._chains:
            assert chain.usable(self.layout) == usable_tokens(chain.blocks.values(), self.layout)
            assert chain.usable(self.layout) <= chain.curable
            assert all(chain in self._owners[block] for block in chain.blocks)
        assert all(owners for owners in self._owners.values()) and not self._owners.keys() & self.orphans
        for block, owners in self._owners.items():
            assert all(chain in self._chains and block in chain.blocks for chain in owners)
        assert set(self._chain_of.values()) <= set(self._chains)

    def _loadable(self, chain: Chain, there: int, on_host: Callable[[int], bool]) -> tuple[int, int]:
        """Tokens that a request is given which finds ``there`` of them in HBM, and blocks loaded for that.

        All that lies beyond what it finds is loaded, also blocks that are in HBM.
        """
        beyond = (block for block, part in chain.blocks.items() if part.end > there)
        copies = [chain.blocks[block] for block in beyond if on_host(block)]
        found = (part for part in chain.blocks.values() if part.end <= there)
        reach, state = usable_tokens([*found, *copies], self.layout), self.layout.state
        return reach, sum(part.end == reach if part.group in state else part.end <= reach for part in copies)

    def _use(self, chain: Chain, now_s: float) -> None:
        self._chains.pop(chain, None)
        self._chains[chain] = None
        chain.used_at = now_s

    def _unlink(self, chain: Chain) -> None:
        for block_hash in chain.hashes:
            if self._chain_of.get(block_hash) is chain:
                del self._chain_of[block_hash]
        for block in chain.blocks:
            owners = self._owners[block]
            owners.discard(chain)
            if not owners:
                del self._owners[block]
                self.orphans[block] = None
