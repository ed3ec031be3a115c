"""The pages of one move: which go where, and the driver calls that take them there, in their order."""

from __future__ import annotations

from collections.abc import Sequence

from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.move import Move, MoveKind
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.transaction import Transaction


class PageWork:
    """What a move does ``ahead``, while kernels queued before it still run, and what it does ``after`` them.

    A page may lie behind two addresses. So it is mapped where it goes while it is still read where it was;
    only what takes something away from those kernels waits for them: unmapping, zeroing, copying over.

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
        if move.kind is MoveKind.RESTORE:
            self._pages = self._deal(groups)
        else:
            leaving = [(layer, group) for layer, of_layer in enumerate(self._leaving) for group in of_layer]
            self._pages = [page for layer, group in leaving for page in slab.pages(layer, group)]
        for swap in move.swaps:
            self._returning[swap.layer][swap.returning] = slab.pages(swap.layer, swap.leaving)

    def ahead(self, tx: Transaction) -> None:
        """Map pages where they go. Nothing that is read now is changed."""
        if self._kind is MoveKind.OFFLOAD:
            self._region.cover(tx, self._pages)
        for layer, pages in enumerate(self._returning):
            self._slab.lay(tx, layer, pages)

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
        elif self._kind is MoveKind.RESTORE:
            self._region.uncover(tx, self._pages)

    def _deal(self, groups: Sequence[Sequence[int]]) -> list[int]:
        """Deal the KV cache's last pages to the groups that return; all of those pages."""
        per_group, first = self._slab.geometry.pages_per_group, 0
        pages = self._region.last(per_group * sum(map(len, groups)))
        for returning, of_layer in zip(self._returning, groups, strict=True):
            for group in sorted(of_layer):
                returning[group] = pages[first : first + per_group]
                first += per_group
        return pages
