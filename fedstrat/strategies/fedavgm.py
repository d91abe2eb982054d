"""FedAvgM: federated averaging with server momentum.

Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019, https://arxiv.org/abs/1909.06335 (section 4.3).

    client     as FedAvg
    server     D = sum_i p_i (y_i - x)
               m <- beta m + D                                m = 0 before round 1
               x <- x + eta_g m                               heavy ball
               x <- x + eta_g (D + beta m)                    nesterov, with the new m

Differs from the paper: nothing but the sign (the paper accumulates x - y_i and subtracts). m covers trainable
parameters only; buffers are averaged and get no momentum.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from fedstrat.aggregation.mean import mean_deltas, moved, normalised
from fedstrat.payloads import Params, Payload, Update, state_dtype, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class FedAvgMState(ServerState):
    """The model and its momentum.

    Attributes:
        momentum: m, one tensor per parameter.
    """

    momentum: Params


class FedAvgM(FedStrategy[FedAvgMState, Payload]):
    """FedAvg with momentum on the server. Works with unmodified Flower clients."""

    shows_non_finite = True
    steps_by_mean = True

    momentum: float = hyper(
        default=0.9, ge=0.0, lt=1.0, symbol="beta", doc="server momentum", flower_name="server_momentum"
    )
    nesterov: bool = hyper(default=False, doc="look ahead by one momentum step")
    server_lr: float = hyper(
        default=1.0,
        gt=0.0,
        symbol="eta_g",
        doc="scales the server's step",
        flower_name="server_learning_rate",
    )

    @override
    def init_state(self, params: Params) -> FedAvgMState:
        return FedAvgMState(params=params, momentum=zeros_like(params))

    @override
    def aggregate(self, state: FedAvgMState, updates: Sequence[Update[Any]]) -> FedAvgMState:
        beta = self.momentum
        p = normalised([u.num_examples for u in updates])
        delta = mean_deltas(state.params, [u.params for u in updates], p)
        m = {n: state.momentum[n].double().mul(beta).add(d) for n, d in delta.items()}
        step = {n: d.add(m[n], alpha=beta) for n, d in delta.items()} if self.nesterov else m
        return dataclasses.replace(
            state,
            params=moved(state.params, step, self.server_lr),
            momentum={n: v.to(state_dtype(state.params[n])) for n, v in m.items()},
        )
