"""The scheduler's bookkeeping of levels, reserve and moves, against ranks that agree or do not."""

from __future__ import annotations

from collections import deque
from itertools import cycle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vamp_runtime.controller import Capacity, CapacityController, StepCommand
from vamp_runtime.memory.move import Move, MoveKind, Outcome, Swap

POOL = 10
PAIR, OTHER = Swap(0, leaving=3, returning=5), Swap(1, leaving=2, returning=0)
# A level brings 4 or 5 blocks; at level 0 three mapped blocks are the reserve.
CAPACITY = Capacity(blocks_at=(13, 17, 22, 26), experts=32, group=2, level_bytes=1 << 20)


def outcome_of(move: Move, ok: bool, capacity: Capacity = CAPACITY) -> Outcome:
    """What the ranks report when all of them, or not all, could make ``move``."""
    level = move.level_after if ok else move.level_before
    return Outcome(move.epoch, ok, level, capacity.blocks_at[level], 0, 0, 0.0, "" if ok else "refused")


def taken(controller: CapacityController) -> StepCommand:
    command = controller.take_command()
    assert command is not None
    return command


def finish(controller: CapacityController, ok: bool = True) -> Move:
    """Send what is queued and settle it; the move that the ranks got."""
    move = taken(controller).move
    assert move is not None
    assert controller.settle(outcome_of(move, ok)) == move
    return move


@pytest.fixture
def controller() -> CapacityController:
    controller = CapacityController(POOL)
    controller.announce(CAPACITY)
    return controller


def test_capacity_in_numbers() -> None:
    assert CAPACITY.max_level == 3 and CAPACITY.blocks_per_level == 4
    assert Capacity((13,), 32, 2, 0).max_level == Capacity((13,), 32, 2, 0).blocks_per_level == 0


def test_nothing_moves_before_the_ranks_have_spoken() -> None:
    controller = CapacityController(POOL)
    assert controller.request_offload(1) == controller.request_restore(1) == 0
    assert len(controller.draw(5)) == controller.reserve_blocks == controller.max_level == 0
    assert controller.take_command() is None and not controller.moving
    assert controller.mapped_blocks == controller.pool_blocks == POOL


def test_what_is_mapped_beyond_the_pool_is_the_reserve(controller: CapacityController) -> None:
    assert controller.reserve_blocks == controller.reserve_target == 3
    assert controller.mapped_blocks == 13 and controller.max_level == 3 and controller.level == 0


def test_capacity_is_announced_once_and_holds_the_pool(controller: CapacityController) -> None:
    with pytest.raises(AssertionError):
        controller.announce(CAPACITY)
    with pytest.raises(AssertionError):
        CapacityController(14).announce(CAPACITY)


def test_drawn_ids_are_the_lowest_and_end_with_the_reserve(controller: CapacityController) -> None:
    assert controller.draw(0) == range(10, 10)
    assert controller.draw(2) == range(10, 12)
    assert controller.draw(9) == range(12, 13)
    assert len(controller.draw(1)) == 0 and controller.pool_blocks == 13
    with pytest.raises(AssertionError):
        controller.draw(-1)


def test_a_claim_travels_once_when_the_pool_has_changed(controller: CapacityController) -> None:
    assert not controller.has_command and controller.take_command() is None
    controller.draw(2)
    assert controller.has_command and taken(controller) == StepCommand(12)
    assert not controller.has_command and controller.take_command() is None


def test_an_offload_is_clipped_to_the_highest_level(controller: CapacityController) -> None:
    assert controller.request_offload(0) == 0
    assert controller.request_offload(9) == 3 and controller.arriving_levels == 3
    assert finish(controller) == Move(1, MoveKind.OFFLOAD, 3, 0, POOL)
    assert controller.level == 3 and controller.mapped_blocks == 26 and controller.reserve_blocks == 16
    assert controller.request_offload(1) == controller.arriving_levels == 0


