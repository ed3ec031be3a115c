"""The three ways VAMP fails. Exhaustion is none of them: it is a result (``None``, or a decision)."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting the user must change; the message names it, its value, and a value that would work."""


class DriverError(RuntimeError):
    """A memory driver refused a call. The caller rolls back; the state before the call still holds.

    Args:
        call: name of the driver call, e.g. ``"map"``.
        detail: what the driver said, e.g. ``"CUDA_ERROR_NOT_PERMITTED"`` or ``"ENOMEM"``.
    """

    def __init__(self, call: str, detail: str) -> None:
        super().__init__(f"{call}: {detail}")
        self.call = call
        self.detail = detail


class StateLost(RuntimeError):
    """A rollback failed or ranks cannot agree: what lies where is unknown, so the process must end."""


class IntegrityError(RuntimeError):
    """An invariant of the memory bookkeeping does not hold, or an expert's bytes have changed."""
