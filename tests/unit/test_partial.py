"""A part of a model is exchanged: which names, and what stays the client's own."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

import fedstrat
from fedstrat.errors import ConfigError, PayloadError, RunFailedError
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid
from tests.strategies import small


class Adapted(torch.nn.Module):
    """A frozen layer with an adapter of rank 1, and a head of the client's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base = torch.nn.Linear(small.FEATURES, small.FEATURES).requires_grad_(False)
        self.lora_a = torch.nn.Parameter(torch.randn(1, small.FEATURES))
        self.lora_b = torch.nn.Parameter(torch.zeros(small.FEATURES, 1))
        self.head = torch.nn.Linear(small.FEATURES, small.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x) + x @ (self.lora_b @ self.lora_a).T))


ADAPTER = ("lora_a", "lora_b")


def adapter() -> ArrayRecord:
    return fedstrat.to_arrays({n: t for n, t in Adapted().state_dict().items() if n in ADAPTER})


def run(strategy: Any, names: Any, models: list[torch.nn.Module]) -> Any:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        models.append(Adapted())
        return fedstrat.train(
            msg, context, models[-1], small.batches(small.client_of(context)), lr=0.1, epochs=1, names=names
        )

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return fedstrat.evaluate(msg, context, Adapted(), small.batches(small.client_of(context)), names=names)

    return strategy.start(InProcessGrid(app, 3), adapter(), num_rounds=2)


@pytest.mark.parametrize("names", [ADAPTER, lambda name: name.startswith("lora_")], ids=["names", "predicate"])
@pytest.mark.parametrize("algorithm", ["FedAvg", "CRAFT", "FedVSSAM", "SCAFFOLD"])
def test_only_the_adapter_travels_and_trains(algorithm: str, names: Any) -> None:
    models: list[torch.nn.Module] = []
    result = run(getattr(fedstrat, algorithm)(), names, models)
    final = decode(result.arrays, "arrays")
    assert list(final) == list(ADAPTER)
    assert final["lora_b"].abs().max() > 0  # began at 0
    assert 0 < result.evaluate_metrics_clientapp[2]["accuracy"] <= 1
    fresh = Adapted().state_dict()
    for model in models:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, fresh[name]) == (name not in ADAPTER) or name == "lora_a"


def test_a_base_optimizer_that_holds_more_is_refused() -> None:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = Adapted()
        with fedstrat.LocalSession(msg, context, model, ADAPTER) as session:
            session.optimizer(base=torch.optim.SGD(model.parameters(), lr=0.1))
        raise AssertionError

    with pytest.raises(RunFailedError, match="holds a parameter that the session's model doesn't have"):
        fedstrat.FedAvg(max_failed_rounds=1).start(InProcessGrid(app, 2), adapter(), num_rounds=1)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no array 'lora_c'; did you mean 'lora_"):
        fedstrat.load_arrays(Adapted(), adapter(), ["lora_a", "lora_c"])
    with pytest.raises(ConfigError, match="none is chosen"):
        fedstrat.load_arrays(Adapted(), adapter(), lambda name: False)
    with pytest.raises(PayloadError, match=r"'base\.weight' is missing"):
        fedstrat.load_arrays(Adapted(), adapter())
    with pytest.raises(PayloadError, match="this model has no array 'lora_b'"):
        fedstrat.load_arrays(Adapted(), adapter(), ["lora_a"])
