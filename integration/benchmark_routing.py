"""Hook, for benchmarks only: simulated routing for models whose weights, and so whose router, are random.

What: where ``VLLM_MOE_ROUTING_SIMULATION_STRATEGY`` begins with ``vamp_lognormal``, registers that strategy
with vLLM's simulator (``vllm/model_executor/layers/fused_moe/router/routing_simulator_router.py``), and gives
its routers numbers: a strategy is not told its layer, and every layer is skewed in its own way. Why: a random
router spreads tokens evenly, as no real one does, and that decides what offloading costs. How: an entry point
of its own, so that unmodified vLLM can use it too (``VLLM_PLUGINS=vamp_benchmark_routing``). It goes when
vLLM tells a strategy its layer. vLLM warns once, with the strategy's whole name, that outputs are not valid.

A token's draw and its topic come from its router logits, all that a strategy is given: tokens of a sequence
share a topic only as far as the model makes their logits alike.

State is one table a layer, at a fixed address: safe in captured graphs. Every step, in every layer, it costs
the time of one small kernel, in the place of the router's.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.router import router_factory
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
    RoutingSimulator,
    RoutingSimulatorRouter,
    RoutingStrategy,
)

from vamp_integration.log import logger
from vamp_integration.lognormal import NAME, LogNormal, parse
from vamp_kernels.lognormal_routing import route_lognormal, route_lognormal_torch


class LogNormalRouting(RoutingStrategy):
    """Draws experts by ``LogNormal`` from a hash of a token's router logits.

    Attributes:
        layer: whose router calls next; set by ``NumberedRouter``.
    """

    def __init__(self, model: LogNormal) -> None:
        self.model = model
        self.layer = 0
        self._domain = model.domain
        self._layers: dict[tuple[int, int, torch.device], tuple[torch.Tensor, int]] = {}

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        route = route_lognormal if router_logits.is_cuda else route_lognormal_torch
        return route(
            router_logits.contiguous(),
            *self._table_and_seed(router_logits),
            top_k,
            _padding(router_logits.shape[0]),
            indices_type or torch.int32,
        )

    def set_domain(self, domain: int) -> None:
        """From the next step on route as in ``domain``; captured graphs too."""
        self._domain = domain
        with torch.inference_mode():
            for (layer, experts, _), (table, _) in self._layers.items():
                table.copy_(self._values(layer, experts))

    def _table_and_seed(self, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        key = (self.layer, logits.shape[1], logits.device)
        if key not in self._layers:  # in the profiling run, before anything is captured
            table = self._values(*key[:2]).to(logits.device)
            self._layers[key] = table, self.model.hash_seed(self.layer)
        return self._layers[key]

    def _values(self, layer: int, experts: int) -> torch.Tensor:
        return torch.from_numpy(self.model.inverse(layer, experts, self._domain))


class NumberedRouter(RoutingSimulatorRouter):
    """vLLM's simulating router, which says whose turn it is: the n-th MoE layer of its model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A router is built just before its layer is entered there.
        self.layer = len(get_current_vllm_config().compilation_config.static_all_moe_layers)

    def _compute_routing(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        strategy = _strategy()
        if strategy is not None:
            strategy.layer = self.layer
        return super()._compute_routing(*args, **kwargs)


class RoutingDomain:
    """Worker extension (``--worker-extension-cls``): ``collective_rpc`` may change the domain at run time."""

    def set_routing_domain(self, domain: int | str) -> None:
        strategy = _strategy()
        assert strategy is not None, f"{NAME} is not the routing strategy of this engine"
        strategy.set_domain(int(domain))


def register() -> None:
    """Entry point ``vllm.general_plugins``: does nothing unless the environment asks for the strategy.

    Raises:
        ConfigError: the strategy's parameters do not fit.
    """
    name = envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY
    if not name.startswith(NAME) or name in RoutingSimulator.get_available_strategies():
        return
    RoutingSimulator.register_strategy(name, LogNormalRouting(parse(name)))
    router_factory.RoutingSimulatorRouter = NumberedRouter  # type: ignore[attr-defined]
    logger.warning("VAMP: SIMULATED ROUTING (%s), for benchmarks only: outputs are not the model's", name)


def _strategy() -> LogNormalRouting | None:
    found = RoutingSimulator._routing_strategies.get(envs.VLLM_MOE_ROUTING_SIMULATION_STRATEGY)
    return found if isinstance(found, LogNormalRouting) else None


def _padding(tokens: int) -> torch.Tensor | None:
    """Rows that only fill a graph up, where vLLM's routers pass them over too (``fused_topk_router.py``)."""
    if not (envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available()):
        return None
    padding = get_forward_context().is_padding
    return None if padding is None else padding[:tokens]
