"""CPU milliseconds of a SCAFFOLD round of fluke on the suite's own task; run by an interpreter that has fluke-fl.

1000 clients with 48 images of MNIST's shape each, 100 a round, an MLP 784-200-200-10, one epoch in batches of 10, no
evaluation. The best of three rounds after a first one.
"""

import time

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.scaffold import SCAFFOLD
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.utils import FederationObserver
from torch import nn

CLIENTS, SAMPLES, ROUNDS = 1000, 48, 4


class Clock(FederationObserver):
    """Notes the CPU time at the end of every round."""

    def __init__(self) -> None:
        self.ends = [time.process_time()]

    def end_round(self, round: int) -> None:  # noqa: A002 - fluke's name
        del round
        self.ends.append(time.process_time())


def loader(x: torch.Tensor, y: torch.Tensor) -> FastDataLoader:
    return FastDataLoader(x, y, num_labels=10, batch_size=10, shuffle=True)


def main() -> None:
    torch.set_num_threads(1)
    settings = FlukeENV()
    settings.set_seed(1)
    settings.set_device("cpu")
    settings.set_inmemory(True)
    x, y = torch.rand(CLIENTS, SAMPLES, 1, 28, 28), torch.randint(10, (CLIENTS, SAMPLES))
    clients = [loader(x[i], y[i]) for i in range(CLIENTS)]
    data = DataSplitter(DummyDataContainer(clients, [None] * CLIENTS, None, 10))
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )
    config = DDict(
        model=model,
        client=DDict(
            batch_size=10,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=0.05),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
        ),
        server=DDict(weighted=True),
    )
    federation = SCAFFOLD(CLIENTS, data, config)
    clock = Clock()
    federation.set_callbacks([clock])
    federation.run(n_rounds=ROUNDS, eligible_perc=0.1)
    print(min(b - a for a, b in zip(clock.ends[1:], clock.ends[2:], strict=False)) * 1e3)


if __name__ == "__main__":
    main()
