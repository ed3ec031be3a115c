"""Entry point ``vllm.general_plugins``: makes ``--load-format vamp`` known, and does nothing else.

vLLM calls it in every process (front end, engine core, workers), several times, before any device exists.
"""

from __future__ import annotations


def register() -> None:
    """Register the load format and the one wrapper that fills worker and scheduler class."""
    from vamp_integration import compat, engine_args, loader

    compat.check_version(compat.installed_vllm())
    loader.register()
    engine_args.install()
