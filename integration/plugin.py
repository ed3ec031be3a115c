"""Entry point ``vllm.general_plugins``: makes ``--load-format vamp`` known, and does nothing else.

vLLM calls it in every process (front end, engine core, workers), several times, before any device exists.
"""

from __future__ import annotations

import warnings


def register() -> None:
    """Register the load format and the one wrapper that fills worker and scheduler class."""
    from vamp_integration import compat
    from vamp_runtime.errors import ConfigError

    try:
        compat.check_version(compat.installed_vllm())
    except ConfigError as error:
        # An engine that does not ask for VAMP must not suffer from it being installed.
        warnings.warn(f"VAMP is off: {error}", stacklevel=1)
        return
    from vamp_integration import engine_args, loader

    loader.register()
    engine_args.install()
