from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vamp_runtime.errors import IntegrityError
from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.ledger import Owner, OwnerKind, PageLedger

FREE, KV = Owner(OwnerKind.FREE), Owner(OwnerKind.KV)
OWNERS = [
    FREE,
    KV,
    Owner(OwnerKind.EXPERT, 0, 1),
    Owner(OwnerKind.EXPERT, 1, 1),
    Owner(OwnerKind.HOME, 1, 1),
]


@pytest.fixture
def ledger() -> PageLedger:
    ledger = PageLedger(4096)
    for page in (3, 1, 2):
        ledger.add(page, Tier.HBM, KV)
    ledger.add(9, Tier.HOST, OWNERS[-1])
    ledger.seal()
    return ledger


def test_pages_come_in_the_order_they_were_got(ledger: PageLedger) -> None:
    assert ledger.pages(KV) == (3, 1, 2)
    ledger.move([3], KV, FREE)
    assert ledger.pages(KV) == (1, 2)
    ledger.move([3], FREE, KV)
    assert ledger.pages(KV) == (1, 2, 3)
    assert ledger.pages(FREE) == ()


def test_counts_tell_tiers_apart(ledger: PageLedger) -> None:
    assert ledger.count(OwnerKind.KV) == ledger.count(OwnerKind.KV, Tier.HBM) == ledger.total(Tier.HBM) == 3
    assert ledger.count(OwnerKind.KV, Tier.HOST) == 0
    assert ledger.count(OwnerKind.HOME, Tier.HOST) == ledger.total(Tier.HOST) == 1


def test_only_the_owner_gives_a_page_away(ledger: PageLedger) -> None:
    with pytest.raises(AssertionError, match="page 3 belongs to"):
        ledger.move([3], FREE, KV)
    assert ledger.owner(3) == KV


def test_no_page_is_added_twice_or_after_sealing(ledger: PageLedger) -> None:
    with pytest.raises(AssertionError, match="sealed"):
        ledger.add(4, Tier.HBM, FREE)
    fresh = PageLedger(4096)
    fresh.add(1, Tier.HBM, FREE)
    with pytest.raises(AssertionError, match="already owned"):
        fresh.add(1, Tier.HBM, FREE)


def test_removing_is_no_loss(ledger: PageLedger) -> None:
    ledger.remove(1)
    ledger.check_integrity()
    assert ledger.pages(KV) == (3, 2)


@pytest.mark.parametrize("damage", ["lost", "doubled", "stolen", "shrunk"])
def test_damage_is_found(ledger: PageLedger, damage: str) -> None:
    if damage == "lost":
        del ledger._pages[KV][1]
    elif damage == "doubled":
        ledger._pages[FREE] = {1: None}
    elif damage == "stolen":
        ledger._owner[1] = FREE
    else:
        del ledger._pages[KV][1], ledger._owner[1], ledger._tier[1]
    with pytest.raises(IntegrityError):
        ledger.check_integrity()


class Pages(RuleBasedStateMachine):
    """A ledger against a plain list of (page, tier, owner) in the order of the last change."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = PageLedger(4096)
        self.rows: list[tuple[int, Tier, Owner]] = []
        self.sealed = False
        self.next_page = 0

    @precondition(lambda self: not self.sealed)
    @rule(tier=st.sampled_from(Tier), owner=st.sampled_from(OWNERS))
    def add(self, tier: Tier, owner: Owner) -> None:
        self.ledger.add(self.next_page, tier, owner)
        self.rows.append((self.next_page, tier, owner))
        self.next_page += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), owner=st.sampled_from(OWNERS))
    def move(self, data: st.DataObject, owner: Owner) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.ledger.move([row[0]], row[2], owner)
        self.rows.remove(row)
        self.rows.append((row[0], row[1], owner))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        self.ledger.remove(row[0])
        self.rows.remove(row)

    @rule()
    def seal(self) -> None:
        self.ledger.seal()
        self.sealed = True

    @invariant()
    def same_as_the_list(self) -> None:
        self.ledger.check_integrity()
        for owner in OWNERS:
            assert self.ledger.pages(owner) == tuple(page for page, _, each in self.rows if each == owner)
        for kind in OwnerKind:
            for tier in Tier:
                held = [row for row in self.rows if row[2].kind is kind and row[1] is tier]
                assert self.ledger.count(kind, tier) == len(held)
        for page, tier, owner in self.rows:
            assert (self.ledger.owner(page), self.ledger.tier(page)) == (owner, tier)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_pages_change_hands_together_or_not_at_all() -> None:
    ledger = PageLedger(4)
    for page in range(1, 5):
        ledger.add(page, Tier.HBM, FREE)
    ledger.move([4], FREE, KV)
    with pytest.raises(AssertionError, match=r"page 4 belongs to .*KV"):
        ledger.move([1, 4], FREE, KV)
    assert ledger.pages(FREE) == (1, 2, 3)
    ledger.move([3, 1, 2], FREE, KV)
    assert ledger.pages(KV) == (4, 3, 1, 2) and ledger.pages(FREE) == ()
    ledger.move([], FREE, KV)
    assert ledger.by_kind()[OwnerKind.KV] == 4
    ledger.check_integrity()
