"""MoFedSAM: sharpness-aware local steps along a global momentum.

Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022,
https://arxiv.org/abs/2206.02618 (Algorithm 2).

    client i   g~ = g_i(y + rho g / |g|),   v = alpha g~ + (1 - alpha) h,   y <- y - eta_l v
    server     L_i = sum_k eta_{l,k}                       (= eta_l K_i at a constant rate)
               h <- mean_S (x - y_i) / L_i                 the mean direction of one step; 0 before round 1
               x <- x - eta_g mean_S(L_i) h                eta_g = server_lr

Differs from the paper: every client is divided by its own L_i, so unequal local steps and schedules need no common K
and eta_l. server_lr is relative to the mean local path; 1 is the paper's choice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from fedstrat.aggregation.mean import moved
from fedstrat.local.rule import LocalRule, Tensors
from fedstrat.local.sam import perturbed_gradient
from fedstrat.payloads import Broadcast, Params, Payload, Update, state_dtype, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.direction import mean_step_direction
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True)
class MoFedSAMBroadcast(Payload):
    """h."""

    direction: Params


@dataclass(frozen=True, kw_only=True)
class MoFedSAMState(ServerState):
    """The model and h.

    Attributes:
        direction: h, the mean direction of a local step, one tensor per parameter.
    """

    direction: Params


class MoFedSAM(FedStrategy[MoFedSAMState, Payload]):
    """FedSAM whose local steps follow the global direction. Twice FedAvg's bytes down."""

    needs = ("num-steps", "lr-sum")

    rho: float = hyper(default=0.05, ge=0.0, symbol="rho", doc="radius of the perturbation")
    alpha: float = hyper(default=0.1, gt=0.0, le=1.0, symbol="alpha", doc="share of the local gradient in a step")
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the server's step")

    @override
    def init_state(self, params: Params) -> MoFedSAMState:
        return MoFedSAMState(params=params, direction=zeros_like(params))

    @override
    def broadcast(self, state: MoFedSAMState, client: str) -> Broadcast[MoFedSAMBroadcast]:
        return Broadcast(state.params, MoFedSAMBroadcast(state.direction))

    @override
    def aggregate(self, state: MoFedSAMState, updates: Sequence[Update[Payload]]) -> MoFedSAMState:
        found = mean_step_direction(state.params, updates)
        if found is None:
            return state
        g, mean_path = found
        return dataclasses.replace(
            state,
            params=moved(state.params, g, -self.server_lr * mean_path),
            direction={n: v.to(state_dtype(state.params[n])) for n, v in g.items()},
        )


@dataclass
class MoFedSAMRule(LocalRule[MoFedSAMBroadcast, None]):
    """Mixes the gradient at the perturbed weights with h."""

    rho: float
    alpha: float
    receives = MoFedSAMBroadcast
    passes = 2
    acts_on_all = True
    one_lr = True
    refuses_momentum = "h is the mean direction of plain SGD steps; the server divides by the sum of their rates"

    @override
    def start(self, received: MoFedSAMBroadcast, state: Tensors | None) -> None:
        self.pull = {n: (1.0 - self.alpha) * h for n, h in received.direction.items()}

    @override
    def backward(self, again: Callable[[], None]) -> None:
        here = {n: y for n, y, _ in self.trainable}
        perturbed_gradient(here, {n: grad for n, _, grad in self.trainable}, self.rho, again)

    @override
    def correct_gradients(self) -> None:
        for name, _, grad in self.trainable:
            grad.mul_(self.alpha).add_(self.pull[name])
