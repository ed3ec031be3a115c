"""The measured policy at vLLM's objects: its pool, its waiting queue, its real CPU engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.engine import run_scenario

from vamp_integration.settings import VampSettings
from vamp_integration.tiny_model import TinyShape
from vamp_runtime.controller import Capacity
from vamp_runtime.errors import ConfigError
from vamp_runtime.policy.chains import Layout
from vamp_runtime.policy.decide import Action

if TYPE_CHECKING:
    from vamp_integration.arbiter import Arbiter

pytestmark = pytest.mark.vllm

BLOCK = 16
LAYOUT = Layout(BLOCK, frozenset({0}), frozenset({1}))


def make(blocks: int, blocks_at: tuple[int, ...] = ()) -> Arbiter:
    from vllm.v1.core.block_pool import BlockPool

    from vamp_integration.arbiter import Arbiter
    from vamp_integration.commands import Report
    from vamp_integration.costs import engine_costs
    from vamp_integration.measured import EngineFacts
    from vamp_integration.pool import VampBlockPool

    config = SimpleNamespace(num_hidden_layers=TinyShape().layers)
    costs = engine_costs(VampSettings(policy="measured", model="tiny-qwen3-next"), config)
    pool = VampBlockPool.adopt(BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK))
    arbiter = Arbiter(pool, costs, BLOCK, lambda blocks: None, 0.03)
    facts = EngineFacts(
        LAYOUT, top_k=2, bandwidth=1e9, layers=4, staged=False, step_tokens=64, prefill_share=1.0
    )
    arbiter.measure(lambda: facts)
    blocks_at = blocks_at or (blocks, blocks + 4)
    arbiter.settle(Report(capacity=Capacity(blocks_at, experts=32, group=2, level_bytes=1)))
    return arbiter


def prompt(arbiter: Arbiter, name: int, blocks: int) -> tuple[Any, list[Any]]:
    """A request that has filled ``blocks`` attention blocks and has a state at their end."""
    hashes = [bytes([name, place]) * 16 for place in range(blocks)]
    request: Any = SimpleNamespace(
        request_id=str(name),
        block_hashes=hashes,
        num_tokens=blocks * BLOCK,
        num_computed_tokens=blocks * BLOCK,
        arrival_time=float(name),
        status=None,
    )
    held = arbiter.pool.get_new_blocks(blocks + 1)
    arbiter.pool.cache_full_blocks(request, held[:-1], 0, blocks, BLOCK, 0)
    states = [arbiter.pool.null_block] * (blocks - 1) + held[-1:]
    arbiter.pool.cache_full_blocks(request, states, 0, blocks, BLOCK, 1)
    return request, held


def finish(arbiter: Arbiter, request: Any, held: list[Any]) -> None:
    assert arbiter.measured is not None
    arbiter.measured.rest(request)
    arbiter.pool.free_blocks(reversed(held))


def test_the_chain_that_is_worth_least_goes_first_whatever_was_used_last() -> None:
    arbiter = make(blocks=32)
    measured = arbiter.measured
    assert measured is not None
    kept, held = prompt(arbiter, 1, 5)
    finish(arbiter, kept, held)
    broken, broken_held = prompt(arbiter, 2, 5)
    finish(arbiter, broken, broken_held)
    # Without its state the chain used last is good for nothing.
    arbiter.pool.put_first([broken_held[-1]])
    (lost,) = arbiter.pool.get_new_blocks(1)
    assert lost is broken_held[-1]
    arbiter.pool.free_blocks([lost])
    filler = arbiter.pool.get_new_blocks(31 - 11)
    request: Any = SimpleNamespace(num_computed_tokens=0)
    assert arbiter.weigh(4, [], 0, request, running=False) == 4
    assert arbiter.journal.decisions[Action.EVICT.value] == 1
    taken = {block.block_id for block in arbiter.pool.get_new_blocks(4)}
    assert taken <= {block.block_id for block in broken_held}
    assert measured.measurements.eviction.wait([kept.block_hashes]) == [5 * BLOCK]
    assert measured.measurements.eviction.wait([broken.block_hashes]) == [0]
    measured.measurements.chains.check_integrity()
    arbiter.pool.free_blocks(filler)


def test_a_reset_leaves_no_chain_with_blocks() -> None:
    arbiter = make(blocks=16)
    finish(arbiter, *prompt(arbiter, 1, 5))
    assert arbiter.pool.reset_prefix_cache()
    assert arbiter.measured is not None
    chains = arbiter.measured.measurements.chains
    chains.check_integrity()
    assert all(not chain.blocks for chain in chains) and not chains.orphans


def test_requests_whose_prefix_is_there_come_first() -> None:
    import time

    from vllm.v1.core.sched.request_queue import FCFSRequestQueue
    from vllm.v1.request import RequestStatus

    arbiter = make(blocks=16)
    there, held = prompt(arbiter, 1, 5)
    finish(arbiter, there, held)
    now = time.time()
    missing: Any = SimpleNamespace(
        request_id="missing",
        block_hashes=[b"x" * 32] * 5,
        num_tokens=80,
        arrival_time=now - 2,
        status=RequestStatus.WAITING,
    )
    there.arrival_time, there.status = now - 1, RequestStatus.WAITING
    queue = FCFSRequestQueue([missing, there])
    assert arbiter.measured is not None
    arbiter.measured.order(queue)
    assert list(queue) == [there, missing]
    assert arbiter.measured.there(missing) == 0 < arbiter.measured.there(there)
    later: Any = SimpleNamespace(request_id="later", block_hashes=there.block_hashes)
    assert arbiter.measured.there(later) == arbiter.measured.there(there), "it came after the last look"
    missing.arrival_time = now - 1e6
    arbiter.measured._ordered_at = 0.0
    arbiter.measured.order(queue)
    assert list(queue) == [missing, there], "it has waited long enough"


def test_a_look_at_who_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.request_queue import FCFSRequestQueue

    from vamp_integration import measured as module

    monkeypatch.setattr(module, "MOST_LOOKUPS", 9)
    arbiter = make(blocks=16)
    (first, held), second = (
        prompt(arbiter, 1, 5),
        SimpleNamespace(request_id="2", block_hashes=[b"y" * 32] * 5),
    )
    finish(arbiter, first, held)
    assert arbiter.measured is not None
    arbiter.measured.order(FCFSRequestQueue([first, second]))
    assert arbiter.measured.there(first) == 5 * BLOCK
    assert arbiter.measured.there(second) is None, "five more blocks would have been looked for"


@pytest.mark.parametrize(
    ("blocks_at", "wanted"),
    [
        (tuple(range(320, 360, 4)), 5),  # a sixteenth of 320 is 20 blocks: five levels
        (tuple(range(12, 32, 2)), 1),  # of 12 it is less than a block: still a level
        ((320, 320, 320, 340, 340), 4),  # some levels add no whole block
    ],
    ids=["a large pool", "a tiny one", "levels that add nothing"],
)
def test_levels_are_asked_for_a_little_ahead(
    blocks_at: tuple[int, ...], wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aim is the highest level; as long as the pool has taken nothing, a second look asks for no more."""
    arbiter = make(blocks_at[0], blocks_at)
    measured = arbiter.measured
    assert measured is not None
    top = len(blocks_at) - 1
    monkeypatch.setattr(measured, "aim", lambda level, at: top - level)
    asked: list[int] = []
    monkeypatch.setattr(arbiter.levels, "want", asked.append)
    arbiter._aim(measured)
    assert asked == [wanted]
    arbiter.levels.wanted = wanted
    arbiter._aim(measured)
    assert asked == [wanted]


