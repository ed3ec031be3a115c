"""A small KV cache under recorded sessions that take turns: no GPU, no vLLM, a virtual clock.

One server prefills what is missing, one request at a time; a session sends its next turn after its recorded
delay. The model is a hybrid: attention blocks, and a recurrent state at the end of a prompt and one block
before. Victims are the least recently used blocks, or the chains that ``policy/measured.py`` ranks lowest.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from vamp_runtime.policy.chains import Layout, Part
from vamp_runtime.policy.measured import MeasuredParameters, Waiting, admission_order
from vamp_runtime.policy.measurements import Measurements
from vamp_runtime.policy.parameters import CostParameters
from vamp_runtime.policy.read_seconds import Link
from vamp_runtime.policy.reads import LevelReads
from vamp_runtime.policy.reuse import ReuseTimes

SESSIONS = Path(__file__).parents[1] / "data" / "weka_turns.jsonl"
LAYOUT = Layout(block_tokens=544, attention=frozenset({0}), state=frozenset({1}))
T_PREFILL_S, STEP_S, DELAY_CAP_S = 1 / 84_000, 0.02, 5.0
ATTENTION, STATE = 0, 1
# 24 layers of 512 experts of 6 MiB; a level of every layer's next coldest one is 24 blocks.
BLOCKS_PER_LEVEL = 24
LINK = Link(
    expert_bytes=6 << 20,
    bandwidth=51e9,
    layers=24,
    hidden_s_per_token=0.0,
    step_tokens=1 << 16,
)
PARAMETERS = MeasuredParameters(
    sigma=0.6, prior_steps=1000, horizon_min_s=10, horizon_max_s=300, min_lookups=56, fairness_s=20
)
COST = CostParameters(
    alpha=1.0,
    tau_s=40.0,
    t_prefill_s=T_PREFILL_S,
    t_sched_s=0.001,
    t_queue_s=0.1,
    c_eff_s=0.0,
    horizon_steps=1,
    max_offload_ratio=0.25,
)

Hash = tuple[int, int, int]


class Turn(NamedTuple):
    prompt_tokens: int
    shared_tokens: int
    delay_ms: int
    output_tokens: int


def recorded() -> list[list[Turn]]:
    """Turns of every session, in the file's order."""
    rows = (json.loads(line) for line in SESSIONS.read_text().splitlines())
    return [[Turn(*turn) for turn in row["turns"]] for row in rows]


