"""Runs in this process: the same results folder as ``fedstrat run`` makes, and ends that say how the run ended."""

import json
import logging
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from fedstrat.errors import ConfigError
from fedstrat.runs import inprocess
from fedstrat.runs.history import load
from fedstrat.runs.inprocess import Engine, load_apps
from fedstrat.runs.launch import RunRequest, launch

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "algorithm": "fedavg",
    "num-server-rounds": 2,
    "num-clients": 3,
    "dataset.alpha": 1.0,
    "model.hidden": "4",
    "train.device": "cpu",
}


def request(folder: Path, **settings: Any) -> RunRequest:
    given = {name.replace("__", ".").replace("_", "-"): value for name, value in settings.items()}
    return RunRequest(app=ROOT, engine=Engine.IN_PROCESS, folder=folder, settings={**SMALL, **given})


def test_a_run_shows_its_rounds_and_at_last_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = list(logging.getLogger("flwr").handlers)
    assert launch(request(tmp_path / "run")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("round ")] == ["1/2", "2/2"]
    assert lines[-1] == str(tmp_path / "run")
    assert not any("INFO" in line or line.startswith("results: ") for line in lines)
    summary = load(tmp_path / "run").summary
    assert summary is not None
    assert summary["status"] == "completed"
    log = (tmp_path / "run" / "run.log").read_text()
    assert "INFO :      Starting FedAvg strategy" in log
    assert "round 2/2" in log
    assert logging.getLogger("flwr").handlers == handlers


def test_a_failed_run_ends_with_1_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(request(tmp_path / "run", train__lr=1e38, max_failed_rounds=1)) == 1
    err = capsys.readouterr().err
    assert "error: the run failed: RunFailedError: 1 failed round in a row" in err
    assert str(tmp_path / "run" / "run.log") in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_as_interrupted(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(number)
    feed = inprocess.Relay.feed

    def feed_and_stop(self: Any, line: str) -> None:
        feed(self, line)
        if line.startswith("round 1/"):
            signal.raise_signal(number)

    monkeypatch.setattr(inprocess.Relay, "feed", feed_and_stop)
    assert launch(request(tmp_path / "run")) == 128 + number
    summary = load(tmp_path / "run").summary
    assert summary is not None
    assert (summary["status"], summary["rounds"]) == ("interrupted", 1)
    assert signal.getsignal(number) == before


def test_a_connection_has_nodes_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine in-process"):
        launch(RunRequest(connection="deployment", app=ROOT, engine=Engine.IN_PROCESS))


def test_code_of_another_copy_is_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with pytest.raises(ConfigError, match=r"expected its module 'server_app\.app'.*'ray' runs an app's own code"):
        load_apps(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.flwr.app.components]\nserverapp = "server_app.app:app"\n')
    with pytest.raises(ConfigError, match="lacks 'clientapp'"):
        load_apps(tmp_path)
