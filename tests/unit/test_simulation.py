"""InProcessGrid: Flower's own strategies and ours, node state that survives, nodes that leave, borrowed identity."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fedstrat
from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.flower import TaskIdentity
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid
from tests.strategies.small import SIZES, batches, client_of, convex

Train = Callable[[Message, Context], Message]


def app_of(train: Train, evaluate: Train | None = None) -> ClientApp:
    app = ClientApp()
    app.train()(train)
    if evaluate is not None:
        app.evaluate()(evaluate)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return fedstrat.query(msg, context)

    return app


def counting(raises: Callable[[int, int], bool] = lambda client, visit: False) -> tuple[ClientApp, list[Any]]:
    """Clients that count their visits in Context.state, and may raise after having done so."""
    seen: list[tuple[int, int]] = []

    def train(msg: Message, context: Context) -> Message:
        client = client_of(context)
        visits = context.state.metric_records.get("visits", MetricRecord({"n": 0}))
        visits["n"] += 1
        context.state["visits"] = visits
        seen.append((client, int(visits["n"])))
        if raises(client, int(visits["n"])):
            raise OSError("the disk is full")
        arrays = msg.content["arrays"]
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": SIZES[client]})}), reply_to=msg
        )

    return app_of(train), seen


def start(strategy: Any, grid: InProcessGrid, num_rounds: int = 3) -> Any:
    return strategy.start(grid=grid, initial_arrays=ArrayRecord(convex().state_dict()), num_rounds=num_rounds)


@pytest.fixture(autouse=True)
def no_identity() -> Iterator[None]:
    """Every test begins outside of a run, whatever grids other tests have left alive."""
    gc.collect()
    be(None, None, None)
    yield
    be(None, None, None)


def identity() -> tuple[Any, Any, Any]:
    return (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)


def be(task: int | None, run: int | None, node: int | None) -> None:
    if TaskIdentity is not None:  # older Flower needs none
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = task, run, node


# --- strategies ----------------------------------------------------------------------------------------------


def test_flower_s_fedavg_and_ours_come_to_the_same():
    def train(msg: Message, context: Context) -> Message:
        model = convex()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches(client_of(context)):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            sgd.step()
        numbers = {"num-examples": SIZES[client_of(context)], "steps": len(batches(client_of(context)))}
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(numbers)})
        return Message(content, reply_to=msg)

    def evaluate(msg: Message, context: Context) -> Message:
        numbers = {"num-examples": SIZES[client_of(context)], "loss": 1.0 + client_of(context)}
        return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=msg)

    grids = [InProcessGrid(app_of(train, evaluate), 3) for _ in range(2)]
    results = [start(s(min_available_nodes=3), g) for s, g in zip((FlowerFedAvg, fedstrat.FedAvg), grids, strict=True)]
    theirs, ours = (decode(result.arrays, "x") for result in results)
    assert not torch.equal(ours["weight"], convex().weight)
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-6) for n in theirs)
    for attribute in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for t in (1, 2, 3):
            mine, other = (dict(getattr(result, attribute)[t]) for result in reversed(results))
            assert mine == pytest.approx(other)
    assert not grids[0].errors + grids[1].errors


def test_good_replies_of_clients_whose_ids_nobody_asked_for_are_no_failures():
    def train(msg: Message, context: Context) -> Message:
        return fedstrat.train(msg, context, convex(), batches(client_of(context)), lr=0.1, epochs=1)

    reports: list[Any] = []
    told = []

    def spy(msg: Message, context: Context) -> Message:
        reply = train(msg, context)
        told.append((int(msg.content["config"]["fedstrat.accepted-round"]), "trainable" in reply.content["client"]))
        return reply

    strategy = fedstrat.FedAvg(fraction_evaluate=0.0)
    strategy.start(
        grid=InProcessGrid(app_of(spy), 2),
        initial_arrays=ArrayRecord(convex().state_dict()),
        num_rounds=2,
        on_round=reports.append,
    )
    assert [(report.trained, dict(report.failed)) for report in reports] == [(("0", "1"), {})] * 2
    # They are told in round 2 that round 1 was accepted, and tell their trainable names once.
    assert told == [(0, True), (0, True), (1, False), (1, False)]


# --- nodes ---------------------------------------------------------------------------------------------------


def test_node_state_survives_rounds():
    app, seen = counting()
    start(FlowerFedAvg(fraction_evaluate=0.0), InProcessGrid(app, 2))
    assert sorted(seen) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]


def test_a_call_that_raises_is_an_error_reply_and_leaves_the_state():
    # Client 1 raises whenever it would count to 2: it stays at 1.
    app, seen = counting(lambda client, visit: client == 1 and visit == 2)
    grid = InProcessGrid(app, 2)
    strategy = fedstrat.FedAvg(fraction_evaluate=0.0, seed=1)
    start(strategy, grid)
    assert sorted(seen) == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 2)]
    assert [str(error) for error in grid.errors] == ["the disk is full"] * 2
    assert strategy.trained == ("0",)
    assert list(strategy.failed) == ["1"]
    assert "the disk is full" in strategy.failed["1"]


def test_a_client_that_keeps_its_records_or_writes_into_them_changes_nothing():
    kept: list[Any] = []

    def train(msg: Message, context: Context) -> Message:
        for record in kept:
            record["server-round"] = -1
        kept.append(msg.content["config"])
        context.run_config["lr"] = 5.0
        context.node_config["partition-id"] = 5
        context.state.setdefault("visits", MetricRecord({"n": 0}))
        context.state["visits"]["n"] += 1
        msg.content["arrays"].clear()
        return Message(
            RecordDict({"a": ArrayRecord(convex().state_dict()), "m": MetricRecord({"num-examples": 1})}), reply_to=msg
        )

    grid = InProcessGrid(app_of(train), 2, run_config={"lr": 0.1})
    config = ConfigRecord({"mine": 1})
    arrays = ArrayRecord(convex().state_dict())
    FlowerFedAvg(fraction_evaluate=0.0).start(grid=grid, initial_arrays=arrays, num_rounds=2, train_config=config)
    assert not grid.errors
    assert list(arrays) == ["weight", "bias"]
    assert config["mine"] == 1
    for i, context in enumerate(grid.contexts.values()):
        assert context.run_config == {"lr": 0.1}
        assert context.node_config["partition-id"] == i
        assert context.state["visits"]["n"] == 2


def test_node_configs_and_run_config_reach_the_clients():
    seen = []

    def train(msg: Message, context: Context) -> Message:
        seen.append((dict(context.node_config), dict(context.run_config), context.node_id))
        raise OSError

    app = app_of(train)
    with pytest.raises(RunFailedError):
        start(fedstrat.FedAvg(), InProcessGrid(app, 2), 1)
    assert [node for node, _, _ in seen] == [
        {"partition-id": 0, "num-partitions": 2},
        {"partition-id": 1, "num-partitions": 2},
    ]
    seen.clear()
    own = [{"client-id": "a", "dataset.dir": "/data"}, {"client-id": "b"}]
    with pytest.raises(RunFailedError):
        start(fedstrat.FedAvg(), InProcessGrid(app, 2, own, {"train.lr": 0.1}), 1)
    assert [node for node, _, _ in seen] == own
    assert [run for _, run, _ in seen] == [{"train.lr": 0.1}] * 2
    assert len({node_id for _, _, node_id in seen}) == 2


@pytest.mark.parametrize(("num_nodes", "configs"), [(0, None), (2, [{}]), (1, [{}, {}]), (-1, [])])
def test_a_wrong_number_of_nodes_is_an_error(num_nodes: int, configs: Any):
    with pytest.raises(ConfigError, match="one node config for each of"):
        InProcessGrid(ClientApp(), num_nodes, configs)


def test_a_node_that_left_does_not_answer_and_is_not_sampled_again():
    app, seen = counting()
    grid = InProcessGrid(app, 3)
    reports: list[Any] = []

    def leave(report: Any) -> None:
        reports.append(report)
        if report.round == 1:
            del grid.contexts[next(n for n, c in grid.contexts.items() if c.node_config["partition-id"] == 1)]

    fedstrat.FedAvg(fraction_evaluate=0.0, seed=1).start(
        grid=grid, initial_arrays=ArrayRecord(convex().state_dict()), num_rounds=2, on_round=leave
    )
    assert [report.trained for report in reports] == [("0", "1", "2"), ("0", "2")]
    assert not reports[1].failed
    grid.get_node_ids()
    gone = Message(RecordDict({"config": ConfigRecord()}), 1001, "train")
    assert list(grid.send_and_receive([gone])) == []
    assert (1, 2) not in seen


def test_replies_are_handed_over_once_and_only_to_who_asks():
    app, _ = counting()
    grid = InProcessGrid(app, 2)
    arrays = ArrayRecord(convex().state_dict())
    nodes = list(grid.get_node_ids())
    one, two = grid.push_messages([Message(RecordDict({"arrays": arrays}), node, "train") for node in nodes])
    assert one != two
    (reply,) = grid.pull_messages([one])
    assert reply.metadata.reply_to_message_id == one
    assert reply.metadata.src_node_id == nodes[0]
    assert list(grid.pull_messages([one])) == []
    assert len(list(grid.pull_messages([one, two]))) == 1


def test_create_message_makes_one():
    app, _ = counting()
    grid = InProcessGrid(app, 1)
    message = grid.create_message(RecordDict(), "train", 1000, "3", ttl=60.0)
    assert (message.metadata.dst_node_id, message.metadata.message_type) == (1000, "train")
    assert (message.metadata.group_id, message.metadata.ttl) == ("3", 60.0)
    with pytest.raises(NotImplementedError, match="no Run"):
        _ = grid.run


# --- the borrowed identity -----------------------------------------------------------------------------------


ALONE = """
import gc

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fedstrat.simulation import InProcessGrid

