"""Names of the metrics, and the way they travel."""

from __future__ import annotations

from types import SimpleNamespace

from vamp_integration import metrics


def test_keys_are_unique_and_names_follow_the_rules_of_prometheus() -> None:
    keys = [metric.key(value) for metric in metrics.METRICS for value in metric.values]
    assert len(set(keys)) == len(keys)
    for metric in metrics.METRICS:
        assert not metric.name.endswith("_total") and metric.help.endswith(".")
        assert bool(metric.label) == (metric.values != ("",))


def test_what_is_put_is_taken_and_the_rest_stays() -> None:
    stats = SimpleNamespace(num_kv_fetch_reqs_by_stage={"in_progress": 2})
    metrics.put(stats, {"vamp:level": 3, "vamp:moves/offload": 4})
    assert metrics.take(stats) == {"vamp:level": 3, "vamp:moves/offload": 4}
    assert stats.num_kv_fetch_reqs_by_stage == {"in_progress": 2}
    assert metrics.take(stats) == {}
