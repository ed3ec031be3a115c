"""Who owns each physical page. Bookkeeping only: no driver call is made here."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from vamp_runtime.errors import IntegrityError
from vamp_runtime.memory.driver import Tier


class OwnerKind(enum.Enum):
    FREE = "free"
    EXPERT = "expert"
    HOME = "home"
    KV = "kv"
    RESERVE = "reserve"
    STAGING = "staging"

    # A member is itself alone. Enum's own hash is Python, and a move asks for thousands beside the steps.
    __hash__ = object.__hash__


class Owner(NamedTuple):
    """One owner of pages. ``place`` is the group of an EXPERT or of STAGING, and the home slot of a HOME."""

    kind: OwnerKind
    layer: int = -1
    place: int = -1


class PageLedger:
    """Owners of pages of ``page_bytes`` bytes each. A page is known by its driver handle."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self._owner: dict[int, Owner] = {}
        self._tier: dict[int, Tier] = {}
        self._pages: dict[Owner, dict[int, None]] = {}
        self._by_kind: Counter[OwnerKind] = Counter()
        self._sealed: dict[Tier, int] | None = None

    def add(self, handle: int, tier: Tier, owner: Owner) -> None:
        """Enter a page. Not allowed once sealed."""
        assert self._sealed is None, "a sealed ledger takes no new pages"
        assert handle not in self._owner, f"page {handle} is already owned"
        self._tier[handle] = tier
        self._give((handle,), owner)

    def remove(self, handle: int) -> None:
        """Strike out a page whose handle is released."""
        tier = self._tier.pop(handle)
        self._take((handle,), self._owner.pop(handle))
        if self._sealed is not None:
            self._sealed[tier] -= 1

    def move(self, handles: Sequence[int], old: Owner, new: Owner) -> None:
        """Hand pages from ``old`` to ``new``, behind those that ``new`` has and in this order; all or none.

        At once, since a step may wait for hundreds of them.
        """
        for page in handles:
            assert self._owner[page] == old, f"page {page} belongs to {self._owner[page]}, not {old}"
        assert len(set(handles)) == len(handles), "a page is named twice"
        if handles:
            self._take(handles, old)
            self._give(handles, new)

    def owner(self, handle: int) -> Owner:
        return self._owner[handle]

    def tier(self, handle: int) -> Tier:
        return self._tier[handle]

    def pages(self, owner: Owner) -> tuple[int, ...]:
        """Handles of ``owner`` in the order it got them."""
        return tuple(self._pages.get(owner, ()))

    def count(self, kind: OwnerKind, tier: Tier | None = None) -> int:
        """Pages of all owners of ``kind``, of one tier or of all."""
        return sum(
            sum(tier is None or self._tier[page] is tier for page in pages)
            for owner, pages in self._pages.items()
            if owner.kind is kind
        )

    def by_kind(self) -> dict[OwnerKind, int]:
        """Pages of all owners of each kind, whatever their tier; cheap enough to ask for after every move."""
        return {kind: self._by_kind[kind] for kind in OwnerKind}

    def total(self, tier: Tier) -> int:
        """Pages of a tier, whoever owns them."""
        return sum(each is tier for each in self._tier.values())

    def seal(self) -> None:
        """From now on pages change hands but none is added; ``check_integrity`` holds the counts to it."""
        self._sealed = {tier: self.total(tier) for tier in Tier}

    def check_integrity(self) -> None:
        """Every page has one owner, and the page count of each tier is what was sealed.

        Raises:
            IntegrityError: naming the page or the tier.
        """
        listed = [(page, owner) for owner, pages in self._pages.items() for page in pages]
        for page, owner in listed:
            if self._owner.get(page) != owner:
                raise IntegrityError(
                    f"page {page} is listed under {owner} but owned by {self._owner.get(page)}"
                )
        if not len(listed) == len(self._owner) == len(self._tier):
            raise IntegrityError(
                f"{len(self._owner)} pages have an owner, {len(listed)} are listed under one"
            )
        if self.by_kind() != {kind: self.count(kind) for kind in OwnerKind}:
            raise IntegrityError(f"the counts by kind of owner are wrong: {self._by_kind}")
        for tier, sealed in (self._sealed or {}).items():
            if self.total(tier) != sealed:
                raise IntegrityError(f"{tier.value}: {self.total(tier)} pages, sealed with {sealed}")

    def _give(self, handles: Sequence[int], owner: Owner) -> None:
        self._owner.update(dict.fromkeys(handles, owner))
        self._pages.setdefault(owner, {}).update(dict.fromkeys(handles))
        self._by_kind[owner.kind] += len(handles)

    def _take(self, handles: Sequence[int], owner: Owner) -> None:
        pages = self._pages[owner]
        for page in handles:
            del pages[page]
        self._by_kind[owner.kind] -= len(handles)
        if not pages:
            del self._pages[owner]
