"""Cut the demo trace from the published mini-SWE-agent recording; see traces/README.md.

python bench/make_traces.py lmcache_miniswe.jsonl[.zst] bench/traces/miniswe_demo.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vamp_integration.replay.load import load_trace
from vamp_integration.replay.trace import Session

TURNS = 8
MAX_PROMPT = 3000


def fits(session: Session) -> bool:
    """Whether the session has enough turns and its prompts are short enough for a CPU."""
    kept = session.turns[:TURNS]
    return len(kept) == TURNS and max(turn.input_length for turn in kept) <= MAX_PROMPT


def rows(session: Session) -> list[str]:
    """The first turns of a session as JSON lines, values as recorded."""
    lines = []
    for number, turn in enumerate(session.turns[:TURNS]):
        row = {
            "session_id": session.session_id,
            "turn": number,
            "input_length": turn.input_length,
            "output_length": turn.output_length,
            "hash_ids": list(turn.hash_ids),
        }
        time = {"delay": round(turn.delay_s * 1000)} if number else {"timestamp": 0}
        lines.append(json.dumps(row | time, separators=(",", ":")))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("original", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    sessions = [session for session in load_trace(arguments.original).sessions if fits(session)]
    lines = [line for session in sessions for line in rows(session)]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{arguments.out}: {len(sessions)} sessions, {len(lines)} turns")


if __name__ == "__main__":
    main()
