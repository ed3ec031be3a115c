"""The scheduler's half of vLLM's own OffloadingConnector, without an engine: which blocks it still uses, and
which contents host memory holds. Requests, pool and connector are real; the ranks are played by the test."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.scenarios import EAGER
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from vamp_integration.arbiter import Arbiter
from vamp_integration.commands import Report
from vamp_integration.costs import engine_costs
from vamp_integration.kv_offload import VampOffloadingConnector
from vamp_integration.measured import EngineFacts
from vamp_integration.pool import VampBlockPool
from vamp_integration.settings import VampSettings
from vamp_integration.shrink import Shrinker
from vamp_integration.tiny_model import TinyShape
from vamp_runtime.controller import Capacity
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.boundary import MoveKind, Outcome
from vamp_runtime.policy.chains import Layout
from vamp_runtime.policy.read_seconds import ReadSeconds
from vamp_runtime.policy.restore import RestoreDecision

pytestmark = pytest.mark.vllm

BLOCK = 16
SPEC = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
SETTINGS = VampSettings(policy=EAGER, model="tiny-qwen3-next")


def vllm_connector(ranks: int = 1, blocks_per_chunk: int = 1, host_blocks: int = 64) -> OffloadingConnector:
    """vLLM's connector on the scheduler's side, for one group of full attention."""
    page = SPEC.page_size_bytes
    tensor = KVCacheTensor(size=16 * page, layers=["a"], layer_stride=16 * page, block_stride=page)
    kv = KVCacheConfig(
        num_blocks=16, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["a"], SPEC)]
    )
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=BLOCK, layer_names=("a",), group_id=0),),
        worker_kv_bytes_per_block=page,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": host_blocks * ranks * blocks_per_chunk * page},
        engine_id="test",
        model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=BLOCK, blocks_per_chunk=blocks_per_chunk),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=ranks,
            tp_size=ranks,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )
    engine: Any = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_cache_retention_interval=None),
        parallel_config=SimpleNamespace(world_size=ranks, decode_context_parallel_size=1),
        speculative_config=None,
    )
    connector = OffloadingConnector.__new__(OffloadingConnector)
    connector.connector_scheduler = OffloadingConnectorScheduler(CPUOffloadingSpec(config), engine, kv)
    connector.connector_worker, connector._kv_cache_config = None, kv
    return connector


class Bench:
    """A connector, a pool that lies as in an engine, and steps of single requests."""

    def __init__(self, ranks: int = 1, blocks: int = 12, **options: int) -> None:
        init_none_hash(sha256)
        self.connector = VampOffloadingConnector.adopt(vllm_connector(ranks, **options), load_block_s=1e-6)
        self.pool = VampBlockPool.adopt(BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK))
        self._names = map(str, itertools.count())

    def request(self, tokens: Sequence[int]) -> Request:
        request = Request(
            request_id=next(self._names),
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.connector.on_new_request(request)
        return request

    def step(
        self,
        new: Request | None = None,
        blocks: Sequence[int] = (),
        tokens: int = 0,
        finished: Request | None = None,
    ) -> Any:
        """One step that schedules ``tokens`` of ``new`` on ``blocks``; the metadata it carries."""
        output: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=new.request_id, block_ids=(list(blocks),))]
            if new
            else [],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
            num_scheduled_tokens={new.request_id: tokens} if new else {},
            finished_req_ids={finished.request_id} if finished else set(),
            preempted_req_ids=set(),
            kv_cache_block_copies=None,
            kv_connector_block_state=None,
        )
        return self.connector.build_connector_meta(output)

    def report(self, *jobs: int) -> None:
        """One rank has finished ``jobs``."""
        meta = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.connector.request_finished(request, [])

    def serve(self, tokens: Sequence[int], count: int) -> list[Any]:
        """A request that comes, is stored whole and goes; its blocks, cached and free."""
        request = self.request(tokens)
        blocks = self.pool.get_new_blocks(count)
        meta = self.step(request, [block.block_id for block in blocks], len(tokens))
        self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK, 0)
        self.report(*meta.store_jobs)
        self.finish(request)
        self.pool.free_blocks(reversed(blocks))
        self.step(finished=request)
        return blocks


def test_a_store_counts_until_every_rank_has_reported_it() -> None:
    bench = Bench(ranks=2)
    request = bench.request(range(48))
    (job,) = bench.step(request, [5, 6, 7], 48).store_jobs
    uses = bench.connector.uses
    assert uses(7) and not uses(8) and bench.connector.transfers.blocks == 3
    bench.report(job)
    assert uses(7)
    bench.report(job)
    assert not uses(1)


def test_the_last_blocks_of_a_request_count_before_their_store_begins() -> None:
    """They are free from the end of the request on, and the next step stores them."""
    bench = Bench()
    request = bench.request(range(48))
    (first,) = bench.step(request, [5, 6, 7], 40).store_jobs
    bench.report(first)
    assert not bench.connector.uses(1)
    bench.finish(request)
    assert not bench.connector.transfers.reach(1) and bench.connector.uses(7)
    (second,) = bench.step(finished=request).store_jobs
    assert bench.connector.transfers.reach(7) and not bench.connector.transfers.reach(8)
    bench.report(second)
    assert not bench.connector.uses(1)


def test_copies_outlive_a_reset_of_the_connector() -> None:
    bench = Bench()
    (job,) = bench.step(bench.request(range(16)), [5], 16).store_jobs
    bench.connector.reset_cache()
    assert not bench.connector.scheduler._jobs and bench.connector.uses(5)
    bench.report(job)
    assert not bench.connector.uses(1)


def test_a_load_counts_too_and_its_tokens_are_known() -> None:
    bench = Bench()
    bench.serve(range(48), 3)
    request = bench.request([*range(48), 99])
    assert bench.connector.get_num_new_matched_tokens(request, 0) == (48, True)
    blocks = bench.pool.get_new_blocks(4)
    bench.connector.update_state_after_alloc(request, KVCacheBlocks((blocks,)), 48)
    assert bench.connector.loading(request) == 48 and bench.connector.loading(bench.request([1])) == 0
    (job,) = bench.step().load_jobs
    highest = max(block.block_id for block in blocks[:3])
    assert bench.connector.uses(highest) and bench.connector.transfers.loaded_blocks == 3
    bench.report(job)
    assert not bench.connector.uses(1)


@pytest.mark.parametrize(
    ("blocks_per_chunk", "before", "after"),
    [(1, [5, 9, 6, 10], [5, 0, 6, 0]), (2, [9, 5, 6, 7], [0, 0, 6, 7]), (2, [5, 6, 7, 9], [5, 6, 7, 0])],
)
def test_nothing_is_stored_from_blocks_that_are_gone(
    blocks_per_chunk: int, before: list[int], after: list[int]
) -> None:
    """A preempted request leaves its ids in the connector's tables, and its end would store them."""
    bench = Bench(blocks_per_chunk=blocks_per_chunk)
    request = bench.request(range(64))
    assert not bench.step(request, before, 0).store_jobs
    bench.connector.forget(9)
    (group,) = bench.connector.scheduler._req_status[request.request_id].group_states
    assert group.block_ids == after
    bench.finish(request)
    assert not bench.connector.uses(9)
    for job in bench.step(finished=request).store_jobs.values():
        assert job.src_spec.block_ids.max() < 9


