"""Hook: ``--load-format vamp``, a model loader that reads weights with another one and places the experts.

What: creates the model and reads weights as the inner loader does (``model_loader_extra_config["inner"]``,
default ``auto``), then moves every routed expert into the slab. Why: expert addresses must be ours before
anything captures them. How: vLLM's own registry of load formats
(``vllm/model_executor/model_loader/__init__.py``); ``BaseModelLoader.load_model`` creates, loads through
``self.load_weights`` and post-processes.
"""

from __future__ import annotations

import copy

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vamp_integration import settings
from vamp_integration.experts import use_vamp_experts
from vamp_integration.supported import check_layers


class VampLoader(BaseModelLoader):
    """Reads weights with the inner loader and puts the experts into slabs."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        inner = copy.copy(load_config)
        inner.load_format = extra.pop("inner", "auto")
        # The inner loaders refuse keys they do not know.
        inner.model_loader_extra_config = extra
        self.inner = get_model_loader(inner)

    def download_model(self, model_config: ModelConfig) -> None:
        self.inner.download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        # The layers are built and no weight is read yet: a model that cannot be served costs no loading.
        check_layers(model, self._settings)
        self.inner.load_weights(model, model_config)

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        from vamp_integration.placement import place

        chosen = settings.of(vllm_config)
        assert chosen is not None
        self._settings = chosen
        with use_vamp_experts():
            model: nn.Module = super().load_model(vllm_config, model_config, prefix)
        model.vamp_memory = place(model, chosen, vllm_config)  # type: ignore[assignment]
        return model


def register() -> None:
    """Make the load format known to vLLM; calling it again changes nothing."""
    from vllm.model_executor import model_loader

    if settings.LOAD_FORMAT not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(settings.LOAD_FORMAT)(VampLoader)
