"""A Flower app with BatchNorm, record names and metrics of its own, and functions that aggregate them."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

CLASSES = 3


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, CLASSES),
    )


def make_batches(who, count=3, size=12):
    rng = torch.Generator().manual_seed(50 + who)
    for _ in range(count):
        y = torch.randint(0, CLASSES, (size,), generator=rng)
        x = torch.randn(size, 1, 6, 6, generator=rng) + who + y[:, None, None, None]
        yield x, y


def recall_per_class(model, batches):
    hits, seen = torch.zeros(CLASSES), torch.zeros(CLASSES)
    model.eval()
    for x, y in batches:
        with torch.no_grad():
            right = model(x).argmax(1) == y
        for c in range(CLASSES):
            hits[c] += right[y == c].sum()
            seen[c] += (y == c).sum()
    return (hits / seen.clamp(min=1)).tolist()


client = ClientApp()


@client.train()
def local_training(message: Message, context: Context) -> Message:
    model, batches = make_model(), list(make_batches(int(context.node_config["partition-id"])))
    model.load_state_dict(message.content["weights"].to_torch_state_dict())
    model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    total = 0.0
    for x, y in batches:
        sgd.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sgd.step()
        total += loss.item() * len(y)
    n = sum(len(y) for _, y in batches)
    numbers = {"rows": n, "loss": total / n, "recall": recall_per_class(model, batches)}
    reply = RecordDict({"weights": ArrayRecord(model.state_dict()), "numbers": MetricRecord(numbers)})
    return Message(reply, reply_to=message)


@client.evaluate()
def local_evaluation(message: Message, context: Context) -> Message:
    model, batches = make_model(), list(make_batches(int(context.node_config["partition-id"])))
    model.load_state_dict(message.content["weights"].to_torch_state_dict())
    numbers = {"rows": sum(len(y) for _, y in batches), "recall": recall_per_class(model, batches)}
    return Message(RecordDict({"numbers": MetricRecord(numbers)}), reply_to=message)


def worst_recall(replies: list[RecordDict], weighting: str) -> MetricRecord:
    recalls = [next(iter(reply.metric_records.values()))["recall"] for reply in replies]
    rows = sum(next(iter(reply.metric_records.values()))[weighting] for reply in replies)
    return MetricRecord({"worst-recall": min(map(min, recalls)), "rows-seen": rows})


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(1)
    strategy = FedAvg(
        min_available_nodes=4,
        weighted_by_key="rows",
        arrayrecord_key="weights",
        train_metrics_aggr_fn=worst_recall,
        evaluate_metrics_aggr_fn=worst_recall,
    )
    result = strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=3)
    context.state["result"] = result.arrays
    context.state["train"], context.state["evaluate"] = (
        MetricRecord({f"{name}/{t}": value for t, record in records.items() for name, value in record.items()})
        for records in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    )
