"""FedNova: normalised averaging, for clients that take unequal numbers of local steps.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481 (section 4).

    client i   b <- rho b + g_i(y) + mu (y - x),   y <- y - eta_l b     K_i steps, b = 0 at first; rho: local momentum
               so  x - y_i = sum_k a_ik g_ik;   sends y_i and |a_i| = sum_k a_ik
    server     D = tau sum_i p_i (y_i - x) / |a_i|,   tau = sum_i p_i |a_i|         p_i = n_i / sum_{j in S} n_j
               x <- x + eta_g D                                         eta_g = server_lr
               m <- beta m + D / eta,   x <- x + eta_g eta m            beta = momentum, where it isn't 0; m = 0 at
                                                                        first, eta = mean eta_l of the round

At a constant rate |a_i| = eta_l K_i for plain SGD, eta_l [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho) with momentum
and [1 - (1 - eta_l mu)^K] / mu with the proximal term.

Differs from the paper: a_i includes the learning rates (the paper's a_i times eta_l), so clients whose rates differ, or
change during a round, are normalised too. |a_i| comes from the recurrence above, which also holds where the closed
forms divide by zero (rho = 1, mu = 0) and for momentum and proximal term together; there, or with eta_l mu > 1, some
a_ik may be negative, and it is the sum that keeps the fixed point of sum_i p_i f_i. tau is sum_i p_i |a_i| also with
mu > 0 (the released code takes sum_i p_i K_i). Clients that took no step are left out and p is renormalised over the
others; the factors tau p_i / |a_i| are not normalised again.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from fedstrat.aggregation.mean import mean_deltas, mean_step, moved, normalised
from fedstrat.local.rule import LocalRule, Tensors
from fedstrat.payloads import Params, Payload, Update, state_dtype, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class FedNovaState(ServerState):
    """The model and its momentum.

    Attributes:
        momentum: m, one tensor per parameter; empty where beta = 0.
    """

    momentum: Params


class FedNova(FedStrategy[FedNovaState, Payload]):
    """Divides every client's update by its number of steps, in effect. Clients also send one number."""

    needs = ("num-steps", "lr-sum", "step-norm")

    mu: float = hyper(default=0.0, ge=0.0, symbol="mu", doc="weight of the clients' proximal term")
    momentum: float = hyper(default=0.0, ge=0.0, lt=1.0, symbol="beta", doc="server momentum")
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the server's step")

    @override
    def init_state(self, params: Params) -> FedNovaState:
        return FedNovaState(params=params, momentum=zeros_like(params) if self.momentum else {})

    @override
    def aggregate(self, state: FedNovaState, updates: Sequence[Update[Any]]) -> FedNovaState:
        norms = {u.client: u.metrics["step-norm"] for u in updates}
        moving = [u for u in updates if u.num_steps > 0 and u.lr_sum > 0.0 and norms[u.client] > 0.0]
        if not moving:
            return state
        p = normalised([u.num_examples for u in moving])
        a = [norms[u.client] for u in moving]
        tau = sum(weight * norm for weight, norm in zip(p, a, strict=True))
        factors = [tau * weight / norm for weight, norm in zip(p, a, strict=True)]
        ys = [u.params for u in moving]
        self.note(mean_step_norm=tau, max_step_norm=max(a), min_step_norm=min(a))
        if not self.momentum:
            return dataclasses.replace(state, params=mean_step(state.params, ys, factors, self.server_lr))
        step = mean_deltas(state.params, ys, factors)
        lr = sum(weight * u.lr_sum / u.num_steps for weight, u in zip(p, moving, strict=True))
        m = {n: state.momentum[n].double().mul(self.momentum).add(d, alpha=1.0 / lr) for n, d in step.items()}
        return dataclasses.replace(
            state,
            params=moved(state.params, m, self.server_lr * lr),
            momentum={n: v.to(state_dtype(state.params[n])) for n, v in m.items()},
        )


@dataclass
class FedNovaRule(LocalRule[None, None]):
    """Local SGD that adds up the weights of its gradients in the displacement."""

    mu: float
    keeps_initial = True
    acts_on_all = True  # a momentum that skips a parameter in some steps would have another a_i there
    one_lr = True
    needs_sgd = "the weights of its gradients in the update must be known"

    @override
    def start(self, received: None, state: Tensors | None) -> None:
        self.step_norm, self.in_buffer, self.lr_sum_before = 0.0, 0.0, 0.0

    @override
    def correct_gradients(self) -> None:
        if self.mu:
            for name, y, grad in self.trainable:
                grad.add_(y - self.initial[name], alpha=self.mu)

    @override
    def after_step(self) -> None:
        # b and x - y, with 1 for every gradient: y - x enters b with the weight mu.
        lr, self.lr_sum_before = self.lr_sum - self.lr_sum_before, self.lr_sum
        self.in_buffer = self.momentum * self.in_buffer + 1.0 - self.mu * self.step_norm
        self.step_norm += lr * self.in_buffer

    @override
    def metrics(self) -> dict[str, float]:
        return {"step-norm": self.step_norm}
