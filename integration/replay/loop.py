"""The closed loop: one request per session in flight, the next a recorded delay after the last has ended."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .trace import Trace


@dataclass(frozen=True)
class Progress:
    """What one engine step gave one request.

    Attributes:
        request_id: as submitted.
        tokens: new output tokens.
        cached_tokens: prompt tokens found in the prefix cache.
        finished: whether the request has ended.
    """

    request_id: str
    tokens: list[int]
    cached_tokens: int
    finished: bool


class Engine(Protocol):
    def submit(self, request_id: str, prompt: list[int], output_tokens: int) -> None: ...

    def step(self) -> list[Progress]: ...

    def busy(self) -> bool:
        """Whether a step has something to do, also when no request is in flight."""
        ...


@dataclass
class Flight:
    session: int
    turn: int
    submitted: float
    first: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class TurnRecord:
    """One finished turn. Times are seconds; ``submitted_s`` counts from the start of the replay.

    Attributes:
        ttft_s: from submission to the first token.
        tpot_s: mean time between output tokens; 0 for a single token.
        tokens: the output tokens.
    """

    session: int
    turn: int
    submitted_s: float
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]


class ClosedLoop:
    """Replays ``trace`` against ``engine``.

    Sessions start in the order of the trace, ``concurrency`` at a time; when one has ended the next starts.

    Args:
        trace: what to replay.
        engine: takes requests and makes steps.
        prompt: gives the token ids of (session, turn).
        concurrency: sessions in flight.
        clock: monotonic seconds.
        sleep: waits for seconds while nothing is in flight.
        on_turn: called with every finished turn.
        on_step: called after every step and sleep with the seconds since the start.
        max_seconds: submit nothing more after so long; what is in flight then is left out. May be set anew
            while the loop runs.
    """

    def __init__(
        self,
        trace: Trace,
        engine: Engine,
        prompt: Callable[[int, int], list[int]],
        concurrency: int,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        on_turn: Callable[[TurnRecord], None],
        on_step: Callable[[float], None],
        max_seconds: float | None = None,
    ) -> None:
        self.trace, self.engine, self.prompt, self.clock, self.sleep = trace, engine, prompt, clock, sleep
        self.on_turn, self.on_step, self.max_seconds = on_turn, on_step, max_seconds
        self._waiting = list(range(len(trace.sessions)))[::-1]
        self._due: list[tuple[float, int, int]] = []
        self._flights: dict[str, Flight] = {}
        for _ in range(min(concurrency, len(trace.sessions))):
            heapq.heappush(self._due, (0.0, self._waiting.pop(), 0))

    @property
    def in_flight(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return list(self._flights)

    def run(self) -> float:
        """Replay until every turn has ended or time is up; return the seconds it took."""
        start = self.clock()
        while self._due or self._flights:
            now = self.clock() - start
            if self.max_seconds is not None and now >= self.max_seconds:
                break
            while self._due and self._due[0][0] <= now:
                _, session, turn = heapq.heappop(self._due)
                self._submit(session, turn, start)
            if self._flights or self.engine.busy():
                self._step(start)
            else:
                self.sleep(self._due[0][0] - now)
            self.on_step(self.clock() - start)
        return self.clock() - start

    def _submit(self, session: int, turn: int, start: float) -> None:
        record = self.trace.sessions[session].turns[turn]
        tokens = self.prompt(session, turn)
        request_id = f"{session}-{turn}"
        self._flights[request_id] = Flight(session, turn, self.clock() - start)
        self.engine.submit(request_id, tokens, record.output_length)

    def _step(self, start: float) -> None:
        outputs = self.engine.step()
        now = self.clock() - start
        for output in outputs:
            flight = self._flights[output.request_id]
            if output.tokens and not flight.tokens:
                flight.first, flight.cached = now, output.cached_tokens
            flight.tokens += output.tokens
            if output.finished:
                del self._flights[output.request_id]
                self._finish(flight, now)

    def _finish(self, flight: Flight, now: float) -> None:
        turns = self.trace.sessions[flight.session].turns
        tokens = len(flight.tokens)
        self.on_turn(
            TurnRecord(
                flight.session,
                flight.turn,
                flight.submitted,
                flight.first - flight.submitted,
                (now - flight.first) / (tokens - 1) if tokens > 1 else 0.0,
                turns[flight.turn].input_length,
                flight.cached,
                flight.tokens,
            )
        )
        following = flight.turn + 1
        if following < len(turns):
            heapq.heappush(self._due, (now + turns[following].delay_s, flight.session, following))
        elif self._waiting:
            heapq.heappush(self._due, (now, self._waiting.pop(), 0))
