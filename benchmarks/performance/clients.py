"""What a client call costs, whole rounds, and evaluation of many clients."""

import functools
import shutil
import time
from collections.abc import Iterator
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedstrat
from benchmarks.performance.problems import images, rounds
from benchmarks.performance.timing import Row, alternate, in_turns
from client_app.app import app
from fedstrat.data.loaders import client_data
from fedstrat.local.loop import evaluate
from fedstrat.local.optimizer import RuleOptimizer
from fedstrat.models import build
from fedstrat.runs import config
from fedstrat.runs.model import build_model
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS

MLP = {"model.name": "mlp", "model.hidden": "200,200", "train.device": "cpu"}
"""784-200-200-10: 199 210 parameters."""


def steps() -> Iterator[Row]:
    """A step of sharpness-aware minimisation against two plain steps."""
    x, y = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))

    def runner(algorithm: str, count: int, **settings: float) -> Any:
        model = build("cnn", input_shape=(1, 28, 28), num_classes=10)
        rule = ALGORITHMS[algorithm].rule(**settings)
        rule.begin(dict(model.named_parameters()), {}, None, None)
        optimizer = RuleOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), rule)

        def run() -> None:
            for _ in range(count):
                optimizer.step(lambda: nn.functional.cross_entropy(model(x), y))

        return run

    pair = alternate(runner("fedsam", 10, rho=0.05), runner("fedavg", 20), 3)
    yield Row("10 SAM steps, CNN, batches of 32", *pair, "20 plain steps", 1)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Take a step of plain training, and nothing else; returns the loss."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def stock_train(x: torch.Tensor, y: torch.Tensor, msg: Message) -> Message:
    """Answer a training message as Flower's quickstart does."""
    model = build("mlp", input_shape=(1, 28, 28), num_classes=10, hidden=(200, 200))
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    total = 0.0
    for xs, ys in DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True):
        total += plain_step(model, optimizer, xs, ys).item()
    metrics = MetricRecord({"num-examples": len(y), "train-loss": total})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)


def stock_app(x: torch.Tensor, y: torch.Tensor) -> ClientApp:
    stock = ClientApp()

    @stock.train()
    def train(msg: Message, context: Context) -> Message:
        del context
        return stock_train(x, y, msg)

    return stock


def one_step(folder: str, clients: int) -> config.RunConfig:
    """FedAvg with all clients; where 3000 clients share the data, each has one batch."""
    return config.parse({
        **MLP, "algorithm": "fedavg", "num-clients": clients, "fraction-train": 1.0, "dataset.name": "npz",
        "dataset.dir": folder, "dataset.partition": "iid", "train.batch-size": 20,
    })  # fmt: skip


def calls(folder: str, *, quick: bool) -> Iterator[Row]:
    """Whole client calls with one local step, through the same grid: ours with all it does, and a stock one.

    The second row leaves out the step itself: a batch, forward, backward and SGD's step with a model at hand.
    """
    count = 20 if quick else 100
    run = one_step(folder, count)
    own = InProcessGrid(app, count, run_config={**run.flat, "num-clients": 3000})
    data = client_data({**run.flat, "num-clients": 3000}, {"partition-id": 0, "num-partitions": 3000}, seed=0).train
    stock = InProcessGrid(stock_app(data.x, data.y), count)
    model = build_model(run.flat)
    strategy = run.strategy()
    messages = list(strategy.configure_train(1, fedstrat.to_arrays(model), ConfigRecord({}), own))

    def through(grid: InProcessGrid) -> None:
        replies = list(grid.send_and_receive(messages))
        if any(reply.has_error() for reply in replies):
            raise RuntimeError(f"a client failed: {grid.errors[:1]}")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def steps_alone() -> None:
        for _ in range(count):
            for x, y in data:
                plain_step(model, optimizer, x, y)

    sides = functools.partial(through, own), functools.partial(through, stock), steps_alone
    ours, theirs, alone = (took / count for took in in_turns(sides, 5))
    yield Row(f"client call, MLP, one step ({count} calls)", ours, theirs, "stock ClientApp")
    yield Row(f"client call beside that step ({count} calls)", ours - alone, theirs - alone, "stock ClientApp", 2)


def bare(folder: str, clients: int) -> float:
    """CPU milliseconds of the same local steps of plain SGD, and nothing else."""
    flat = config.parse({**scaffold(folder), **MLP}).flat
    batches = [client_data(flat, {"partition-id": i, "num-partitions": 1000}, seed=1).train for i in range(clients)]
    model = build_model(flat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begun = time.process_time()
    for loader in batches:
        for x, y in loader:
            plain_step(model, optimizer, x, y)
    return (time.process_time() - begun) * 1e3


def scaffold(folder: str) -> dict[str, Any]:
    return {
        **MLP, "algorithm": "scaffold", "num-clients": 1000, "fraction-train": 0.1, "fraction-evaluate": 0.0,
        "dataset.name": "npz", "dataset.dir": folder, "dataset.partition": "iid", "dataset.test-fraction": 0.2,
        "train.batch-size": 10, "train.lr": 0.05, "state-dir": f"{folder}/state",
    }  # fmt: skip


def whole_rounds(folder: str, *, quick: bool, fluke_ms: float | None) -> Iterator[Row]:
    """Rounds of runs in one process; the first round, which loads and imports, is left out."""
    on_disk = scaffold(folder)
    in_memory = {key: value for key, value in on_disk.items() if key != "state-dir"}
    for where, settings in (("on disk", on_disk), ("in memory", in_memory)):
        took = min(rounds(settings, 3 if quick else 4)[1:]) * 1e3
        name = f"SCAFFOLD round, MNIST-shaped MLP, 100 of 1000 clients, c_i {where}"
        yield Row(name, took, bare(folder, 100), "its SGD steps alone")
        if fluke_ms is not None:
            yield Row(name, took, fluke_ms, "fluke, c_i in memory", 2)
    craft, fedavg = (min(rounds({"algorithm": name}, 4)[1:]) * 1e3 for name in ("craft", "fedavg"))
    yield Row("CRAFT round, digits, 10 of 50 train, 50 evaluate", craft, fedavg, "FedAvg round")


def evaluation(folder: str, *, quick: bool) -> Iterator[Row]:
    """All clients' evaluation through messages against one pass over all their test data."""
    count = 100 if quick else 1000
    settings = {**scaffold(folder), "num-clients": count, "fraction-evaluate": 1.0, "algorithm": "fedavg"}
    run = config.parse(settings)
    grid = InProcessGrid(app, count, run_config=run.flat)
    model = build_model(run.flat)
    arrays = fedstrat.to_arrays(model)
    strategy = run.strategy()
    strategy._adopt(arrays)
    parts = [client_data(run.flat, {"partition-id": i, "num-partitions": count}, seed=0).test for i in range(count)]
    x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])

    def ours() -> None:
        messages = list(strategy.configure_evaluate(1, arrays, ConfigRecord({}), grid))
        strategy.aggregate_evaluate(1, grid.send_and_receive(messages))

    def theirs() -> None:
        evaluate(model, zip(x.split(256), y.split(256), strict=True), loss_fn=nn.functional.cross_entropy)

    yield Row(f"evaluation of {count} clients, {len(y)} examples", *alternate(ours, theirs, 2), "one pass", 0.83)


def everything(*, quick: bool, fluke_ms: float | None) -> Iterator[Row]:
    yield from steps()
    folder = images()
    try:
        yield from calls(folder, quick=quick)
        yield from evaluation(folder, quick=quick)
        yield from whole_rounds(folder, quick=quick, fluke_ms=fluke_ms)
    finally:
        shutil.rmtree(folder)
