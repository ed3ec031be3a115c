"""Reads a running server's ``/metrics`` page: VAMP's figures, and the few of vLLM's that go with them."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vamp_integration.metrics import METRICS, PREFIX, Metric
from vamp_runtime.errors import ConfigError

TIMEOUT_S = 5.0
Samples = dict[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class ServerFigures:
    """One reading of the page.

    Attributes:
        vamp: by ``Metric.name``, a number or numbers by label value; counters are since start.
        vllm: ``requests_running``, ``requests_waiting``, ``kv_cache_usage``, and since start
            ``prefix_hit_rate``, ``preemptions``, ``ttft_mean_s``, ``tpot_mean_s`` (None before any).
    """

    vamp: dict[str, Any]
    vllm: dict[str, float | None]


def read_server(url: str) -> ServerFigures:
    """The figures of the server at ``url``, e.g. ``http://localhost:8000``.

    Raises ``ConfigError``: no server answers there, or one without VAMP.
    """
    page = metrics_url(url)
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        raise ConfigError(f"URL: {page} answers {error.code}; give that of a vLLM server") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"URL: nothing answers at {page} ({reason}); give that of a running server, "
            "such as http://localhost:8000"
        ) from None
    return parse(text, page)


def metrics_url(url: str) -> str:
    """``url`` with scheme and path; both may be left out."""
    base = url.rstrip("/").removesuffix("/metrics")
    return f"{base if '://' in base else f'http://{base}'}/metrics"


def parse(text: str, page: str = "the page") -> ServerFigures:
    """Figures of a page's text. Raises ``ConfigError`` where VAMP's are not on it."""
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        raise ConfigError(f"URL: {page} is no page of Prometheus metrics; give a vLLM server's") from None
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    if f"{PREFIX}level" not in samples:
        raise ConfigError(
            f"URL: {page} has no VAMP metrics; start the server with `vamp serve` (or --load-format vamp), "
            "without --disable-log-stats"
        )
    return ServerFigures({metric.name: _own(samples, metric) for metric in METRICS}, _vllm(samples))


def exported(metric: Metric) -> str:
    """The metric's name on the page."""
    return f"{PREFIX}{metric.name}{'_total' if metric.counter else ''}"


def _own(samples: Samples, metric: Metric) -> Any:
    found = samples.get(exported(metric), [])
    values = {labels.get(metric.label, ""): _plain(value) for labels, value in found}
    return values if metric.label else values.get("", 0)


def _vllm(samples: Samples) -> dict[str, float | None]:
    def total(name: str) -> float:
        return sum(value for _, value in samples.get(f"vllm:{name}", []))

    def ratio(part: str, whole: str) -> float | None:
        return total(part) / total(whole) if total(whole) else None

    ttft, tpot = "time_to_first_token_seconds", "request_time_per_output_token_seconds"
    return {
        "requests_running": _plain(total("num_requests_running")),
        "requests_waiting": _plain(total("num_requests_waiting")),
        "kv_cache_usage": total("kv_cache_usage_perc"),
        "prefix_hit_rate": ratio("prefix_cache_hits_total", "prefix_cache_queries_total"),
        "preemptions": _plain(total("num_preemptions_total")),
        "ttft_mean_s": ratio(f"{ttft}_sum", f"{ttft}_count"),
        "tpot_mean_s": ratio(f"{tpot}_sum", f"{tpot}_count"),
    }


def _plain(value: float) -> float:
    return int(value) if float(value).is_integer() else value
