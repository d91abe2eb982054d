"""q-FedAvg: fair resource allocation.

Li, Sanjabi, Beirami, Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020,
https://arxiv.org/abs/1905.10497 (Algorithm 2).

    client i   F_i = loss over all local data at the received x, before training; then as FedAvg; sends y_i, F_i
    server     L = 1 / eta_l,   w_i = L (y_i - x)
               h_i = q F_i^(q - 1) |w_i|^2 + L F_i^q
               x <- x + sum_i F_i^q w_i / sum_i h_i

q = 0 is the mean of the y_i with equal weights; the larger q, the more clients of large loss count. eta_l is part of
the step's length.

Differs from the paper: eta_l is the mean rate of the local steps that this round's clients took, as they tell it, so L
follows a schedule. F_i + 1e-10 stands for F_i (0^(q - 1) has no value for q < 1), and a loss below 0 counts as 0. A
round in which nobody took a step leaves x as it is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from fedstrat.aggregation.mean import mean_step
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Params, Payload, Update
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState

_SMALLEST_LOSS = 1e-10


class QFedAvg(FedStrategy[ServerState, Payload]):
    """Weighs clients by the q-th power of their loss. Clients also send their loss at x."""

    needs = ("num-steps", "lr-sum", "loss-before")

    q: float = hyper(default=0.1, ge=0.0, symbol="q", doc="fairness; 0: equal weights")

    @override
    def aggregate(self, state: ServerState, updates: Sequence[Update[Any]]) -> ServerState:
        rates = [u.lr_sum / u.num_steps for u in updates if u.num_steps > 0 and u.lr_sum > 0.0]
        if not rates:
            return state
        L = len(rates) / sum(rates)
        losses = [max(u.metrics["loss-before"], 0.0) + _SMALLEST_LOSS for u in updates]
        # Divided by the largest loss, which cancels: a large q would overflow.
        powers = [(loss / max(losses)) ** self.q for loss in losses]
        h = 0.0
        for u, loss, power in zip(updates, losses, powers, strict=True):
            h += power * (self.q * L**2 * squared_distance(u.params, state.params) / loss + L)
        after = mean_step(state.params, [u.params for u in updates], [L * power / h for power in powers])
        self.note(largest_loss=max(losses), step_share=L * sum(powers) / h)
        return dataclasses.replace(state, params=after)


def squared_distance(one: Params, other: Params) -> float:
    """``|one - other|^2`` over all parameters, in float64."""
    return sum(float((one[n].double() - x.double()).square().sum()) for n, x in other.items())


class QFedAvgRule(LocalRule[None, None]):
    """Plain local training, after the loss at the received model."""

    needs_calls = ("loss_before",)
    one_lr = True
