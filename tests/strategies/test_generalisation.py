"""How personal models do on the other clients' data: asked once, at the end, where the data are at hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrat
from client_app.app import app
from fedstrat.data import clients
from fedstrat.data.clients import assign, others
from fedstrat.local.state import open_store, peek
from fedstrat.metrics.rounds import RoundReport
from fedstrat.models import trainable_names
from fedstrat.runs import config
from fedstrat.runs.history import RunFolder, load
from fedstrat.runs.model import build_model, initial_model
from fedstrat.runs.progress import round_line
from fedstrat.simulation import InProcessGrid

SETTING: dict[str, Any] = {
    "num-server-rounds": 2,
    "num-clients": 6,
    "fraction-train": 0.5,
    "model.hidden": "16",
    "train.lr": 0.3,
    "dataset.alpha": 0.3,
}


def run(
    should_end: Callable[[RoundReport], bool] | None = None, **settings: Any
) -> tuple[Any, InProcessGrid, list[RoundReport], Any]:
    checked = config.parse(
        {**SETTING, **{name.replace("__", ".").replace("_", "-"): v for name, v in settings.items()}}
    )
    model = initial_model(checked.flat)
    strategy = checked.strategy(trainable=trainable_names(model))
    grid = InProcessGrid(app, checked.num_clients, run_config=checked.flat)
    reports: list[RoundReport] = []
    result = strategy.start(
        grid=grid,
        initial_arrays=fedstrat.to_arrays(model),
        num_rounds=checked.num_server_rounds,
        on_round=reports.append,
        should_end=should_end,
    )
    return strategy, grid, reports, result


def expected(strategy: Any, grid: InProcessGrid, arrays: Any) -> list[float]:
    """Every client's model of its own on all the others' test parts, by hand."""
    shares = []
    for context in grid.contexts.values():
        place = context.node_config["partition-id"]
        model = build_model(context.run_config)
        fedstrat.load_arrays(model, arrays)
        state = peek(open_store(context, strategy.experiment_id, str(place)), strategy.accepted.get(str(place), 0))
        if state is not None:
            own = {n.removeprefix("personal/"): t for n, t in state.items() if n.startswith("personal/")}
            model.load_state_dict(own)
        model.eval()
        correct = total = 0
        for other in grid.contexts.values():
            if other is not context:
                part = assign(other.run_config, other.node_config)
                with torch.no_grad():
                    answers = model(torch.from_numpy(part.source.features(part.test))).argmax(1).numpy()
                correct += int((answers == part.source.y[part.test]).sum())
                total += len(part.test)
        shares.append(correct / total)
    return shares


@pytest.mark.parametrize("algorithm", ["fedcspack", "ditto", "fedavg"])
def test_personal_models_meet_the_others_data_in_the_last_round(algorithm: str, tmp_path: Path) -> None:
    settings = {"evaluate_personal": True} if algorithm == "fedavg" else {}
    strategy, grid, reports, result = run(algorithm=algorithm, fedcspack__pack_size=64, **settings)
    assert reports[0].elsewhere is None
    shares = expected(strategy, grid, result.arrays)
    elsewhere = reports[1].elsewhere
    assert elsewhere is not None
    assert elsewhere.mean == pytest.approx(np.mean(shares))
    assert elsewhere.worst == pytest.approx(min(shares))
    metrics = result.evaluate_metrics_clientapp[2]
    assert metrics["personal-elsewhere-accuracy-mean"] == elsewhere.mean
    assert not {n for n in metrics if n.startswith("personal-elsewhere-num")}

    # Side by side in the round's line, in the history and in the summary; bytes beside FedAvg's.
    line = round_line(reports[1])
    own, whole = f"{reports[1].personal.worst:.3f}"[-4:], f"{reports[1].fairness.worst:.3f}"[-4:]
    for words in ("acc mean", "worst10", f"worst {whole}  personal mean", f"worst {own}", "elsewhere"):
        assert words in line
    assert ("of FedAvg's" in line) == (algorithm == "fedcspack")
    folder = RunFolder(tmp_path / "run", config.parse(SETTING).flat)
    for report in reports:
        folder.record(report)
    summary = folder.finish("completed")
    history = load(tmp_path / "run").history
    assert history[0]["personal_elsewhere"] is None
    assert history[1]["personal_elsewhere"]["mean"] == summary["personal_elsewhere"]["mean"] == elsewhere.mean
    assert summary["personal"]["worst"] == reports[1].personal.worst
    assert summary["final"]["worst"] == reports[1].fairness.worst
    size = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert summary["bytes"]["train_dense_payload"] == 2 * (2 * 3 * size)  # rounds, directions, clients
    moved = summary["bytes"]["train_up_payload"] + summary["bytes"]["train_down_payload"]
    assert moved < summary["bytes"]["train_dense_payload"] if algorithm == "fedcspack" else moved > 0


def test_a_run_that_reached_its_goal_meets_the_others_data_there() -> None:
    """The goal is reached after round 2 of 4."""
    settings = {"algorithm": "fedcspack", "fedcspack__pack_size": 64, "num_server_rounds": 4}
    _, _, straight, _ = run(algorithm="fedcspack", fedcspack__pack_size=64)
    _, _, reports, _ = run(should_end=lambda report: report.round == 2, **settings)
    assert [r.round for r in reports] == [1, 2]
    assert reports[1].elsewhere is not None
    assert reports[1].elsewhere.mean == straight[1].elsewhere.mean
    assert (reports[1].fairness, reports[1].personal) == (straight[1].fairness, straight[1].personal)
    # What was evaluated twice also travelled twice.
    assert reports[1].traffic.evaluate_down_wire > 1.9 * straight[1].traffic.evaluate_down_wire


def test_nobody_is_asked_without_personal_models() -> None:
    _, _, reports, result = run(algorithm="fedavg")
    assert all(r.personal is None and r.elsewhere is None for r in reports)
    assert not {n for n in result.evaluate_metrics_clientapp[2] if n.startswith("personal")}


def test_others_are_the_test_parts_of_all_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = config.parse(SETTING).flat
    places = [{"partition-id": i, "num-partitions": 6} for i in range(6)]
    tests = [set(assign(flat, place).test.tolist()) for place in places]
    for i, place in enumerate(places):
        found = others(flat, place)
        assert found is not None
        assert sorted(found.test) == sorted(set().union(*tests) - tests[i])
        assert not len(found.train)
    monkeypatch.setattr(clients, "MOST_ELSEWHERE", 50)
    some = [others(flat, places[0]) for _ in range(2)]
    assert len(some[0].test) == len(set(some[0].test)) == 50
    assert set(some[0].test.tolist()) <= set().union(*tests[1:])
    np.testing.assert_array_equal(some[0].test, some[1].test)


def test_a_node_with_private_data_has_nobody_elses(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.zeros((4, 64), np.float32), y=np.arange(4))
    assert others(config.parse(SETTING).flat, {"dataset.dir": str(tmp_path)}) is None


def test_the_built_in_clients_make_the_initial_model_from_the_seed() -> None:
    """Over a whole run of the apps: the same bits as with the model on the wire, no first contact with a model."""
    runs = {
        where: run(algorithm="fedcspack", fedcspack__pack_size=64, fedcspack__initial_model=where, seed=4)
        for where in ("wire", "seed")
    }
    wire, seed = (result.arrays for _, _, _, result in runs.values())
    assert {n: a.data for n, a in wire.items()} == {n: a.data for n, a in seed.items()}
    first = {where: reports[0].traffic.train_down_payload for where, (_, _, reports, _) in runs.items()}
    assert first == {"wire": 3 * 4 * (64 * 16 + 16 + 16 * 10 + 10), "seed": 3 * 32}
