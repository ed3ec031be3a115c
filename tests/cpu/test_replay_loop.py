"""The closed loop against an engine in virtual time."""

from __future__ import annotations

from support.replay_runs import SerialEngine, small_trace

from vamp_integration.replay.loop import ClosedLoop, TurnRecord
from vamp_integration.replay.trace import Trace


def run(
    trace: Trace, concurrency: int, max_seconds: float | None = None
) -> tuple[SerialEngine, list[TurnRecord], float]:
    engine, turns = SerialEngine(), []
    loop = ClosedLoop(
        trace,
        engine,
        lambda session, turn: [0] * trace.sessions[session].turns[turn].input_length,
        concurrency,
        engine.clock,
        engine.sleep,
        turns.append,
        lambda now: None,
        max_seconds,
    )
    return engine, turns, loop.run()


def test_the_next_turn_waits_for_the_last_one_and_its_delay() -> None:
    engine, turns, seconds = run(small_trace(sessions=1, turns=2, delay_s=3.0), concurrency=1)
    # A turn takes 0.5 s to its first token and 3 x 0.25 s for the others.
    assert engine.submitted == [(0.0, "0-0"), (1.25 + 3.0, "0-1")]
    assert seconds == 2 * 1.25 + 3.0
    assert [t.tokens for t in turns] == [[1, 2, 3, 4]] * 2


def test_times_count_from_submission_and_between_tokens() -> None:
    _, turns, _ = run(small_trace(sessions=2, turns=1), concurrency=2)
    assert [t.ttft_s for t in turns] == [0.5, 1.25 + 0.5]
    assert [t.tpot_s for t in turns] == [0.25, 0.25]
    assert [t.cached_tokens for t in turns] == [64, 64]


def test_no_more_sessions_than_the_concurrency_are_open() -> None:
    engine, turns, _ = run(small_trace(sessions=5, turns=2, delay_s=0.0), concurrency=2)
    assert len(turns) == 10
    first = {int(name.split("-")[0]): at for at, name in reversed(engine.submitted)}
    last = {t.session: t.submitted_s + t.ttft_s + 3 * t.tpot_s for t in turns}
    for session in range(2, 5):
        open_then = [s for s in range(session) if last[s] > first[session]]
        assert len(open_then) < 2
    assert first[0] == first[1] == 0.0


def test_time_is_up_at_max_seconds() -> None:
    _, turns, seconds = run(small_trace(sessions=4, turns=4), concurrency=4, max_seconds=3.0)
    assert len(turns) == 2
    assert 3.0 <= seconds <= 3.5
