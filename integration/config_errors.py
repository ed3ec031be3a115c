"""What vLLM raises for settings it refuses, as one-line ``ConfigError``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vamp_runtime.errors import ConfigError


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Around parsing and checking of engine options only: what fails there is the user's to mend."""
    from pydantic import ValidationError

    try:
        yield
    except ConfigError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f"{name}: {first['input']!r}: " for name in first["loc"][:1])
        raise ConfigError(_one_line(field + first["msg"].removeprefix("Value error, "))) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(_one_line(str(error))) from error


def _one_line(text: str) -> str:
    return " ".join(text.split())
