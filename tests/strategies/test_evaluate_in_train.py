"""``evaluate_in_train``: the clients that train first evaluate what they received; it is the round before's model."""

import json
from typing import Any

import pytest
import torch
from flwr.app import MetricRecord
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fedstrat
from fedstrat.errors import ConfigError
from fedstrat.metrics.rounds import RoundReport
from fedstrat.payloads import decode
from fedstrat.runs import config
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.runs.goals import Goals
from fedstrat.runs.history import RunFolder, load
from fedstrat.runs.progress import round_line
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS
from tests.strategies import small

ROUNDS = 3
COMMON = {
    "seed": 3,
    "min_train_nodes": 1,
    "min_evaluate_nodes": 1,
    "min_available_nodes": 5,
    "trainable": small.TRAINED,
}


def test_batches(client: int) -> DataLoader[Any]:
    """Other examples than the training data, in an order that is drawn from the global generator."""
    x, y = (torch.cat(parts) for parts in zip(*small.batches((client + 1) % len(small.SIZES)), strict=True))
    return DataLoader(TensorDataset(x[:7], y[:7]), batch_size=3, shuffle=True)


test_batches.__test__ = False


def scores(model: Any, clients: Any) -> tuple[float, float]:
    """(mean client accuracy, loss over examples) of a model, by hand."""
    net = small.everything()
    net.load_state_dict(decode(model, "test"))
    net.eval()
    accuracies, losses = [], []
    for client in clients:
        x, y = (torch.cat(parts) for parts in zip(*small.batches((int(client) + 1) % len(small.SIZES)), strict=True))
        with torch.no_grad():
            outputs = net(x[:7])
        accuracies.append(float((outputs.argmax(1) == y[:7]).double().mean()))
        losses.append(float(cross_entropy(outputs, y[:7])))
    return sum(accuracies) / len(accuracies), sum(losses) / len(losses)


class Counting(InProcessGrid):
    """Counts messages by type."""

    def push_messages(self, messages: Any) -> Any:
        sent = list(messages)
        self.sent = [*getattr(self, "sent", []), *(m.metadata.message_type for m in sent)]
        return super().push_messages(sent)


def run(strategy: Any, rounds: int = ROUNDS, **options: Any) -> tuple[small.Run, list[str]]:
    grid = Counting(small.client_app(small.everything, test_data=test_batches), len(small.SIZES))
    done = small.start(strategy, grid, small.everything, rounds, **options)
    assert grid.errors == []
    return done, grid.sent


def made(name: str, **settings: Any) -> Any:
    return ALGORITHMS[name].strategy(**{**COMMON, **settings})


@pytest.mark.parametrize("name", [name for name, a in ALGORITHMS.items() if "evaluate_in_train" in a.strategy.hypers])
def test_it_changes_no_bit_of_the_training(name: str) -> None:
    plain, _ = run(made(name, fraction_train=0.6))
    asked, _ = run(made(name, fraction_train=0.6, evaluate_in_train=True))
    assert [report.trained for report in asked.reports] == [report.trained for report in plain.reports]
    assert small.bits(asked.result.arrays) == small.bits(plain.result.arrays)
    theirs = plain.result.train_metrics_clientapp
    assert {t: dict(r) for t, r in asked.result.train_metrics_clientapp.items()} == {
        t: dict(r) for t, r in theirs.items()
    }


def test_the_scores_are_those_of_the_model_before_and_only_the_last_has_an_exchange_of_its_own() -> None:
    done, sent = run(made("fedavg", evaluate_in_train=True))
    assert sent.count("evaluate") == len(small.SIZES)
    metrics = done.result.evaluate_metrics_clientapp
    assert sorted(metrics) == [0, 1, 2, 3]
    for t, model in enumerate(done.models):
        mean, loss = scores(model, small.CLIENTS)
        assert metrics[t]["accuracy-mean"] == pytest.approx(mean)
        assert metrics[t]["loss"] == pytest.approx(loss, rel=1e-5)
    plain, _ = run(made("fedavg"))
    for t in (1, 2, 3):
        assert dict(metrics[t]) == pytest.approx(
            dict(plain.result.evaluate_metrics_clientapp[t])
        )  # shuffled: the last bits
    assert [report.fairness is None for report in done.reports] == [True, True, False]
    assert [report.received.num_clients for report in done.reports] == [5, 5, 5]


def test_only_the_clients_that_train_are_in_it() -> None:
    done, _ = run(made("fedavg", fraction_train=0.4, evaluate_in_train=True))
    for report, before in zip(done.reports, done.models, strict=False):
        assert report.received.num_clients == len(report.trained) == 2
        assert report.received.mean == pytest.approx(scores(before, report.trained)[0])


def test_it_goes_by_evaluate_every() -> None:
    done, sent = run(made("fedavg", evaluate_in_train=True), rounds=5, evaluate_every=2)
    assert sorted(done.result.evaluate_metrics_clientapp) == [0, 2, 4, 5]
    assert sent.count("evaluate") == len(small.SIZES)


def test_a_goal_is_met_by_the_scores_and_the_last_model_is_evaluated() -> None:
    done, sent = run(made("fedavg", evaluate_in_train=True), rounds=9, should_end=Goals(target_accuracy=1e-9))
    assert len(done.reports) == 2  # round 1 begins with a model that nobody trained
    assert done.reports[1].fairness.mean == pytest.approx(scores(done.result.arrays, small.CLIENTS)[0])
    assert sent.count("evaluate") == len(small.SIZES)