def test_there_is_one_move_at_a_time(controller: CapacityController) -> None:
    controller.request_offload(1)
    finish(controller)
    controller.request_offload(1)
    for _ in ("queued", "in flight"):
        assert controller.moving
        assert controller.request_offload(1) == controller.request_restore(1) == 0
        controller.take_command()
    assert controller.in_flight is not None
    controller.settle(outcome_of(controller.in_flight, ok=True))
    assert not controller.moving and controller.level == 2


def test_the_reserve_stays_open_while_an_offload_travels(controller: CapacityController) -> None:
    """The move carries the pool of the step it rides on; what is drawn later is claimed by later steps."""
    controller.request_offload(1)
    controller.draw(1)
    command = taken(controller)
    assert command == StepCommand(11, Move(1, MoveKind.OFFLOAD, 1, 0, 11))
    assert controller.draw(1) == range(11, 12)
    assert taken(controller) == StepCommand(12, None)
    assert command.move is not None
    controller.settle(outcome_of(command.move, ok=True))
    assert controller.reserve_blocks == 17 - 12


def test_a_restore_shrinks_the_pool_and_keeps_the_reserve(controller: CapacityController) -> None:
    controller.request_offload(2)
    finish(controller)
    controller.draw(99)
    taken(controller)
    assert controller.pool_blocks == 22 and controller.restore_limit(1) == 14
    assert controller.request_restore(1) == controller.pool_blocks == 14
    assert finish(controller) == Move(2, MoveKind.RESTORE, 1, 2, 14)
    assert controller.level == 1 and controller.mapped_blocks == 17 and controller.reserve_blocks == 3


def test_a_swap_leaves_level_pool_and_reserve_alone(controller: CapacityController) -> None:
    assert controller.request_swap([PAIR]) == 0, "nothing is out yet"
    controller.request_offload(1)
    finish(controller)
    assert controller.request_swap([]) == 0
    assert controller.request_swap([PAIR, OTHER]) == 2 and controller.moving
    assert controller.request_offload(1) == controller.request_restore(1) == 0
    assert controller.arriving_levels == 0 and controller.draw(2) == range(POOL, POOL + 2)
    assert finish(controller) == Move(2, MoveKind.SWAP, 0, 1, POOL + 2, (PAIR, OTHER))
    assert controller.level == 1 and controller.mapped_blocks == 17 and not controller.moving


def test_a_restore_leaves_a_pool_that_never_grew(controller: CapacityController) -> None:
    controller.request_offload(3)
    finish(controller)
    assert controller.request_restore(3) == POOL
    assert taken(controller).claimed_blocks == POOL


@pytest.mark.parametrize("levels", [0, -1, 3])
def test_no_restore_of_levels_that_are_not_out(controller: CapacityController, levels: int) -> None:
    controller.request_offload(2)
    finish(controller)
    assert controller.request_restore(levels) == 0 and not controller.moving
    assert controller.pool_blocks == POOL


def test_a_restore_on_its_way_owns_the_tail(controller: CapacityController) -> None:
    controller.request_offload(1)
    finish(controller)
    assert controller.reserve_blocks == 7
    controller.request_restore(1)
    for _ in ("queued", "in flight"):
        assert controller.reserve_blocks == controller.arriving_levels == 0
        assert len(controller.draw(3)) == 0
        controller.take_command()
    assert controller.in_flight is not None
    controller.settle(outcome_of(controller.in_flight, ok=True))
    assert controller.reserve_blocks == 3


@pytest.mark.parametrize("kind", list(MoveKind))
def test_a_failed_move_leaves_the_level_and_the_blocks(
    controller: CapacityController, kind: MoveKind
) -> None:
    controller.request_offload(1)
    finish(controller)
    if kind is MoveKind.OFFLOAD:
        controller.request_offload(2)
    elif kind is MoveKind.RESTORE:
        controller.request_restore(1)
    else:
        controller.request_swap([PAIR])
    assert finish(controller, ok=False).kind is kind
    assert controller.level == 1 and controller.mapped_blocks == 17 and not controller.moving
    assert controller.draw(99) == range(POOL, 17)