def test_what_host_memory_holds() -> None:
    bench = Bench(host_blocks=4)
    (block,) = bench.serve(range(16), 1)
    content = block.block_hash
    assert content is not None and bench.connector.holds(content)
    bench.serve(range(100, 164), 4)
    assert not bench.connector.holds(content), "the four blocks that host memory has are others now"


def test_a_copy_under_way_is_one() -> None:
    bench = Bench()
    request = bench.request(range(16))
    blocks = bench.pool.get_new_blocks(1)
    bench.pool.cache_full_blocks(request, blocks, 0, 1, BLOCK, 0)
    content = blocks[0].block_hash
    assert content is not None and not bench.connector.holds(content)
    bench.step(request, [blocks[0].block_id], 16)
    assert bench.connector.holds(content)


def test_chunks_of_several_blocks_are_priced_as_lost() -> None:
    bench = Bench(blocks_per_chunk=2)
    blocks = bench.serve(range(32), 2)
    assert not bench.connector.copies_known
    assert not any(bench.connector.holds(block.block_hash) for block in blocks)


def test_another_connector_is_refused() -> None:
    adopted = Bench().connector
    with pytest.raises(
        ConfigError, match=r"^--kv-transfer-config kv_connector: VampOffloadingConnector is not"
    ):
        VampOffloadingConnector.adopt(adopted, 1.0)


