"""The paper's cost model (arXiv 2609.13537): what each way to find KV blocks costs, in seconds.

The functions are the formulas and nothing else; what is feasible is decided in ``decide.py``. ``spill_cost``
is not the paper's, which knows no copies of KV blocks in host memory.
"""

from __future__ import annotations

from vamp_runtime.policy.parameters import CostParameters


def effective_reuse(age_s: float, r_hit: float, parameters: CostParameters) -> float:
    """Chance that cached blocks are used again: ``p_eff = alpha * r_hit / (1 + age / tau)``.

    Args:
        age_s: seconds since the blocks were last used; infinite is allowed and gives 0.
        r_hit: prefix-cache hit rate over the sliding window, 0 to 1.
    """
    return parameters.alpha * r_hit / (1.0 + age_s / parameters.tau_s)


def overhead(parameters: CostParameters) -> float:
    """Seconds before a request runs again, its tokens apart: ``t_overhead = t_sched + t_queue``."""
    return parameters.t_sched_s + parameters.t_queue_s


def evict_cost(tokens: int, age_s: float, r_hit: float, parameters: CostParameters) -> float:
    """Evicting cached blocks: ``C_c = p_eff * (n_tok * t_prefill + t_overhead)``.

    Args:
        tokens: tokens in the reclaimed blocks.
        age_s: seconds since these blocks were last used.
        r_hit: prefix-cache hit rate over the sliding window, 0 to 1.
    """
    refill = tokens * parameters.t_prefill_s + overhead(parameters)
    return effective_reuse(age_s, r_hit, parameters) * refill


def spill_cost(
    copied: int,
    lost: int,
    tokens_per_block: int,
    load_block_s: float,
    age_s: float,
    r_hit: float,
    parameters: CostParameters,
) -> float:
    """Evicting blocks some of which have a copy in host memory, in seconds.

    ``C_s = p_eff * (n_copied * min(t_load, t_block) + n_lost * t_block + t_wait)``, where a block comes back
    by a copy (``t_load``) or by prefilling its tokens (``t_block``), whichever is sooner. ``t_wait`` is
    ``t_overhead`` where tokens are prefilled again, and ``t_sched`` where a load is all that the request
    waits for: then nothing of it stands in the queue for the device. Without copies it is ``evict_cost``.

    Args:
        copied: evicted blocks that the host holds a copy of.
        lost: the other evicted blocks.
        tokens_per_block: tokens of one full block.
        load_block_s: seconds to copy one block from host memory.
        age_s: seconds since these blocks were last used.
        r_hit: prefix-cache hit rate over the sliding window, 0 to 1.
    """
    prefill_s = tokens_per_block * parameters.t_prefill_s
    by_load = copied > 0 and lost == 0 and load_block_s < prefill_s
    wait = parameters.t_sched_s if by_load else overhead(parameters)
    back = copied * min(load_block_s, prefill_s) + lost * prefill_s
    return effective_reuse(age_s, r_hit, parameters) * (back + wait)


def offload_cost(shards: int, experts: int, parameters: CostParameters) -> float:
    """Moving experts out: ``C_e(n_cand) = min(n_cand, E) * c_eff * w``.

    Args:
        shards: additional expert shards of one layer that leave HBM; every layer gives as many.
        experts: local shards per layer and rank.
    """
    return min(shards, experts) * parameters.c_eff_s * parameters.horizon_steps


def preempt_cost(blocks: int, partial_tokens: int, parameters: CostParameters) -> float:
    """Preempting: ``C_p = C_p1 * G`` with ``C_p1 = t_sched + t_queue + n_partial * t_prefill``.

    Args:
        blocks: additional uncached blocks needed, the paper's G.
        partial_tokens: tokens in the victim's last, unfinished block: the only ones that are not cached.
    """
    return (overhead(parameters) + partial_tokens * parameters.t_prefill_s) * blocks


def combined_cost(
    shards: int, experts: int, tokens: int, age_s: float, r_hit: float, parameters: CostParameters
) -> float:
    """Expanding by whole levels and evicting the rest: ``C_b = C_e(floor) + C_c(remainder)``.

    Args:
        shards: shards of one layer in the levels that leave.
        experts: local shards per layer and rank.
        tokens: tokens in the blocks that are evicted for the remainder.
        age_s: seconds since those blocks were last used.
        r_hit: prefix-cache hit rate over the sliding window, 0 to 1.
    """
    return offload_cost(shards, experts, parameters) + evict_cost(tokens, age_s, r_hit, parameters)
