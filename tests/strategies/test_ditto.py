"""Ditto: what personal models are, what they leave alone, and their evaluation."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

import fedstrat
from fedstrat import CRAFT, SCAFFOLD, ConFIG, Ditto, FedAvg, FedAvgM
from fedstrat.errors import ConfigError
from fedstrat.local.state import open_store, peek
from tests.strategies import small
from tests.strategies.small import TRAINED, Recorder, bits, start


def batches(client: int) -> small.Loader:
    return small.batches(client, dtype=torch.float64)


def whole(client: int) -> small.Loader:
    return small.batches(client, None, dtype=torch.float64)


def own_models(strategy: Any, grid: Recorder) -> dict[int, dict[str, torch.Tensor]]:
    """The personal models of all clients that have one."""
    models = {}
    for context in grid.contexts.values():
        client = str(small.client_of(context))
        state = peek(open_store(context, strategy.experiment_id, client), strategy.accepted.get(client, 0))
        if state is not None:
            models[int(client)] = {name.removeprefix("personal/"): t for name, t in state.items()}
    return models


def as_matrix(model: dict[str, torch.Tensor]) -> np.ndarray:
    return np.column_stack([model["weight"].numpy(), model["bias"].numpy()])


def test_lambda_0_is_training_alone() -> None:
    """From the model of its first participation a client goes on by itself: equal bits."""
    strategy = Ditto(lam=0.0, fraction_train=0.6, fraction_evaluate=0.0, seed=5)
    grid = Recorder(small.client_app(small.double, batches, epochs=2))
    run = start(strategy, grid, small.double, 6)
    own = own_models(strategy, grid)
    assert len(own) == 5
    for client, model in own.items():
        rounds = [trip.round for trip in grid.trips if trip.client == str(client)]
        alone = small.double()
        fedstrat.load_arrays(alone, run.models[rounds[0] - 1])
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(2 * len(rounds)):
            for x, y in batches(client):
                optimizer.zero_grad()
                cross_entropy(alone(x), y).backward()
                optimizer.step()
        for name, tensor in alone.state_dict().items():
            assert torch.equal(model[name], tensor), f"client {client}, {name}"
    assert len({len([t for t in grid.trips if t.client == str(c)]) for c in own}) > 1


AGGREGATORS = {
    "fedavg": ("fedavg", FedAvg, {}),
    "craft": ("craft", CRAFT, {}),
    "craft with settings": (CRAFT(server_lr=0.3, grouping="tensor"), CRAFT, {"server_lr": 0.3, "grouping": "tensor"}),
    "fedavgm": (FedAvgM(momentum=0.5), FedAvgM, {"momentum": 0.5}),
    "config": ("config", ConFIG, {}),
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_global_path_is_the_aggregators_own(name: str) -> None:
    """Bit by bit, on a model with dropout and running statistics, trained with clipping, momentum and decay."""
    aggregator, plain, settings = AGGREGATORS[name]
    common = {"fraction_train": 0.6, "fraction_evaluate": 0.0, "seed": 5, "trainable": TRAINED}
    places = {"run_config": {"train.momentum": 0.5, "train.weight-decay": 0.1, "train.clip-norm": 1.0}}
    runs = [
        small.run(strategy, small.everything, 4, epochs=2, **places)
        for strategy in (Ditto(lam=0.7, aggregator=aggregator, **common), plain(**settings, **common))
    ]
    for ours, theirs in zip(runs[0].models, runs[1].models, strict=True):
        assert bits(ours) == bits(theirs)
    assert runs[0].reports[-1].trained == runs[1].reports[-1].trained
    assert bits(runs[0].models[-1]) != bits(runs[0].models[0])


def test_ditto_is_registered_over_craft_by_name() -> None:
    strategy = Ditto(aggregator="craft")
    assert isinstance(strategy.inner, CRAFT)
    assert strategy.settings()["craft.server_lr"] == 0.1


def test_lambda_1_over_lr_is_one_step_from_x() -> None:
    """v - eta (g(v) + lambda (v - x)) with eta lambda = 1 is x - eta g(v): v itself drops out."""
    strategy = Ditto(lam=10.0, fraction_evaluate=0.0, seed=5)
    grid = Recorder(small.client_app(small.double, whole))
    run = start(strategy, grid, small.double, 3)
    for client, model in own_models(strategy, grid).items():
        v = small.matrix(run.models[0])
        for t in range(3):
            v = small.matrix(run.models[t]) - 0.1 * small.gradient(v, *small.rows(client))
        np.testing.assert_allclose(as_matrix(model), v, rtol=1e-10, atol=1e-12)


def test_a_larger_lambda_pulls_nearer_to_x() -> None:
    distances = []
    for lam in (0.0, 0.5, 2.0, 8.0, 90.0):
        strategy = Ditto(lam=lam, fraction_evaluate=0.0, seed=5)
        grid = Recorder(small.client_app(small.double, whole, lr=0.01, epochs=60))
        run = start(strategy, grid, small.double, 2)
        x = small.matrix(run.models[1])  # as received in the last round
        own = own_models(strategy, grid)
        distances.append(max(float(np.linalg.norm(as_matrix(model) - x)) for model in own.values()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.03 * distances[0]


def test_only_the_global_path_travels() -> None:
    strategy = Ditto(lam=1.0, fraction_evaluate=0.0, seed=5)
    grid = Recorder(small.client_app(small.double, batches))
    run = start(strategy, grid, small.double, 2)
    size = 8 * 3 * 7
    for report in run.reports:
        assert report.traffic.train_up_payload == report.traffic.train_down_payload == 5 * size
        assert report.traffic.train_dense_payload == 2 * 5 * size
    assert all(set(trip.reply.array_records) == {"arrays"} for trip in grid.trips)


def accuracy(model: nn.Module, client: int) -> tuple[int, float, int]:
    with torch.no_grad():
        x, y = whole(client)[0]
        loss = float(cross_entropy(model(x), y, reduction="sum"))
        return int((model(x).argmax(1) == y).sum()), loss, len(y)


def test_personal_models_are_evaluated_on_their_clients_data_and_the_global_one_where_there_is_none() -> None:
    """Two of five clients a round, two rounds: somebody was never selected."""
    strategy = Ditto(lam=0.1, fraction_train=0.4, seed=1)
    grid = Recorder(small.client_app(small.double, batches, lr=0.5, epochs=5))
    run = start(strategy, grid, small.double, 2)
    own = own_models(strategy, grid)
    never = set(range(5)) - set(own)
    assert never
    expected = {}
    for client in range(5):
        model = small.double()
        if client in own:
            model.load_state_dict(own[client])
        else:
            fedstrat.load_arrays(model, run.result.arrays)
        expected[client] = accuracy(model, client)
    report = run.reports[-1]
    personal = [correct / n for correct, _, n in expected.values()]
    assert report.personal.num_clients == 5
    assert report.personal.mean == pytest.approx(np.mean(personal))
    assert report.personal.worst == min(personal)
    total = sum(n for _, _, n in expected.values())
    assert report.personal.accuracy == pytest.approx(sum(c for c, _, _ in expected.values()) / total)
    assert report.personal.loss == pytest.approx(sum(loss for _, loss, _ in expected.values()) / total)
    # The global model's own counts are beside them.
    model = small.double()
    fedstrat.load_arrays(model, run.result.arrays)
    assert report.counts == {str(c): pytest.approx(accuracy(model, c)) for c in range(5)}
    assert report.personal.mean > report.fairness.mean
    for client in never:
        assert expected[client] == pytest.approx(report.counts[str(client)])


def test_a_lost_reply_takes_the_personal_steps_back() -> None:
    """What the server never heard of didn't happen: the next participation goes on from the accepted state."""

    def lose(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return None if (t, client) == (2, "3") else content

    settings = {"lam": 0.5, "fraction_evaluate": 0.0, "seed": 5}
    lossy, strategy = Recorder(small.client_app(small.double, batches), alter=lose), Ditto(**settings)
    run = start(strategy, lossy, small.double, 3)
    v = small.double()
    fedstrat.load_arrays(v, run.models[0])
    for t in (1, 3):
        x = small.double()
        fedstrat.load_arrays(x, run.models[t - 1])
        optimizer = torch.optim.SGD(v.parameters(), lr=0.1)
        for rows, y in batches(3):
            optimizer.zero_grad()
            pull = sum(((a - b.detach()) ** 2).sum() for a, b in zip(v.parameters(), x.parameters(), strict=True))
            (cross_entropy(v(rows), y) + 0.25 * pull).backward()
            optimizer.step()
    for name, tensor in own_models(strategy, lossy)[3].items():
        torch.testing.assert_close(tensor, v.state_dict()[name], rtol=1e-12, atol=1e-12)


def test_a_client_that_lost_its_state_begins_anew() -> None:
    grid = Recorder(small.client_app(small.double, batches))

    def clear(report: Any) -> None:
        if report.round == 2:
            (context,) = [c for c in grid.contexts.values() if small.client_of(c) == 2]
            context.state = RecordDict()

    run = start(Ditto(fraction_evaluate=0.0, seed=5), grid, small.double, 4, on_round=clear)
    states = {t: {s.client: s.reply["client"]["state"] for s in grid.of(t)} for t in (3, 4)}
    assert states[3] == {"0": "ok", "1": "ok", "2": "lost", "3": "ok", "4": "ok"}
    assert set(states[4].values()) == {"ok"}
    assert run.reports[2].failed == {}
    assert run.reports[3].trained == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(
    ("aggregator", "complaint"),
    [
        ("scaffold", "'scaffold' has a local rule of its own; choose one of .*fedavg.*craft"),
        (SCAFFOLD(), "'scaffold' has a local rule"),
        ("carft", "no aggregator 'carft'.*craft"),
    ],
)
def test_an_aggregator_that_ditto_cant_stand_beside_is_refused(aggregator: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Ditto(aggregator=aggregator)


def test_a_loop_of_ones_own_must_make_the_call() -> None:
    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        x, y = batches(client)[0]
        optimizer.step(lambda: cross_entropy(model(x), y))

    grid = Recorder(small.own_loop(small.double, steps))
    with pytest.raises(fedstrat.errors.RunFailedError, match="train_personal"):
        start(Ditto(fraction_evaluate=0.0, seed=5, max_failed_rounds=1), grid, small.double)


def test_the_received_model_is_where_the_global_path_starts() -> None:
    """Personal training uses the same module; the loop that follows begins at x all the same."""
    begun: list[tuple[bool, ArrayRecord]] = []

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        before = fedstrat.to_arrays(model)
        session.train_personal(batches(client), cross_entropy, lr=0.1, epochs=1)
        begun.append((bits(fedstrat.to_arrays(model)) == bits(before), before))
        optimizer = session.optimizer(lr=0.1)
        for x, y in batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))

    run = start(Ditto(fraction_evaluate=0.0, seed=5), Recorder(small.own_loop(small.double, steps)), small.double, 2)
    assert all(unchanged for unchanged, _ in begun)
    assert bits(begun[-1][1]) == bits(run.models[1])
