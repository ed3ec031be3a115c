"""What the Grafana dashboard asks Prometheus for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import vamp_integration

DASHBOARD = Path(vamp_integration.__file__).parent / "grafana" / "vamp.json"


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def queries() -> list[str]:
    """Every query of a panel or a variable."""
    board = dashboard()
    panels = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    return panels + [each["definition"] for each in board["templating"]["list"] if "definition" in each]


def asked_for() -> set[str]:
    """Names of the metrics in them."""
    return {name for query in queries() for name in re.findall(r"\b(?:vamp|vllm):\w+", query)}