# With the arbiter and the shrinker.


def with_arbiter(bench: Bench, levels: Sequence[int], level: int = 0) -> Arbiter:
    """An arbiter over ``bench``'s pool, at ``level``; ``levels`` are the blocks of each level."""
    costs = engine_costs(SETTINGS, SimpleNamespace(num_hidden_layers=TinyShape().layers))
    arbiter = Arbiter(bench.pool, costs, BLOCK, lambda blocks: None, 0.03)
    arbiter.settle(Report(capacity=Capacity(tuple(levels), experts=32, group=2, level_bytes=1)))
    arbiter.host_kv = bench.connector
    for step in range(1, level + 1):
        arbiter.levels.want(1)
        arbiter.command()
        arbiter.settle(Report(outcome=Outcome(step, True, step, levels[step], 1, 0, 0.001, "")))
    arbiter.levels.draw(levels[level])
    return arbiter


def measured(arbiter: Arbiter) -> Arbiter:
    """The same arbiter by the measured policy."""
    chosen = VampSettings(policy="measured", model="tiny-qwen3-next")
    arbiter.costs = engine_costs(chosen, SimpleNamespace(num_hidden_layers=TinyShape().layers))
    layout = Layout(BLOCK, frozenset({0}), frozenset())
    facts = EngineFacts(
        layout, top_k=2, bandwidth=1e9, layers=4, staged=False, step_tokens=64, prefill_share=1.0
    )
    arbiter.measure(lambda: facts)
    return arbiter


@pytest.fixture
def shrinking() -> Callable[[float], tuple[Bench, Shrinker, int]]:
    """A request has ended whose last block, in the tail of level 1, is being stored; a restore has begun."""

    def begin(max_cordon_s: float) -> tuple[Bench, Shrinker, int]:
        bench = Bench(blocks=8)
        arbiter = with_arbiter(bench, (8, 12), level=1)
        request = bench.request(range(48))
        blocks = sorted(bench.pool.get_new_blocks(11), key=lambda block: block.block_id)
        (job,) = bench.step(request, [block.block_id for block in blocks[-3:]], 48).store_jobs
        bench.finish(request)
        bench.pool.free_blocks(blocks)
        bench.step(finished=request)
        shrinker = Shrinker(arbiter, VampSettings(policy=EAGER, max_cordon_s=max_cordon_s))
        assert shrinker.restore(1)
        return bench, shrinker, job

    return begin


Begin = Callable[[float], tuple[Bench, Shrinker, int]]


def test_a_free_tail_stays_while_it_is_being_copied(shrinking: Begin) -> None:
    bench, shrinker, job = shrinking(30.0)
    arbiter = shrinker.arbiter
    assert bench.pool.cordoned_free and bench.pool.num_gpu_blocks == 12
    shrinker.begin_step(0)
    assert not arbiter.controller.moving and arbiter.journal.steps_waited_for_copies == 2
    bench.report(job)
    shrinker.begin_step(0)
    assert bench.pool.num_gpu_blocks == 8 and arbiter.journal.cordons_given_up == 0
    command = arbiter.command()
    assert command is not None and command.move is not None and command.move.kind is MoveKind.RESTORE


def test_a_copy_that_does_not_end_lifts_the_cordon(shrinking: Begin) -> None:
    bench, shrinker, _ = shrinking(1e-9)
    assert bench.pool.cordon_limit is None and bench.pool.num_gpu_blocks == 12
    assert shrinker.arbiter.journal.cordons_given_up == 1 and not shrinker.arbiter.controller.moving
    assert bench.pool.get_num_free_blocks() == 11


def test_evicting_what_host_memory_holds_is_a_spill() -> None:
    bench = Bench(blocks=4)
    arbiter = with_arbiter(bench, (4,))
    bench.serve(range(48), 3)
    request: Any = SimpleNamespace(num_computed_tokens=0)
    assert arbiter.weigh(2, [], 0, request, running=False) == 2
    assert arbiter.journal.decisions == {"spill": 1} and arbiter.journal.spilled_blocks == 0
    bench.pool.get_new_blocks(2)
    assert arbiter.journal.spilled_blocks == bench.pool.evictions == 2
    price = arbiter.journal.decision_log[-1]
    assert price["cost_s"] < price["rejected"]["evict"]


