"""FedACG: accelerated client gradient.

Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
https://arxiv.org/abs/2201.03172 (Algorithm 1).

    server     z = x + lambda m                                             lambda = momentum; only z is sent
    client i   y <- y - eta_l [ g_i(y) + beta (y - z) ]                     from y = z
    server     D = sum_i p_i (y_i - z)                                      p_i = n_i / sum_{j in S} n_j
               m <- lambda m + D                                            m = 0 before round 1
               x <- x + m                                                   so  x = sum_i p_i y_i
    evaluated  x

With beta = 0 the z of the rounds are the models of FedAvgM with nesterov.

Differs from the paper: p_i by examples (the released code averages uniformly). beta has the factor 1/2 of
(beta/2) |y - z|^2; the released code has none, so its 1e-3 is 2e-3 here. Buffers are averaged and never look ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from fedstrat.aggregation.mean import mean_deltas, moved, normalised
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Params, Payload, Update, state_dtype, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class FedACGState(ServerState):
    """The look-ahead z (as ``params``, since it is what clients move from), the model and its momentum.

    Attributes:
        model: x, one tensor per parameter.
        momentum: m, one tensor per parameter.
    """

    model: Params
    momentum: Params


class FedACG(FedStrategy[FedACGState, Payload]):
    """Clients start where the server's momentum leads. FedAvg's bytes, both ways."""

    shows_non_finite = True
    steps_by_mean = True

    momentum: float = hyper(default=0.85, ge=0.0, lt=1.0, symbol="lambda", doc="server momentum, and the look-ahead")
    beta: float = hyper(default=0.002, ge=0.0, symbol="beta", doc="weight of the proximal term")

    @override
    def init_state(self, params: Params) -> FedACGState:
        return FedACGState(params=params, model=params, momentum=zeros_like(params))

    @override
    def evaluated(self, state: FedACGState) -> Params:
        return state.model

    @override
    def aggregate(self, state: FedACGState, updates: Sequence[Update[Any]]) -> FedACGState:
        z, p = state.params, normalised([u.num_examples for u in updates])
        delta = mean_deltas(z, [u.params for u in updates], p)
        m = {n: state.momentum[n].double().mul(self.momentum).add(d) for n, d in delta.items()}
        x = moved(state.model, m)
        return FedACGState(
            params=moved(x, m, self.momentum),
            model=x,
            momentum={n: v.to(state_dtype(z[n])) for n, v in m.items()},
        )


@dataclass
class FedACGRule(LocalRule[None, None]):
    """Adds beta (y - z) to every gradient."""

    beta: float
    keeps_initial = True

    @override
    def correct_gradients(self) -> None:
        if self.beta:
            for name, y, grad in self.trainable:
                grad.add_(y - self.initial[name], alpha=self.beta)
