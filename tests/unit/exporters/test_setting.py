"""The setting `export`, and the messages for what it cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tierckpt import ConfigError, load_config
from tierckpt.exporters import SHAPES, PrometheusPort, exporters_of


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("all_installed")
def test_it_names_exporters_with_an_argument() -> None:
    text = (
        "prometheus 9401, prometheus 127.0.0.1:9402, prometheus /var/metrics/a.prom,"
        "opentelemetry http://collector:4318, tensorboard runs, wandb, mlflow"
    )
    made = [type(each).__name__ for each in exporters_of(text)]
    assert made == [
        *("PrometheusPort", "PrometheusPort", "PrometheusFile", "OpenTelemetry", "TensorBoard"),
        *("WandB", "MLflow"),
    ]
    assert [repr(each) for each in exporters_of(text)[:3]] == [
        "PrometheusPort(9401)",
        "PrometheusPort(9402)",
        "PrometheusFile('/var/metrics/a.prom')",
    ]
    assert exporters_of("") == []


@pytest.mark.usefixtures("all_installed")
def test_the_port_is_for_this_machine_alone_unless_an_address_is_given() -> None:
    given = ["9400", "*:9400", "10.0.0.7:9400", "[::1]:9400"]
    made = [exporters_of(f"prometheus {where}")[0] for where in given]
    addresses = [each.address for each in made if isinstance(each, PrometheusPort)]
    assert addresses == [PrometheusPort().address, "0.0.0.0", "10.0.0.7", "::1"]
    assert PrometheusPort().address == "127.0.0.1"


@pytest.mark.parametrize(
    "text",
    ["grafana", "prometheus", "prometheus 9400 9401", "tensorboard", "wandb a b", "mlflow a b"],
)
@pytest.mark.usefixtures("all_installed")
def test_an_unknown_one_is_told_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"export": text})
    assert str(raised.value) == (
        f"export is {text!r}; it takes one or several of these, separated by commas: "
        "prometheus [ADDRESS:]PORT; prometheus FILE.prom; opentelemetry [URL]; "
        "tensorboard FOLDER; wandb [PROJECT]; mlflow [EXPERIMENT]"
    )
    assert len(SHAPES) == 6


@pytest.mark.usefixtures("all_installed")
def test_a_file_that_node_exporter_would_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reads only \*\.prom in its folder: give such"):
        load_config({"export": f"prometheus {tmp_path}/metrics.txt"})
    with pytest.raises(ConfigError, match="port is 99999; it must be from 0 to 65535"):
        load_config({}, {"TIERCKPT_EXPORT": "prometheus 99999"})


@pytest.mark.parametrize("url", ["collector:4318", "localhost", "ftp://x"])
@pytest.mark.usefixtures("all_installed")
def test_a_collector_without_a_scheme_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"export": f"opentelemetry {url}"})
    assert str(raised.value) == (
        f"export is 'opentelemetry {url}': the collector is {url!r}; give its URL for OTLP over "
        "HTTP, like http://collector:4318"
    )


@pytest.mark.parametrize(
    ("text", "package", "extra"),
    [
        ("prometheus 1", "prometheus_client", "prometheus"),
        ("opentelemetry", "opentelemetry.sdk", "opentelemetry"),
        ("tensorboard x", "tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    text: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        load_config({"export": text})
    assert str(raised.value) == (
        f"export is {text!r}: the exporter to {extra} needs the package {package}, which is not "
        f"installed; run: pip install 'tierckpt[{extra}]'"
    )
