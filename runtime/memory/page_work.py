"""The pages of one move: which go where, and the driver calls that take them there, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.move import Move, MoveKind
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.transaction import Transaction


class PageWork:
    """What a move does ``ahead``, while kernels queued before it still run, and what it does ``after`` them.

    A page may lie behind several addresses. So it is mapped where it goes while it is still read where it
    was, and stays mapped there; only what takes something away from those kernels waits for them: zeroing,
    copying over, and with ``mirror`` the exchange of pages for homes.

    Args:
        groups: of every layer, those that an OFFLOAD or SWAP takes out, or a RESTORE brings back.
    """

    def __init__(
        self, slab: ExpertSlab, region: KVRegion, move: Move, groups: Sequence[Sequence[int]]
    ) -> None:
        self._slab = slab
        self._region = region
        self._kind = move.kind
        self._leaving = [[] if move.kind is MoveKind.RESTORE else sorted(of_layer) for of_layer in groups]
        self._returning: list[dict[int, Sequence[int]]] = [{} for _ in groups]
        self._pages: list[int] = []
        if move.kind is MoveKind.RESTORE:
            self._pages = self._deal(groups)
        elif move.kind is MoveKind.OFFLOAD:
            self._pages = in_tail_order(slab, groups)
        for swap in move.swaps:
            self._returning[swap.layer][swap.returning] = slab.pages(swap.layer, swap.leaving)

    def ahead(self, tx: Transaction) -> None:
        """Map pages where they go. Nothing that is read now is changed."""
        if self._kind is MoveKind.OFFLOAD:
            self._region.cover(self._pages)
        for layer, pages in enumerate(self._returning):
            self._slab.lay(layer, pages)

    def after(self, tx: Transaction) -> None:
        """Take pages from where they were. Copies and zeroing may still run when this returns."""
        if self._kind is MoveKind.RESTORE:
            self._region.shrink(tx, len(self._pages))
        for layer, (leaving, returning) in enumerate(zip(self._leaving, self._returning, strict=True)):
            # A layer's copies run while the next one's pages are moved.
            if leaving:
                self._slab.take_out(tx, layer, leaving)
            if returning:
                self._slab.bring_back(tx, layer, returning)
        if self._kind is MoveKind.OFFLOAD:
            self._region.extend(tx, self._pages)

    def _deal(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Deal the KV cache's last pages to the groups that return, last out first; all of those pages.

        In the order in which they came, so that a group finds the pages that lie behind its addresses still.
        """
        per_group, first = self._slab.geometry.pages_per_group, 0
        pages = self._region.last(per_group * sum(map(len, groups)))
        for level in reversed([*zip(*groups, strict=True)]):
            for returning, group in zip(self._returning, level, strict=True):
                returning[group] = pages[first : first + per_group]
                first += per_group
        return pages


def in_tail_order(slab: ExpertSlab, groups: Sequence[Sequence[int]]) -> list[int]:
    """Pages of ``groups[layer]``, the coldest first, as they follow each other in the KV cache.

    Level by level, and layer by layer inside one: where a page comes to lie does not depend on how many
    levels move at once.
    """
    levels = zip(*groups, strict=True)
    return [
        page for level in levels for layer, group in enumerate(level) for page in slab.pages(layer, group)
    ]