def test_the_measured_policy_spills_too() -> None:
    bench = Bench(blocks=4)
    arbiter = with_arbiter(bench, (4,))
    assert measured(arbiter).measured is not None
    blocks = bench.serve(range(48), 3)
    served = bench.request(range(48))
    served.num_computed_tokens = 48
    arbiter.measured.rest(served)
    request: Any = SimpleNamespace(num_computed_tokens=0)
    assert arbiter.weigh(2, [], 0, request, running=False) == 2
    assert arbiter.journal.decisions == {"spill": 1}
    price = arbiter.journal.decision_log[-1]
    assert price["cost_s"] < price["rejected"]["evict"]
    assert [block.block_id for block in bench.pool.get_new_blocks(2)] == [b.block_id for b in blocks[:0:-1]]
    assert arbiter.journal.spilled_blocks == 2


def test_without_copies_it_is_an_eviction() -> None:
    bench = Bench(blocks=4)
    arbiter = with_arbiter(bench, (4,))
    bench.serve(range(48), 3)
    bench.connector.reset_cache()
    request: Any = SimpleNamespace(num_computed_tokens=0)
    arbiter.weigh(2, [], 0, request, running=False)
    bench.pool.get_new_blocks(2)
    assert arbiter.journal.decisions == {"evict": 1} and arbiter.journal.spilled_blocks == 0


def test_a_restore_takes_copied_blocks_for_what_their_load_costs() -> None:
    bench = Bench(blocks=8)
    arbiter = with_arbiter(bench, (8, 12), level=1)
    assert min(block.block_id for block in bench.serve(range(48), 3)) >= 8, "grown blocks go first"
    shrinker = Shrinker(arbiter, SETTINGS)
    situation = shrinker._situation(1, shrinker._leaving(1), 0, arbiter.levels.last_growth_at + 1e3)
    assert situation.cached_blocks == situation.copied_blocks == 3
    bench.connector.reset_cache()
    situation = shrinker._situation(1, shrinker._leaving(1), 0, arbiter.levels.last_growth_at + 1e3)
    assert (situation.cached_blocks, situation.copied_blocks) == (3, 0)


def test_a_spill_does_without_the_tail_that_is_about_to_go_back() -> None:
    bench = Bench(blocks=8)
    arbiter = measured(with_arbiter(bench, (8, 12), level=1))
    assert arbiter.measured is not None
    bench.serve(range(10 * BLOCK), 10)
    served = bench.request(range(10 * BLOCK))
    served.num_computed_tokens = 10 * BLOCK
    arbiter.measured.rest(served)
    bench.pool.cordon(8)
    request: Any = SimpleNamespace(num_computed_tokens=0)
    assert arbiter.weigh(7, [], 0, request, running=False) == 7
    assert set(arbiter.journal.decisions) <= {"evict", "spill"} and bench.pool.cordon_limit == 8
    # Nothing but the tail has so many.
    arbiter.weigh(9, [], 0, request, running=False)
    assert bench.pool.cordon_limit is None


@pytest.mark.parametrize("most", [3, 1])
def test_levels_that_are_all_worth_giving_back_go_together(most: int) -> None:
    bench = Bench(blocks=8)
    arbiter = with_arbiter(bench, (8, 12, 16, 20), level=3)
    arbiter.levels.max_move_s, arbiter.levels.level_s = 1.0, 1.0 / (most + 0.5)
    arbiter.levels.last_growth_at -= 1e3
    asked: list[int] = []

    def decide_restore(situation: Any, level: int, levels: int, cached: Any) -> RestoreDecision:
        asked.append(levels)
        assert situation.blocks_per_level == 4 * levels and level == 3
        return RestoreDecision(int(levels in (3, 1)), 1.0, 0.0, None)

    arbiter.measured = SimpleNamespace(decide_restore=decide_restore)  # type: ignore[assignment]
    Shrinker(arbiter, SETTINGS).begin_step(0)
    assert asked == [most] and bench.pool.num_gpu_blocks == 20 - 4 * most
    command = arbiter.command()
    assert command is not None and command.move is not None and command.move.levels == most