def test_a_history_has_every_score_in_the_line_of_its_round(tmp_path: Any) -> None:
    folder = RunFolder(tmp_path, {"algorithm": "fedavg"})
    seen = []

    def record(report: RoundReport) -> None:
        folder.record(report)
        seen.append([line["mean"] for line in load(tmp_path).history])

    done, _ = run(made("fedavg", fraction_train=0.4, evaluate_in_train=True), on_round=record)
    lines = load(tmp_path).history
    assert [mean is None for mean in seen[1]] == [False, True]
    assert [line["evaluated_in_train"] for line in lines] == [True, True, False]
    assert [line["num_evaluated"] for line in lines] == [2, 2, 5]
    for line, model, trained in zip(lines, done.models[1:], [r.trained for r in done.reports[1:]], strict=False):
        assert line["mean"] == pytest.approx(scores(model, trained)[0])
    assert lines == folder.history
    assert json.loads((tmp_path / "clients.json").read_text())["round"] == ROUNDS


def test_a_resumed_run_goes_on_with_it(tmp_path: Any) -> None:
    whole, _ = run(made("scaffold", evaluate_in_train=True), rounds=4)
    checkpoints = CheckpointFolder(tmp_path, every=1)
    grid = Counting(small.client_app(small.everything, test_data=test_batches), len(small.SIZES))
    small.start(made("scaffold", evaluate_in_train=True), grid, small.everything, 2, checkpoints=checkpoints)
    rest = small.start(made("scaffold", evaluate_in_train=True), grid, small.everything, 4, resume=checkpoints.latest())
    assert small.bits(rest.result.arrays) == small.bits(whole.result.arrays)
    ours, theirs = rest.result.evaluate_metrics_clientapp, whole.result.evaluate_metrics_clientapp
    assert sorted(ours) == sorted(theirs) == [0, 1, 2, 3, 4]
    for t, record in theirs.items():
        assert dict(ours[t]) == pytest.approx(dict(record))


def test_a_loop_of_ones_own_tells_by_the_session() -> None:
    def steps(session: fedstrat.LocalSession, model: Any, client: int) -> None:
        session.evaluate_received(test_batches(client), cross_entropy)
        optimizer = session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            optimizer.step(lambda: session.loss(x, y, cross_entropy))  # noqa: B023

    grid = InProcessGrid(small.own_loop(small.everything, steps), len(small.SIZES))
    asked = small.start(made("fedavg", evaluate_in_train=True, fraction_evaluate=0.0), grid, small.everything, ROUNDS)
    assert sorted(asked.result.evaluate_metrics_clientapp) == [0, 1, 2]
    theirs, _ = run(made("fedavg", evaluate_in_train=True))
    assert dict(asked.result.evaluate_metrics_clientapp[2]) == pytest.approx(
        dict(theirs.result.evaluate_metrics_clientapp[2])
    )


def test_clients_that_tell_nothing_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    done = small.run(made("fedavg", evaluate_in_train=True), small.everything, 1)
    assert done.reports[0].received is None
    assert "round 1: no client told how it does on the received model" in caplog.text


@pytest.mark.parametrize("wrong", [-1, 8, float("nan")])
def test_a_count_that_cant_be_is_dropped_and_the_update_stays(wrong: float, caplog: pytest.LogCaptureFixture) -> None:
    def alter(_: int, client: str, content: Any) -> Any:
        if client == "1":
            content["metrics"]["received-num-correct"] = wrong
        return content

    app = small.client_app(small.everything, test_data=test_batches)
    done = small.start(made("fedavg", evaluate_in_train=True), small.Recorder(app, alter=alter), small.everything, 1)
    assert done.reports[0].trained == small.CLIENTS
    assert done.reports[0].received.num_clients == 4
    assert "evaluation of client 1 is dropped: metrics/received-num-correct" in caplog.text


def test_what_nobody_asked_for_is_not_believed() -> None:
    """A client tells perfect scores of its own accord: no goal is reached by them."""

    def alter(_t: int, client: str, content: Any) -> Any:
        told = {"received-num-examples": 10, "received-num-correct": 10, "received-loss-sum": 0.0}
        return (
            small.replaced(content, metrics=MetricRecord({**content["metrics"], **told})) if client == "1" else content
        )

    grid = small.Recorder(small.client_app(small.everything), alter=alter)
    strategy = made("fedavg", fraction_evaluate=0.0)
    done = small.start(strategy, grid, small.everything, 3, should_end=Goals(target_accuracy=0.99))
    assert [report.round for report in done.reports] == [1, 2, 3]
    assert all(report.received is None for report in done.reports)


def test_where_the_model_doesnt_travel_it_is_refused() -> None:
    parts = [name for name, a in ALGORITHMS.items() if not a.strategy.sends_model]
    assert set(parts) >= {"fedcspack", "fedspu"}
    for name in parts:
        with pytest.raises(ConfigError, match="evaluate_in_train"):
            ALGORITHMS[name].strategy(evaluate_in_train=True)
        with pytest.raises(ConfigError, match=f"'evaluate-in-train' needs the model .* '{name}'"):
            config.parse({"algorithm": name, "evaluate-in-train": True})


def test_the_line_of_a_round_says_whose_scores_they_are() -> None:
    done, _ = run(made("fedavg", evaluate_in_train=True))
    lines = [round_line(report) for report in done.reports]
    assert [("(of round 0)" in line, "(of round 1)" in line, "(of round" in line) for line in lines] == [
        (True, False, True),
        (False, True, True),
        (False, False, False),
    ]
