"""The small problem that the strategies' tests share: data, models, a ClientApp and a grid that writes everything down.

Five clients of unequal size and class mix hold fixed batches. ``Everything`` is a model with whatever a model may
hold; ``convex`` is multinomial logistic regression, whose optimum can be computed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result
from torch import nn
from torch.nn.functional import cross_entropy

import fedstrat
from fedstrat.models import trainable_names
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid

FEATURES, CLASSES = 6, 3
SIZES = (12, 20, 8, 16, 24)
CLIENTS = tuple(str(i) for i in range(len(SIZES)))

Batch = tuple[torch.Tensor, torch.Tensor]
Loader = Sequence[Batch]
Schedule = Callable[[int], float]


# --- data and models -------------------------------------------------------------------------------------------------


@cache
def rows(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, 6), float64, and labels (n,) of one client; each prefers a class of its own."""
    rng = np.random.default_rng(100 + client)
    labels = rng.choice(CLASSES, size=SIZES[client], p=np.roll([0.6, 0.25, 0.15], client))
    centres = np.random.default_rng(7).normal(size=(CLASSES, FEATURES))
    return centres[labels] + 0.8 * rng.normal(size=(SIZES[client], FEATURES)) + 0.3 * client, labels


def batches(
    client: int, batch_size: int | None = 8, dtype: torch.dtype = torch.float32, examples: int | None = None
) -> list[Batch]:
    """The client's data in batches that never change; one batch where ``batch_size`` is None."""
    x, y = (torch.tensor(part)[:examples] for part in rows(client))
    size = batch_size or max(len(y), 1)
    return [(x[i : i + size].to(dtype), y[i : i + size]) for i in range(0, len(y), size)]


class Everything(nn.Module):
    """A frozen layer, normalisation with a counter, tied weights, dropout, a scalar, and a parameter nobody uses."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.hidden = nn.Linear(width, width)
        self.again = nn.Linear(width, width)
        self.again.weight = self.hidden.weight
        self.dropout = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.arange(2.0))
        self.output = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(self.norm(self.embed(x))))
        return self.dropout(torch.tanh(self.again(h)))

    def classify(self, z: torch.Tensor) -> torch.Tensor:
        return self.output(self.scale * z)


def everything() -> nn.Module:
    """Always at the same starting point."""
    model, generator = Everything(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in (model.embed, model.hidden, model.again, model.output):
            for parameter in layer.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)
    return model


TRAINED = trainable_names(everything())


class Logistic(nn.Linear):
    """Its representation is the input."""

    features = nn.Identity()
    classify = nn.Linear.forward


def convex(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Multinomial logistic regression, always at the same starting point."""
    model = Logistic(FEATURES, CLASSES)
    rng = np.random.default_rng(3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(0.5 * rng.normal(size=(CLASSES, FEATURES))))
        model.bias.copy_(torch.tensor(0.5 * rng.normal(size=CLASSES)))
    return model.to(dtype)


def double() -> nn.Module:
    return convex(torch.float64)


def matrix(record: ArrayRecord) -> np.ndarray:
    """The convex model as (classes, features + 1), the bias last."""
    tensors = decode(record, "test")
    return np.column_stack([tensors["weight"].double().numpy(), tensors["bias"].double().numpy()])


def gradient(w: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of the convex model's mean cross-entropy, by hand; w is (classes, features + 1)."""
    x = np.column_stack([x, np.ones(len(x))])
    p = np.exp(x @ w.T)
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(x)), labels] -= 1.0
    return p.T @ x / len(x)


def initial(model: Callable[[], nn.Module]) -> ArrayRecord:
    return fedstrat.to_arrays(model())


# --- clients ---------------------------------------------------------------------------------------------------------


def client_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def round_of(content: RecordDict) -> int:
    return int(next(iter(content.config_records.values()))["server-round"])


def client_app(
    model: Callable[[], nn.Module],
    loader: Callable[[int], Loader] = batches,
    *,
    lr: float | Schedule = 0.1,
    epochs: int | Callable[[int], int] = 1,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy,
    raises: Iterable[tuple[int, str]] = (),
    test_data: Callable[[int], Iterable[Any]] | None = None,
) -> ClientApp:
    """Clients that leave the work to fedstrat; ``raises`` holds the (round, client) pairs whose training fails."""
    app, failing = ClientApp(), set(raises)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        client, t = client_of(context), round_of(msg.content)
        if (t, str(client)) in failing:
            raise OSError("the disk is full")
        rate = lr if isinstance(lr, float) else lr(t)
        passes = epochs if isinstance(epochs, int) else epochs(t)
        test = None if test_data is None else lambda: test_data(client)
        return fedstrat.train(
            msg, context, model(), loader(client), loss_fn=loss_fn, lr=rate, epochs=passes, test_data=test
        )

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        data = (test_data or loader)(client_of(context))
        return fedstrat.evaluate(msg, context, model(), data, loss_fn=loss_fn)

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        client = client_of(context)
        return fedstrat.query(msg, context, num_examples=lambda: sum(len(y) for _, y in loader(client)))

    return app


