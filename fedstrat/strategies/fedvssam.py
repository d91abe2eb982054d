"""FedVSSAM: sharpness-aware federated learning with one global direction.

arXiv 2605.09144, https://arxiv.org/abs/2605.09144.

    client i   g  = g_i(y)
               b  = (1 - gamma_l) h + gamma_l g                perturb = "mixed";    b = g with "gradient"
               y~ = y + rho b / |b|,   g~ = g_i(y~)            the same batch twice
               u  = (1 - gamma_l) h + gamma_l g~               update = "mixed";     u = g~ with "gradient"
               y <- y - eta_l u
    server     L_i = sum_k eta_{l,k}                           (= eta_l K_i at a constant rate)
               g^ = mean_S (x - y_i) / L_i
               h <- (1 - gamma_g) h + gamma_g g^               h = 0 before round 1; first h,
               x <- x - eta h                                  then x with the new h
               eta = eta_g mean_S(L_i) ("relative") or eta_g ("absolute"),   eta_g = server_lr

So h' = (1 - gamma_l gamma_g) h + gamma_l gamma_g mean(g~): a running mean of sharpness-aware gradients.

The paper's ablation switches: LF is perturb, LU is update, GU is gamma_g (off: gamma_g = 1).

Differs from the paper: every client is divided by its own L_i (the paper has one eta_l and K). h has the scale of a
gradient, so an absolute eta_g of FedAvg's pace is eta_l K, not 1; "relative" puts that factor in. Weight decay is part
of g~ and so of h. |b| = 0 gives no perturbation. gamma_l = 0 is refused: no gradient would enter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
class FedVSSAMBroadcast(Payload):
    """h."""

    direction: Params


@dataclass(frozen=True, kw_only=True)
class FedVSSAMState(ServerState):
    """The model and h.

    Attributes:
        direction: h, one tensor per parameter, of a gradient's scale.
    """

    direction: Params


class FedVSSAM(FedStrategy[FedVSSAMState, Payload]):
    """One global direction steadies perturbation, local update and server step. Twice FedAvg's bytes down."""

    needs = ("num-steps", "lr-sum")

    rho: float = hyper(default=0.05, ge=0.0, symbol="rho", doc="radius of the perturbation")
    gamma_l: float = hyper(default=0.4, gt=0.0, le=1.0, symbol="gamma_l", doc="share of the local gradient")
    gamma_g: float = hyper(default=0.6, gt=0.0, le=1.0, symbol="gamma_g", doc="share of the round in h")
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="the server's step, see server_lr_scale")
    server_lr_scale: Literal["relative", "absolute"] = hyper(
        default="relative", doc="whether server_lr multiplies the mean local path or is the step itself"
    )
    perturb: Literal["mixed", "gradient"] = hyper(default="mixed", doc="direction of the perturbation (LF)")
    update: Literal["mixed", "gradient"] = hyper(default="mixed", doc="direction of the local step (LU)")

    @override
    def init_state(self, params: Params) -> FedVSSAMState:
        return FedVSSAMState(params=params, direction=zeros_like(params))

    @override
    def broadcast(self, state: FedVSSAMState, client: str) -> Broadcast[FedVSSAMBroadcast]:
        return Broadcast(state.params, FedVSSAMBroadcast(state.direction))

    @override
    def aggregate(self, state: FedVSSAMState, updates: Sequence[Update[Payload]]) -> FedVSSAMState:
        found = mean_step_direction(state.params, updates)
        if found is None:
            return state
        g, mean_path = found
        h = {n: v.mul(self.gamma_g).add(state.direction[n].double(), alpha=1.0 - self.gamma_g) for n, v in g.items()}
        eta = self.server_lr * (mean_path if self.server_lr_scale == "relative" else 1.0)
        return dataclasses.replace(
            state,
            params=moved(state.params, h, -eta),
            direction={n: v.to(state_dtype(state.params[n])) for n, v in h.items()},
        )


@dataclass
class FedVSSAMRule(LocalRule[FedVSSAMBroadcast, None]):
    """Mixes h into the perturbation and into the step."""

    rho: float
    gamma_l: float
    perturb: str
    update: str
    receives = FedVSSAMBroadcast
    passes = 2
    acts_on_all = True
    one_lr = True
    refuses_momentum = "h is the mean direction of plain SGD steps; the server divides by the sum of their rates"

    @override
    def start(self, received: FedVSSAMBroadcast, state: Tensors | None) -> None:
        self.pull = {n: (1.0 - self.gamma_l) * h for n, h in received.direction.items()}

    @override
    def backward(self, again: Callable[[], None]) -> None:
        here = {n: y for n, y, _ in self.trainable}
        b = {n: grad for n, _, grad in self.trainable}
        if self.perturb == "mixed":
            b = {n: self.pull[n].add(g, alpha=self.gamma_l) for n, g in b.items()}
        perturbed_gradient(here, b, self.rho, again)

    @override
    def correct_gradients(self) -> None:
        if self.update == "mixed":
            for name, _, grad in self.trainable:
                grad.mul_(self.gamma_l).add_(self.pull[name])
