"""A routing profile: which experts tokens were routed to, as the record order of the next start.

The most used expert of a layer takes its first record and the least used its last: groups are of experts
about equally warm, and until an engine has counts of its own, the last groups leave first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vamp_integration.replay.report import write_atomically
from vamp_runtime.errors import ConfigError

Hits = Sequence[Sequence[int]]
COLD = 0.15


def record_order(hits: Hits) -> list[list[int]]:
    """``[layers][experts]``, the record of each expert; equally used experts stay in the order of index."""
    order = []
    for row in hits:
        records = [0] * len(row)
        for record, expert in enumerate(sorted(range(len(row)), key=lambda e: (-row[e], e))):
            records[expert] = record
        order.append(records)
    return order


@dataclass(frozen=True)
class Coverage:
    """How much the counts say.

    Attributes:
        selections: of experts by tokens, all layers together.
        cold_share: of the selections of an average layer, those of its coldest ``COLD`` experts.
        unused_share: of all experts, those that no token was routed to.
    """

    selections: int
    cold_share: float
    unused_share: float


def coverage(hits: Hits) -> Coverage:
    """Raises ``ConfigError`` where nothing was counted in some layer."""
    if not hits or not all(sum(row) for row in hits):
        raise ConfigError("prompts: a layer has routed no token; give at least one prompt")
    shares = [sum(sorted(row)[: int(COLD * len(row))]) / sum(row) for row in hits]
    unused = sum(not count for row in hits for count in row)
    return Coverage(sum(map(sum, hits)), sum(shares) / len(shares), unused / sum(len(row) for row in hits))


def write_profile(path: Path, hits: Hits, about: dict[str, Any]) -> None:
    """Write ``order``, which is what an engine reads, with the counts that it comes from and ``about``."""
    profile = {**about, "order": record_order(hits), "hits": [list(row) for row in hits]}
    write_atomically(path, json.dumps(profile) + "\n")


def read_prompts(path: Path) -> list[str | list[int]]:
    """Prompts of a text file, one a line, or of ``.jsonl`` rows ``{"prompt": text or token ids}``.

    Raises:
        ConfigError: naming file, line and field.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts: {path}: cannot be read ({error}); give a text or .jsonl file"
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts: {path}: has no prompts; give one a line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt(path, number, line) for number, line in numbered]


def _prompt(path: Path, number: int, line: str) -> str | list[int]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    prompt: Any = row.get("prompt") if isinstance(row, dict) else None
    ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise ConfigError(
            f'--prompts: {path}:{number}: prompt: is no text and no token ids; give {{"prompt": "text"}}'
        )
    found: str | list[int] = prompt
    return found