def test_who_has_to_queue_is_not_priced_anew_while_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for as long as others only take cached blocks; a block given back, or some time, and it is."""
    from vamp_integration import measured as module

    monkeypatch.setattr(module, "AGAIN_S", 1000.0)
    arbiter, asked = make(blocks=32), []
    request, held = prompt(arbiter, 1, 5)
    finish(arbiter, request, held)

    def queue(situation: Any, prices: Any, parameters: Any) -> Any:
        asked.append(situation)
        return module.Decision(Action.QUEUE, 0, 0, 0, 0.1, (), None)

    monkeypatch.setattr(module, "decide_by", queue)
    others = arbiter.pool.get_new_blocks(31 - 6 - 4)
    waits: Any = SimpleNamespace(num_computed_tokens=0)

    def weigh(count: int) -> int:
        arbiter.weigh(count, [], 0, waits, running=False)
        return len(asked)

    assert [weigh(8), weigh(8)] == [1, 1]
    arbiter.pool.touch([held[0]])
    assert weigh(8) == 1, "one more is taken"
    arbiter.pool.free_blocks(others[:1])
    assert [weigh(8), weigh(8)] == [2, 2]
    assert weigh(9) == 3
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    assert weigh(9) == 4


def test_what_host_memory_holds_is_asked_again_before_levels_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decision at an allocation comes between two looks at the tail."""
    from vamp_integration import measured as module
    from vamp_runtime.policy.restore import RestoreSituation

    arbiter, asked = make(blocks=32), []
    measured = arbiter.measured
    assert measured is not None
    request, held = prompt(arbiter, 1, 5)
    finish(arbiter, request, held)
    monkeypatch.setattr(measured, "_host_holds", lambda block: bool(asked.append(block.block_id)) or True)
    situation = RestoreSituation(
        level=1,
        shards_per_group=2,
        experts=32,
        blocks_per_level=4,
        clean_blocks=0,
        cached_blocks=6,
        tokens_per_block=BLOCK,
        cached_age_s=0.0,
        r_hit=0.0,
        waiting_requests=0,
        since_growth_s=10.0,
        moving=False,
        copied_blocks=6,
    )
    tail = [block.block_id for block in held]
    for seconds, times in ((1000.0, 1), (1000.0, 1), (0.0, 2)):
        monkeypatch.setattr(module, "AGAIN_S", seconds)
        measured.decide_restore(situation, 1, 1, tail)
        assert asked and all(asked.count(block) == times for block in asked)


