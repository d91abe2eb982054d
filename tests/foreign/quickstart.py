"""A Flower app as its quickstart for PyTorch goes: a model, functions that train and test it, handlers around them."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.classifier = nn.Linear(16, 3)

    def forward(self, x):
        return self.classifier(self.encoder(x))


def load_data(partition_id, size=48):
    generator = torch.Generator().manual_seed(partition_id)
    labels = torch.randint(0, 3, (size,), generator=generator)
    labels[: size // 2] = partition_id % 3
    images = torch.randn(size, 8, generator=generator)
    images[torch.arange(size), labels] += 2.0
    return DataLoader(TensorDataset(images, labels), batch_size=16)


def fit(net, loader, optimizer, epochs=1):
    criterion = nn.CrossEntropyLoss()
    net.train()
    running = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
    return running / (epochs * len(loader))


def test(net, loader):
    net.eval()
    correct, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in loader:
            outputs = net(images)
            loss += nn.functional.cross_entropy(outputs, labels).item()
            correct += (outputs.argmax(1) == labels).sum().item()
    return loss / len(loader), correct / len(loader.dataset)


client = ClientApp()


@client.train()
def train(msg: Message, context: Context) -> Message:
    net, loader = Net(), load_data(context.node_config["partition-id"])
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])
    loss = fit(net, loader, optimizer)
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@client.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    net, loader = Net(), load_data(context.node_config["partition-id"])
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss, accuracy = test(net, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = FedAvg(fraction_train=1.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=3,
    )
    print("final model:", sum(len(array.data) for array in result.arrays.values()), "bytes")
    context.state["result"] = result.arrays
    losses = {str(t): metrics["eval_loss"] for t, metrics in result.evaluate_metrics_clientapp.items()}
    context.state["losses"] = MetricRecord(losses)