def test_one_level_goes_back_where_several_should_not() -> None:
    bench = Bench(blocks=8)
    arbiter = with_arbiter(bench, (8, 12, 16, 20), level=3)
    arbiter.levels.max_move_s, arbiter.levels.level_s = 1.0, 0.1
    arbiter.levels.last_growth_at -= 1e3

    def decide_restore(situation: Any, level: int, levels: int, cached: Any) -> RestoreDecision:
        return RestoreDecision(int(levels == 1), 1.0, 0.0, None)

    arbiter.measured = SimpleNamespace(decide_restore=decide_restore)  # type: ignore[assignment]
    Shrinker(arbiter, SETTINGS).begin_step(0)
    assert bench.pool.num_gpu_blocks == 16


def test_a_cordon_that_was_given_up_is_not_tried_again_at_once() -> None:
    bench = Bench(blocks=8)
    arbiter = with_arbiter(bench, (8, 12), level=1)
    arbiter.levels.last_growth_at -= 1e3
    shrinker = Shrinker(arbiter, VampSettings(policy=EAGER, max_cordon_s=1e-9))
    blocks = bench.pool.get_new_blocks(11)
    assert shrinker.restore(1)
    shrinker.begin_step(0)
    assert bench.pool.cordon_limit is None and arbiter.journal.cordons_given_up == 1
    assert shrinker._situation(1, shrinker._leaving(1), 0, time.monotonic()).since_growth_s < 1.0
    bench.pool.free_blocks(blocks)


def test_only_blocks_that_host_memory_holds_too_may_be_in_use_in_a_tail_that_goes() -> None:
    bench = Bench(blocks=8)
    arbiter = measured(with_arbiter(bench, (8, 12), level=1))
    blocks = bench.serve(range(4 * BLOCK), 4)
    for block in blocks:
        bench.pool.touch([block])
    shrinker = Shrinker(arbiter, SETTINGS)
    held = [block for block in shrinker._tail(1) if block.ref_cnt]
    assert held and all(block in shrinker._leaving(1) for block in held)
    bench.connector.reset_cache()
    assert not any(block in shrinker._leaving(1) for block in held)


@pytest.mark.parametrize(("computed", "running", "held"), [(0, 0, 5), (16, 0, 0), (16, 1, 5)])
def test_who_has_blocks_may_wait_for_requests_that_run_and_not_for_itself(
    computed: int, running: int, held: int
) -> None:
    bench = Bench(blocks=8)
    arbiter = measured(with_arbiter(bench, (8, 12)))
    bench.pool.get_new_blocks(5)
    arbiter.running, arbiter.waiting = running, 4
    request: Any = SimpleNamespace(num_computed_tokens=computed)
    situation = arbiter._situation(4, 2, [], request, running=False)
    assert (situation.held_blocks, situation.waiting) == (held, 3), "it is one of them"


def test_a_request_that_stays_in_the_queue_does_without_the_tail() -> None:
    bench = Bench(blocks=8)
    arbiter = measured(with_arbiter(bench, (8, 12), level=1))
    assert arbiter.measured is not None
    arbiter.measured.measurements.released(time.monotonic(), 1000)
    tail = [block for block in bench.pool.get_new_blocks(6) if block.block_id >= 8]
    bench.pool.cordon(8)
    request: Any = SimpleNamespace(num_computed_tokens=0)
    assert arbiter.weigh(9, [], 0, request, running=False) == 9
    assert set(arbiter.journal.decisions) == {"queue"} and bench.pool.cordon_limit == 8
    bench.pool.free_blocks(tail)
    assert len(bench.pool.parked) == 4
    assert arbiter.weigh(9, [], 0, request, running=False) == 9
    assert bench.pool.cordon_limit is None, "what is free of the tail lets it in"


@pytest.mark.parametrize("copies", [True, False])
def test_levels_go_back_while_requests_wait_only_where_the_queue_is_a_choice(copies: bool) -> None:
    bench = Bench(blocks=8)
    arbiter = measured(with_arbiter(bench, (8, 12), level=1))
    arbiter.host_kv = bench.connector if copies else None
    arbiter.levels.last_growth_at -= 1e3
    added = [0.0, 1.0]
    reads = ReadSeconds(step=added, step_decode=added, decode=added, prefill=added, token=[0.0, 0.0])
    assert arbiter.measured is not None
    with mock.patch.object(arbiter.measured.measurements, "_reading", lambda *_: reads):
        arbiter.measured.measurements.step(time.monotonic(), 1)
        arbiter.measured.measurements.step(time.monotonic() + 0.1, 1)
        Shrinker(arbiter, SETTINGS).begin_step(waiting=3)
    assert bench.pool.num_gpu_blocks == (8 if copies else 12)