def test_another_kind_of_cache_is_refused() -> None:
    from vamp_integration.measured import cache_layout

    class Window:
        block_size = BLOCK

    config: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=Window())])
    with pytest.raises(
        ConfigError, match=r"^policy: measured knows .* not Window in blocks of 16 .* policy = paper"
    ):
        cache_layout(config, BLOCK)


@pytest.mark.parametrize(
    ("policy", "known", "on_cpu", "becomes"),
    [
        ("auto", True, False, "measured"),
        ("auto", False, False, "paper"),
        ("auto", True, True, "auto"),
        ("paper", True, False, "paper"),
        ("measured", False, False, "measured"),
    ],
)
def test_auto_takes_what_is_measured_where_it_can(
    policy: str, known: bool, on_cpu: bool, becomes: str
) -> None:
    """A policy that was asked for by name is not replaced: ``engine_facts`` refuses it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vamp_integration.measured import resolve_policy

    spec = FullAttentionSpec(
        block_size=BLOCK if known else 2 * BLOCK, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
    )
    config: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    assert resolve_policy(VampSettings(policy=policy), config, BLOCK, on_cpu).policy == becomes


def test_whole_sessions_are_kept_where_lru_loses_all(tiny_model: Path) -> None:
    """Twelve sessions take turns in a pool for fewer; no expert may leave, so that order alone decides."""
    work = {"seed": 8, "count": 12, "length": 400, "growth": 20, "turns": 5, "max_tokens": 2, "kv_mib": 6}
    runs = {
        policy: run_scenario(
            "rounds",
            tiny_model,
            max_model_len=1024,
            vamp={"max_offload_ratio": 0.0, "policy": policy},
            **work,
        )
        for policy in ("paper", "measured")
    }
    cached = {policy: sum(result["cached"] for result in run["results"]) for policy, run in runs.items()}
    assert all(run["decisions"]["evict"] > 0 and run["moves"] == 0 for run in runs.values())
    assert cached["measured"] > cached["paper"]


def test_levels_move_beside_it(tiny_model: Path) -> None:
    """Growth and restores with victims chosen by value: pool, ranks and chains stay in step."""
    work = {"seed": 8, "count": 4, "length": 600, "growth": 130, "turns": 3, "max_tokens": 4}
    vamp = {"max_offload_ratio": 0.5, "policy": "measured", "exercise_steps": 3}
    run = run_scenario("rounds", tiny_model, kv_mib=3, max_model_len=1024, vamp=vamp, **work)
    assert run["moves"] > 0 and run["failed_moves"] == 0
    assert all(len(result["tokens"]) == 4 for result in run["results"])
