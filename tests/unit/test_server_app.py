"""The ServerApp in this process: how runs end, and how they go on."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file

from client_app.app import app as client_app
from fedstrat.errors import RunFailedError, StateError
from fedstrat.runs import config
from fedstrat.runs.history import load
from fedstrat.simulation import InProcessGrid
from server_app.app import main

CLIENTS = 4
CONFIG: dict[str, Any] = {
    "algorithm": "scaffold",
    "num-clients": CLIENTS,
    "num-server-rounds": 4,
    "fraction-train": 0.5,
    "dataset.alpha": 1.0,
    "model.hidden": "4",
    "train.device": "cpu",
    "connect-timeout": 0.01,
}


def run(folder: Path, app: ClientApp = client_app, **settings: Any) -> Path:
    """One run of both apps; underscores in keys stand for hyphens, two for a dot."""
    given = {name.replace("__", ".").replace("_", "-"): value for name, value in settings.items()}
    flat = {**config.defaults(), **CONFIG, "results-dir": str(folder), "state-dir": str(folder / "state"), **given}
    grid = InProcessGrid(app, CLIENTS, run_config=flat)
    main(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=flat))
    return folder


def that(happens: Any, *, in_call: int = 1) -> ClientApp:
    """Our ClientApp, to which something happens in its so many-th training."""
    app, calls = ClientApp(), []

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        calls.append(msg)
        if len(calls) >= in_call:
            happens()
        return client_app(msg, context)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return client_app(msg, context)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return client_app(msg, context)

    return app


def fails() -> None:
    raise OSError("the disk is full")


def interrupts() -> None:
    raise KeyboardInterrupt


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in load(folder).history]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("straight") / "run")


def test_a_run_that_completes_says_so(straight: Path) -> None:
    summary = load(straight).summary
    assert (summary["status"], summary["error"], summary["rounds_succeeded"]) == ("completed", None, 4)
    assert len(summary["model_sha256"]) == 64


@pytest.mark.parametrize("ends", [interrupts, is_terminated])
def test_an_interrupted_run_says_so_and_goes_on_as_if_it_were_not(ends: Any, straight: Path, tmp_path: Path) -> None:
    """Interrupted in the first training of round 3 (two clients a round)."""
    before = signal.getsignal(signal.SIGTERM)
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(folder, that(ends, in_call=5))
    assert signal.getsignal(signal.SIGTERM) == before
    summary = load(folder).summary
    assert (summary["status"], summary["rounds"]) == ("interrupted", 2)
    assert "resume" in summary["error"]
    assert load_file(folder / "model.safetensors")
    run(tmp_path / "ignored", resume=str(folder), state_dir=str(folder / "state"))
    assert not (tmp_path / "ignored").exists()
    assert load(folder).summary["status"] == "completed"
    assert rows(folder) == rows(straight)
    assert load(folder).summary["model_sha256"] == load(straight).summary["model_sha256"]


def test_a_run_whose_clients_all_fail_is_a_failed_run_with_the_last_good_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunFailedError, match=r"2 failed rounds in a row, the last in round 3: .*the disk is full"):
        run(folder, that(fails, in_call=3), max_failed_rounds=2)
    summary = load(folder).summary
    assert summary["status"] == "failed"
    assert "the disk is full" in summary["error"]
    assert (summary["rounds_succeeded"], summary["rounds_failed"]) == (1, 2)
    one = run(tmp_path / "one", num_server_rounds=1)
    assert summary["model_sha256"] == load(one).summary["model_sha256"]


def test_a_run_without_a_good_round_saves_the_initial_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(RunFailedError, match=r"no round of 1 succeeded: its app failed.*the disk is full.*\(client"):
        run(folder, that(fails), num_server_rounds=1)
    assert load(folder).summary["status"] == "failed"
    assert load_file(folder / "model.safetensors")


def test_too_few_nodes_end_the_run_naming_the_clients_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match=r"at least 9 connected nodes.*4 are connected \(clients 0, 1, 2, 3\)"):
        run(tmp_path / "run", num_clients=9)
    assert load(tmp_path / "run").summary["status"] == "failed"


def test_resume_without_checkpoints_is_refused(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", checkpoint_every=0, num_server_rounds=1)
    assert not (folder / "checkpoints").exists()
    kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(StateError, match="checkpoint-every is 0; set it to 1 or more"):
        run(folder, resume=str(folder), checkpoint_every=0)
    with pytest.raises(StateError, match="there is no checkpoint in"):
        run(folder, resume=str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == kept


def test_resume_with_other_settings_is_refused_and_leaves_the_run_alone(straight: Path) -> None:
    kept = {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()}
    for settings, named in (
        ({"algorithm": "fedavg"}, "algorithm = 'scaffold', but this one has 'fedavg'"),
        ({"dataset__alpha": 0.5}, r"dataset\.alpha = 1\.0, but this one has 0\.5"),
        ({"train__lr": 0.5}, r"train\.lr = 0\.05, but this one has 0\.5"),
        ({"scaffold__option": 1}, r"scaffold\.option = 2, but this one has 1"),
    ):
        with pytest.raises(StateError, match=named):
            run(straight, resume=str(straight), **settings)
    assert {path: path.read_bytes() for path in straight.rglob("*") if path.is_file()} == kept


def test_a_finished_run_can_be_made_longer(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", num_server_rounds=2)
    before = rows(folder)
    run(folder, resume=str(folder), num_server_rounds=2)
    assert rows(folder) == before
    out = capsys.readouterr().out
    assert "nothing is left to do: the run has its 2 rounds; resume with a larger num-server-rounds" in out
    assert "resuming" not in out
    run(folder, resume=str(folder))
    # What ends a run is evaluated: round 2 was the last then.
    assert [row["round"] for row in rows(folder)] == [1, 2, 3, 4]
    assert load(folder).summary["model_sha256"] == load(straight).summary["model_sha256"]
    assert json.loads((folder / "config.json").read_text())["resumed"][1]["changed"]["num-server-rounds"] == [2, 4]


def test_a_target_ends_the_run_and_a_resume_of_it_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", target_accuracy=0.01)
    summary = load(folder).summary
    assert (summary["status"], summary["rounds"], summary["rounds_to_target"]) == ("completed", 1, 1)
    assert summary["bytes_to_target"]["train_down_wire"] == load(folder).history[0]["bytes"]["train_down_wire"] > 0
    assert "ended early: mean accuracy" in capsys.readouterr().out
    run(folder, resume=str(folder), target_accuracy=0.01)
    assert len(rows(folder)) == 1
    run(folder, resume=str(folder), target_accuracy=0.0)
    assert len(rows(folder)) == 4
