"""AFL: agnostic federated learning.

Mohri, Sivek, Suresh, "Agnostic Federated Learning", ICML 2019, https://arxiv.org/abs/1902.00146 (section 4).

    client i   F_i = loss over all local data at the received x, before training; then as FedAvg; sends y_i, F_i
    server     x <- x + eta_g sum_i lambda_i (y_i - x)                      eta_g = server_lr
               lambda <- nearest point of the simplex to lambda + gamma F   gamma = lambda_lr, lambda = 1/N at first
               x_mean <- (t x_mean + x) / (t + 1)                           t rounds before this one
    evaluated  x_mean

Minimises the loss of the worst mixture of clients, max_lambda sum_i lambda_i f_i. The paper's clients take one step a
round, all of them.

Differs from the paper: any number of local steps, and any cohort S: lambda is kept over all N clients seen, the model
moves by lambda restricted to S and renormalised (equal weights where its sum is 0), only lambda_i of S rise, and the
projection goes over all N. When N grows to N', a newcomer gets 1/N' and the others are scaled by N/N'.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from fedstrat.aggregation.mean import mean_step, normalised
from fedstrat.aggregation.simplex import project
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Params, Payload, Update, state_dtype
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import Clients, ServerState


@dataclass(frozen=True, kw_only=True)
class AFLState(ServerState):
    """The model, the mixture and the mean model.

    Attributes:
        mixture: lambda, client id -> weight >= 0, of every client seen; they sum to 1.
        mean: x_mean, one tensor per parameter.
        rounds: t, the models in x_mean.
    """

    mixture: Mapping[str, float]
    mean: Params
    rounds: int

    @functools.cached_property
    def mean_model(self) -> dict[str, torch.Tensor]:
        """x_mean in the model's own dtypes."""
        return {n: v.to(self.params[n].dtype) for n, v in self.mean.items()}


class AFL(FedStrategy[AFLState, Payload]):
    """Serves the worst mixture of clients. Clients also send their loss at x."""

    needs = ("loss-before",)

    lambda_lr: float = hyper(default=0.01, ge=0.0, symbol="gamma_lambda", doc="step of the mixture, per unit of loss")
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the averaged displacement")

    @override
    def init_state(self, params: Params) -> AFLState:
        return AFLState(params=params, mixture={}, mean={n: p.to(state_dtype(p)) for n, p in params.items()}, rounds=0)

    @override
    def admit(self, state: AFLState, clients: Clients) -> AFLState:
        new = [c for c in clients if c not in state.mixture]
        known, total = len(state.mixture), len(state.mixture) + len(new)
        mixture = {c: weight * known / total for c, weight in state.mixture.items()}
        return dataclasses.replace(state, mixture={**mixture, **dict.fromkeys(new, 1.0 / total)})

    @override
    def evaluated(self, state: AFLState) -> Params:
        return state.mean_model

    @override
    def aggregate(self, state: AFLState, updates: Sequence[Update[Any]]) -> AFLState:
        weights = normalised([state.mixture[u.client] for u in updates])
        x = mean_step(state.params, [u.params for u in updates], weights, self.server_lr)
        raised = dict(state.mixture)
        for u in updates:
            raised[u.client] += self.lambda_lr * u.metrics["loss-before"]
        mixture = project(torch.tensor(list(raised.values()), dtype=torch.float64)).tolist()
        # From the difference, so that a model that stays has itself for its mean, bit by bit.
        share = 1.0 / (state.rounds + 1)
        mean = {n: v.double().add(x[n].double() - v.double(), alpha=share).to(v.dtype) for n, v in state.mean.items()}
        self.note(max_mixture=max(mixture), mixed_clients=sum(weight > 0.0 for weight in mixture))
        return AFLState(params=x, mixture=dict(zip(raised, mixture, strict=True)), mean=mean, rounds=state.rounds + 1)


class AFLRule(LocalRule[None, None]):
    """Plain local training, after the loss at the received model."""

    needs_calls = ("loss_before",)