def prompts(number: int, turns: Iterable[Turn]) -> Iterator[list[Hash]]:
    """Block hashes of the turns of session ``number``."""
    hashes: list[Hash] = []
    for index, turn in enumerate(turns):
        del hashes[turn.shared_tokens // LAYOUT.block_tokens :]
        blocks = turn.prompt_tokens // LAYOUT.block_tokens
        hashes = [*hashes[:blocks], *((number, place, index) for place in range(len(hashes), blocks))]
        yield list(hashes)


@dataclass
class Outcome:
    """Sums over the turns after each session's first, and virtual seconds of each served turn."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    turns: int = 0
    ttft_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class SessionCache:
    """``capacity`` blocks, of which a request takes its own, cached ones included, while it is served."""

    def __init__(self, capacity: int, hold: bool, levels: int = 0, link_rate: float = 51e9) -> None:
        self.capacity, self.hold = capacity, hold
        times = ReuseTimes(prior=0.5, prior_events=8, tau_s=40, half_life=500)
        self.measurements = Measurements(PARAMETERS, COST, LAYOUT, times, window_s=60)
        self.level, self.blocks_at = 0, [capacity + BLOCKS_PER_LEVEL * level for level in range(levels + 1)]
        reads = LevelReads(experts=512, group=1, max_level=levels, top_k=10, sigma=0.6, prior_steps=1000)
        self.measurements.announce(reads, replace(LINK, bandwidth=link_rate))
        self.content: dict[tuple[int, Hash], int] = {}
        self.holds: dict[int, tuple[int, Hash]] = {}
        self.free: dict[int, None] = dict.fromkeys(range(capacity))  # in the order of LRU

    def cached(self, hashes: list[Hash]) -> int:
        """Blocks of the prompt that a request would be given."""
        reach = 0
        while reach < len(hashes) and (ATTENTION, hashes[reach]) in self.content:
            reach += 1
        while reach and (STATE, hashes[reach - 1]) not in self.content:
            reach -= 1
        return reach

    def serve(self, now_s: float, hashes: list[Hash]) -> tuple[int, dict[int, Part]]:
        """Admit a request: tokens it is given, and its blocks."""
        hit = self.cached(hashes)
        self.measurements.looked_up(now_s, hashes, hit * LAYOUT.block_tokens)
        keys = [(ATTENTION, block_hash) for block_hash in hashes]
        keys += [(STATE, block_hash) for block_hash in hashes[-2:]]
        mine = [self.content[key] for key in keys if key in self.content]
        for block in mine:
            del self.free[block]
        missing = [key for key in keys if key not in self.content]
        self._grow(now_s, len(missing))
        for key, block in zip(missing, self._take(len(missing), now_s), strict=True):
            self.content[key], self.holds[block] = block, key
        ends = {block_hash: (place + 1) * LAYOUT.block_tokens for place, block_hash in enumerate(hashes)}
        return hit * LAYOUT.block_tokens, {self.content[key]: Part(key[0], ends[key[1]]) for key in keys}

    def finish(self, now_s: float, hashes: list[Hash], blocks: dict[int, Part]) -> None:
        self.measurements.chains.rest(now_s, hashes, blocks)
        for block in sorted(blocks, key=lambda block: -blocks[block].end):
            self.free[block] = None

    def _take(self, count: int, now_s: float) -> list[int]:
        empty = [block for block in self.free if block not in self.holds][:count]
        taken = [*empty, *self._victims(count - len(empty), now_s)]
        for block in taken:
            del self.free[block]
            if block in self.holds:
                del self.content[self.holds.pop(block)]
                self.measurements.lost(block)
        return taken

    def _victims(self, count: int, now_s: float) -> list[int]:
        full = [block for block in self.free if block in self.holds]
        if not self.hold:
            return full[:count]
        return self.measurements.eviction.victims(now_s, count, self.free)

    def _grow(self, now_s: float, wanted: int) -> None:
        """Under pressure, go to the level that is worth its price."""
        if self.capacity - len(self.holds) >= wanted:
            return
        self.measurements.pressed(now_s)
        level = self.measurements.target(now_s, self.level, self.blocks_at[self.level], self.blocks_at)
        self.free |= dict.fromkeys(range(self.blocks_at[self.level], self.blocks_at[level]))
        self.level, self.capacity = level, self.blocks_at[level]


def replay(
    cache: SessionCache,
    sessions: list[list[Turn]],
    seconds: float,
    fairness_s: float = 0.0,
    start_s: float = 0.0,
) -> Outcome:
    """Serve ``sessions``, closed loop, for so long; ``fairness_s`` over 0 admits by what is there first."""
    outcome, now = Outcome(), start_s
    named = enumerate(sessions, int(start_s))  # of two replays into one cache, no session is the other's
    turns = [iter(zip(session, prompts(name, session), strict=True)) for name, session in named]
    arrivals = [(start_s, number) for number in range(len(sessions))]
    waiting: list[tuple[float, int, Turn, list[Hash], bool]] = []
    begun: set[int] = set()
    while (arrivals or waiting) and now < start_s + seconds:
        if not waiting:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, number = heapq.heappop(arrivals)
            following = next(turns[number], None)
            if following is not None:
                waiting.append((at, number, *following, number not in begun))
                begun.add(number)
        if not waiting:
            continue
        order = [0]
        if fairness_s:
            there = [Waiting(at, len(hashes), cache.cached(hashes)) for at, _, _, hashes, _ in waiting]
            order = admission_order(there, now, fairness_s)
        at, number, turn, hashes, first = waiting.pop(order[0])
        hit, blocks = cache.serve(now, hashes)
        cache.measurements.step(now, turn.prompt_tokens - hit)
        now += (turn.prompt_tokens - hit) * T_PREFILL_S + STEP_S
        cache.finish(now, hashes, blocks)
        heapq.heappush(arrivals, (now + min(turn.delay_ms / 1e3, DELAY_CAP_S), number))
        if not first:
            outcome.turns += 1
            outcome.prompt_tokens += turn.prompt_tokens
            outcome.hit_tokens += hit
            outcome.ttft_s.append(now - at)
    cache.measurements.chains.check_integrity()
    return outcome
