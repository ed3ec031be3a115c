"""The Grafana dashboard in itself; `tests/vllm/test_metrics.py` holds it against a live page."""

from __future__ import annotations

import re

from support.dashboard import asked_for, dashboard, queries

from vamp_integration.metrics import METRICS
from vamp_integration.server_figures import exported


def test_it_shows_every_metric_of_ours_and_no_other() -> None:
    assert {name for name in asked_for() if name.startswith("vamp:")} == {exported(m) for m in METRICS}


def test_every_query_is_of_one_model_and_engine_and_balanced() -> None:
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    for query in queries():
        assert all(query.count(left) == query.count(right) for left, right in ("()", "{}", "[]")), query
        assert set(re.findall(r"\$(\w+)", query)) <= variables | {"__rate_interval"}, query
        if "label_values" not in query:
            selectors = re.findall(r"(?:vamp|vllm):\w+(\{[^}]*\})?", query)
            assert selectors and all('model_name="$model"' in each for each in selectors), query


def test_labels_of_legends_are_labels_of_the_metrics() -> None:
    labels = {metric.label for metric in METRICS}
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