grid = InProcessGrid(ClientApp(), 2)
assert TaskIdentity._run_id is None
grid.get_node_ids()
Message(RecordDict(), 1000, "train")
del grid
gc.collect()
assert (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id) == (None, None, None)
try:
    Message(RecordDict(), 1000, "train")
except RuntimeError:
    print("given back")
"""


@pytest.mark.skipif(TaskIdentity is None, reason="this Flower needs no identity to create a Message")
def test_the_identity_is_borrowed_when_needed_and_given_back_with_the_last_grid():
    # In a process of its own, since other tests' grids may be alive here.
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=root, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.strip() == "given back", done.stderr


def test_a_second_grid_still_works_when_the_first_one_is_gone():
    first, second = (InProcessGrid(counting()[0], 2) for _ in range(2))
    first.get_node_ids()
    second.get_node_ids()
    del first
    gc.collect()
    Message(RecordDict(), 1000, "train")
    del second


@pytest.mark.skipif(TaskIdentity is None, reason="this Flower needs no identity to create a Message")
def test_the_identity_of_a_real_run_is_left_alone():
    be(5, 77, 1)
    app, seen = counting()
    grid = InProcessGrid(app, 2)
    start(FlowerFedAvg(fraction_evaluate=0.0), grid, 1)
    assert len(seen) == 2
    assert identity() == (5, 77, 1)
    del grid
    gc.collect()
    assert identity() == (5, 77, 1)
