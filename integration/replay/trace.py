"""The model of a recorded trace: sessions of turns, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class TraceError(ValueError):
    """A trace file cannot be used; the message names file, line, field and what would work, in one line."""

    def __init__(self, path: Path, line: int | None, field: str | None, problem: str) -> None:
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {problem}" if field is None else f"{place}: field '{field}': {problem}")
        self.path, self.line, self.field = path, line, field


@dataclass(frozen=True)
class Turn:
    """One request of a session.

    Attributes:
        input_length: prompt length in tokens, the whole context included.
        output_length: tokens to generate.
        hash_ids: one id per block of ``Trace.block_tokens`` prompt tokens, from the front; the same id at the
            same place means the same tokens up to there.
        delay_s: seconds to wait after the previous turn of the session has ended; 0 for a first turn.
    """

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    delay_s: float


@dataclass(frozen=True)
class Session:
    session_id: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Trace:
    """Sessions in the order of their first appearance.

    Attributes:
        name: file name without suffixes.
        sessions: the sessions; none is empty.
        block_tokens: prompt tokens that one hash id stands for; a fraction after lengths were scaled.
        shared_ids: whether equal ids in different sessions mean equal tokens.
        notes: what a reader of the results has to know about how the file was read or changed.
    """

    name: str
    sessions: tuple[Session, ...]
    block_tokens: float
    shared_ids: bool = False
    notes: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        return sum(len(s.turns) for s in self.sessions)

    @property
    def max_tokens(self) -> int:
        """Longest prompt plus its output, in tokens: the least ``max_model_len``."""
        return max(t.input_length + t.output_length for s in self.sessions for t in s.turns)
