"""Which home slot of one layer holds a valid copy of which expert group. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vamp_runtime.errors import IntegrityError


class HomeSlots:
    """Home slots of one layer. A slot is empty, or holds a valid copy of one group."""

    def __init__(self, slots: int) -> None:
        self._group_of: list[int | None] = [None] * slots
        self._slot_of: dict[int, int] = {}

    def slot_of(self, group: int) -> int | None:
        """Slot with a valid copy of ``group``."""
        return self._slot_of.get(group)

    def plan(self, wanted: Sequence[int], pinned: Collection[int]) -> list[tuple[int, int, int]]:
        """Copies to make as ``(rank in wanted, group, slot)``; empty slots are taken first.

        ``pinned`` groups keep their slots whatever is wanted, and a wanted group that has one keeps it.
        """
        keep = {*wanted, *pinned}
        spare = [slot for slot, group in enumerate(self._group_of) if group is None]
        spare += [
            slot for slot, group in enumerate(self._group_of) if group is not None and group not in keep
        ]
        missing = [(rank, group) for rank, group in enumerate(wanted) if group not in self._slot_of]
        assert len(spare) >= len(missing), "more groups are wanted and pinned than there are home slots"
        return [(rank, group, slot) for (rank, group), slot in zip(missing, spare, strict=False)]

    def empty(self, slot: int) -> None:
        """Give up what ``slot`` holds: its bytes are about to be overwritten."""
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
