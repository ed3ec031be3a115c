"""Which home slot of one layer holds a valid copy of which expert group. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice, product

from vamp_runtime.errors import IntegrityError
from vamp_runtime.memory.runs import runs


@dataclass(frozen=True)
class HomeCopies:
    """Copies that are made together or not at all.

    Attributes:
        exchange: whether the groups have homes already, of the wrong kind.
        rank: in the order of the wanted groups, of the first of them.
        copies: ``(group, slot)``.
    """

    exchange: bool
    rank: int
    copies: tuple[tuple[int, int], ...]


def belong_in_peer(wanted: Sequence[int], slots: int) -> frozenset[int]:
    """Of the groups that may leave, coldest first, those whose homes belong in ``slots`` slots of a peer.

    The warmest: out of HBM they are read the most, and a peer is read several times as fast as the host.
    """
    return frozenset(wanted[max(len(wanted) - slots, 0) :])


class HomeSlots:
    """Home slots of one layer, the first ``peer`` of them in a peer's HBM.

    A slot is empty, or holds a valid copy of one group.
    """

    def __init__(self, slots: int, peer: int = 0) -> None:
        assert 0 <= peer <= slots
        self._peer = peer
        self._group_of: list[int | None] = [None] * slots
        self._slot_of: dict[int, int] = {}

    def slot_of(self, group: int) -> int | None:
        """Slot with a valid copy of ``group``."""
        return self._slot_of.get(group)

    def in_peer(self, group: int) -> bool:
        """Whether ``group`` has a valid copy in the peer."""
        return group in self._slot_of and self._slot_of[group] < self._peer

    def plan(
        self, wanted: Sequence[int], pinned: Collection[int], most: int | None = None
    ) -> list[HomeCopies]:
        """Copies to make for homes of the ``wanted`` groups, coldest first; empty slots are taken first.

        At most for the first ``most`` groups without a home, and as many exchanges; others another time.

        ``pinned`` groups keep their slots whatever is wanted, and a wanted group that has one keeps it,
        unless it can change places so that the warmest are in the peer (``belong_in_peer``). A group without
        a home takes one of the other kind rather than none.
        """
        keep = {*wanted, *pinned}
        free = [slot for slot, group in enumerate(self._group_of) if group is None]
        free += [slot for slot, group in enumerate(self._group_of) if group is not None and group not in keep]
        rank_of = {group: rank for rank, group in enumerate(wanted)}
        missing = [group for group in wanted if group not in self._slot_of]
        assert len(free) >= len(missing), "more groups are wanted and pinned than there are home slots"
        missing = missing[:most]
        warm = belong_in_peer(wanted, self._peer - sum(self.in_peer(group) for group in pinned))
        placed: dict[int, int] = {}
        for own_kind in (True, False):
            for group in missing:
                fitting = (slot for slot in free if not own_kind or (slot < self._peer) is (group in warm))
                slot = None if group in placed else next(fitting, None)
                if slot is not None:
                    placed[group] = slot
                    free.remove(slot)
        self._line_up(placed)
        copies = [HomeCopies(False, rank_of[group], ((group, placed[group]),)) for group in missing]
        held = [group for group in wanted if group in self._slot_of]
        risers = [group for group in reversed(held) if group in warm and not self.in_peer(group)]
        fallers = [group for group in held if group not in warm and self.in_peer(group)]
        spare = [slot for slot in free if slot < self._peer]
        for riser, faller in islice(zip(risers, fallers, strict=False), most):
            both = ((riser, self._slot_of[faller]), (faller, self._slot_of[riser]))
            copies.append(HomeCopies(True, rank_of[faller], both))
        for riser, slot in islice(zip(risers[len(fallers) :], spare, strict=False), most):
            copies.append(HomeCopies(True, rank_of[riser], ((riser, slot),)))
        return copies

    def _line_up(self, placed: dict[int, int]) -> None:
        """Turn round groups that follow each other downwards, so that neighbours can be copied as one.

        Otherwise slots stay in the order of coldness: whatever is out then lies together, for staging.
        """
        for kind in product((True, False), repeat=2):
            alike = [
                (-g, s) for g, s in placed.items() if (s < self._peer, self._group_of[s] is None) == kind
            ]
            for run in runs(alike):
                turned = zip(run, reversed(run), strict=True)
                placed.update((-negative, slot) for (negative, _), (_, slot) in turned)

    def begin(self, copies: HomeCopies) -> None:
        """Give up what their slots and groups hold: the slots' bytes are about to be overwritten."""
        for group, slot in copies.copies:
            self.empty(slot)
            if group in self._slot_of:
                self.empty(self._slot_of[group])

    def empty(self, slot: int) -> None:
        """Give up what ``slot`` holds."""
        group, self._group_of[slot] = self._group_of[slot], None
        if group is not None:
            del self._slot_of[group]

    def fill(self, slot: int, group: int) -> None:
        """From now on ``slot`` holds a valid copy of ``group``."""
        assert self._group_of[slot] is None and group not in self._slot_of
        self._group_of[slot] = group
        self._slot_of[group] = slot

    def check_integrity(self) -> None:
        """Both directions agree, so that no group has two homes and no slot two groups."""
        held = {group: slot for slot, group in enumerate(self._group_of) if group is not None}
        if held != self._slot_of or len(held) != sum(group is not None for group in self._group_of):
            raise IntegrityError(f"home slots hold {self._group_of}, groups point at {self._slot_of}")
