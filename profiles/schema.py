"""What a profile may say: one frozen dataclass per kind, with the unit and range of every field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

Number = TypeVar("Number", int, float)

Provenance = Literal["measured", "configured", "paper"]


class ProfileError(ValueError):
    """A profile the user must change; one line naming file, line and field, and what would work."""


@dataclass(frozen=True)
class Quantity(Generic[Number]):
    """A number that says where it comes from.

    Attributes:
        value: in ``unit``.
        unit: as the schema demands, e.g. ``"B/s"``; ``"1"`` is dimensionless.
        provenance: ``measured`` on a device, ``configured`` by judgement, or from the ``paper``.
        source: how it was obtained, in one sentence.
    """

    value: Number
    unit: str
    provenance: Provenance
    source: str


@dataclass(frozen=True)
class QuantityRule:
    """What the loader demands of a quantity: ``low <= value <= high``, or ``low < value`` if ``open_low``."""

    unit: str
    low: float
    high: float
    example: float
    whole: bool = False
    open_low: bool = False
    optional: bool = False


@dataclass(frozen=True)
class TextRule:
    """What the loader demands of a text: one of ``choices``, or without them any that is not empty."""

    choices: tuple[str, ...] = ()
    example: str = ""


Whole = Quantity[int]
Real = Quantity[float]

LAYERS = QuantityRule("layer", 1, 10_000, 24, whole=True)
EXPERTS = QuantityRule("expert", 1, 100_000, 10, whole=True)
WIDTH = QuantityRule("1", 1, 1_000_000, 2048, whole=True)
TOKENS = QuantityRule("token", 1, 10**12, 200_000, whole=True)
RATE = QuantityRule("B/s", 1e6, 1e15, 51e9)
PEER_RATE = QuantityRule("B/s", 1e6, 1e15, 374e9, optional=True)
SHARE = QuantityRule("1", 0.0, 1.0, 0.5)
PAUSE = QuantityRule("s", 0.0, 1e3, 0.1)
TIME = QuantityRule("s", 0.0, 1e9, 40.0, open_low=True)
SPAN = QuantityRule("s", 0.0, 1e9, 60.0, open_low=True, optional=True)
EVENTS = QuantityRule("1", 1, 1e9, 100, optional=True)


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Speeds of one device and its links, and the memory driver that serves it.

    Rates are bytes per second, ``remap`` is seconds for one expert group, ``granularity`` bytes. A device
    without peers leaves out the peer rates.
    """

    kind: Annotated[str, TextRule(("hardware",))]
    name: Annotated[str, TextRule(example="h200")]
    driver: Annotated[str, TextRule(("cuda", "host"))]
    granularity: Annotated[Whole, QuantityRule("B", 4096, 1 << 30, 2097152, whole=True)]
    hbm_bandwidth: Annotated[Real, RATE]
    host_read_bandwidth: Annotated[Real, RATE]
    host_to_device_bandwidth: Annotated[Real, RATE]
    device_to_host_bandwidth: Annotated[Real, RATE]
    remap: Annotated[Real, PAUSE]
    peer_read_bandwidth: Annotated[Real | None, PEER_RATE] = None
    peer_copy_bandwidth: Annotated[Real | None, PEER_RATE] = None
    compute: Annotated[Real | None, QuantityRule("FLOP/s", 1e6, 1e18, 779e12, optional=True)] = None


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The routed part of a mixture-of-experts model, and what one prefilled token costs."""

    kind: Annotated[str, TextRule(("model",))]
    name: Annotated[str, TextRule(example="qwen3-next-80b-a3b")]
    layers: Annotated[Whole, LAYERS]
    experts: Annotated[Whole, EXPERTS]
    top_k: Annotated[Whole, EXPERTS]
    hidden_size: Annotated[Whole, WIDTH]
    moe_intermediate_size: Annotated[Whole, WIDTH]
    weight_width: Annotated[Whole, QuantityRule("B", 1, 8, 2, whole=True)]
    prefill: Annotated[Real, QuantityRule("s/token", 0.0, 1e3, 1.2e-5, open_low=True)]
    prefill_layers: Annotated[Whole, LAYERS]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert of one layer, unsharded: gate, up and down projections."""
        parameters = 3 * self.hidden_size.value * self.moe_intermediate_size.value
        return parameters * self.weight_width.value

    def prefill_s(self, layers: int) -> float:
        """Seconds per prefilled token with ``layers`` layers, in proportion to the layers of ``prefill``."""
        return self.prefill.value * layers / self.prefill_layers.value


@dataclass(frozen=True, kw_only=True)
class PolicyProfile:
    """The cost model's constants and how the hit rate is taken; symbols are the paper's.

    A profile that has all of the last nine prices by measurements on the running engine (``measured``).
    """

    kind: Annotated[str, TextRule(("policy",))]
    name: Annotated[str, TextRule(example="paper")]
    hit_rate: Annotated[str, TextRule(("observed", "reusable"))]
    alpha: Annotated[Real, SHARE]
    tau: Annotated[Real, TIME]
    t_sched: Annotated[Real, PAUSE]
    t_queue: Annotated[Real, PAUSE]
    c_eff: Annotated[Real, QuantityRule("s/(shard*step)", 0.0, 1e3, 0.0008)]
    horizon: Annotated[Whole, QuantityRule("step", 1, 10_000_000, 100, whole=True)]
    max_offload_ratio: Annotated[Real, SHARE]
    hit_rate_window_tokens: Annotated[Whole, TOKENS]
    hit_rate_window: Annotated[Real, TIME]
    hit_rate_prior: Annotated[Real, SHARE]
    hit_rate_prior_tokens: Annotated[Whole, QuantityRule("token", 0, 10**12, 200_000, whole=True)]
    dead_zone: Annotated[Real, QuantityRule("1", 1.0, 1e6, 2.0)]
    min_dwell: Annotated[Real, QuantityRule("s", 0.0, 1e9, 10.0)]
    popularity_sigma: Annotated[Real | None, QuantityRule("1", 0.0, 5.0, 0.6, optional=True)] = None
    popularity_prior_steps: Annotated[Real | None, EVENTS] = None
    horizon_min: Annotated[Real | None, SPAN] = None
    horizon_max: Annotated[Real | None, SPAN] = None
    min_lookups: Annotated[Whole | None, QuantityRule("1", 1, 1e6, 30, whole=True, optional=True)] = None
    fairness: Annotated[Real | None, SPAN] = None
    miss_weight: Annotated[Real | None, QuantityRule("1", 1.0, 1e3, 4.0, optional=True)] = None
    reuse_prior_events: Annotated[Real | None, EVENTS] = None
    reuse_half_life: Annotated[Real | None, EVENTS] = None