def own_loop(
    model: Callable[[], nn.Module],
    steps: Callable[[fedstrat.LocalSession, nn.Module, int], None],
    examples: Callable[[int], int] = SIZES.__getitem__,
) -> ClientApp:
    """Clients whose training loop is ``steps(session, model, client)``."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        own, client = model(), client_of(context)
        with fedstrat.LocalSession(msg, context, own) as session:
            steps(session, own, client)
            return session.reply(num_examples=examples(client))

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return fedstrat.query(msg, context, num_examples=examples(client_of(context)))

    return app


# --- a grid that writes everything down ------------------------------------------------------------------------------


@dataclass
class Trip:
    """One training message and its answer (None where none arrived)."""

    round: int
    client: str
    sent: RecordDict
    reply: RecordDict | None = None


Alter = Callable[[int, str, RecordDict], RecordDict | None]


class Recorder(InProcessGrid):
    """Keeps every training message.

    Args:
        alter: May change a reply on its way to the server, or lose it (None): (round, client, content) -> content.
        arrange: Puts the replies of a round into another order.
    """

    def __init__(
        self,
        app: ClientApp,
        num_nodes: int = len(SIZES),
        *,
        alter: Alter | None = None,
        arrange: Callable[[list[Message]], list[Message]] = lambda replies: replies,
        **options: Any,
    ) -> None:
        super().__init__(app, num_nodes, **options)
        self.trips: list[Trip] = []
        self._alter, self._arrange = alter, arrange
        self._names = {node: str(c.node_config["partition-id"]) for node, c in self.contexts.items()}
        self._open: dict[str, Trip] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        ids = list(super().push_messages(sent))
        for message, message_id in zip(sent, ids, strict=True):
            if message.metadata.message_type == "train":
                trip = Trip(
                    round_of(message.content), self._names[message.metadata.dst_node_id], _copy(message.content)
                )
                self.trips.append(trip)
                self._open[message_id] = trip
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        arrived = []
        for reply in super().pull_messages(message_ids):
            trip = self._open.get(reply.metadata.reply_to_message_id)
            if trip is not None and reply.has_content():
                content = reply.content
                if self._alter is not None:
                    changed = self._alter(trip.round, trip.client, content)
                    if changed is None:
                        continue
                    reply.content = content = changed
                trip.reply = _copy(content)
            arrived.append(reply)
        return self._arrange(arrived)

    def cohort(self, t: int) -> list[str]:
        return [trip.client for trip in self.trips if trip.round == t]

    def of(self, t: int) -> list[Trip]:
        """The answered trips of a round, in the order of clients."""
        return sorted((s for s in self.trips if s.round == t and s.reply is not None), key=lambda s: s.client)


def _copy(records: RecordDict) -> RecordDict:
    return RecordDict({name: type(record)(dict(record)) for name, record in records.items()})  # type: ignore[call-arg]


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run left behind; ``models[t]`` is the model after round t, ``models[0]`` the initial one."""

    result: Result
    models: list[ArrayRecord] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)


def start(
    strategy: Any,
    grid: InProcessGrid,
    model: Callable[[], nn.Module],
    num_rounds: int = 3,
    *,
    on_round: Callable[[Any], None] = lambda _: None,
    **options: Any,
) -> Run:
    """Run a strategy; lost replies cost 10 ms, since all others are there at once."""
    models: list[ArrayRecord] = []
    reports: list[Any] = []

    def keep(_: int, arrays: ArrayRecord) -> MetricRecord | None:
        models.append(ArrayRecord(dict(arrays)))
        return None

    def report(round_report: Any) -> None:
        reports.append(round_report)
        on_round(round_report)

    options = {"timeout": 0.01, "evaluate_fn": keep, "on_round": report, **options}
    result = strategy.start(grid=grid, initial_arrays=initial(model), num_rounds=num_rounds, **options)
    return Run(result, models, reports)


def run(
    strategy: Any,
    model: Callable[[], nn.Module],
    num_rounds: int = 3,
    *,
    num_nodes: int = len(SIZES),
    run_config: Mapping[str, float | str] | None = None,
    **clients: Any,
) -> Run:
    """Run a strategy over :func:`client_app` clients."""
    return start(
        strategy, InProcessGrid(client_app(model, **clients), num_nodes, run_config=run_config), model, num_rounds
    )


# --- looking at records ----------------------------------------------------------------------------------------------


def bits(record: ArrayRecord) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Names, dtypes, shapes and bytes: equal only where not one bit differs."""
    return {name: (array.dtype, tuple(array.shape), array.data) for name, array in record.items()}


def vector(record: ArrayRecord, names: Iterable[str] | None = None) -> np.ndarray:
    """The numbers of a record as one float64 vector."""
    tensors = decode(record, "test")
    return np.concatenate([tensors[n].double().numpy().ravel() for n in (tensors if names is None else names)])


def frozen(value: Any) -> Any:
    """A value of nested dataclasses, mappings and tensors, down to its bytes, for comparison."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), plain.view(torch.uint8).numpy().tobytes() if len(plain) else b""
    if isinstance(value, ArrayRecord):
        return bits(value)
    if isinstance(value, RecordDict | ConfigRecord | MetricRecord | Mapping):
        return {name: frozen(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {f.name: frozen(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def with_array(content: RecordDict, name: str, array: Array | None, record: str = "arrays") -> RecordDict:
    """A reply in which one array is another one, or missing."""
    arrays = {**content[record], name: array}
    return replaced(content, **{record: ArrayRecord({n: a for n, a in arrays.items() if a is not None})})


def replaced(content: RecordDict, **records: Any) -> RecordDict:
    """A reply in which some records are others (underscores stand for hyphens)."""
    return RecordDict({**dict(content.items()), **{n.replace("_", "-"): r for n, r in records.items()}})
