import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedstrat.errors import ConfigError, StateError
from fedstrat.metrics.fairness import fairness
from fedstrat.metrics.rounds import RoundReport, Traffic
from fedstrat.runs.history import RunFolder, load
from fedstrat.runs.progress import Progress, format_bytes, format_seconds, round_line
from fedstrat.runs.summary import summarise

CONFIG = {"algorithm": "craft", "train.lr": 0.05, "num-server-rounds": 3, "target-accuracy": 0.0}
COUNTS = {"0": (1, 2.0, 4), "1": (4, 1.0, 4), "2": (0, 0.0, 0)}


def report(number: int = 1, **changes) -> RoundReport:
    base = RoundReport(
        round=number,
        num_rounds=3,
        seconds=0.5,
        aggregated=True,
        trained=("0", "1"),
        failed={"2": "NaN in 'layer.weight'"},
        train={"train-loss": 0.75},
        diagnostics={"rank": 2.0},
        counts=COUNTS,
        fairness=fairness(COUNTS),
        server={"loss": 1.0},
        traffic=Traffic(100, 50, 110, 60, 70, 7),
    )
    return replace(base, **changes)


def without_evaluation(number: int) -> RoundReport:
    return report(number, counts=None, fairness=None)


# --- writing and reading back ----------------------------------------------------------------------------


def test_config_holds_what_decides_the_run(tmp_path):
    RunFolder(tmp_path / "a" / "b", CONFIG, experiment_id="e1", num_clients=3, num_parameters=10, device="cpu")
    config = load(tmp_path / "a" / "b").config
    assert config["run_config"] == CONFIG
    assert (config["experiment_id"], config["num_clients"], config["num_parameters"]) == ("e1", 3, 10)
    assert config["versions"]["torch"] == torch.__version__
    assert config["versions"]["numpy"] == np.__version__
    assert {"python", "flwr", "fedstrat"} <= set(config["versions"])
    assert config["platform"]
    assert config["started"].endswith("+00:00")


