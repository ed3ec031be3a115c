"""The move protocol of one rank: expert groups give pages to the KV cache or each other, and return."""

from __future__ import annotations

import enum
import hashlib
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from vamp_kernels.ranges import ranged
from vamp_runtime.errors import DriverError, IntegrityError
from vamp_runtime.memory.agreement import Agreement, Vote
from vamp_runtime.memory.driver import MemoryDriver
from vamp_runtime.memory.kv_region import KVRegion
from vamp_runtime.memory.move import Move as Move
from vamp_runtime.memory.move import MoveKind as MoveKind
from vamp_runtime.memory.move import Outcome as Outcome
from vamp_runtime.memory.move import Swap
from vamp_runtime.memory.page_work import PageWork, in_tail_order
from vamp_runtime.memory.slab import ExpertSlab
from vamp_runtime.memory.transaction import Transaction

#: Pages that one slice of covering ahead maps: 0.1 to 0.2 ms on an H200, in which steps may wait for the
#: driver.
SLICE_PAGES = 4


class MoveState(enum.Enum):
    IDLE = "idle"
    REQUESTED = "requested"
    REDIRECTED = "redirected"
    PREPARED = "prepared"


class Boundary:
    """Walks a move: ``request``, ``redirect``, ``prepare``, ``agree``; then ``publish`` or ``abandon``.

    A rank that refuses a move, or whose driver fails, still takes every step up to ``agree``, where it votes
    against; then every rank abandons. For one thread at a time. ``StateLost`` from any step ends the process.

    Pages stay mapped where they were, and are mapped ahead where they may come (``cover_ahead``).

    Args:
        strict: no address that nobody may use leads anywhere between moves, so that a stray access faults
            there: everything is unmapped after a move, and nothing mapped ahead of one.

    Attributes:
        epoch: of the last move requested, published or not.
    """

    def __init__(
        self,
        slab: ExpertSlab,
        region: KVRegion,
        agreement: Agreement,
        driver: MemoryDriver,
        strict: bool = False,
    ) -> None:
        self.slab = slab
        self.region = region
        self.strict = strict
        self.epoch = 0
        self.state = MoveState.IDLE
        self._agreement = agreement
        self._driver = driver
        self._pages_at_level_0 = region.pages - slab.level * slab.geometry.pages_per_level

    @ranged("request")
    def request(self, move: Move) -> str:
        """Check a move and choose its groups; why it is refused, or an empty string.

        Offloads take the coldest groups that have a valid home, restores those that left last, and a swap
        names its own. An accepted move claims ``claimed_blocks`` in the region.
        """
        assert self.state is MoveState.IDLE
        self._started = time.perf_counter()
        self._move = move
        self._groups: list[list[int]] = []
        self._mark: object = None
        self._pages_seconds = 0.0
        self._agreed = False
        self._held: tuple[ExitStack, Transaction] | None = None
        self._claimed_before = self.region.claimed
        self._reason = self._refusal(move) or self._choose(move)
        self.epoch = max(self.epoch, move.epoch)
        if not self._reason:
            self.region.claim(move.claimed_blocks)
        self.state = MoveState.REQUESTED
        return self._reason

    @ranged("redirect")
    def redirect(self) -> None:
        """Read leaving groups through their homes, and mark the work that may still read as before."""
        assert self.state is MoveState.REQUESTED
        self.state = MoveState.REDIRECTED
        if not self._reason and self._move.kind is not MoveKind.RESTORE:
            self._redirect()
        if not self._reason:
            try:
                self._mark = self._driver.mark()
            except DriverError as error:
                self._reason = str(error)

    @ranged("prepare")
    def prepare(self) -> bool:
        """Move the pages, all or none; whether this rank is ready to publish.

        Pages are mapped where they go at once. What queued kernels may read stays as it is until the mark.
        """
        assert self.state is MoveState.REDIRECTED
        self.state = MoveState.PREPARED
        if not self._reason:
            try:
                started = time.perf_counter()
                with ExitStack() as stack:
                    tx = stack.enter_context(Transaction())
                    tx.on_undo(self._driver.synchronize)
                    work = PageWork(self.slab, self.region, self._move, self._groups)
                    work.ahead(tx)
                    waited = -time.perf_counter()
                    self._driver.wait(self._mark)
                    waited += time.perf_counter()
                    work.after(tx)
                    self._driver.synchronize()
                    self._held = stack.pop_all(), tx
                self._pages_seconds = time.perf_counter() - started - waited
            except DriverError as error:
                self._reason = str(error)
        return not self._reason

    @ranged("agree")
    def agree(self) -> bool:
        """Vote with the other ranks; whether to publish.

        Raises:
            StateLost: a rank did not answer in time.
        """
        assert self.state is MoveState.PREPARED
        vote = Vote(self._move.epoch, not self._reason, 0 if self._reason else self._digest())
        self._agreed = self._agreement.all_agree(vote)
        if not self._agreed and not self._reason:
            self._reason = "another rank failed, refused, or chose other groups"
        return self._agreed

    @ranged("publish")
    def publish(self) -> Outcome:
        """Make an agreed move final: groups count as out, or are read at their own addresses again."""
        assert self.state is MoveState.PREPARED and self._agreed and self._held is not None
        stack, tx = self._held
        tx.commit()
        stack.close()
        for swap in self._move.swaps:
            self.slab.mark_swapped(swap.layer, swap.leaving, swap.returning)
        for layer, groups in enumerate(self._groups):
            if self._move.kind is MoveKind.OFFLOAD:
                self.slab.mark_out(layer, groups)
            elif self._move.kind is MoveKind.RESTORE:
                self.slab.mark_resident(layer, groups)
        return self._finish()

    @ranged("clear")
    def clear(self) -> None:
        """Between moves, unmap what lies at addresses that nobody may use.

        Raises:
            DriverError: a call was refused; the rest stays where it is, which does no harm.
        """
        assert self.state is MoveState.IDLE
        self.region.uncover()
        self.slab.clear()

    def cover_ahead(self, levels: int, slice_pages: int = SLICE_PAGES) -> Iterator[int]:
        """Between moves, map behind the KV tail what an offload of ``levels`` levels would take by now.

        Fewer where there are no more, or their homes are not ready. The next move takes what it chooses, and
        maps what differs: this is a cache, in which ranks may differ. Each turn of the iterator maps
        ``slice_pages`` pages at most, and gives their number; no move may begin while one is under way.
        Meanwhile another thread may claim blocks, and set coldness. Strict boundaries cover nothing.

        Raises:
            DriverError: a call was refused; the rest is as useful as before.
        """
        epoch, slices = self.epoch, self.region.cover_slices(self._next_pages(levels), slice_pages)
        while covered := self._cover_slice(epoch, slices):
            yield covered

    @ranged("abandon")
    def abandon(self, reason: str = "") -> Outcome:
        """Bring back the pages, bytes and slot table of before the request.

        KV blocks from the move's ``claimed_blocks`` on are zero after an abandoned RESTORE that had been
        prepared; the region counts them as claimed again. Any other abandoned move leaves the claim as it is,
        since the scheduler has added those ids in any case.

        Raises:
            StateLost: a step could not be undone.
        """
        assert self.state is not MoveState.IDLE
        self._agreed = False
        self._reason = self._reason or reason or "abandoned"
        if self._held is not None:
            self._held[0].close()
        for layer, groups in enumerate(self._groups):
            for group in self.slab.redirected(layer).difference(self.slab.out(layer)).intersection(groups):
                self.slab.point_back(layer, group)
        if self._groups and self._move.kind is MoveKind.RESTORE:
            self.region.claim(self._claimed_before)
        return self._finish()

    @ranged("move")
    def run(self, move: Move) -> Outcome:
        """The whole walk, one step after the other."""
        self.request(move)
        self.redirect()
        self.prepare()
        outcome = self.publish() if self.agree() else self.abandon()
        if self.strict:
            try:
                self.clear()
            except DriverError:  # what still leads somewhere can wait for the next move's end
                traceback.print_exc()
        return outcome

    def offload(self, levels: int) -> Outcome:
        """Give ``levels`` groups of every layer to the KV cache."""
        return self.run(self._next(MoveKind.OFFLOAD, levels))

    def restore(self, levels: int) -> Outcome:
        """Take ``levels`` groups of every layer back from the KV cache."""
        return self.run(self._next(MoveKind.RESTORE, levels))

    def swap(self, swaps: Sequence[Swap]) -> Outcome:
        """Give the pages of groups that leave HBM to groups that return."""
        return self.run(replace(self._next(MoveKind.SWAP, 0), swaps=tuple(swaps)))

    def check_integrity(self) -> None:
        """Ledger, slab and region agree; between moves also that what left the experts is what KV got.

        Raises:
            IntegrityError: naming what does not hold.
        """
        slab, region = self.slab, self.region
        slab.ledger.check_integrity()
        slab.check_integrity()
        region.check_integrity()
        if self.state is not MoveState.IDLE:
            return
        for layer in range(slab.geometry.layers):
            out = slab.out(layer)
            if not len(out) == len(set(out)) == slab.level <= slab.geometry.max_level:
                raise IntegrityError(f"layer {layer}: groups {out} are out at level {slab.level}")
            if slab.redirected(layer) != set(out) or slab.without_pages(layer) != set(out):
                raise IntegrityError(
                    f"layer {layer}: groups {out} are out, but others are redirected or empty"
                )
        if region.pages != self._pages_at_level_0 + slab.level * slab.geometry.pages_per_level:
            raise IntegrityError(f"the KV cache has {region.pages} pages at level {slab.level}")

    def close(self) -> None:
        """Give back every page and address of region and slab, whatever lies where."""
        self.region.uncover()
        self.slab.close()
        self.region.close()

    def _next_pages(self, levels: int) -> list[int]:
        """Pages of the levels that would leave next, at most ``levels``, in their order behind the tail."""
        slab, per_level = self.slab, self.slab.geometry.pages_per_level
        levels = min(levels, slab.geometry.max_level - slab.level)
        levels = min(levels, (self.region.geometry.max_pages - self.region.pages) // per_level)
        if self.strict or levels < 1:
            return []
        groups = [slab.ready(layer, levels) for layer in range(slab.geometry.layers)]
        least = min(map(len, groups))
        return in_tail_order(slab, [of_layer[:least] for of_layer in groups])

    @ranged("cover ahead")
    def _cover_slice(self, epoch: int, slices: Iterator[int]) -> int:
        assert self.state is MoveState.IDLE and epoch == self.epoch, "the tail is no longer the one to cover"
        return next(slices, 0)

    def _next(self, kind: MoveKind, levels: int) -> Move:
        return Move(self.epoch + 1, kind, levels, self.slab.level, self.region.claimed)

    def _refusal(self, move: Move) -> str:
        """Why this rank cannot make the move, whatever groups it takes; empty if it can."""
        slab, region, level = self.slab, self.region, move.level_after
        pages = region.pages + (level - move.level_before) * slab.geometry.pages_per_level
        if move.epoch != self.epoch + 1:
            return f"epoch {move.epoch} does not follow {self.epoch}"
        if move.level_before != slab.level:
            return f"this rank is at level {slab.level}, not {move.level_before}"
        swap = move.kind is MoveKind.SWAP
        if swap is not bool(move.swaps) or (swap and move.levels):
            return f"{move.kind.value} of {move.levels} levels and {len(move.swaps)} pairs of groups"
        if (move.levels < 1 and not swap) or not 0 <= level <= slab.geometry.max_level:
            top = slab.geometry.max_level
            return f"{move.kind.value} of {move.levels} from level {slab.level} leaves 0..{top}"
        if not 0 <= pages <= region.geometry.max_pages:
            return f"the KV cache would have {pages} pages of 0..{region.geometry.max_pages}"
        blocks = min(region.blocks, region.geometry.blocks_for_pages(pages))
        if not 0 <= move.claimed_blocks <= blocks:
            return f"{move.claimed_blocks} blocks are claimed, {blocks} would be backed"
        return ""

    def _choose(self, move: Move) -> str:
        """Choose the groups of every layer; why that is not possible, or an empty string."""
        slab, groups = self.slab, []
        if move.kind is MoveKind.SWAP:
            reason = swap_refusal(slab, move.swaps)
            leaving = {swap.layer: [swap.leaving] for swap in move.swaps}
            self._groups = [] if reason else [leaving.get(la, []) for la in range(slab.geometry.layers)]
            return reason
        for layer in range(slab.geometry.layers):
            if move.kind is MoveKind.RESTORE:
                groups.append(list(slab.out(layer)[: -move.levels - 1 : -1]))
                continue
            groups.append(slab.ready(layer, move.levels))
            if len(groups[-1]) < move.levels:
                return f"layer {layer}: {len(groups[-1])} of {move.levels} groups have a valid home"
        self._groups = groups
        return ""

    def _redirect(self) -> None:
        leaving = [(layer, group) for layer, groups in enumerate(self._groups) for group in groups]
        if any(self.slab.home_of(layer, group) is None for layer, group in leaving):
            self._reason = "a home was given to another group since the request"
            return
        for layer, group in leaving:
            self.slab.redirect(layer, group)

    def _digest(self) -> int:
        text = repr((self._move, self._groups, self.region.blocks)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    def _finish(self) -> Outcome:
        self.state = MoveState.IDLE
        self._held = None
        geometry, move = self.slab.geometry, self._move
        groups = move.levels * geometry.layers + len(move.swaps)
        moved = groups * geometry.group_bytes if self._agreed else 0
        return Outcome(
            epoch=move.epoch,
            ok=self._agreed,
            level=self.slab.level,
            blocks=self.region.blocks,
            bytes_moved=moved,
            copied_bytes=0 if move.kind is MoveKind.OFFLOAD else moved,
            seconds=time.perf_counter() - self._started,
            reason=self._reason,
            pages_seconds=self._pages_seconds,
        )


def swap_refusal(slab: ExpertSlab, swaps: Sequence[Swap]) -> str:
    """Why ``slab`` cannot swap these groups; empty if it can."""
    layers = [swap.layer for swap in swaps]
    if len(set(layers)) < len(layers) or not set(layers) <= set(range(slab.geometry.layers)):
        return f"swaps of layers {layers}, which should be different ones of 0..{slab.geometry.layers - 1}"
    for swap in swaps:
        if swap.returning not in slab.out(swap.layer):
            return f"layer {swap.layer}: group {swap.returning} is not out of HBM"
        if swap.leaving not in slab.ready(swap.layer, slab.geometry.groups):
            return f"layer {swap.layer}: group {swap.leaving} is not in HBM with a valid home"
    return ""
