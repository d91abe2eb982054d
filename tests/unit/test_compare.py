"""``fedstrat compare`` on small runs in this process: cells are kept, changes are noticed, tables hold the numbers."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstrat.errors import ConfigError
from fedstrat.experiments import compare as module
from fedstrat.experiments.cells import identity, make_cells, read_outcome
from fedstrat.experiments.compare import Request, compare
from fedstrat.experiments.recipe import Method, Published, Recipe
from fedstrat.experiments.selection import Outcome, make_row
from fedstrat.experiments.table import pairs_grid, published_grid, scores_csv, scores_grid
from fedstrat.runs import config
from fedstrat.runs.history import load
from fedstrat.runs.inprocess import Engine
from fedstrat.runs.launch import launch
from fedstrat.runs.overrides import read_app

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = {
    "num-server-rounds": 2,
    "num-clients": 4,
    "fraction-train": 0.5,
    "dataset.alpha": 1.0,
    "dataset.validation-fraction": 0.2,
    "model.hidden": "4",
    "train.device": "cpu",
}
FEDAVG = Method("FedAvg", "fedavg", {}, {"train.lr": (0.1, 0.5)})
CRAFT = Method("CRAFT", "craft", {}, {"train.lr": (0.1,)})
RECIPE = Recipe("Small", (FEDAVG, CRAFT), (1, 2), RUN, targets=(0.01, 0.99))


def ask(folder: Path, **more: Any) -> Request:
    return Request(folder, Engine.IN_PROCESS, ROOT, **more)


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open() as stream:
        return list(csv.DictReader(stream))


def stamps(folder: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("cells/*/summary.json")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("compare") / "out"
    assert compare(RECIPE, ask(folder)) == 0
    return folder


def test_every_cell_is_an_ordinary_results_folder(made: Path) -> None:
    folders = list((made / "cells").iterdir())
    assert len(folders) == 6
    for folder in folders:
        run = load(folder)
        assert run.summary is not None
        assert run.summary["status"] == "completed"
        assert run.config["run_config"]["num-clients"] == 4
        assert (folder / "run.log").read_text().count("[ROUND") == 2
        assert not (folder / "checkpoints").exists()
        assert not (folder / "state").exists()


def test_tables_hold_what_the_runs_came_to(made: Path) -> None:
    runs = read_csv(made / "runs.csv")
    summaries = [load(path).summary for path in sorted((made / "cells").iterdir())]
    assert sorted(float(run["mean"]) for run in runs) == sorted(s["final"]["mean"] for s in summaries if s)
    assert sorted(float(run["validation"]) for run in runs) == sorted(s["validation"]["mean"] for s in summaries if s)
    fedavg, craft = read_csv(made / "table.csv")
    own = [run for run in runs if run["method"] == "CRAFT"]
    assert float(craft["mean"]) == pytest.approx(sum(float(run["mean"]) for run in own) / 2)
    assert (fedavg["seeds"], fedavg["runs"], craft["runs"]) == ("2", "4", "2")
    assert (craft["seeds_to_0.01"], craft["seeds_to_0.99"], craft["rounds_to_0.99"]) == ("2", "0", "")
    validation = {
        setting: sum(float(r["validation"]) for r in runs if r["setting"] == setting and r["method"] == "FedAvg")
        for setting in ("lr 0.1", "lr 0.5")
    }
    assert fedavg["setting"] == max(validation, key=validation.__getitem__)
    differences = [
        float(run["mean"]) - next(float(r["mean"]) for r in runs if r["method"] == "FedAvg"
                                  and r["seed"] == run["seed"] and r["setting"] == fedavg["setting"])
        for run in own
    ]  # fmt: skip
    assert float(craft["difference"]) == pytest.approx(sum(differences) / 2)
    assert int(craft["wins"]) == sum(d > 0 for d in differences)
    text = (made / "table.txt").read_text()
    assert "seeds 1, 2" in text
    assert re.search(r"CRAFT +lr 0\.1 ", text)
    assert json.loads((made / "recipe.json").read_text())["title"] == "Small"


def test_payload_bytes_and_the_rounds_to_a_target_come_from_the_history(made: Path) -> None:
    (cell, *_) = make_cells(RECIPE, read_app(ROOT), made / "cells")
    run = load(cell.folder)
    outcome = read_outcome(cell, RECIPE)
    last = run.history[-1]
    assert (outcome.up_bytes, outcome.down_bytes) == (
        sum(line["bytes"]["train_up_payload"] for line in run.history),
        sum(line["bytes"]["train_down_payload"] for line in run.history),
    )
    assert outcome.seconds == last["total_seconds"]
    first = outcome.reached[0]
    assert first is not None
    assert run.history[first.round - 1]["mean"] >= 0.01
    assert all(line["mean"] < 0.01 for line in run.history[: first.round - 1])
    assert outcome.best == max(line["mean"] for line in run.history)


def test_a_second_call_makes_nothing_again(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = stamps(made)
    assert compare(RECIPE, ask(made)) == 0
    assert stamps(made) == before
    assert "6 runs: 6 completed" in capsys.readouterr().out


def test_a_changed_recipe_is_noticed_and_only_what_changed_is_made(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = stamps(made)
    changed = replace(RECIPE, methods=(FEDAVG, replace(CRAFT, fixed={"craft.rtol": 0.5})), seeds=(1,))
    assert compare(changed, ask(made)) == 0
    out = capsys.readouterr().out
    assert "3 runs: 2 completed, 1 new" in out
    assert "note: 4 earlier runs" in out
    after = stamps(made)
    assert {name: after[name] for name in before} == before
    assert len(after) == 7
    assert {run["method"] for run in read_csv(made / "runs.csv")} == {"FedAvg", "CRAFT"}
    assert len(read_csv(made / "runs.csv")) == 3


def test_identity_is_that_of_what_is_computed() -> None:
    flat = dict(config.parse({"algorithm": "ditto", "ditto.aggregator": "craft"}).flat)
    same = {
        "results-dir": "x", "resume": "y", "train.threads": 4, "dataset.dir": "/d", "train.device": "cuda",
        "aggregation-device": "cuda", "fedavgm.momentum": 0.1, "checkpoint-every": 9, "diagnostics": "off",
    }  # fmt: skip
    other = {"ditto.lam": 0.5, "craft.rtol": 0.5, "num-server-rounds": 31, "evaluate-every": 2, "seed": 5}
    assert {identity({**flat, key: value}) for key, value in same.items()} == {identity(flat)}
    assert len({identity(flat)} | {identity({**flat, key: value}) for key, value in other.items()}) == 6


def test_personal_models_are_compared_where_the_recipe_says_so(tmp_path: Path) -> None:
    ditto = Method("Ditto", "ditto", {}, {})
    recipe = replace(RECIPE, methods=(ditto,), seeds=(1,), model="personal")
    assert compare(recipe, ask(tmp_path)) == 0
    (cell,) = make_cells(recipe, read_app(ROOT), tmp_path / "cells")
    run, found = load(cell.folder), read_outcome(cell, recipe)
    assert run.summary is not None
    assert found.final is not None
    assert found.validation == run.summary["validation_personal"]["mean"] != run.summary["validation"]["mean"]
    assert found.final["mean"] == run.history[-1]["personal"]["mean"] != run.history[-1]["mean"]
    assert "personal models" in (tmp_path / "table.txt").read_text()


# --- interruptions and failures -----------------------------------------------------------------------------

ONE = replace(RECIPE, methods=(CRAFT,), seeds=(1,), targets=())


def the_cell(folder: Path) -> Path:
    (cell,) = make_cells(ONE, read_app(ROOT), folder / "cells")
    return cell.folder


def test_an_interrupted_comparison_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A signal in the second of three runs: the first is kept, the second resumes after its last checkpoint."""
    recipe, calls = replace(RECIPE, methods=(FEDAVG, CRAFT), seeds=(1,)), []

    def launch_or_stop(request: Any) -> int:
        calls.append(request)
        if len(calls) != 2:
            return launch(request)
        stopped = replace(request, settings={**request.settings, "num-server-rounds": 1})
        assert launch(stopped) == 0
        folder = request.folder
        (folder / "summary.json").write_text(json.dumps({"status": "interrupted"}))
        return 130

    monkeypatch.setattr(module, "launch", launch_or_stop)
    assert compare(recipe, ask(tmp_path)) == 130
    assert "the same command goes on from here" in capsys.readouterr().out
    assert len(stamps(tmp_path)) == 2
    assert compare(recipe, ask(tmp_path)) == 0
    assert "1 completed, 1 interrupted, 1 new" in capsys.readouterr().out
    assert "resume" in calls[2].settings
    assert calls[2].folder is None
    resumed = load(calls[1].folder)
    assert [line["round"] for line in resumed.history] == [1, 2]
    assert resumed.config["resumed"]
    assert len(calls) == 4


