"""VAMP's Prometheus metrics: their names, and their values in the engine core.

Values travel from the scheduler's process to the HTTP server's as whole numbers, in a dictionary that vLLM
already sends with every step (``vllm/v1/metrics/stats.py`` ``SchedulerStats.num_kv_fetch_reqs_by_stage``):
attributes of our own would be dropped on the way. ``stat_logger.py`` takes them out again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.ledger import OwnerKind
from vamp_runtime.memory.move import MoveKind
from vamp_runtime.policy.decide import Action

if TYPE_CHECKING:
    from vamp_integration.arbiter import Arbiter

PREFIX = "vamp:"
MICRO = 1e-6
MOVES = tuple(kind.value for kind in MoveKind)
ACTIONS = tuple(action.value for action in Action)
OWNERS = tuple(kind.value for kind in OwnerKind)
HOME_TIERS = (Tier.HOST.value, Tier.PEER.value)
CAUSES = ("offload", "evict", "preempt", "spill")
# Which way HBM pages go in a move of each kind.
DIRECTIONS = {
    MoveKind.OFFLOAD: "experts_to_kv",
    MoveKind.RESTORE: "kv_to_experts",
    MoveKind.SWAP: "between_experts",
}


@dataclass(frozen=True)
class Metric:
    """One metric: a series, or one for each of ``values`` of ``label``.

    Attributes:
        name: after ``vamp:``; a counter's gets ``_total`` on the page.
        unit: what one whole number stands for, in the metric's unit.
    """

    name: str
    help: str
    counter: bool = False
    label: str = ""
    values: tuple[str, ...] = ("",)
    unit: float = 1.0

    def key(self, value: str) -> str:
        """Key of a series in the dictionary that travels."""
        return f"{PREFIX}{self.name}/{value}" if value else f"{PREFIX}{self.name}"


@dataclass(frozen=True)
class LinkRates:
    """Bytes/s from host memory, by the hardware profile: read in place, and by the copy engine."""

    read: float
    copy: float


METRICS = (
    Metric("level", "Expert groups of every layer that are out of HBM."),
    Metric("level_max", "Most groups of every layer that may be out."),
    Metric("experts_offloaded", "Experts of every layer that are out of HBM."),
    Metric("experts", "Experts of every layer."),
    Metric(
        "kv_blocks",
        "KV blocks that are mapped: in the pool, in reserve, or withdrawn to be given back.",
        label="state",
        values=("pool", "reserve", "withdrawn"),
    ),
    Metric("kv_blocks_max", "KV blocks that are mapped at the highest level."),
    Metric("cordon_active", "1 while a tail of the KV cache is cordoned to be given back."),
    Metric("pages", "Physical pages by owner, on the first rank.", label="owner", values=OWNERS),
    Metric("home_pages", "Home pages by where they lie, on the first rank.", label="tier", values=HOME_TIERS),
    Metric("page_bytes", "Bytes of a page."),
    Metric("decisions", "Decisions at a KV allocation.", counter=True, label="action", values=ACTIONS),
    Metric(
        "predicted_cost_seconds",
        "Price of the decisions when they were taken.",
        counter=True,
        label="action",
        values=ACTIONS,
        unit=MICRO,
    ),
    Metric(
        "realized_cost_seconds",
        "Seconds of link or GPU time paid since: host bytes read and staged, and KV blocks loaded, over the "
        "link's rates; "
        "tokens computed again after an eviction or a preemption times the profile's seconds per token.",
        counter=True,
        label="cause",
        values=CAUSES,
        unit=MICRO,
    ),
    Metric("moves", "Moves that were published.", counter=True, label="kind", values=MOVES),
    Metric("moves_failed", "Moves that failed and were undone.", counter=True),
    Metric(
        "move_seconds",
        "Time from request to publication of moves.",
        counter=True,
        label="kind",
        values=MOVES,
        unit=MICRO,
    ),
    Metric(
        "moved_bytes",
        "HBM that changed hands, on each rank.",
        counter=True,
        label="direction",
        values=tuple(DIRECTIONS.values()),
    ),
    Metric(
        "copied_bytes",
        "Expert bytes copied to and from home pages, also those in a peer, on the first rank.",
        counter=True,
        label="direction",
        values=("to_host", "from_host"),
    ),
    Metric(
        "moe_host_read_bytes",
        "Expert bytes that the MoE layers read from host memory, on the first rank, estimated from hits; "
        "without those of steps that read copies made ahead, whose share of an expert's hits is taken to be "
        "that of all the layer's.",
        counter=True,
    ),
    Metric(
        "staged_bytes",
        "Expert bytes copied from host memory to staging slots ahead of layers, on the first rank, counted "
        "when the copies are queued.",
        counter=True,
    ),
    Metric(
        "moe_peer_read_bytes",
        "Expert bytes that the MoE layers read from another GPU's HBM, on the first rank, estimated.",
        counter=True,
    ),
    Metric(
        "staging_seconds",
        "Time of copies to staging slots ahead of layers, on the first rank, from one staged step of 16: "
        "hidden behind the layers, or exposed, a layer waiting for them.",
        counter=True,
        label="state",
        values=("hidden", "exposed"),
        unit=MICRO,
    ),
    Metric("evicted_blocks", "KV blocks that lost their cached content.", counter=True),
    Metric(
        "spilled_blocks",
        "KV blocks that lost their cached content while host memory held it too; evicted_blocks counts them.",
        counter=True,
    ),
    Metric("loaded_blocks", "KV blocks copied back from host memory.", counter=True),
    Metric("copying_blocks", "KV blocks that are being copied to host memory or back."),
    Metric(
        "steps_waited_for_copies",
        "Steps in which only such copies kept a free tail from being given back.",
        counter=True,
    ),
    Metric(
        "steps_without_prefills",
        "Steps in which prefills were held back so that a pass over the experts on the host serves several.",
        counter=True,
    ),
    Metric("cordons_given_up", "Restores given up because their blocks did not become free.", counter=True),
)


def values(arbiter: Arbiter, link: LinkRates, held_steps: int = 0) -> dict[str, int]:
    """The state of every series, keyed by ``Metric.key``."""
    given = _gauges(arbiter) | _counters(arbiter, link)
    given["steps_without_prefills"] = {"": held_steps}
    return {
        metric.key(value): round(given[metric.name].get(value, 0) / metric.unit)
        for metric in METRICS
        for value in metric.values
    }


def _gauges(arbiter: Arbiter) -> dict[str, Mapping[str, float]]:
    controller, capacity = arbiter.controller, arbiter.controller.capacity
    pool, memory = arbiter.pool, arbiter.journal.memory
    limit = pool.cordon_limit
    usable = controller.pool_blocks if limit is None else min(limit, controller.pool_blocks)
    reserve = controller.reserve_blocks
    blocks = {"pool": usable, "reserve": reserve, "withdrawn": controller.mapped_blocks - usable - reserve}
    return {
        "level": {"": controller.level},
        "level_max": {"": controller.max_level},
        "experts_offloaded": {"": controller.level * capacity.group if capacity else 0},
        "experts": {"": capacity.experts if capacity else 0},
        "kv_blocks": blocks,
        "kv_blocks_max": {"": capacity.blocks_at[-1] if capacity else controller.mapped_blocks},
        "cordon_active": {"": limit is not None},
        "pages": memory.pages,
        "home_pages": memory.home_pages,
        "page_bytes": {"": memory.page_bytes},
        "copying_blocks": {"": arbiter.host_kv.transfers.blocks if arbiter.host_kv is not None else 0},
    }


def _counters(arbiter: Arbiter, link: LinkRates) -> dict[str, Mapping[str, float]]:
    journal, memory = arbiter.journal, arbiter.journal.memory
    token_s, host_kv = arbiter.costs.parameters.t_prefill_s, arbiter.host_kv
    loaded = host_kv.transfers.loaded_blocks if host_kv is not None else 0
    return {
        "decisions": journal.decisions,
        "predicted_cost_seconds": journal.predicted_s,
        "realized_cost_seconds": {
            "offload": memory.host_bytes_read / link.read + memory.staged_bytes / link.copy,
            "evict": journal.evicted_tokens_missed * token_s,
            "preempt": journal.preempted_tokens_lost * token_s,
            "spill": loaded * host_kv.load_block_s if host_kv is not None else 0.0,
        },
        "moves": journal.moves,
        "moves_failed": {"": journal.failed_moves},
        "move_seconds": journal.seconds_by_kind,
        "moved_bytes": {way: journal.bytes_by_kind[kind.value] for kind, way in DIRECTIONS.items()},
        "copied_bytes": {"to_host": memory.home_bytes_copied, "from_host": journal.copied_bytes},
        "moe_host_read_bytes": {"": memory.host_bytes_read},
        "staged_bytes": {"": memory.staged_bytes},
        "moe_peer_read_bytes": {"": memory.peer_bytes_read},
        "staging_seconds": {"hidden": memory.staging.hidden, "exposed": memory.staging.exposed},
        "evicted_blocks": {"": arbiter.pool.evictions},
        "spilled_blocks": {"": journal.spilled_blocks},
        "loaded_blocks": {"": loaded},
        "steps_waited_for_copies": {"": journal.steps_waited_for_copies},
        "cordons_given_up": {"": journal.cordons_given_up},
    }


def put(stats: Any, sent: Mapping[str, int]) -> None:
    """Lay ``sent`` into a ``SchedulerStats``."""
    stats.num_kv_fetch_reqs_by_stage.update(sent)


def take(stats: Any) -> dict[str, int]:
    """What ``put`` has laid into ``stats``, which is left as if it had never been there."""
    carrier: dict[str, int] = stats.num_kv_fetch_reqs_by_stage
    return {key: carrier.pop(key) for key in list(carrier) if key.startswith(PREFIX)}
