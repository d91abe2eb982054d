"""In somebody's existing Flower project: unmodified Flower clients, Flower's arguments, Flower's numbers."""

import gc
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import flwr.serverapp.strategy as flower
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedstrat import CRAFT, SCAFFOLD, ConFIG, FedAvg, FedAvgM, FedProx, FedVSSAM, MoFedSAM
from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS
from fedstrat.strategies.base import FedStrategy
from tests.strategies import small
from tests.strategies.small import SIZES

LR = 0.1
PLAIN = [FedAvg, FedAvgM, CRAFT, ConFIG, FedProx]


def flower_app(arrays: str = "arrays", metrics: str = "metrics") -> ClientApp:
    """As in Flower's quickstart for PyTorch, without a word of fedstrat; FedProx's term as Flower documents it."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, client = small.convex(), small.client_of(context)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        received = [p.detach().clone() for p in model.parameters()]
        mu = float(msg.content["config"].get("proximal-mu", 0.0))
        optimizer, running = torch.optim.SGD(model.parameters(), lr=LR), 0.0
        loader = small.batches(client)
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            running += loss.item()
            if mu:
                pairs = zip(model.parameters(), received, strict=True)
                loss = loss + mu / 2 * sum((p - r).square().sum() for p, r in pairs)
            loss.backward()
            optimizer.step()
        numbers = {"train_loss": running / len(loader), "num-examples": SIZES[client], "steps": [1, len(loader)]}
        content = RecordDict({arrays: ArrayRecord(model.state_dict()), metrics: MetricRecord(numbers)})
        return Message(content, reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model, client = small.convex(), small.client_of(context)
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        ((x, y),) = small.batches(client, None)
        with torch.no_grad():
            outputs = model(x)
        numbers = {
            "eval_loss": cross_entropy(outputs, y).item(),
            "eval_acc": (outputs.argmax(1) == y).float().mean().item(),
            "num-examples": SIZES[client],
        }
        return Message(RecordDict({metrics: MetricRecord(numbers)}), reply_to=msg)

    return app


def grid(app: ClientApp | None = None) -> InProcessGrid:
    return InProcessGrid(app or flower_app(), len(SIZES))


# --- unmodified clients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("names", [("arrays", "metrics"), ("weights", "numbers")], ids="-".join)
@pytest.mark.parametrize("algorithm", PLAIN)
def test_flowers_clients_are_as_good_as_ours(algorithm: Any, names: tuple[str, str], seed: int | None) -> None:
    run = small.start(algorithm(seed=seed), grid(flower_app(*names)), small.convex)
    for report in run.reports:
        assert report.aggregated
        assert not report.failed
        assert report.trained == ("1000", "1001", "1002", "1003", "1004")  # nobody told them apart but by node
    ours = small.run(algorithm(seed=seed, fraction_evaluate=0.0), small.convex, lr=LR)
    np.testing.assert_allclose(small.vector(run.result.arrays), small.vector(ours.result.arrays), atol=1e-6)
    assert run.result.train_metrics_clientapp.keys() == run.result.evaluate_metrics_clientapp.keys() == {1, 2, 3}
    assert run.result.train_metrics_clientapp[3].keys() == {"train_loss", "steps"}
    assert run.result.evaluate_metrics_clientapp[3].keys() == {"eval_loss", "eval_acc"}


@pytest.mark.parametrize("algorithm", [SCAFFOLD, FedVSSAM, MoFedSAM])
def test_clients_without_the_other_half_fail_in_round_1_and_say_what_to_add(algorithm: Any) -> None:
    reports: list[Any] = []
    with pytest.raises(RunFailedError) as caught:
        small.start(algorithm(), grid(), small.convex, 1, on_round=reports.append)
    missing = "metrics/num-steps is missing"
    assert missing in str(caught.value)
    for text in (*reports[0].failed.values(), str(caught.value)):
        assert missing in text
        assert "fedstrat.train(" in text
        assert "with LocalSession(msg, context, model) as session:" in text
    assert len(reports[0].failed) == len(SIZES)


def test_a_missing_control_variate_is_named() -> None:
    def without(t: int, client: str, content: RecordDict) -> RecordDict:
        return RecordDict({name: record for name, record in content.items() if name != "control-delta"})

    recorder = small.Recorder(small.client_app(small.convex), alter=without)
    with pytest.raises(RunFailedError, match=r"'control-delta' is missing.*fedstrat\.train\("):
        small.start(SCAFFOLD(fraction_evaluate=0.0), recorder, small.convex, 1)


# --- Flower's FedAvg -------------------------------------------------------------------------------------------------


def test_our_fedavg_is_flowers() -> None:
    evaluated: dict[type, list[tuple[int, np.ndarray]]] = {}

    def result(strategy: Any) -> Any:
        seen = evaluated.setdefault(type(strategy), [])

        def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
            seen.append((t, small.vector(arrays)))
            return MetricRecord({"round": t})

        return strategy.start(grid(), small.initial(small.convex), num_rounds=4, evaluate_fn=evaluate)

    ours, theirs = result(FedAvg()), result(flower.FedAvg())
    assert list(ours.arrays) == list(theirs.arrays)
    assert [a.dtype for a in ours.arrays.values()] == [a.dtype for a in theirs.arrays.values()]
    for (t, own), (other_t, other) in zip(evaluated[FedAvg], evaluated[flower.FedAvg], strict=True):
        assert t == other_t
        np.testing.assert_allclose(own, other, atol=1e-6)
    assert ours.evaluate_metrics_serverapp == theirs.evaluate_metrics_serverapp
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        own, other = getattr(ours, kind), getattr(theirs, kind)
        assert own.keys() == other.keys()
        for t in own:
            assert own[t].keys() == other[t].keys()
            for name in own[t]:
                assert own[t][name] == pytest.approx(other[t][name], rel=1e-5)


def log_lines(strategy: Any) -> list[str]:
    """The strategy's log without the drawings of lines, times and the settings of its own."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(re.sub(r"[│├└─> \t]+|in [\d.]+s|[\d.]+(e[+-]\d+)?", " ", record.getMessage()).strip())

    kept: list[str] = []
    handler, log = Keep(logging.INFO), logging.getLogger("flwr")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        config = ConfigRecord({"lr": 0.5})
        strategy.start(grid(), small.initial(small.convex), 2, 60.0, config, None, lambda t, _: MetricRecord({"t": t}))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [line for line in kept if not line.startswith("FedAvg: ")]


