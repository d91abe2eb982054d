"""The torch side of the reference problem: the same model and data, behind ClientApps."""

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy

import fedstrat
from tests.reference.problem import CLASSES, EMBEDDED, FEATURES, HIDDEN, Task

Batch = tuple[torch.Tensor, torch.Tensor]
DTYPES = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}


class Net(nn.Module):
    """A frozen embedding, a normalisation without parameters, and two trained layers."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, EMBEDDED, bias=False, dtype=dtype)
        self.embed.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(EMBEDDED, affine=False, dtype=dtype)
        self.hidden = nn.Linear(EMBEDDED, HIDDEN, dtype=dtype)
        self.output = nn.Linear(HIDDEN, CLASSES, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.hidden(self.norm(self.embed(x))))

    def classify(self, z: torch.Tensor) -> torch.Tensor:
        return self.output(z)


def initial_arrays(task: Task) -> ArrayRecord:
    """The starting model as a state_dict."""
    model = Net(DTYPES[task.x0.dtype])
    with torch.no_grad():
        model.embed.weight.copy_(torch.tensor(task.embed))
        trained = [p for p in model.parameters() if p.requires_grad]
        nn.utils.vector_to_parameters(torch.tensor(task.x0), trained)
    return ArrayRecord(model.state_dict())


def own_loop(task: Task) -> ClientApp:
    """Clients with a loop of their own around a LocalSession; the node's partition-id is the client."""

    def train(msg: Message, context: Context) -> Message:
        client, t, loader, model = setting(task, msg, context)
        with fedstrat.LocalSession(msg, context, model) as session:
            optimizer = session.optimizer(
                lr=task.lr(client, t, 0),
                momentum=task.momentum,
                weight_decay=task.weight_decay,
                clip_norm=task.clip_norm,
            )
            # A loop that serves every algorithm makes every call; the rule takes what it needs.
            session.full_gradient(loader, cross_entropy)
            session.loss_before(loader, cross_entropy)
            for epoch in range(task.epochs):
                for group in optimizer.param_groups:
                    group["lr"] = task.lr(client, t, epoch)
                for x, y in loader:
                    optimizer.step(lambda x=x, y=y: session.loss(x, y, cross_entropy))
                if session.should_stop(loader, cross_entropy):
                    break
            return session.reply(num_examples=task.num_examples(client))

    return client_app(task, train)


def one_line(task: Task) -> ClientApp:
    """Clients that leave the loop to fedstrat; weight decay and clipping come from the run config."""

    def train(msg: Message, context: Context) -> Message:
        client, t, loader, model = setting(task, msg, context)
        return fedstrat.train(msg, context, model, loader, lr=task.lr(client, t, 0), epochs=task.epochs)

    return client_app(task, train)


def run_config(task: Task) -> dict[str, float]:
    return {
        "train.momentum": task.momentum,
        "train.weight-decay": task.weight_decay,
        "train.clip-norm": task.clip_norm,
    }


def setting(task: Task, msg: Message, context: Context) -> tuple[int, int, list[Batch], Net]:
    """Client, round, batches and an empty model."""
    client = int(context.node_config["partition-id"])
    loader = [(torch.tensor(rows), torch.tensor(labels)) for rows, labels in task.batches(client)]
    return client, int(msg.content["config"]["server-round"]), loader, Net(DTYPES[task.x0.dtype])


def client_app(task: Task, train: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.train()(train)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        return fedstrat.query(msg, context, num_examples=task.num_examples(client))

    return app


def decoded(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}
