"""FedSAM: sharpness-aware local steps.

Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022,
https://arxiv.org/abs/2206.02618 (Algorithm 1).

    client i   g = g_i(y),   y~ = y + rho g / |g|,   g~ = g_i(y~)      the same batch twice
               y <- y - eta_l g~
    server     as FedAvg

Differs from the paper: the server weights by examples (the paper averages uniformly). Weight decay is part of the
descent direction and not of the perturbation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from fedstrat.local.rule import LocalRule
from fedstrat.local.sam import perturbed_gradient
from fedstrat.strategies.fedavg import FedAvg
from fedstrat.strategies.settings import hyper


class FedSAM(FedAvg):
    """Clients look for flat minima: two gradients a step."""

    rho: float = hyper(default=0.05, ge=0.0, symbol="rho", doc="radius of the perturbation")
    drop_stragglers = False  # not a setting of FedSAM
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the averaged displacement")


@dataclass
class FedSAMRule(LocalRule[None, None]):
    """Replaces every gradient by the one at the perturbed weights."""

    rho: float
    passes = 2

    @override
    def backward(self, again: Callable[[], None]) -> None:
        here = {n: y for n, y, _ in self.trainable}
        g = {n: grad for n, _, grad in self.trainable}
        perturbed_gradient(here, g, self.rho, again)
