"""Models, replies and data that the suite works on; all random, all seeded."""

import itertools
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import fedstrat
from client_app.app import app
from fedstrat.flower import borrow_identity
from fedstrat.models import build, trainable_names
from fedstrat.runs import config
from fedstrat.runs.model import build_model
from fedstrat.simulation import InProcessGrid

Tensors = dict[str, torch.Tensor]


def quiet() -> None:
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


def parameters(model: str) -> Tensors:
    """The parameters of a ResNet-20 (269 722, 59 arrays) or of ResNet-18 (11.2 million, 62 arrays)."""
    if model == "resnet20":
        net = build("resnet20", input_shape=(3, 32, 32), num_classes=10)
    else:
        from torchvision.models import resnet18  # noqa: PLC0415

        net = resnet18(num_classes=10)
    return {name: p.detach() for name, p in net.named_parameters()}


def trained(x: Tensors, clients: int) -> list[Tensors]:
    """What so many clients made of x: half of every displacement is common to all."""
    generator = torch.Generator().manual_seed(0)
    common = {n: torch.randn(p.shape, generator=generator) for n, p in x.items()}
    return [
        {n: p + 0.01 * (common[n] + torch.randn(p.shape, generator=generator)) for n, p in x.items()}
        for _ in range(clients)
    ]


def exchange_of(x: Tensors, ys: list[Tensors]) -> tuple[ArrayRecord, list[Message], list[Message]]:
    """A round's model, training messages and replies."""
    borrow_identity()
    model = fedstrat.to_arrays(x)
    sent, replies = [], []
    for i, y in enumerate(ys):
        message = Message(RecordDict({"arrays": model, "config": ConfigRecord({})}), 1000 + i, "train")
        message.metadata.__dict__["_message_id"] = f"message-{i}"
        metrics = MetricRecord({"num-examples": 10 + i, "num-steps": 3, "lr-sum": 0.3})
        reply = Message(RecordDict({"arrays": fedstrat.to_arrays(y), "metrics": metrics}), reply_to=message)
        sent.append(message)
        replies.append(reply)
    return model, sent, replies


def images(examples: int = 60_000) -> str:
    """A folder with data of MNIST's shape."""
    folder = tempfile.mkdtemp(prefix="fedstrat-performance-")
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (examples, 28, 28), dtype=np.uint8)
    np.savez(Path(folder) / "train.npz", x=pixels, y=rng.integers(0, 10, examples), num_classes=10)
    return folder


def rounds(settings: dict[str, Any], count: int) -> list[float]:
    """CPU seconds of every round of a run in this process."""
    run = config.parse({"num-server-rounds": count, "train.device": "cpu", **settings})
    torch.manual_seed(0)
    model = build_model(run.flat)
    ends = [time.process_time()]
    run.strategy(trainable=trainable_names(model)).start(
        grid=InProcessGrid(app, run.num_clients, run_config=run.flat),
        initial_arrays=fedstrat.to_arrays(model),
        num_rounds=count,
        on_round=lambda _: ends.append(time.process_time()),
    )
    return [b - a for a, b in itertools.pairwise(ends)]