def test_the_log_is_flowers() -> None:
    ours, theirs = log_lines(FedAvg()), log_lines(flower.FedAvg())
    assert any(line.startswith("Aggregated MetricRecord") for line in ours)
    assert [line for line in ours if line] == [line for line in theirs if line]


def test_fedprox_tells_flowers_clients_mu() -> None:
    def configs(strategy: Any) -> list[ConfigRecord]:
        recorder = small.Recorder(flower_app())
        strategy.start(recorder, small.initial(small.convex), num_rounds=2)
        return [trip.sent["config"] for trip in recorder.trips]

    for ours, theirs in zip(configs(FedProx(mu=0.25)), configs(flower.FedProx(proximal_mu=0.25)), strict=True):
        assert dict(theirs).items() <= dict(ours).items()
        assert ours["proximal-mu"] == 0.25


def test_configs_hold_the_users_entries_and_the_round() -> None:
    asked: list[dict[str, Any]] = []

    def spying(app: ClientApp) -> ClientApp:
        def note(msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
            if "config" in msg.content:
                asked.append(dict(msg.content["config"]))
            return call_next(msg, context)

        spy = ClientApp(mods=[note])
        spy.train()(app)
        spy.evaluate()(app)
        return spy

    train, evaluate = ConfigRecord({"lr": 0.5, "who": "me"}), ConfigRecord({"batches": [1, 2]})
    FedAvg().start(grid(spying(flower_app())), small.initial(small.convex), 2, 60.0, train, evaluate)
    assert (dict(train), dict(evaluate)) == ({"lr": 0.5, "who": "me"}, {"batches": [1, 2]})
    for expected in ({"lr": 0.5, "who": "me"}, {"batches": [1, 2]}):
        found = [a for a in asked if a.items() >= expected.items()]
        assert [a["server-round"] for a in found] == [1] * 5 + [2] * 5


# --- Flower's arguments ----------------------------------------------------------------------------------------------

OWN = {
    "seed", "trainable", "round_timeout", "connect_timeout", "min_replies", "max_failed_rounds", "max_update_norm",
    "update_dtype", "aggregation_device",
}  # fmt: skip


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}


def test_every_argument_of_flowers_fedavg_is_ours() -> None:
    theirs, ours = parameters(flower.FedAvg.__init__), parameters(FedStrategy)
    assert {name: ours[name] for name in theirs} == theirs
    assert set(ours) >= OWN
    assert not any(ours[name] for name in set(ours) - set(theirs) - OWN), "unless asked for, it is as in Flower"
    for name in ALGORITHMS:
        strategy = ALGORITHMS[name].strategy
        assert set(theirs) | OWN <= set(parameters(strategy))
        assert {n: getattr(strategy(), n) for n in theirs} == theirs


def test_start_has_flowers_signature() -> None:
    theirs, ours = (inspect.signature(s.start).parameters for s in (flower.Strategy, FedStrategy))
    assert [(n, ours[n].default, ours[n].kind) for n in theirs] == [(n, p.default, p.kind) for n, p in theirs.items()]
    assert {p.kind for n, p in ours.items() if n not in theirs} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }


def test_flowers_own_spellings_are_accepted() -> None:
    assert set(parameters(flower.FedProx.__init__)) - set(parameters(flower.FedAvg.__init__)) == {"proximal_mu"}
    assert FedProx(proximal_mu=0.3).mu == 0.3
    both = {"server_momentum": 0.5, "server_learning_rate": 0.25}
    assert set(parameters(flower.FedAvgM.__init__)) - set(parameters(flower.FedAvg.__init__)) >= set(both)
    strategy = FedAvgM(**both)
    assert (strategy.momentum, strategy.server_lr) == (0.5, 0.25)
    with pytest.raises(ConfigError, match="'mu' was given twice"):
        FedProx(mu=0.1, proximal_mu=0.1)


def test_a_grid_that_is_gone_takes_nothing_from_another() -> None:
    first, second = grid(), grid()
    (node, *_) = second.get_node_ids()
    del first
    gc.collect()
    (reply,) = second.send_and_receive([Message(RecordDict(), node, "query")])
    assert reply.has_error()  # there is no query handler; the point is that the message could be made