def test_a_cell_that_was_killed_before_a_checkpoint_restarts(tmp_path: Path) -> None:
    folder = the_cell(tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"run_config": {}}))
    (folder / "half").write_text("")
    assert compare(ONE, ask(tmp_path)) == 0
    assert not (folder / "half").exists()
    assert load(folder).summary is not None


def test_a_failed_run_is_shown_and_kept_until_it_is_asked_for_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate that overflows: no reply of round 1 is finite."""
    diverging = replace(CRAFT, fixed={"max-failed-rounds": 1}, grid={"train.lr": (1e38,)})
    recipe = replace(RECIPE, methods=(replace(FEDAVG, grid={"train.lr": (0.1,)}), diverging), seeds=(1,))
    assert compare(recipe, ask(tmp_path)) == 1
    out = capsys.readouterr()
    assert "failed, " in out.out
    assert "CRAFT 1 failed" in " ".join(out.out.split())
    assert re.search(r"CRAFT +– ", out.out)
    (row,) = [row for row in read_csv(tmp_path / "runs.csv") if row["method"] == "CRAFT"]
    assert row["status"] == "failed"
    before = stamps(tmp_path)
    assert compare(recipe, ask(tmp_path)) == 1
    assert stamps(tmp_path) == before
    assert compare(recipe, ask(tmp_path, retry=True)) == 1
    again = stamps(tmp_path)
    assert {name for name in before if again[name] != before[name]} == {n for n in before if n.startswith("craft")}


@pytest.mark.parametrize(
    ("changes", "more", "complaint"),
    [
        ({"run": {**RUN, "train.rl": 1.0}}, {}, r"FedAvg, lr 0.1: run config: there is no key 'train.rl'"),
        ({"run": {**RUN, "dataset.name": "mnist"}}, {"data": Path("/nowhere")}, "--data /nowhere.*'mnist'"),
        ({"run": {**RUN, "dataset.min-size": 10_000}}, {}, "min-size"),
    ],
)
def test_a_wrong_request_starts_nothing(tmp_path: Path, changes: Any, more: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        compare(replace(RECIPE, **changes), ask(tmp_path, **more))
    assert not list(tmp_path.glob("cells/*"))


def test_data_lie_in_a_folder_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "npz").mkdir()
    cell = make_cells(replace(ONE, run={**RUN, "dataset.name": "npz"}), read_app(ROOT), tmp_path)[0]
    assert module._places(cell, ask(tmp_path, data=tmp_path)) == {"dataset.dir": str(tmp_path / "npz")}
    with pytest.raises(ConfigError, match="there is no folder"):
        module._places(cell, ask(tmp_path, data=tmp_path / "npz"))


# --- tables -------------------------------------------------------------------------------------------------


def outcome(method: str, setting: Any, seed: int, mean: float, **more: Any) -> Outcome:
    final = {"mean": mean, "best10": 1.0, "worst10": 0.0, "std": 0.25}
    given = {"status": "completed", "validation": mean, "final": final, "best": mean, "reached": (None, None), **more}
    return Outcome(method, setting, seed, **given)


def make_rows() -> list[Any]:
    fedavg = [outcome("FedAvg", s, seed, 0.5 + 0.1 * seed) for seed in (1, 2) for s in FEDAVG.settings]
    craft = [outcome("CRAFT", s, seed, 0.4 + 0.3 * seed) for seed in (1, 2) for s in CRAFT.settings]
    return [make_row(method, (1, 2), fedavg + craft) for method in (FEDAVG, CRAFT)]


def test_texts_of_a_table() -> None:
    rows = make_rows()
    assert scores_grid(RECIPE, rows).rows[0][:3] == ("FedAvg", "lr 0.1*", ".650 ± .071")
    assert pairs_grid(rows).rows == (("CRAFT", "+.200 ± .141", "−1.071 to +1.471", "2", "2", "0"),)
    assert pairs_grid(rows).header[1] == "minus FedAvg"
    latex = scores_grid(RECIPE, rows).latex()
    assert r".650 $\pm$ .071" in latex
    assert r"best 10 \%" in latex
    assert latex.count(r"\\") == 3
    assert "| FedAvg | lr 0.1\\* |" in scores_grid(RECIPE, rows).markdown()


def test_csv_has_all_digits_and_no_nan() -> None:
    text = scores_csv(RECIPE, make_rows())
    (fedavg, craft) = csv.DictReader(io.StringIO(text))
    assert float(fedavg["mean"]) == pytest.approx(0.65, abs=1e-12)
    assert (fedavg["difference"], craft["wins"]) == ("", "2")
    assert "nan" not in text


def test_published_numbers_stand_beside() -> None:
    recipe = replace(RECIPE, published=Published("a paper", {"CRAFT": {"mean": 0.8, "GB": 1.5}, "X": {"GB": "none"}}))
    grid = published_grid(recipe)
    assert grid is not None
    assert grid.header == ("published", "mean", "GB")
    assert grid.rows == (("CRAFT", "0.8", "1.5"), ("X", "–", "none"))
    assert published_grid(RECIPE) is None