def test_epochs_count_failed_moves_too(controller: CapacityController) -> None:
    epochs = []
    for ok in (False, True, False, False, True):
        controller.request_offload(1)
        epochs.append(finish(controller, ok).epoch)
    assert epochs == [1, 2, 3, 4, 5] and controller.level == 2


def test_refused_requests_use_no_epoch(controller: CapacityController) -> None:
    assert controller.request_restore(1) == 0
    controller.request_offload(1)
    assert controller.request_offload(1) == 0
    assert finish(controller).epoch == 1


@pytest.mark.parametrize("damage", [{"epoch": 2}, {"level": 0}, {"blocks": 13}])
def test_an_outcome_that_does_not_fit_is_not_believed(
    controller: CapacityController, damage: dict[str, int]
) -> None:
    controller.request_offload(1)
    move = taken(controller).move
    assert move is not None
    good = outcome_of(move, ok=True)
    with pytest.raises(AssertionError):
        controller.settle(Outcome(**{**good.__dict__, **damage}))


def test_an_outcome_without_a_move_is_not_believed(controller: CapacityController) -> None:
    controller.request_offload(1)
    with pytest.raises(AssertionError):
        controller.settle(Outcome(1, True, 1, 17, 0, 0, 0.0, ""))


class Rank:
    """Memory as a rank sees it: obeys commands in order and refuses what does not fit its own state."""

    def __init__(self, capacity: Capacity, verdicts: tuple[bool, ...]) -> None:
        self.capacity = capacity
        self.verdicts = cycle(verdicts)
        self.level = self.epoch = self.claimed = 0

    @property
    def blocks(self) -> int:
        return self.capacity.blocks_at[self.level]

    def obey(self, command: StepCommand) -> Outcome | None:
        assert 0 < command.claimed_blocks <= self.blocks
        self.claimed = command.claimed_blocks
        move = command.move
        if move is None:
            return None
        assert move.epoch == self.epoch + 1 and move.level_before == self.level
        assert (move.levels > 0) is (move.kind is not MoveKind.SWAP) is (not move.swaps)
        self.epoch = move.epoch
        outcome = outcome_of(move, next(self.verdicts), self.capacity)
        reached = outcome_of(move, True, self.capacity).blocks
        assert move.claimed_blocks == command.claimed_blocks <= reached
        self.level = outcome.level
        return outcome


