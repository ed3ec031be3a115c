"""VAMP's logger: a child of vLLM's, which is the only one that vLLM gives a handler."""

from __future__ import annotations

from vllm.logger import init_logger

logger = init_logger("vllm.vamp")
