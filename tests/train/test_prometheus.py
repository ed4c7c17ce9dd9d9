"""The last step's figures, as Prometheus reads them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from conftest import House
from prometheus_client.parser import text_string_to_metric_families

from trainer import prometheus


def test_figures_are_read_by_prometheus_own_parser() -> None:
    labels = {"job": 'a"b\\c', "pipeline": "two\nlines"}
    row = {"step": 7, "loss": 2.5, "lr": 1e-5, "grad_norm": None, "data": 0.1, "forward": 0.2, "domains": {"m": 0.25}}
    text = prometheus.render(labels, row, heartbeat=1e9, total=12)
    read = {
        (sample.name, sample.labels.get("part") or sample.labels.get("domain")): (sample.value, sample.labels["job"])
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert read[("refit_train_step", None)] == (7.0, 'a"b\\c')
    assert read[("refit_train_learning_rate", None)][0] == 1e-5
    assert read[("refit_train_step_part_seconds", "forward")][0] == 0.2
    assert read[("refit_train_domain_tokens_ratio", "m")][0] == 0.25
    assert not any(name == "refit_train_gradient_norm" for name, _ in read), "a skipped step has none"
    assert prometheus.render(labels, {}, heartbeat=1.0, total=12).count("\n") == 6


@pytest.mark.integration
def test_a_training_leaves_its_figures_and_status_prints_them(house: House, trained: dict[str, Any]) -> None:
    written = (house.root / "alone" / prometheus.FILE).read_text()
    assert "refit_train_heartbeat_seconds" in {family.name for family in text_string_to_metric_families(written)}
    argv = [sys.executable, "-m", "trainer", "status", house.uri("alone"), "--prometheus"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout
    read = {(s.name, s.labels.get("part")): s.value for f in text_string_to_metric_families(said) for s in f.samples}
    last = house.metrics("alone")[-1]
    assert read[("refit_train_step", None)] == 12
    assert read[("refit_train_loss", None)] == last["loss"]
    assert read[("refit_train_step_part_seconds", "backward")] == last["backward"]
