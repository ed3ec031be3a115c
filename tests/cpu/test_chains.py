"""Chains: what blocks are good for together, who owns them, and the order in which they go."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from vamp_runtime.policy.chains import Chain, Chains, Layout, Loss, Part, usable_tokens

HYBRID = Layout(block_tokens=16, attention=frozenset({0}), state=frozenset({1, 2}))
PLAIN = Layout(block_tokens=16, attention=frozenset({0, 1}), state=frozenset())


def parts(*blocks: tuple[int, int]) -> list[Part]:
    return [Part(group, 16 * count) for group, count in blocks]


def names(text: str) -> Sequence[str]:
    """Chained hashes: each names the whole prefix."""
    return [text[: end + 1] for end in range(len(text))]


def test_attention_must_be_whole_from_the_start() -> None:
    assert usable_tokens(parts((0, 1), (0, 2), (1, 1), (1, 2)), PLAIN) == 32
    assert usable_tokens(parts((0, 1), (0, 2), (1, 1)), PLAIN) == 16
    assert usable_tokens(parts((0, 2), (0, 3), (1, 1), (1, 2), (1, 3)), PLAIN) == 0


def test_a_lost_state_costs_back_to_the_one_before() -> None:
    attention = [(0, 1), (0, 2), (0, 3)]
    assert usable_tokens(parts(*attention, (1, 3), (2, 3)), HYBRID) == 48
    assert usable_tokens(parts(*attention, (1, 3), (1, 1), (2, 1)), HYBRID) == 16
    assert usable_tokens(parts(*attention, (1, 3)), HYBRID) == 0
    # A state that lies behind a lost attention block is of no use either.
    assert usable_tokens(parts((0, 1), (0, 3), (1, 3), (2, 3)), HYBRID) == 0


def make(layout: Layout = HYBRID, most: int = 8) -> tuple[Chains, list[float]]:
    ended: list[float] = []
    return Chains(layout, most, ended.append), ended


def session(first: int, blocks: int) -> dict[int, Part]:
    """Attention blocks from id ``first`` on, then the two states at their end."""
    ends = [Part(0, 16 * (place + 1)) for place in range(blocks)]
    return dict(enumerate([*ends, Part(1, 16 * blocks), Part(2, 16 * blocks)], first))


def test_what_host_memory_would_bring_back() -> None:
    chains, _ = make()
    chains.rest(1.0, names("aaaa"), session(0, 4))
    state = {4, 5}
    assert chains.loss_of(state) == [Loss(64, 1.0)]
    assert chains.loss_of(state, lambda block: True) == [Loss(64, 1.0, loadable=64, loads=6)]
    # Without a copy of one state nothing is; nor beyond an attention block that has none.
    assert chains.loss_of(state, lambda block: block != 4) == [Loss(64, 1.0)]
    plain, _ = make(PLAIN)
    plain.rest(1.0, names("aaaa"), dict(enumerate(parts(*((g, n) for n in (1, 2, 3, 4) for g in (0, 1))))))
    assert plain.loss_of({4, 6}, lambda block: block >= 2) == [Loss(32, 1.0, loadable=32, loads=4)]
    assert plain.loss_of({4, 6}, lambda block: block < 6) == [Loss(32, 1.0, loadable=16, loads=2)]


def test_a_lookup_knows_what_would_have_kept_the_prefix() -> None:
    chains, _ = make()
    chains.rest(1.0, names("aaaa"), session(0, 4))
    chains.rest(2.0, names("bb"), session(10, 2))
    assert chains.looked_up(5.0, names("cc")) is None
    lookup = chains.looked_up(5.0, names("aaaaa"))
    assert lookup is not None
    assert (lookup.age_s, lookup.need, lookup.tokens) == (4.0, 4 + 6 * 5 // 4, 64)
    again = chains.looked_up(6.0, names("aaaaa"))
    assert again is not None and again.need == 6 * 5 // 4, "nothing has been used since"
    assert chains.size_under_way == 6 * 5 // 4


def test_newest_states_that_went_before_the_rest_are_curable() -> None:
    """Once a request has left a whole prefix, one that leaves less had its states evicted under way."""
    chains, _ = make()
    chains.rest(1.0, names("aaaa"), session(0, 4))
    chains.rest(2.0, names("bbbb"), {10: Part(0, 16), 11: Part(0, 32)})
    lookup = chains.looked_up(3.0, names("bbbbb"))
    assert lookup is not None and lookup.tokens == 3 * 16


def test_old_states_are_those_before_the_last_three() -> None:
    chains, _ = make()
    states = {place: parts((1, place), (2, place)) for place in (1, 2, 3, 4)}
    blocks = dict(enumerate(parts(*((0, place) for place in (1, 2, 3, 4)))))
    blocks |= {
        100 + 10 * place + index: part for place, two in states.items() for index, part in enumerate(two)
    }
    chains.rest(1.0, names("aaaa"), blocks)
    assert sorted(chains.old_states()) == [110, 111]
    chains.lost(140)
    assert not list(chains.old_states()), "three whole ones are left"


def test_what_the_model_would_not_have_hit_is_not_curable() -> None:
    chains, _ = make()
    chains.rest(1.0, names("aaaa"), {0: Part(0, 16), 1: Part(0, 32)})
    lookup = chains.looked_up(2.0, names("aaaa"))
    assert lookup is not None and lookup.tokens == 0


def test_a_shared_beginning_goes_with_the_last_that_needs_it() -> None:
    chains, _ = make()
    shared = {0: Part(0, 16)}
    chains.rest(1.0, names("saaa"), shared | {1: Part(0, 32), 2: Part(1, 32), 3: Part(2, 32)})
    chains.rest(2.0, names("sbbb"), shared | {4: Part(0, 32), 5: Part(1, 32), 6: Part(2, 32)})
    first, second = chains
    free = set(range(7))
    assert list(chains.order([first], free)) == [1, 2, 3]
    assert list(chains.order([second, first], free)) == [4, 5, 6, 1, 2, 3, 0]
    assert list(chains.order([second, first], free - {5})) == [4, 6, 1, 2, 3, 0]


def test_continuing_a_session_replaces_its_chain() -> None:
    chains, ended = make()
    chains.rest(1.0, names("aaaa"), session(0, 4))
    chains.rest(2.0, names("aaaab"), session(0, 4) | {20: Part(0, 80), 21: Part(1, 80), 22: Part(2, 80)})
    (chain,) = chains
    assert chain.size == 9 and chain.usable(HYBRID) == 80 and not ended
    chains.lost(21)
    assert chain.usable(HYBRID) == 64, "back to the state of the turn before"


def test_the_oldest_is_forgotten() -> None:
    chains, ended = make(most=2)
    for at, name in enumerate("abc"):
        chains.rest(float(at), names(name * 4), session(10 * at, 4))
    assert ended == [2.0] and not chains.owned(0) and chains.owned(10)
    chains.forget_unused(10.0, after_s=8.5)
    assert ended == [2.0, 9.0] and len(list(chains)) == 1
    chains.check_integrity()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["rest", "look", "lose", "forget"]), st.integers(0, 5), st.integers(1, 6)),
    max_size=60,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_owners_and_chains_agree(operations: list[tuple[str, int, int]]) -> None:
    chains, ended = make(most=3)
    next_id, ids = 0, dict[str, int]()
    for now, (what, number, length) in enumerate(operations):
        prefix = names("s" + str(number) * length)
        if what == "rest":
            blocks = {}
            for place, name in enumerate(prefix):
                if name not in ids:
                    ids[name], next_id = next_id, next_id + 1
                blocks[ids[name]] = Part(0, 16 * (place + 1))
            blocks |= {next_id: Part(1, 16 * len(prefix)), next_id + 1: Part(2, 16 * len(prefix))}
            next_id += 2
            chains.rest(float(now), prefix, blocks)
        elif what == "look":
            chains.looked_up(float(now), prefix)
        elif what == "lose" and next_id:
            lost = (number * 7 + length) % next_id
            chains.lost(lost)
            ids = {name: block for name, block in ids.items() if block != lost}
        elif what == "forget":
            chains.forget_unused(float(now), after_s=10.0 * length)
        chains.check_integrity()
        ranked: list[Chain] = list(chains)
        everything = {block for chain in ranked for block in chain.blocks}
        ordered = list(chains.order(ranked, everything))
        assert sorted(ordered) == sorted(everything), "each block once"
    assert all(age >= 0 for age in ended)
