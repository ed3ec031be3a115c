"""Readers for the two JSONL forms: one row per turn with a session id, and Mooncake's rows without."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .trace import Session, Trace, TraceError, Turn

MOONCAKE_BLOCK = 512
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


def rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for every line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(
                path,
                number,
                None,
                f"broken JSON ({error.msg} at column {error.colno}); give one JSON object per line",
            ) from None
        if not isinstance(row, dict):
            raise TraceError(
                path,
                number,
                None,
                f'a JSON {type(row).__name__}; give an object such as {{"input_length": 100, ...}}',
            )
        yield number, row


def count(path: Path, line: int, row: dict[str, Any], field: str, least: int) -> int:
    """The whole number ``row[field]``, at least ``least``."""
    if field not in row:
        raise TraceError(path, line, field, f"missing; give a whole number of at least {least}")
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TraceError(
            path, line, field, f"is {json.dumps(value)}; give a whole number of at least {least}"
        )
    return value


def milliseconds(path: Path, line: int, row: dict[str, Any], field: str) -> float:
    value = row[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise TraceError(path, line, field, f"is {json.dumps(value)}; give milliseconds of at least 0")
    return float(value)


def hash_ids(path: Path, line: int, row: dict[str, Any]) -> tuple[int, ...]:
    value = row.get("hash_ids", ...)
    if value is ...:
        raise TraceError(
            path, line, "hash_ids", "missing; give a list of whole numbers, [] if nothing is reused"
        )
    good = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
    if not good:
        raise TraceError(
            path, line, "hash_ids", "not a list of whole numbers of at least 0, such as [0, 1, 2]"
        )
    return tuple(value)


def block_size(path: Path, turns: list[tuple[int, Turn]]) -> int:
    """Tokens per hash id: the size in ``BLOCK_SIZES`` that explains the rows best.

    Rows may hold full blocks only or the partial last one too, and lengths may have been rounded after
    hashing, so one block more or less is let pass.
    """

    def error(size: int, turn: Turn) -> float:
        return abs(len(turn.hash_ids) - turn.input_length / size)

    best = min(BLOCK_SIZES, key=lambda size: sum(error(size, t) for _, t in turns))
    line, worst = max(turns, key=lambda pair: error(best, pair[1]))
    if worst.hash_ids and error(best, worst) > 1:
        raise TraceError(
            path,
            line,
            "hash_ids",
            f"{len(worst.hash_ids)} ids for {worst.input_length} tokens fit no common block size of "
            f"{', '.join(map(str, BLOCK_SIZES))}; give --block-tokens",
        )
    return best


def read_sessions(path: Path, lines: Iterable[str], block_tokens: int | None) -> Trace:
    """Read rows of session_id, turn, input_length, output_length, hash_ids and ``delay`` or ``timestamp``
    (ms).

    Rows of sessions may be interleaved; turns of one session must follow each other upwards from its first.
    ``delay`` counts from the end of the previous turn. Where only a ``timestamp`` is given, the difference of
    timestamps stands in: start to start, so it contains the recorded service time.
    """
    turns: dict[str, list[Turn]] = {}
    last: dict[str, tuple[int, float | None]] = {}
    numbered: list[tuple[int, Turn]] = []
    stamped = 0
    for line, row in rows(path, lines):
        name = row.get("session_id")
        if not isinstance(name, str) or not name:
            raise TraceError(path, line, "session_id", 'missing or not text; give a name such as "s1"')
        number = count(path, line, row, "turn", 0)
        stamp = milliseconds(path, line, row, "timestamp") if "timestamp" in row else None
        delay = milliseconds(path, line, row, "delay") if "delay" in row else None
        if name in last:
            turn_before, stamp_before = last[name]
            if number != turn_before + 1:
                raise TraceError(
                    path, line, "turn", f"is {number} after {turn_before}; give {turn_before + 1}"
                )
            if delay is None and stamp is not None and stamp_before is not None:
                if stamp < stamp_before:
                    raise TraceError(
                        path, line, "timestamp", f"is {stamp:g} after {stamp_before:g}; give a later one"
                    )
                delay, stamped = stamp - stamp_before, stamped + 1
        turn = Turn(
            count(path, line, row, "input_length", 1),
            count(path, line, row, "output_length", 0),
            hash_ids(path, line, row),
            (delay or 0.0) / 1000 if name in last else 0.0,
        )
        turns.setdefault(name, []).append(turn)
        last[name] = (number, stamp)
        numbered.append((line, turn))
    if not turns:
        raise TraceError(path, None, None, "no rows; give one JSON object per turn")
    notes = (f"{stamped} delays are differences of timestamps, start to start",) if stamped else ()
    return Trace(
        path.name.split(".")[0],
        tuple(Session(name, tuple(of)) for name, of in turns.items()),
        block_tokens or block_size(path, numbered),
        notes=notes,
    )


def read_mooncake(path: Path, lines: Iterable[str], block_tokens: int | None) -> Trace:
    """Read Mooncake's rows: timestamp (ms), input_length, output_length, hash_ids of 512 tokens; no session
    ids.

    A row is taken as the next turn of an earlier one when it repeats all of that row's full blocks, at least
    two (a single block is often a system prompt that strangers share), and nobody has continued that row yet.
    Other rows start a session of their own. Delays are differences of timestamps, start to start.
    """
    sessions: list[list[Turn]] = []
    stamps: list[float] = []
    open_ends: dict[int, int] = {}
    for line, row in rows(path, lines):
        if "timestamp" not in row:
            raise TraceError(path, line, "timestamp", "missing; give milliseconds of at least 0")
        stamp = milliseconds(path, line, row, "timestamp")
        length = count(path, line, row, "input_length", 1)
        output = count(path, line, row, "output_length", 0)
        ids = hash_ids(path, line, row)
        end = next((i for i in reversed(ids) if i in open_ends), None)
        if end is None:
            index, delay = len(sessions), 0.0
            sessions.append([])
            stamps.append(stamp)
        else:
            index = open_ends.pop(end)
            delay, stamps[index] = max(0.0, stamp - stamps[index]) / 1000, stamp
        sessions[index].append(Turn(length, output, ids, delay))
        full = min(len(ids), length // (block_tokens or MOONCAKE_BLOCK))
        if full >= 2:
            open_ends[ids[full - 1]] = index
    if not sessions:
        raise TraceError(path, None, None, "no rows; give one JSON object per request")
    return Trace(
        path.name.split(".")[0],
        tuple(Session(f"chain_{i}", tuple(of)) for i, of in enumerate(sessions)),
        block_tokens or MOONCAKE_BLOCK,
        shared_ids=True,
        notes=(
            "sessions are chains of shared leading ids; delays are differences of timestamps, start to start",
        ),
    )