def test_rounds_come_back_as_reported(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    folder.record(report(1))
    folder.record(report(2, seconds=1.0))
    first, second = load(tmp_path).history
    # Accuracies of the clients with test data: 1/4 and 1; std of (.25, 1) is .375; loss 3/8 over examples.
    assert {key: first[key] for key in ("mean", "accuracy", "best10", "worst10", "std", "loss")} == {
        "mean": 0.625,
        "accuracy": 0.625,
        "best10": 1.0,
        "worst10": 0.25,
        "std": 0.375,
        "loss": 0.375,
    }
    assert (first["round"], first["num_rounds"], first["aggregated"], first["num_evaluated"]) == (
        1,
        3,
        True,
        2,
    )
    assert (first["train"], first["diagnostics"], first["server"]) == (
        {"train-loss": 0.75},
        {"rank": 2.0},
        {"loss": 1.0},
    )
    assert (first["trained"], first["failed"]) == (["0", "1"], {"2": "NaN in 'layer.weight'"})
    assert first["bytes"]["train_down_payload"] == 100
    assert first["bytes"]["evaluate_up_wire"] == 7
    assert second["bytes"]["train_up_wire"] == 60
    assert second["total_bytes"]["train_up_wire"] == 120
    assert (second["seconds"], second["total_seconds"]) == (1.0, 1.5)


def test_a_round_is_on_disk_as_soon_as_it_is_recorded(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    for number in (1, 2):
        folder.record(report(number))
        assert len((tmp_path / "history.jsonl").read_text().splitlines()) == number


def test_clients_hold_the_last_evaluation(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    folder.record(report(1))
    folder.record(report(2, counts={"7": (3, 1.5, 6)}))
    folder.record(without_evaluation(3))
    assert load(tmp_path).clients == {
        "round": 2,
        "clients": {"7": {"accuracy": 0.5, "loss": 0.25, "num_correct": 3, "num_examples": 6}},
    }


def test_a_client_without_test_data_has_no_accuracy(tmp_path):
    RunFolder(tmp_path, CONFIG).record(report())
    assert load(tmp_path).clients["clients"]["2"]["accuracy"] is None


def test_json_holds_neither_nan_nor_infinity(tmp_path):
    folder = RunFolder(tmp_path, {**CONFIG, "x": math.nan})
    folder.record(
        report(
            counts={"0": (1, math.nan, 2)},
            fairness=fairness({"0": (1, math.inf, 2)}),
            train={"train-loss": float("nan")},
            diagnostics={"rank": np.float32("inf"), "norm": np.float32(1.5)},
        )
    )
    folder.finish("completed")

    def refuse(name):
        raise AssertionError(f"{name} in JSON")

    for file in sorted(tmp_path.iterdir()):
        for text in file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            json.loads(text, parse_constant=refuse)
    line = load(tmp_path).history[0]
    assert line["loss"] is None
    assert line["train"] == {"train-loss": None}
    assert line["diagnostics"] == {"rank": None, "norm": 1.5}


# --- the folder's life -----------------------------------------------------------------------------------


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path):
    RunFolder(tmp_path, CONFIG, experiment_id="first").record(report())
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder(tmp_path, CONFIG, experiment_id="second")
    assert load(tmp_path).config["experiment_id"] == "first"
    assert len(load(tmp_path).history) == 1


def test_a_folder_that_cannot_be_made_is_an_error_about_results_dir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can't be written.*'results-dir'"):
        RunFolder(tmp_path / "file" / "run", CONFIG)
    with pytest.raises(ConfigError, match=r"is a file.*'results-dir'"):
        RunFolder(tmp_path / "file", CONFIG)


def test_loading_or_resuming_what_is_no_run_says_so(tmp_path):
    for attempt in (lambda: load(tmp_path), lambda: RunFolder(tmp_path, CONFIG, resume=True)):
        with pytest.raises(ConfigError, match=r"no config\.json"):
            attempt()


def test_torn_last_line_is_left_out(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    for number in (1, 2):
        folder.record(report(number))
    file = tmp_path / "history.jsonl"
    file.write_text(file.read_text()[:-20])
    assert [line["round"] for line in load(tmp_path).history] == [1]


def test_damage_elsewhere_is_an_error(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    for number in (1, 2):
        folder.record(report(number))
    file = tmp_path / "history.jsonl"
    file.write_text("{broken\n" + file.read_text())
    with pytest.raises(StateError, match="line 1"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StateError, match=r"config\.json"):
        load(tmp_path)


def test_resume_goes_on_after_a_torn_line(tmp_path):
    folder = RunFolder(tmp_path, CONFIG, experiment_id="e1")
    for number in (1, 2):
        folder.record(report(number))
    folder.finish("failed", error="killed")
    file = tmp_path / "history.jsonl"
    file.write_text(file.read_text()[:-20])

    resumed = RunFolder(tmp_path, {**CONFIG, "num-server-rounds": 5}, resume=True)
    assert load(tmp_path).summary is None
    for number in (2, 3):
        resumed.record(report(number))
    recorded = load(tmp_path)
    assert [line["round"] for line in recorded.history] == [1, 2, 3]
    assert recorded.history[-1]["total_seconds"] == 1.5
    assert recorded.config["run_config"] == CONFIG
    assert recorded.config["experiment_id"] == "e1"
    assert recorded.config["resumed"][0]["changed"] == {"num-server-rounds": [3, 5]}


def test_rounds_that_are_done_again_stand_once(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    for number in (1, 2, 3):
        folder.record(report(number))
    again = RunFolder(tmp_path, CONFIG, resume=True)
    again.record(report(2, seconds=2.0))
    history = load(tmp_path).history
    assert [line["round"] for line in history] == [1, 2]
    assert history[-1]["total_seconds"] == 2.5
    assert history[-1]["total_bytes"]["train_up_payload"] == 100


def test_nothing_temporary_stays_behind(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    folder.record(report())
    folder.finish("completed", model_sha256=folder.save_model({"w": torch.ones(2)}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "clients.json",
        "config.json",
        "history.jsonl",
        "model.safetensors",
        "summary.json",
    ]


# --- the model -------------------------------------------------------------------------------------------


def test_model_comes_back_bit_for_bit(tmp_path):
    shared = torch.randn(3, 2)
    model = {
        "a": torch.randn(2, 3, dtype=torch.bfloat16),
        "b": torch.randn(4).half(),
        "tied": shared,
        "tied_too": shared,
        "transposed": torch.randn(2, 3).t(),
        "needs_grad": torch.nn.Parameter(torch.randn(2)),
        "counter": torch.tensor(2**53 + 1),
        "empty": torch.zeros(0, 3),
    }
    digest = RunFolder(tmp_path, CONFIG).save_model(model)
    file = tmp_path / "model.safetensors"
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()
    loaded = load_file(file)
    assert sorted(loaded) == sorted(model)
    for name, tensor in model.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor.detach()), name


def test_equal_models_have_equal_digests(tmp_path):
    first = RunFolder(tmp_path / "1", CONFIG).save_model({"w": torch.arange(3.0), "v": torch.ones(1)})
    same = RunFolder(tmp_path / "2", CONFIG).save_model({"v": torch.ones(1), "w": torch.arange(3.0)})
    other = RunFolder(tmp_path / "3", CONFIG).save_model({"w": torch.arange(3.0) + 1, "v": torch.ones(1)})
    assert first == same != other


# --- the summary -----------------------------------------------------------------------------------------


def counted(correct: int) -> dict:
    counts = {"0": (correct, 1.0, 10)}
    return {"counts": counts, "fairness": fairness(counts)}


def test_summary_tells_final_best_and_when_the_target_was_reached(tmp_path):
    folder = RunFolder(tmp_path, {**CONFIG, "target-accuracy": 0.8})
    folder.record(report(1, **counted(5)))
    folder.record(report(2, aggregated=False, trained=(), **counted(8)))
    folder.record(report(3, **counted(9)))
    folder.record(report(4, **counted(9)))
    folder.record(report(5, **counted(7)))
    folder.record(without_evaluation(6))
    summary = folder.finish("completed", model_sha256="abc")
    assert summary == load(tmp_path).summary
    assert (summary["status"], summary["error"], summary["model_sha256"]) == ("completed", None, "abc")
    assert (summary["rounds"], summary["rounds_succeeded"], summary["rounds_failed"]) == (6, 5, 1)
    assert (summary["final"]["round"], summary["final"]["mean"]) == (5, 0.7)
    assert (summary["best"]["round"], summary["best"]["mean"]) == (3, 0.9)
    assert set(summary["best"]) == {"round", "loss", "mean", "accuracy", "best10", "worst10", "std", "worst"}
    assert (summary["target_accuracy"], summary["rounds_to_target"]) == (0.8, 2)
    assert summary["bytes_to_target"]["train_up_wire"] == 120
    assert summary["bytes"]["train_up_wire"] == 360
    assert summary["seconds"] == 3.0


def test_summary_of_a_failed_run_has_the_error(tmp_path):
    folder = RunFolder(tmp_path, CONFIG)
    summary = folder.finish("failed", error="no node came")
    assert (summary["status"], summary["error"], summary["rounds"]) == ("failed", "no node came", 0)
    assert summary["final"] is summary["best"] is summary["bytes"] is summary["model_sha256"] is None
    assert load(tmp_path).summary == summary


def test_no_target_is_never_reached():
    line = {"round": 1, "mean": 0.0, "aggregated": True, "total_bytes": {}, "total_seconds": 1.0}
    scores = dict.fromkeys(("loss", "accuracy", "best10", "worst10", "std"))
    assert summarise([{**line, **scores}])["rounds_to_target"] is None


# --- the line --------------------------------------------------------------------------------------------


def test_round_line():
    line = round_line(
        report(
            3,
            num_rounds=30,
            failed={},
            seconds=0.84,
            fairness=replace(fairness(COUNTS), loss=0.7341, mean=0.8009, best10=1.0, worst10=0.0, std=0.1541),
            traffic=Traffic(train_up_wire=1_234_567, train_down_wire=999),
        ),
        seconds_left=21.4,
    )
    assert line == (
        "round  3/30  loss  0.734  acc mean .801  best10 1.00  worst10 .000  std .154"
        "  train up   1.2 MB  down    999 B    0.8 s  left 21 s"
    )


def test_round_line_says_what_went_wrong():
    line = round_line(report(1, aggregated=False, trained=(), failed={"0": "x", "1": "y"}, fairness=None))
    assert "not evaluated" in line
    assert "no update" in line
    assert line.endswith("failed 2")


def test_round_lines_align_and_are_plain():
    lines = [
        round_line(report(9, num_rounds=10, failed={})),
        round_line(report(10, num_rounds=10, failed={}, fairness=None)),
        round_line(report(10, num_rounds=10, failed={}, fairness=replace(fairness(COUNTS), loss=math.nan))),
        round_line(report(10, num_rounds=10, failed={}, traffic=Traffic(train_up_wire=999_949_999))),
    ]
    assert len({line.index("train up") for line in lines}) == 1
    assert len({line.index("down") for line in lines}) == 1
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_progress_guesses_from_the_mean():
    progress = Progress()
    assert "left" not in progress.line(report(1, num_rounds=10, seconds=2.0))
    # Round 1 also started the engine and doesn't count: 4 s a round, 8 to go; then (4 + 6) / 2 s, 7 to go.
    assert "left 32 s" in progress.line(report(2, num_rounds=10, seconds=4.0))
    assert "left 35 s" in progress.line(report(3, num_rounds=10, seconds=6.0))
    assert "left 0 s" in progress.line(report(10, num_rounds=10))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (1_250_000_000, "1.2 GB"),
        (5 * 10**12, "5.0 TB"),
    ],
)
def test_bytes_in_decimal_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_seconds_in_words(seconds, text):
    assert format_seconds(seconds) == text
