"""What a client call takes on Flower's Ray backend, in a process of its own: ``python -m …on_ray FOLDER``.

Prints wall milliseconds per client of 100 clients: of ours with one local step, of a stock ClientApp with the same
step, of one that takes that step with a model and a batch at hand and answers with what it received, and of one that
only answers, which is what Ray and Flower themselves take.
"""

import functools
import importlib
import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import nn

import fedstrat
from benchmarks.performance.clients import one_step, plain_step, stock_train
from benchmarks.performance.problems import images, quiet
from benchmarks.performance.timing import Row, apart
from client_app import app as own
from fedstrat.data.loaders import client_data
from fedstrat.runs.model import build_model

CLIENTS, REPEATS = 100, 8
MOST_SECONDS = 400.0
POLL_SECONDS = 0.002
SIDES = ("own", "stock", "step", "answer")


def client_app(run_config: dict[str, Any]) -> ClientApp:
    """One app with a train action for every side, so that all of them run in the same Ray workers."""
    app = ClientApp()
    settings = json.dumps(run_config)

    @app.train("own")
    def train(msg: Message, context: Context) -> Message:
        # Flower lets no client change the run config of its context.
        kept = Context(context.run_id, context.node_id, context.node_config, context.state, run_config)
        return own.train(msg, kept)

    @app.train("stock")
    def stock(msg: Message, context: Context) -> Message:
        del context
        return stock_train(*examples(settings), msg)

    @app.train("step")
    def step(msg: Message, context: Context) -> Message:
        plain_step(*at_hand(settings), *examples(settings))
        return answer(msg, context)

    @app.train("answer")
    def answer(msg: Message, context: Context) -> Message:
        del context
        content = RecordDict({"arrays": msg.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return fedstrat.query(msg, context)

    return app


@functools.cache
def examples(settings: str) -> tuple[Any, Any]:
    """The first client's, loaded once per worker."""
    data = client_data(json.loads(settings), {"partition-id": 0, "num-partitions": 1}, seed=0).train
    return data.x, data.y


@functools.cache
def at_hand(settings: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, made once per worker."""
    model = build_model(json.loads(settings))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def milliseconds(grid: Grid, sent: list[Message], side: str) -> float:
    """Wall milliseconds per client of one exchange."""
    messages = [Message(m.content, m.metadata.dst_node_id, f"train.{side}") for m in sent]
    begun = time.perf_counter()
    waiting = set(grid.push_messages(messages))
    while waiting:
        for reply in grid.pull_messages(waiting):
            if reply.has_error():
                raise RuntimeError(f"{side}: {reply.error.reason}")
            waiting.discard(reply.metadata.reply_to_message_id)
        time.sleep(POLL_SECONDS)
    return (time.perf_counter() - begun) * 1e3 / len(messages)


def measure(folder: str) -> dict[str, float]:
    """The medians of some exchanges of every side, in turns after one that starts the workers."""
    run = one_step(folder, CLIENTS)
    found: dict[str, float] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        arrays = fedstrat.to_arrays(build_model(run.flat))
        sent = list(run.strategy().configure_train(1, arrays, ConfigRecord({}), grid))
        turns = [{side: milliseconds(grid, sent, side) for side in SIDES} for _ in range(1 + REPEATS)][1:]
        found.update({side: median(turn[side] for turn in turns) for side in SIDES})
        for side in ("own", "stock"):
            found[f"{side} beside"] = median(turn[side] - turn["step"] for turn in turns)

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client_app({**run.flat, "num-clients": 3000}), CLIENTS, backend_config=resources)
    return found


def rows() -> Iterator[Row]:
    folder = images()
    try:
        found = json.loads(apart(__spec__.name, folder, seconds=MOST_SECONDS))
    except subprocess.TimeoutExpired:
        print(f"no rows on Ray: 100 clients didn't end in {MOST_SECONDS:.0f} s", file=sys.stderr)
        return
    finally:
        shutil.rmtree(folder)
    name = f"client call on Ray, MLP, one step ({CLIENTS} clients), wall time"
    yield Row(name, found["own"], found["stock"], "stock ClientApp")
    yield Row(name, found["own"], found["answer"], "a ClientApp that only answers")
    name = "client call on Ray beside answer and step, wall time"
    yield Row(name, found["own beside"], found["stock beside"], "stock ClientApp", 2)


if __name__ == "__main__":
    quiet()
    logging.disable(logging.WARNING)
    # Ray's workers find functions by their module, which __main__ isn't there.
    print(json.dumps(importlib.import_module(__spec__.name).measure(sys.argv[1])))
