"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629 (Algorithm 1).

    client i   y <- y - eta_l g_i(y)                          K_i steps from y = x
    server     x <- x + eta_g sum_i p_i (y_i - x)             p_i = n_i / sum_{j in S} n_j,  eta_g = server_lr

Differs from the paper: p_i is renormalised over the replies that came (in the paper every sampled client replies),
and server_lr scales the averaged displacement (1 in the paper).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from fedstrat.aggregation.mean import mean_step, normalised
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Payload, Update
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


class FedAvgRule(LocalRule[None, None]):
    """Plain local training: no hook is needed."""


class FedAvg(FedStrategy[ServerState, Payload]):
    """Example-weighted averaging. Works with unmodified Flower clients."""

    refuses_privacy = None
    shows_non_finite = True
    steps_by_mean = True
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the averaged displacement")
    drop_stragglers: bool = hyper(default=False, doc="leave stragglers out, as in the experiments of FedProx")

    @override
    def aggregate(self, state: ServerState, updates: Sequence[Update[Any]]) -> ServerState:
        p = normalised([u.num_examples for u in updates])
        after = mean_step(state.params, [u.params for u in updates], p, self.server_lr)
        return dataclasses.replace(state, params=after)
