"""A Flower app whose loop accumulates gradients over micro-batches, with momentum and a schedule."""

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

ACCUMULATE = 2


class Classifier(torch.nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, width)
        self.head = torch.nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.embedding(tokens).mean(1))


def micro_batches(shard):
    rng = torch.Generator().manual_seed(900 + shard)
    tokens = torch.randint(0, 20, (8, 6, 5), generator=rng)
    return [(t, (t.float().mean(1) + shard > 10).long()) for t in tokens]


def train_loop(model, optimizer, schedule, batches):
    losses = []
    for i, (tokens, target) in enumerate(batches):
        loss = F.cross_entropy(model(tokens), target) / ACCUMULATE
        loss.backward()
        losses.append(loss.item() * ACCUMULATE)
        if (i + 1) % ACCUMULATE == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return sum(losses) / len(losses)


client = ClientApp()


@client.train()
def train(msg: Message, ctx: Context) -> Message:
    cfg = msg.content["config"]
    batches = micro_batches(int(ctx.node_config["partition-id"]))
    model = Classifier()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"] * 0.9 ** cfg["server-round"], momentum=cfg["momentum"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    loss = train_loop(model, optimizer, schedule, batches)
    n = sum(len(target) for _, target in batches)
    reply = RecordDict()
    reply["arrays"] = ArrayRecord(model.state_dict())
    reply["metrics"] = MetricRecord({"num-examples": n, "loss": loss})
    return Message(reply, reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(2)
    strategy = FedAvg(fraction_evaluate=0.0)
    config = ConfigRecord({"lr": 0.5, "momentum": 0.9})
    result = strategy.start(grid, ArrayRecord(Classifier().state_dict()), num_rounds=3, train_config=config)
    context.state["result"] = result.arrays
    losses = {str(t): record["loss"] for t, record in result.train_metrics_clientapp.items()}
    context.state["losses"] = MetricRecord(losses)
