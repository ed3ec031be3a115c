"""Scaling a trace and making its prompts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.replay_runs import small_trace

from vamp_integration.replay.scale import Scaling, scale
from vamp_integration.replay.trace import Session, Trace, Turn
from vamp_integration.replay.workload import Prompts
from vamp_runtime.errors import ConfigError


def test_each_option_changes_what_it_names() -> None:
    trace = small_trace(sessions=3, turns=5, delay_s=9.0)
    scaled = scale(
        trace, Scaling(think_cap_s=2.0, sessions=2, turns=3, skip_turns=1, max_prompt=250, max_output=3)
    )
    assert [len(s.turns) for s in scaled.sessions] == [3, 3]
    assert [t.input_length for t in scaled.sessions[0].turns] == [164, 228, 250]
    assert [t.delay_s for t in scaled.sessions[0].turns] == [0.0, 2.0, 2.0]
    assert {t.output_length for t in scaled.sessions[0].turns} == {3}
    assert len(scaled.notes) == 5


def test_lengths_scale_with_their_blocks() -> None:
    scaled = scale(small_trace(), Scaling(lengths=0.25))
    assert [t.input_length for t in scaled.sessions[0].turns] == [25, 41, 57]
    assert {t.output_length for t in scaled.sessions[0].turns} == {2}
    assert scaled.block_tokens == 16.0


def test_short_sessions_can_be_left_out() -> None:
    long, short = small_trace(1, 5).sessions[0], small_trace(1, 2).sessions[0]
    trace = Trace("t", (Session("short", short.turns), Session("long", long.turns)), 64.0)
    assert [s.session_id for s in scale(trace, Scaling(skip_turns=1, min_turns=2)).sessions] == ["long"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"lengths": 0.0}, "--scale-lengths is 0; give a factor above 0, such as 0.5"),
    ({"lengths": float("nan")}, "--scale-lengths is nan"),
    ({"think_cap_s": -1.0}, "--think-cap is -1"),
    ({"sessions": 0}, "--sessions is 0; give a whole number of at least 1"),
    ({"turns": 0}, "--turns is 0"),
    ({"skip_turns": -1}, "--skip-turns is -1"),
    ({"max_output": 1}, "--max-output is 1; give a whole number of at least 2"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_name_themselves(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Scaling(**options)
    assert message in str(caught.value)


def test_nothing_left_is_an_error_that_says_what_would_work() -> None:
    with pytest.raises(ConfigError, match="longest has 3 turns, so give --skip-turns 2 or less"):
        scale(small_trace(turns=3), Scaling(skip_turns=3))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Two sessions whose turns share a random number of leading ids with the turn before."""
    block = draw(st.sampled_from([16, 32, 64]))
    fresh = iter(range(10_000))
    sessions = []
    for name in "ab":
        ids: list[int] = []
        turns = []
        for _ in range(draw(st.integers(1, 4))):
            ids = ids[: draw(st.integers(0, len(ids)))] + [
                next(fresh) for _ in range(draw(st.integers(0, 4)))
            ]
            length = max(1, block * len(ids) + draw(st.integers(0, block - 1)))
            turns.append(Turn(length, 4, tuple(ids), 0.0))
        sessions.append(Session(name, tuple(turns)))
    return Trace("random", tuple(sessions), float(block))


@given(traces(), st.floats(0.02, 3.0), st.integers(0, 3))
def test_equal_leading_ids_give_equal_leading_tokens_at_any_scale(
    trace: Trace, lengths: float, seed: int
) -> None:
    scaled = scale(trace, Scaling(lengths=lengths))
    prompts = Prompts(scaled, vocab_size=50_000, seed=seed)
    for index, session in enumerate(scaled.sessions):
        tokens = [prompts.prompt(index, i) for i in range(len(session.turns))]
        assert [len(t) for t in tokens] == [t.input_length for t in session.turns]
        for a, one in enumerate(session.turns):
            for b, other in enumerate(session.turns[:a]):
                pairs = zip(one.hash_ids, other.hash_ids, strict=False)
                same = next(
                    (i for i, (x, y) in enumerate(pairs) if x != y),
                    min(len(one.hash_ids), len(other.hash_ids)),
                )
                shared = min(int(same * scaled.block_tokens), one.input_length, other.input_length)
                assert tokens[a][:shared] == tokens[b][:shared]


def test_different_blocks_sessions_and_seeds_give_different_tokens() -> None:
    trace = small_trace()
    prompts, others = Prompts(trace, 50_000), Prompts(trace, 50_000, seed=1)
    one = prompts.prompt(0, 2)
    assert one[:64] != one[64:128]
    assert one[:64] != prompts.prompt(1, 2)[:64]
    assert one[:64] != others.prompt(0, 2)[:64]
    assert one == Prompts(trace, 50_000).prompt(0, 2)
    assert all(0 <= token < 50_000 for token in one)


def test_shared_ids_give_the_same_tokens_in_every_session() -> None:
    trace = small_trace()
    prompts = Prompts(Trace("m", trace.sessions, 64.0, shared_ids=True), 50_000)
    assert prompts.prompt(0, 1)[:128] == prompts.prompt(1, 1)[:128]
    assert prompts.prompt(0, 1)[128:] != prompts.prompt(1, 1)[128:]
