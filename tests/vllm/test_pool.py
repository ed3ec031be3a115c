"""vLLM's block pool, grown and cut while requests hold, cache, hit and free its blocks."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vamp_runtime.errors import ConfigError

if TYPE_CHECKING:
    from vamp_integration.pool import VampBlockPool

pytestmark = pytest.mark.vllm

BLOCK = 16
HASHES = [bytes([number]) * 32 for number in range(6)]


def make_pool(blocks: int) -> VampBlockPool:
    from vllm.v1.core.block_pool import BlockPool

    from vamp_integration.pool import VampBlockPool

    return VampBlockPool.adopt(BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK))


def give_hash(pool: VampBlockPool, block: Any, content: bytes) -> None:
    """Cache ``block`` as vLLM does when a request has filled it."""
    request: Any = SimpleNamespace(block_hashes=[content])
    pool.cache_full_blocks(request, [block], 0, 1, BLOCK, 0)


def free_ids(pool: VampBlockPool) -> list[int]:
    return [block.block_id for block in pool.free_order()]


def hold_all(pool: VampBlockPool) -> list[Any]:
    """Every free block, in order of its id."""
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    return sorted(blocks, key=lambda block: block.block_id)


def test_adopting_changes_the_live_pool() -> None:
    from vllm.v1.core.block_pool import BlockPool

    from vamp_integration.pool import VampBlockPool

    pool = BlockPool(4, enable_caching=True, hash_block_size=BLOCK)
    held = pool.get_new_blocks(2)
    adopted = VampBlockPool.adopt(pool)
    assert adopted is pool and free_ids(adopted) == [3]
    adopted.free_blocks(held)
    assert adopted.get_num_free_blocks() == 3 and set(adopted.freed_at) == {1, 2}


def test_a_pool_of_another_plugin_is_refused() -> None:
    from vamp_integration.pool import VampBlockPool

    with pytest.raises(ConfigError, match=r"^block pool: VampBlockPool is not vLLM's BlockPool; remove"):
        VampBlockPool.adopt(make_pool(4))


def test_grown_blocks_go_first_and_spare_the_cached_ones() -> None:
    pool = make_pool(4)
    held = hold_all(pool)
    for block, content in zip(held, HASHES, strict=False):
        give_hash(pool, block, content)
    pool.free_blocks(held)
    pool.grow(range(4, 6))
    assert pool.num_gpu_blocks == 6 and free_ids(pool) == [4, 5, 1, 2, 3]
    assert [block.block_id for block in pool.get_new_blocks(2)] == [4, 5] and pool.evictions == 0
    pool.get_new_blocks(1)
    assert pool.evictions == 1 and pool.get_cached_block(HASHES[0], [0]) is None


@pytest.mark.parametrize("ids", [range(3, 6), range(5, 6)])
def test_only_the_next_ids_can_be_appended(ids: range) -> None:
    with pytest.raises(AssertionError):
        make_pool(4).grow(ids)


def test_evictions_are_reported_by_hash() -> None:
    from vllm.v1.core.kv_cache_utils import get_block_hash

    pool, lost = make_pool(4), []
    pool.on_evict = lambda key: lost.append(get_block_hash(key))
    held = hold_all(pool)
    for block, content in zip(held[:2], HASHES, strict=False):
        give_hash(pool, block, content)
    pool.free_blocks(held)
    pool.get_new_blocks(2)
    assert lost == HASHES[:1]
    pool.cordon(2)
    assert lost == HASHES[:2] and pool.evictions == 2


def test_a_cordoned_tail_leaves_when_its_last_request_has() -> None:
    pool = make_pool(6)
    held = hold_all(pool)
    pool.free_blocks(held[:3])
    pool.cordon(3)
    assert set(pool.parked) == {3} and not pool.cordoned_free and sorted(free_ids(pool)) == [1, 2]
    pool.free_blocks(held[3:])
    assert set(pool.parked) == {3, 4, 5} and pool.cordoned_free and sorted(free_ids(pool)) == [1, 2]
    pool.truncate()
    assert pool.num_gpu_blocks == len(pool.blocks) == 3 and set(pool.freed_at) == {1, 2}
    assert pool.cordon_limit is None and not pool.parked and not pool.cordoned_free


def test_a_lifted_cordon_gives_everything_back() -> None:
    pool = make_pool(6)
    held = hold_all(pool)
    pool.cordon(3)
    pool.free_blocks(held[1:])
    assert pool.cordoned_free and free_ids(pool) == [2]
    pool.lift_cordon()
    assert sorted(free_ids(pool)) == [2, 3, 4, 5] and pool.get_num_free_blocks() == 4
    assert pool.num_gpu_blocks == 6 and pool.cordon_limit is None and not pool.parked


def test_a_cordoned_block_that_is_cached_again_loses_that_when_parked() -> None:
    pool = make_pool(4)
    held = hold_all(pool)
    pool.cordon(2)
    give_hash(pool, held[1], HASHES[0])
    pool.free_blocks([held[1]])
    assert set(pool.parked) == {2} and pool.get_cached_block(HASHES[0], [0]) is None
    assert held[1].block_hash is None and pool.evictions == 1


def test_a_block_freed_twice_in_one_call_is_parked_once() -> None:
    """Two requests that copy from one partial block return its two references together."""
    pool = make_pool(4)
    held = hold_all(pool)
    pool.touch([held[2]])
    pool.cordon(3)
    pool.free_blocks([held[2], held[0], held[2]])
    assert set(pool.parked) == {3} and free_ids(pool) == [1]


@pytest.mark.parametrize("limit", [0, 1, 7])
def test_a_cordon_leaves_the_null_block_and_another(limit: int) -> None:
    with pytest.raises(AssertionError):
        make_pool(6).cordon(limit)


def test_under_a_cordon_the_pool_neither_grows_nor_is_cut_early() -> None:
    pool = make_pool(4)
    held = hold_all(pool)
    pool.cordon(3)
    for change in (lambda: pool.grow(range(4, 5)), lambda: pool.cordon(2), pool.truncate):
        with pytest.raises(AssertionError):
            change()
    pool.free_blocks(held)
    pool.truncate()
    with pytest.raises(AssertionError):
        pool.lift_cordon()


class PoolMachine(RuleBasedStateMachine):
    """References, hashes and losses as plain containers beside the real pool."""

    @initialize(blocks=st.integers(2, 8))
    def start(self, blocks: int) -> None:
        from vllm.v1.core.kv_cache_utils import get_block_hash

        self.pool = make_pool(blocks)
        self.size = blocks
        self.limit: int | None = None
        self.refs: Counter[int] = Counter()
        self.hashes: dict[int, bytes] = {}
        self.lost: list[bytes] = []
        self.reported: list[bytes] = []
        self.pool.on_evict = lambda key: self.reported.append(get_block_hash(key))

    def lose(self, block_id: int) -> None:
        if block_id in self.hashes:
            self.lost.append(self.hashes.pop(block_id))

    def held(self) -> list[int]:
        return sorted(self.refs.elements())

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        order = free_ids(self.pool)
        if count > len(order):
            with pytest.raises(ValueError, match="free blocks"):
                self.pool.get_new_blocks(count)
            return
        blocks = self.pool.get_new_blocks(count)
        assert [block.block_id for block in blocks] == order[:count]
        for block_id in order[:count]:
            self.refs[block_id] += 1
            self.lose(block_id)

    @precondition(lambda self: self.refs.keys() - self.hashes.keys())
    @rule(data=st.data(), content=st.sampled_from(HASHES))
    def fill(self, data: st.DataObject, content: bytes) -> None:
        """A running request fills a block; two blocks may have the same content."""
        block_id = data.draw(st.sampled_from(sorted(self.refs.keys() - self.hashes.keys())))
        give_hash(self.pool, self.pool.blocks[block_id], content)
        self.hashes[block_id] = content

    @rule(content=st.sampled_from(HASHES))
    def hit(self, content: bytes) -> None:
        found = self.pool.get_cached_block(content, [0])
        assert (found is not None) == (content in self.hashes.values())
        if found is not None:
            assert self.hashes[found[0].block_id] == content
            self.pool.touch(found)
            self.refs[found[0].block_id] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """References in any order; one block may be there several times."""
        held = data.draw(st.permutations(self.held()))
        ids = held[: data.draw(st.integers(1, len(held)))]
        self.pool.free_blocks(self.pool.blocks[block_id] for block_id in ids)
        self.refs = +(self.refs - Counter(ids))
        if self.limit is not None:
            for block_id in dict.fromkeys(ids):
                if block_id >= self.limit and block_id not in self.refs:
                    self.lose(block_id)

    @precondition(lambda self: self.limit is None)
    @rule(count=st.integers(0, 4))
    def grow(self, count: int) -> None:
        new = range(self.size, self.size + count)
        before = free_ids(self.pool)
        self.pool.grow(new)
        self.size += count
        assert free_ids(self.pool) == [*new, *before]

    @precondition(lambda self: self.limit is None)
    @rule(data=st.data())
    def cordon(self, data: st.DataObject) -> None:
        self.limit = data.draw(st.integers(2, self.size))
        self.pool.cordon(self.limit)
        for block_id in range(self.limit, self.size):
            self.lose(block_id)
        assert all(block.block_hash is None for block in self.pool.blocks[self.limit :])

    @precondition(lambda self: self.limit is not None)
    @rule()
    def lift(self) -> None:
        self.pool.lift_cordon()
        self.limit = None

    @precondition(lambda self: self.limit is not None)
    @rule()
    def truncate(self) -> None:
        assert self.limit is not None
        possible = all(block_id < self.limit for block_id in self.refs)
        assert self.pool.cordoned_free == possible
        if not possible:
            with pytest.raises(AssertionError):
                self.pool.truncate()
            return
        self.pool.truncate()
        self.size, self.limit = self.limit, None

    @rule()
    def reset(self) -> None:
        # A reset lifts the cordon: vLLM would take the parked blocks for used ones.
        idle = not self.refs
        assert self.pool.reset_prefix_cache() == idle
        self.limit = None
        if idle:
            self.hashes.clear()

    def parked(self) -> set[int]:
        first = self.size if self.limit is None else self.limit
        return set(range(first, self.size)) - set(self.refs)

    @invariant()
    def ids_are_contiguous_from_the_null_block(self) -> None:
        assert [block.block_id for block in self.pool.blocks] == list(range(self.size))
        assert self.pool.num_gpu_blocks == self.size
        assert self.pool.blocks[0] is self.pool.null_block and self.pool.null_block.is_null
        assert not any(block.is_null for block in self.pool.blocks[1:])

    @invariant()
    def every_block_is_held_free_or_parked(self) -> None:
        free = free_ids(self.pool)
        assert set(free) == set(range(1, self.size)) - set(self.refs) - self.parked()
        assert self.pool.get_num_free_blocks() == len(free) == len(set(free))
        assert [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()] == free
        assert set(self.pool.parked) == self.parked() and self.pool.cordon_limit == self.limit
        assert all(block.ref_cnt == self.refs[block.block_id] for block in self.pool.blocks[1:])

    @invariant()
    def hashes_are_those_of_the_model(self) -> None:
        hashed = {block.block_id for block in self.pool.blocks if block.block_hash is not None}
        assert hashed == set(self.hashes)
        assert not hashed & set(self.pool.parked)
        assert len(self.pool.cached_block_hash_to_block) == len(set(self.hashes.values()))

    @invariant()
    def what_holds_nothing_is_handed_out_first_and_then_the_oldest(self) -> None:
        free = free_ids(self.pool)
        cached = [block_id for block_id in free if block_id in self.hashes]
        assert free[len(free) - len(cached) :] == cached
        ages = [self.pool.freed_at[block_id] for block_id in cached]
        assert ages == sorted(ages)
        assert all(0 < block_id < self.size for block_id in self.pool.freed_at)

    @invariant()
    def losses_are_reported(self) -> None:
        assert self.reported == self.lost and self.pool.evictions == len(self.lost)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.pytestmark = [pytest.mark.vllm]
