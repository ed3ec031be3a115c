"""Fit a recorded trace to a machine: pure functions from a trace and options to a trace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vamp_runtime.errors import ConfigError

from .trace import Session, Trace, Turn


@dataclass(frozen=True)
class Scaling:
    """What to change about a trace; the defaults change nothing but lift outputs to two tokens.

    Attributes:
        lengths: factor on input and output lengths.
        think_cap_s: longest delay between turns in seconds.
        sessions: keep the first so many sessions.
        turns: keep the first so many turns of each session, after ``skip_turns``.
        skip_turns: leave out so many turns at the start of each session.
        min_turns: leave out sessions with fewer turns after ``skip_turns``.
        max_prompt: cut prompts at so many tokens.
        max_output: cut outputs at so many tokens.
        min_output: lift outputs to so many tokens; time per output token needs two.
    """

    lengths: float = 1.0
    think_cap_s: float | None = None
    sessions: int | None = None
    turns: int | None = None
    skip_turns: int = 0
    min_turns: int = 1
    max_prompt: int | None = None
    max_output: int | None = None
    min_output: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.lengths <= 1000:
            raise ConfigError(f"--scale-lengths is {self.lengths:g}; give a factor above 0, such as 0.5")
        if self.think_cap_s is not None and not 0 <= self.think_cap_s < math.inf:
            raise ConfigError(f"--think-cap is {self.think_cap_s:g}; give seconds of at least 0, such as 5")
        least = {"sessions": 1, "turns": 1, "skip_turns": 0, "min_turns": 1, "max_prompt": 1, "min_output": 1}
        for name, bound in {**least, "max_output": self.min_output}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is {value}; give a whole number of at least {bound}")

    def describe(self) -> tuple[str, ...]:
        """One note for every change that a reader of the results has to know."""
        notes = []
        if self.lengths != 1.0:
            notes.append(f"lengths scaled by {self.lengths:g}")
        if self.think_cap_s is not None:
            notes.append(f"delays capped at {self.think_cap_s:g} s")
        if self.skip_turns:
            notes.append(f"first {self.skip_turns} turns of each session left out")
        if self.turns is not None:
            notes.append(f"at most {self.turns} turns of each session")
        if self.max_prompt is not None:
            notes.append(f"prompts cut at {self.max_prompt} tokens")
        if self.max_output is not None:
            notes.append(f"outputs capped at {self.max_output} tokens")
        return tuple(notes)


def scale_turn(turn: Turn, scaling: Scaling) -> Turn:
    """Scale one turn. Hash ids stay: ``Trace.block_tokens`` shrinks with the lengths."""
    length = max(1, math.ceil(turn.input_length * scaling.lengths))
    output = max(scaling.min_output, math.ceil(turn.output_length * scaling.lengths))
    delay = turn.delay_s
    if scaling.max_prompt is not None:
        length = min(length, scaling.max_prompt)
    if scaling.max_output is not None:
        output = min(output, scaling.max_output)
    if scaling.think_cap_s is not None:
        delay = min(delay, scaling.think_cap_s)
    return replace(turn, input_length=length, output_length=output, delay_s=delay)


def scale(trace: Trace, scaling: Scaling) -> Trace:
    """Apply ``scaling``. The first turn that is kept of a session starts without delay.

    Raises:
        ConfigError: nothing would be left.
    """
    stop = None if scaling.turns is None else scaling.skip_turns + scaling.turns
    kept: list[Session] = []
    for session in trace.sessions:
        turns = session.turns[scaling.skip_turns : stop]
        if len(session.turns) - scaling.skip_turns < scaling.min_turns or len(kept) == scaling.sessions:
            continue
        scaled = [scale_turn(t, scaling) for t in turns]
        kept.append(Session(session.session_id, (replace(scaled[0], delay_s=0.0), *scaled[1:])))
    if not kept:
        longest = max(len(s.turns) for s in trace.sessions)
        raise ConfigError(
            f"--skip-turns {scaling.skip_turns} and --min-turns {scaling.min_turns} leave no session of "
            f"{trace.name}; its longest has {longest} turns, so give --skip-turns {longest - 1} or less"
        )
    return replace(
        trace,
        sessions=tuple(kept),
        block_tokens=trace.block_tokens * scaling.lengths,
        notes=trace.notes + scaling.describe(),
    )
