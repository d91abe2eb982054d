"""Ditto: a personal model beside any aggregator.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221 (Algorithm 1).

    client i   v_i <- v_i - eta_l (g_i(v_i) + lambda (v_i - x))     personal steps, v_i = x at first; x as received
               y   <- y - eta_l g_i(y)                              then plain training from y = x; only y is sent
    server     that of the aggregator: FedAvg, CRAFT, …

Differs from the paper: v_i starts from the model of the client's first participation. The aggregator weights by its own
rule (the paper averages uniformly). Personal steps see the batches that the global path will see, and leave the random
state as it was, so the global path is bit by bit that of the aggregator alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from fedstrat.errors import ConfigError, nearest
from fedstrat.local.loop import same_randomness, train_epochs
from fedstrat.local.optimizer import RuleOptimizer
from fedstrat.local.rule import PERSONAL, LocalRule, LossFunction, Tensors
from fedstrat.payloads import Broadcast, Params, Payload, Update
from fedstrat.strategies.arguments import CommonArguments
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.fedavg import FedAvgRule
from fedstrat.strategies.fedprox import FedProxRule
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import Clients, ServerState


class Ditto(FedStrategy[ServerState, Payload]):
    """Personal models pulled towards the global one, which any aggregator of plain clients makes."""

    stateful_clients = True
    evaluate_personal = True

    lam: float = hyper(default=1.0, ge=0.0, symbol="lambda", doc="pull of the personal model towards the global one")
    aggregator: str | Any = hyper(default="fedavg", doc="whose server step makes the global model")

    @override
    def check_settings(self) -> None:
        from fedstrat.strategies import ALGORITHMS  # noqa: PLC0415 - the table imports this file

        if isinstance(self.aggregator, str):
            if self.aggregator not in ALGORITHMS:
                raise ConfigError(
                    f"Ditto: there is no aggregator '{self.aggregator}'{nearest(self.aggregator, ALGORITHMS)}"
                )
            self.inner: FedStrategy[ServerState, Payload] = ALGORITHMS[self.aggregator].strategy()
        else:
            self.inner = self.aggregator
        if self.inner.rule is not FedAvgRule:
            plain = [name for name, entry in ALGORITHMS.items() if entry.rule is FedAvgRule]
            raise ConfigError(
                f"Ditto: '{self.inner.algorithm}' has a local rule of its own; choose one of {', '.join(plain)}"
            )

    @override
    def settings(self) -> dict[str, Any]:
        names = [n for n in self.inner.hypers if n not in CommonArguments.hypers]
        own = {f"{self.inner.algorithm}.{n}": getattr(self.inner, n) for n in names}
        return {**super().settings(), "aggregator": self.inner.algorithm, **own}

    @override
    def init_state(self, params: Params) -> ServerState:
        return self.inner.init_state(params)

    @override
    def admit(self, state: ServerState, clients: Clients) -> ServerState:
        return self.inner.admit(state, clients)

    @override
    def broadcast(self, state: ServerState, client: str) -> Broadcast[Any]:
        return self.inner.broadcast(state, client)

    @override
    def evaluated(self, state: ServerState) -> Params:
        return self.inner.evaluated(state)

    @override
    def aggregate(self, state: ServerState, updates: Sequence[Update[Any]]) -> ServerState:
        self.inner.diagnostics = self.diagnostics
        return self.inner.aggregate(state, updates)


@dataclass
class DittoRule(LocalRule[None, None]):
    """Trains v_i beside the plain path."""

    lam: float
    keeps_state = True
    keeps_initial = True

    @property
    @override
    def needs_calls(self) -> tuple[str, ...]:
        return ("train_personal",)

    @override
    def start(self, received: None, state: Tensors | None) -> None:
        self.own = self.personal_model() if state is None else dict(state)

    @override
    def train_personal(
        self, model: torch.nn.Module, loader: Iterable[Any], loss_fn: LossFunction, **training: float
    ) -> None:
        epochs, lr, momentum = int(training["epochs"]), training["lr"], training["momentum"]
        received = self.personal_model()
        self._load(self.own)
        pull = FedProxRule(mu=self.lam, gamma=0.0)
        pull.begin(self.params, self.buffers, None, None)
        pull.initial = self.initial  # towards x, not towards where v_i starts
        optimizer = RuleOptimizer(
            torch.optim.SGD(list(self.params.values()), lr=lr, momentum=momentum),
            pull,
            weight_decay=training["weight_decay"],
            clip_norm=training["clip_norm"],
        )
        with same_randomness(loader):
            train_epochs(model, loader, optimizer, pull, loss_fn=loss_fn, epochs=epochs, stop=lambda: False)
        self.own = self.personal_model()
        self._load(received)

    def _load(self, own: Tensors) -> None:
        with torch.no_grad():
            for name, tensor in {**self.params, **self.buffers}.items():
                tensor.copy_(own[f"{PERSONAL}{name}"])

    @override
    def finish(self) -> tuple[None, Tensors]:
        return None, self.own
