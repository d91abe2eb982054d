"""FedSMOO: dynamic regularisation of both the model and the perturbation.

Sun, Shen, Chen, Ding, Tao, "Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching
Global Consistency and Smooth Landscape", ICML 2023, https://arxiv.org/abs/2305.11584 (Algorithm 1).

    client i   v = g_i(y) - mu_i - s,   e = rho v / |v|
               mu_i <- mu_i + e - s
               g~ = g_i(y + e)                                              the same batch twice
               y <- y - eta_l [ g~ + lamb (y - x + h_i) ]
               then  h_i <- h_i + (y_i - x);   sends y_i and mu_i;   h_i and mu_i count once the server has accepted
    server     s = rho m / |m|,   m = mean_S mu_i                           s = 0 before round 1
               h <- h + (1/N) sum_S (y_i - x)                               so  h = (1/N) sum_{all N} h_i
               x <- mean_S y_i + h

rho = 0 is FedDyn with alpha = lamb, whose gradient memory is -lamb h_i.

Differs from the paper: s is the released code's simplification. lamb = 0 switches h_i and h off, so that what remains
is FedSAM with a dual for the perturbation. N is the number of distinct clients seen; when it grows to N', h <- h N / N'
(a newcomer's h_i is 0). A client that lost its state counts as one that left for ever and a new one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from fedstrat.aggregation.mean import mean_deltas, moved, weighted_sum
from fedstrat.local.rule import LocalRule, Tensors, global_norm
from fedstrat.local.sam import ascent_scale, perturbed_gradient
from fedstrat.payloads import Broadcast, Params, Payload, Update, state_dtype, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import Clients, ServerState


@dataclass(frozen=True)
class FedSMOOBroadcast(Payload):
    """s."""

    perturbation: Params


@dataclass(frozen=True)
class FedSMOOUpdate(Payload):
    """mu_i."""

    dual: Params


@dataclass(frozen=True, kw_only=True)
class FedSMOOState(ServerState):
    """The model, s and h.

    Attributes:
        perturbation: s, one tensor per parameter; its norm is rho, or 0.
        drift: h, one tensor per parameter.
        num_clients: N.
    """

    perturbation: Params
    drift: Params
    num_clients: int


class FedSMOO(FedStrategy[FedSMOOState, FedSMOOUpdate]):
    """Clients agree on the minimum and on the perturbation. Twice FedAvg's bytes, both ways."""

    payload = FedSMOOUpdate
    stateful_clients = True

    rho: float = hyper(default=0.1, ge=0.0, symbol="rho", doc="radius of the perturbation")
    lamb: float = hyper(default=0.1, ge=0.0, symbol="1/beta", doc="weight of the dynamic regulariser; 0: off")

    @override
    def init_state(self, params: Params) -> FedSMOOState:
        zero = zeros_like(params)
        return FedSMOOState(params=params, perturbation=zero, drift=zero, num_clients=0)

    @override
    def admit(self, state: FedSMOOState, clients: Clients) -> FedSMOOState:
        known, total = state.num_clients, state.num_clients + len(clients)
        drift = {n: h * (known / total) for n, h in state.drift.items()}
        return dataclasses.replace(state, drift=drift, num_clients=total)

    @override
    def forget(self, state: FedSMOOState, client: str) -> FedSMOOState:
        return self.admit(state, {client: 1.0})

    @override
    def broadcast(self, state: FedSMOOState, client: str) -> Broadcast[FedSMOOBroadcast]:
        return Broadcast(state.params, FedSMOOBroadcast(state.perturbation))

    @override
    def aggregate(self, state: FedSMOOState, updates: Sequence[Update[FedSMOOUpdate]]) -> FedSMOOState:
        m = len(updates)
        equal = [1.0 / m] * m
        step = mean_deltas(state.params, [u.params for u in updates], equal)
        h = {n: old.double() for n, old in state.drift.items()}
        if self.lamb:
            h = {n: old.add(step[n], alpha=m / state.num_clients) for n, old in h.items()}
            step = {n: d + h[n] for n, d in step.items()}
        dual = {n: weighted_sum([u.extra.dual[n] for u in updates], equal) for n in state.params}
        scale = ascent_scale(list(dual.values()), self.rho)
        self.note(dual_norm=float(global_norm(list(dual.values()))), drift_norm=float(global_norm(list(h.values()))))
        return dataclasses.replace(
            state,
            params=moved(state.params, step),
            perturbation={n: (v * scale).to(state_dtype(state.params[n])) for n, v in dual.items()},
            drift={n: v.to(state_dtype(state.params[n])) for n, v in h.items()},
        )


@dataclass
class FedSMOORule(LocalRule[FedSMOOBroadcast, FedSMOOUpdate]):
    """Perturbs along the corrected gradient and pulls towards x - h_i; renews h_i and mu_i."""

    rho: float
    lamb: float
    receives = FedSMOOBroadcast
    keeps_state = True
    keeps_initial = True
    passes = 2
    acts_on_all = True

    @override
    def start(self, received: FedSMOOBroadcast, state: Tensors | None) -> None:
        self.s = received.perturbation
        kept = state or {}
        self.dual = {n: _kept(kept, f"dual/{n}", s) for n, s in self.s.items()}
        self.drift = {n: _kept(kept, f"drift/{n}", s) for n, s in self.s.items()}

    @override
    def backward(self, again: Callable[[], None]) -> None:
        v = {n: -self.dual[n] - s for n, s in self.s.items()}
        for name, _, grad in self.trainable:
            v[name] += grad
        scale = ascent_scale(list(v.values()), self.rho)
        self.renew_dual({n: d * scale.to(d.dtype) for n, d in v.items()})
        perturbed_gradient(self.params, v, self.rho, again)

    def renew_dual(self, perturbation: Tensors) -> None:
        """Apply ``mu_i <- mu_i + e - s``."""
        for name, e in perturbation.items():
            self.dual[name] += e - self.s[name]

    @override
    def correct_gradients(self) -> None:
        if self.lamb:
            for name, y, grad in self.trainable:
                grad.add_(y - self.initial[name] + self.drift[name], alpha=self.lamb)

    @override
    def finish(self) -> tuple[FedSMOOUpdate, Tensors]:
        drift = self.drift
        if self.lamb:
            # What the server saw of y_i: its h stays the mean of the h_i.
            drift = {
                n: h + (self.sent[n].detach().to(h.device, h.dtype) - self.initial[n].to(h.dtype))
                for n, h in drift.items()
            }
        state = {**{f"dual/{n}": v for n, v in self.dual.items()}, **{f"drift/{n}": h for n, h in drift.items()}}
        return FedSMOOUpdate(self.dual), state


def _kept(state: Tensors, name: str, like: torch.Tensor) -> torch.Tensor:
    """A writable copy of what the client remembers; 0 at first."""
    return state[name].to(like.device, copy=True) if name in state else torch.zeros_like(like)
