"""FedMGDA+: federated learning meets multi-objective optimization.

Hu, Shaloudegi, Zhang, Yu, "Federated Learning Meets Multi-Objective Optimization", IEEE Transactions on Network
Science and Engineering 9(4), 2022, https://arxiv.org/abs/2006.11489 (Algorithm 1).

    client     as FedAvg
    server     delta_i = y_i - x,   u_i = delta_i / |delta_i|,   p_i = n_i / sum_{j in S} n_j
               lambda = argmin |sum_i lambda_i u_i|^2    over  lambda >= 0, sum lambda = 1, |lambda_i - p_i| <= epsilon
               x <- x + eta_g sum_i lambda_i u_i         eta_g = server_lr

The u_i are unit vectors, so a step is at most eta_g long, whatever the clients' learning rate. epsilon = 0 keeps the
weights p_i; with epsilon = 1 the step d is the min-norm point, along which every client gains: <u_i, d> >= |d|^2.

Differs from the paper: clients whose update is 0, or shorter than float32's rounding of x (4 eps32 |x|), have no
direction and are left out; p is renormalised over the others.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from fedstrat.aggregation.gram import Displacements, has_direction, rounding_of
from fedstrat.aggregation.mean import normalised
from fedstrat.aggregation.simplex import min_norm_weights
from fedstrat.payloads import Payload, Update
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


class FedMGDAPlus(FedStrategy[ServerState, Payload]):
    """The shortest combination of unit updates, near the data weights. Works with unmodified Flower clients."""

    epsilon: float = hyper(
        default=0.1, ge=0.0, le=1.0, symbol="epsilon", doc="how far a client's weight may be from its share of the data"
    )
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta", doc="the step's length, where all clients agree")

    @override
    def aggregate(self, state: ServerState, updates: Sequence[Update[Any]]) -> ServerState:
        rows = Displacements(state.params, [u.params for u in updates])
        gram = rows.gram()
        lengths = gram.diagonal().sqrt()
        active = has_direction(lengths, rounding_of(state.params))
        if not bool(active.any()):
            return state
        n = lengths[active]
        units = gram[active][:, active] / (n[:, None] * n[None, :])
        examples = [u.num_examples for u, acts in zip(updates, active.tolist(), strict=True) if acts]
        p = torch.tensor(normalised(examples), dtype=torch.float64)
        weights = min_norm_weights(units, (p - self.epsilon).clamp(min=0.0), (p + self.epsilon).clamp(max=1.0))
        inner = units @ weights
        coefficients = torch.zeros_like(lengths)
        coefficients[active] = weights / n
        norm = float((weights @ inner).clamp(min=0.0).sqrt())
        self.note(active_clients=len(n), min_inner=float(inner.min()), direction_norm=norm)
        return dataclasses.replace(state, params=rows.moved(self.server_lr * coefficients))
