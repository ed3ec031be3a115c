"""Reader for SWE-agent trajectories (.traj): one JSON object, lengths estimated from its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .trace import Session, Trace, TraceError, Turn

# English and source code come to 3.5-4.5 characters per token with byte-pair vocabularies of 100k-150k
# entries.
CHARS_PER_TOKEN = 4
BLOCK_TOKENS = 16


def message_text(message: Any) -> str:
    """Role, text parts and tool calls of one chat message."""
    if not isinstance(message, dict):
        return ""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(
            p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)
        )
    calls = message.get("tool_calls")
    return f"{message.get('role', '')}\n{content or ''}\n" + (
        json.dumps(calls, sort_keys=True) if calls else ""
    )


def prompts(trajectory: list[dict[str, Any]], history: list[Any]) -> list[str]:
    """The prompt of every step.

    SWE-agent 1.x records it as ``query``. Before that, it is taken as append-only: the history up to the
    first assistant message, then response and observation of every earlier step.
    """
    opening: list[str] = []
    for message in history:
        if isinstance(message, dict) and message.get("role") == "assistant" and not message.get("is_demo"):
            break
        opening.append(message_text(message))
    said = "".join(opening)
    result = []
    for step in trajectory:
        query = step.get("query")
        result.append("".join(map(message_text, query)) if isinstance(query, list) and query else said)
        said += f"{step['response']}\n{step['observation']}\n"
    return result


def read_traj(path: Path, text: str) -> Trace:
    """Read one trajectory as a one-session trace.

    The prefix grows turn by turn; the delay of a turn is the ``execution_time`` (seconds) of the step before
    it. Hash ids number the distinct prefixes of the prompt text in blocks of 16 x 4 characters, so equal ids
    mean an equal prefix, also where the agent rewrote its history.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(
            path,
            error.lineno,
            None,
            f"broken JSON ({error.msg} at column {error.colno}); give one SWE-agent object",
        ) from None
    steps = record.get("trajectory") if isinstance(record, dict) else None
    if not isinstance(steps, list) or not steps:
        raise TraceError(
            path, None, "trajectory", "missing, empty or not a list; give the steps of a SWE-agent run"
        )
    delays = [step_delay(path, i, step) for i, step in enumerate(steps)]
    history = record.get("history", [])
    known: dict[tuple[int, str], int] = {}
    turns = []
    for index, prompt in enumerate(prompts(steps, history if isinstance(history, list) else [])):
        length = max(1, len(prompt) // CHARS_PER_TOKEN)
        ids = prefix_ids(prompt, length // BLOCK_TOKENS, known)
        output = max(1, -(-len(steps[index]["response"]) // CHARS_PER_TOKEN))
        turns.append(Turn(length, output, ids, delays[index - 1] if index else 0.0))
    note = f"lengths are estimated from text at {CHARS_PER_TOKEN} characters per token"
    return Trace(path.stem, (Session(path.stem, tuple(turns)),), BLOCK_TOKENS, notes=(note,))


def step_delay(path: Path, index: int, step: Any) -> float:
    """Check one step; return its tool time in seconds."""
    field = f"trajectory[{index}]"
    if not isinstance(step, dict):
        raise TraceError(path, None, field, "not an object; give action, observation, response")
    for name in ("action", "observation", "response"):
        if not isinstance(step.get(name), str):
            raise TraceError(
                path, None, f"{field}.{name}", 'missing or not text; give the recorded text, "" if none'
            )
    seconds = step.get("execution_time", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise TraceError(
            path, None, f"{field}.execution_time", f"is {json.dumps(seconds)}; give seconds of at least 0"
        )
    return float(seconds)


def prefix_ids(prompt: str, blocks: int, known: dict[tuple[int, str], int]) -> tuple[int, ...]:
    """Number the prefixes of ``prompt``; ``known`` maps (id of the prefix before, text of the block) to an "
    "id."""
    step = BLOCK_TOKENS * CHARS_PER_TOKEN
    ids: list[int] = []
    before = -1
    for start in range(0, blocks * step, step):
        before = known.setdefault((before, prompt[start : start + step]), len(known))
        ids.append(before)
    return tuple(ids)