class ControllerMachine(RuleBasedStateMachine):
    """Requests in any order, commands and outcomes that arrive late; the model is a list of pool ids."""

    @initialize(
        pool=st.integers(1, 8),
        reserve=st.integers(0, 6),
        growth=st.lists(st.integers(1, 6), max_size=4),
        verdicts=st.sampled_from([(True,), (False,), (True, False), (False, True, True)]),
    )
    def start(self, pool: int, reserve: int, growth: list[int], verdicts: tuple[bool, ...]) -> None:
        blocks_at = [pool + reserve]
        for more in growth:
            blocks_at.append(blocks_at[-1] + more)
        self.capacity = Capacity(tuple(blocks_at), experts=8, group=1, level_bytes=1)
        self.initial, self.reserve = pool, reserve
        self.controller = CapacityController(pool)
        self.rank = Rank(self.capacity, verdicts)
        self.ids = list(range(pool))
        self.claim_sent = pool
        self.level = self.epochs = 0
        self.announced = False
        self.queued: tuple[MoveKind, int] | None = None
        self.travelling: tuple[MoveKind, int] | None = None
        self.steps: deque[StepCommand] = deque()
        self.outcomes: deque[Outcome] = deque()

    @property
    def move(self) -> tuple[MoveKind, int] | None:
        return self.queued or self.travelling

    @precondition(lambda self: not self.announced)
    @rule()
    def announce(self) -> None:
        self.controller.announce(self.capacity)
        self.announced = True

    @rule(blocks=st.integers(0, 12))
    def draw(self, blocks: int) -> None:
        ids = self.controller.draw(blocks)
        assert len(ids) <= blocks and (len(ids) == blocks or self.controller.reserve_blocks == 0)
        assert ids.start == len(self.ids)
        self.ids.extend(ids)

    @rule(levels=st.integers(0, 5))
    def request_offload(self, levels: int) -> None:
        room = len(self.capacity.blocks_at) - 1 - self.level if self.announced else 0
        wanted = 0 if self.move else min(levels, room)
        assert self.controller.request_offload(levels) == wanted
        if wanted:
            self.queued, self.epochs = (MoveKind.OFFLOAD, wanted), self.epochs + 1

    @rule(levels=st.integers(0, 5))
    def request_restore(self, levels: int) -> None:
        kept = self.controller.request_restore(levels)
        if self.move or not 0 < levels <= self.level:
            assert kept == 0
            return
        assert kept == min(len(self.ids), self.capacity.blocks_at[self.level - levels] - self.reserve)
        del self.ids[kept:]
        self.queued, self.epochs = (MoveKind.RESTORE, levels), self.epochs + 1

    @rule(pairs=st.integers(0, 2))
    def request_swap(self, pairs: int) -> None:
        wanted = 0 if self.move or not self.level else pairs
        assert self.controller.request_swap([PAIR, OTHER][:pairs]) == wanted
        if wanted:
            self.queued, self.epochs = (MoveKind.SWAP, 0), self.epochs + 1
            self.pairs = (PAIR, OTHER)[:pairs]

    @rule()
    def build_step(self) -> None:
        wanted = self.queued is not None or self.claim_sent != len(self.ids)
        assert self.controller.has_command == wanted
        command = self.controller.take_command()
        assert (command is not None) == wanted
        if command is None:
            return
        assert command.claimed_blocks == len(self.ids)
        self.claim_sent = len(self.ids)
        if self.queued is None:
            assert command.move is None
        else:
            kind, levels = self.queued
            pairs = self.pairs if kind is MoveKind.SWAP else ()
            assert command.move == Move(self.epochs, kind, levels, self.level, len(self.ids), pairs)
            self.queued, self.travelling = None, self.queued
        self.steps.append(command)

    @precondition(lambda self: self.steps)
    @rule()
    def rank_runs_a_step(self) -> None:
        outcome = self.rank.obey(self.steps.popleft())
        if outcome is not None:
            self.outcomes.append(outcome)

    @precondition(lambda self: self.outcomes)
    @rule()
    def settle(self) -> None:
        outcome = self.outcomes.popleft()
        move = self.controller.settle(outcome)
        assert self.travelling == (move.kind, move.levels) and move.epoch == outcome.epoch
        if outcome.ok:
            self.level += {MoveKind.OFFLOAD: move.levels, MoveKind.RESTORE: -move.levels}.get(move.kind, 0)
        self.travelling = None
        assert self.rank.level == self.level

    @invariant()
    def agrees_with_the_model(self) -> None:
        controller, move = self.controller, self.move
        controller.check_integrity()
        assert controller.level == self.level and controller.epoch == self.epochs
        assert self.ids == list(range(controller.pool_blocks)) and len(self.ids) >= self.initial
        assert controller.moving == (move is not None)
        offload = move is not None and move[0] is MoveKind.OFFLOAD
        assert controller.arriving_levels == (move[1] if move is not None and offload else 0)
        mapped = self.capacity.blocks_at[self.level] if self.announced else self.initial
        restore = move is not None and move[0] is MoveKind.RESTORE
        assert controller.reserve_blocks == (0 if restore else mapped - len(self.ids))

    @invariant()
    def every_pool_id_is_backed(self) -> None:
        """Also while a restore travels that the rank has already carried out."""
        assert len(self.ids) <= self.rank.blocks


ControllerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestController = ControllerMachine.TestCase
