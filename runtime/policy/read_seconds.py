"""What reading experts that are out adds to the load: seconds of a layer, of a second, of a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vamp_runtime.policy.reads import LevelReads
from vamp_runtime.policy.reuse import HitCurve

# Steps of more tokens than this prefill.
MOST_DECODING = 512.0


@dataclass(frozen=True, kw_only=True)
class Link:
    """What reading experts from host memory costs on one rank.

    Attributes:
        expert_bytes: of one expert of one layer.
        bandwidth: bytes/s at which a kernel reads host memory.
        layers: with experts.
        hidden_s_per_token: seconds per token of a step that transfers are hidden behind, in one layer.
        step_tokens: most tokens of a step.
        paced: prefills wait for each other, so that every prompt waits for one pass over what is out.
    """

    expert_bytes: int
    bandwidth: float
    layers: int
    hidden_s_per_token: float
    step_tokens: int
    paced: bool = False


@dataclass(frozen=True)
class ReadSeconds:
    """What reads add, in seconds by level.

    Attributes:
        step: to one layer of a step, as steps were.
        step_decode: the same of those steps that decode, the others counting for nothing.
        decode: a second, to steps that decode.
        prefill: a second, to what prompts wait for: where they are paced the pass that serves them, else
            steps that prefill, had nothing been missed that capacity would cure.
        token: to a missed token.
    """

    step: Sequence[float]
    step_decode: Sequence[float]
    decode: Sequence[float]
    prefill: Sequence[float]
    token: Sequence[float]


def read_seconds(reads: LevelReads, link: Link, curve: HitCurve, capacity: int) -> ReadSeconds:
    """From the steps taken of late, the load of ``curve``, and the ``capacity`` blocks there are."""

    def hidden(tokens: float) -> float:
        return tokens * link.hidden_s_per_token

    # Counted by request: both rates are then those of the same load.
    steps_per_s = curve.lookups_per_s * reads.steps_per_lookup
    missed = (curve.reusable - curve.now(capacity)) / link.step_tokens
    gone = min(1.0, missed / steps_per_s) if steps_per_s else 0.0
    on = link.expert_bytes, link.bandwidth, hidden
    decode = reads.per_layer_s(*on, tokens=(0, MOST_DECODING))
    full = reads.step_s(link.step_tokens, *on)
    if link.paced:
        whole = reads.step_s(link.step_tokens, link.expert_bytes, link.bandwidth, lambda tokens: 0.0)
        prefill = [seconds * link.layers * curve.lookups_per_s for seconds in whole]
    else:
        apart = reads.per_layer_s(*on, tokens=(MOST_DECODING, math.inf), largest_gone=gone)
        prefill = [seconds * link.layers * steps_per_s for seconds in apart]
    return ReadSeconds(
        step=reads.per_layer_s(*on),
        step_decode=decode,
        decode=[seconds * link.layers * steps_per_s for seconds in decode],
        prefill=prefill,
        token=[seconds * link.layers / link.step_tokens for seconds in full],
    )
