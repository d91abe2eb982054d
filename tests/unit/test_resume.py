"""Going on with a run: its own settings, which of them may change, and folders that their ServerApp couldn't close."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedstrat.errors import ConfigError, StateError
from fedstrat.models import trainable_names
from fedstrat.naming import kebab
from fedstrat.payloads import decode, to_arrays
from fedstrat.runs import config, launch, resume
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.runs.history import RunFolder, load
from fedstrat.runs.inprocess import Engine
from fedstrat.runs.model import build_model
from fedstrat.runs.relay import Relay
from fedstrat.strategies.state import Snapshot
from tests.unit.asked import Asked
from tests.unit.test_history import report

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = config.defaults()


# --- settings --------------------------------------------------------------------------------------------


def test_naming_the_folder_is_enough(tmp_path, monkeypatch):
    """``fedstrat run -c resume=FOLDER`` takes all settings of the run there; what is given beside it wins."""
    folder = tmp_path / "old"
    before = {**DEFAULTS, "algorithm": "scaffold", "train.lr": 0.3, "num-clients": 3, "results-dir": str(folder)}
    RunFolder(folder, {**before, "state-dir": str(folder / "state")})
    moved = folder.rename(tmp_path / "new")
    plans = []

    def keep(plan, _):
        plans.append((launch._take_folder(plan), plan))
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_share_machine", keep)
    with pytest.raises(KeyboardInterrupt):
        launch.launch(launch.RunRequest(pairs=[f"resume={moved} num-server-rounds=40"], app=ROOT))
    ((took, plan),) = plans
    assert took == moved
    assert (plan.config.algorithm, plan.config.train.lr, plan.config.num_clients) == ("scaffold", 0.3, 3)
    assert plan.config.num_server_rounds == 40
    assert plan.given["state-dir"] == str(moved / "state")
    assert plan.given["results-dir"] == plan.given["resume"] == str(moved)


@pytest.mark.parametrize("engine", list(Engine))
def test_a_folder_without_a_run_is_refused_before_anything_starts(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(launch, "_share_machine", lambda *_: pytest.fail("it was started"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, why in (("none", "doesn't exist"), ("empty", "has no config.json"), ("file", "is a file")):
        request = launch.RunRequest(pairs=[f"resume={tmp_path / name}"], app=ROOT, engine=engine)
        with pytest.raises(ConfigError, match=rf"{name}: expected the results folder .* it {why}; there is no run in"):
            launch.launch(request)
    for number in range(7):
        RunFolder(tmp_path / f"run-{number}", DEFAULTS)
    with pytest.raises(ConfigError, match=r"the runs near it are .*run-\d, .* and 2 more$"):
        launch.launch(launch.RunRequest(pairs=[f"resume={tmp_path / 'none'}"], app=ROOT, engine=engine))
    with pytest.raises(ConfigError, match=r"the runs near it are .*run-\d"):  # the folder of the folders
        launch.launch(launch.RunRequest(pairs=[f"resume={tmp_path}"], app=ROOT, engine=engine))


def test_a_run_that_was_made_longer_stays_so(tmp_path):
    """What a resume changed holds at the next one, too."""
    folder = tmp_path / "run"
    settings = {**DEFAULTS, "num-server-rounds": 3, "results-dir": str(folder)}
    RunFolder(folder, settings)
    RunFolder(folder, {**settings, "num-server-rounds": 2000, "resume": str(folder), "patience": 9}, resume=True)
    went_on = resume.recorded_settings(folder)
    assert (went_on["num-server-rounds"], went_on["patience"]) == (2000, 9)
    assert not {"results-dir", "resume"} & set(went_on)


def test_state_that_lies_elsewhere_stays_there(tmp_path):
    RunFolder(tmp_path / "run", {**DEFAULTS, "results-dir": str(tmp_path / "run"), "state-dir": "/volume/state"})
    settings = resume.recorded_settings(tmp_path / "run")
    assert settings["state-dir"] == "/volume/state"
    assert not {"results-dir", "resume"} & set(settings)
    assert resume.recorded_settings(tmp_path / "nothing") == {}


@pytest.mark.parametrize("key", sorted(set(DEFAULTS) - resume.FREE - {"algorithm"}))
def test_what_decides_the_result_may_not_change(key):
    """Every key of the run config is free, or belongs to another algorithm, or stops the resume by its name."""
    table = key.rpartition(".")[0]
    algorithm = table if table in config.algorithms() else "scaffold"
    before = {**DEFAULTS, "algorithm": algorithm}
    now = {**before, key: not before[key] if isinstance(before[key], bool) else f"{before[key]}1"}
    with pytest.raises(StateError, match=rf"had {key} = .* but this one has .* resume with\s+the same settings"):
        resume.check_unchanged(before, now)


def test_the_first_key_that_differs_is_named():
    with pytest.raises(StateError, match="algorithm = 'craft', but this one has 'fedavg'") as error:
        resume.check_unchanged(DEFAULTS, {**DEFAULTS, "algorithm": "fedavg", "train.lr": 1.0})
    assert "train.lr" not in str(error.value)


def test_what_decides_nothing_may_change():
    changed = dict.fromkeys(resume.FREE, "other")
    resume.check_unchanged(DEFAULTS, {**DEFAULTS, **changed, "fedprox.mu": 9.0})
    resume.check_unchanged({"algorithm": "craft"}, DEFAULTS)  # a key that this version has and that one had not


def test_what_a_strategy_lets_change_the_run_does_too():
    free = {kebab(name) for name in Snapshot._FREE}
    assert free & DEFAULTS.keys() <= resume.FREE


def test_keys_of_the_algorithm_within_count():
    ditto = {**DEFAULTS, "algorithm": "ditto", "ditto.aggregator": "fedavgm"}
    resume.check_unchanged(ditto, {**ditto, "scaffold.server-lr": 0.5})
    with pytest.raises(StateError, match=r"fedavgm\.momentum"):
        resume.check_unchanged(ditto, {**ditto, "fedavgm.momentum": 0.5})


def test_a_schedule_that_ends_with_the_run_ties_its_length():
    cosine = {**DEFAULTS, "train.lr-schedule": "cosine"}
    with pytest.raises(StateError, match="num-server-rounds = 30, but this one has 60"):
        resume.check_unchanged(cosine, {**cosine, "num-server-rounds": 60})
    resume.check_unchanged(DEFAULTS, {**DEFAULTS, "num-server-rounds": 60})


def test_the_results_folder_refuses_other_settings_and_stays_as_it_was(tmp_path):
    RunFolder(tmp_path, DEFAULTS).record(report(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StateError, match=r"dataset\.alpha"):
        RunFolder(tmp_path, {**DEFAULTS, "dataset.alpha": 0.5}, resume=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# --- the end of a run that could not write it ------------------------------------------------------------


def killed_run(folder: Path, **settings) -> tuple[RunFolder, dict[str, torch.Tensor]]:
    """A run that was killed after round 2: no summary, no model, two checkpoints."""
    flat = {**DEFAULTS, "model.hidden": "3", "num-clients": 1, **settings}
    run = config.parse(flat)
    history = RunFolder(folder, flat)
    model = build_model(run.flat)
    strategy = run.strategy(trainable=trainable_names(model))
    asked = Asked(strategy, model)
    checkpoints = CheckpointFolder(folder / "checkpoints")
    for t in (1, 2):
        asked.message(t)
        history.record(report(t))
        checkpoints.save(strategy.snapshot(t))
    return history, decode(to_arrays(model), "test")


@pytest.mark.parametrize("algorithm", ["craft", "scaffold", "fedacg"])
def test_a_killed_run_gets_its_summary_and_the_last_good_model(tmp_path, algorithm):
    _, model = killed_run(tmp_path, algorithm=algorithm, **{"target-accuracy": 0.5})
    resume.close_folder(tmp_path, "interrupted", "ended by SIGTERM")
    summary = load(tmp_path).summary
    assert (summary["status"], summary["error"], summary["rounds"]) == ("interrupted", "ended by SIGTERM", 2)
    assert summary["rounds_to_target"] == 1
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == model.keys()
    assert all(torch.equal(saved[name], model[name]) for name in model)
    assert summary["model_sha256"]
    # The run can still be resumed.
    assert CheckpointFolder(tmp_path / "checkpoints").latest().round == 2
    RunFolder(tmp_path, load(tmp_path).config["run_config"], resume=True)


def test_a_run_whose_gpu_is_gone_gets_its_model_too(tmp_path):
    _, model = killed_run(tmp_path)
    recorded = json.loads((tmp_path / "config.json").read_text())
    recorded["run_config"]["aggregation-device"] = "cuda:99"
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    resume.close_folder(tmp_path, "failed", "ended by SIGKILL")
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], model[name]) for name in model)


def test_a_run_that_told_its_own_end_is_left_alone(tmp_path):
    history, _ = killed_run(tmp_path)
    history.finish("failed", error="its own words")
    resume.close_folder(tmp_path, "interrupted", "ended by SIGINT")
    assert load(tmp_path).summary["error"] == "its own words"


def test_a_folder_without_a_run_is_left_alone(tmp_path):
    resume.close_folder(tmp_path, "failed", "x")
    assert list(tmp_path.iterdir()) == []


def test_where_no_checkpoint_can_be_read_there_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"run_config": {"algorithm": "nothing"}}))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "round-000001.safetensors").write_bytes(b"no")
    resume.close_folder(tmp_path, "failed", "x")
    assert not (tmp_path / "model.safetensors").exists()
    summary = load(tmp_path).summary
    assert (summary["status"], summary["error"], summary["model_sha256"]) == ("failed", "x", None)


# --- what people see -------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_shown_to_the_user():
    shown = []
    relay = Relay(shown.append)
    relay.feed("WARNING :  the checkpoint /r/round-000003.safetensors is damaged or foreign (x); trying the one before")
    relay.feed("WARNING :  something of Flower's")
    assert shown == [
        "warning: the checkpoint /r/round-000003.safetensors is damaged or foreign (x); trying the one before"
    ]
