"""One run whose clients hold back a part of their training data, so that settings can be chosen without test data.

The run is a run as ``fedstrat run`` makes it: the run config's own Strategy, clients that answer with
``fedstrat.train`` and ``fedstrat.evaluate``, the same partition, seeds and batch orders. Two things differ: a client
trains on what ``VALIDATION_FRACTION`` leaves of its training part, and the final model is evaluated on the part held
back as well as on the test part.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

import fedstrat
from fedstrat.data.clients import assign
from fedstrat.data.loaders import EVALUATION_BATCH, Batches
from fedstrat.data.partition import split
from fedstrat.errors import RunFailedError
from fedstrat.flower import Scalar, client_id
from fedstrat.metrics.fairness import Fairness
from fedstrat.metrics.rounds import RoundReport
from fedstrat.models import trainable_names
from fedstrat.runs import config
from fedstrat.runs.model import build_model, initial_model
from fedstrat.seeding import derive
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies.base import FedStrategy

VALIDATION_FRACTION = 0.2

Examples = tuple[torch.Tensor, torch.Tensor]
Items = tuple[tuple[str, Scalar], ...]

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train on this client's training part without the share held back."""
    server_round = int(msg.content["config"]["server-round"])  # type: ignore[arg-type]
    seed = derive(int(context.run_config["seed"]), "client", client_id(context), server_round)
    batches = Batches(
        *_part(context, "train"),
        int(context.run_config["train.batch-size"]),
        shuffle=True,
        generator=torch.Generator().manual_seed(derive(seed, "batches")),
    )
    return fedstrat.train(msg, context, build_model(context.run_config), batches)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate on the part that the message names: ``validation`` or ``test``."""
    data = Batches(*_part(context, str(msg.content["config"]["part"])), EVALUATION_BATCH, shuffle=False)
    return fedstrat.evaluate(msg, context, build_model(context.run_config), data)


@app.query()
def query(msg: Message, context: Context) -> Message:
    """Tell this client's id and how many examples it trains on."""
    return fedstrat.query(msg, context, num_examples=lambda: len(_part(context, "train")[1]))


def measure(run_config: Mapping[str, Scalar]) -> tuple[dict[str, Fairness], int, str]:
    """Make one run and evaluate its final model on every client.

    Args:
        run_config: Flat; what it leaves out has its default.

    Returns:
        The final model's scores on ``validation`` and ``test``; bytes of the payloads of all training messages, both
        ways; and what went wrong: replies that were dropped, or why the run ended early (the last good model is then
        evaluated), "" for nothing.
    """
    run = config.parse(run_config)
    model = initial_model(run.flat)
    strategy = run.strategy(trainable=trainable_names(model))
    grid = InProcessGrid(app, run.num_clients, run_config=run.flat)
    dropped: list[str] = []
    sent = 0

    def on_round(report: RoundReport) -> None:
        nonlocal sent
        sent += report.traffic.train_up_payload + report.traffic.train_down_payload
        dropped.extend(f"round {report.round}, client {client}: {why}" for client, why in report.failed.items())

    problem = ""
    try:
        result = strategy.start(
            grid=grid,
            initial_arrays=fedstrat.to_arrays(model),
            num_rounds=run.num_server_rounds,
            evaluate_config=ConfigRecord({"part": "validation"}),
            evaluate_every=run.num_server_rounds,
            on_round=on_round,
        )
    except RunFailedError as error:
        result, problem = error.result, str(error)
    if dropped and not problem:
        problem = f"{len(dropped)} replies were dropped, the first in {dropped[0]}"
    return {part: _scores(strategy, grid, result, part) for part in ("validation", "test")}, sent, problem


def _scores(strategy: FedStrategy[Any, Any], grid: InProcessGrid, result: Result, part: str) -> Fairness:
    """Evaluate the final model on one part of every client, through the Strategy's own evaluation."""
    asked = strategy.configure_evaluate(0, result.arrays, ConfigRecord({"part": part}), grid)
    strategy.aggregate_evaluate(0, grid.send_and_receive(asked))
    if strategy.fairness is None:
        raise RuntimeError(f"no client could be evaluated on its {part} part")
    return strategy.fairness


def _part(context: Context, name: str) -> Examples:
    keys = ("seed", "num-clients", "dataset.")
    about_data = {k: v for k, v in context.run_config.items() if k.startswith(keys)}
    return _parts(tuple(sorted(about_data.items())), tuple(sorted(context.node_config.items())))[name]


@functools.lru_cache(maxsize=512)
def _parts(run_items: Items, node_items: Items) -> dict[str, Examples]:
    """Split what a run of ``fedstrat`` gives this client once more."""
    run, node = dict(run_items), dict(node_items)
    own = assign(run, node)
    seed = derive(int(run["seed"]), "validation", int(node["partition-id"]))
    kept, held_back = split(own.train, VALIDATION_FRACTION, seed)
    parts = {"train": kept, "validation": held_back, "test": own.test}
    return {
        name: (torch.from_numpy(own.source.features(i)), torch.from_numpy(own.source.y[i])) for name, i in parts.items()
    }
