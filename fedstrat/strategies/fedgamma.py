"""FedGAMMA: SCAFFOLD with sharpness-aware gradients.

Dai, Yang, Sun, Shen, Tian, Wang, Zhang, "FedGAMMA: Federated Learning With Global Sharpness-Aware Minimization", IEEE
Transactions on Neural Networks and Learning Systems, 2023, https://doi.org/10.1109/TNNLS.2023.3304453.

    client i   g = g_i(y),   g~ = g_i(y + rho g / |g|)                      the same batch twice
               y <- y - eta_l (g~ - c_i + c)
               c_i+ = c_i - c + (x - y_i) / (K_i eta_l)                     the mean g~ along its path
    server     as SCAFFOLD

Differs from the paper: as SCAFFOLD does (see there). The correction isn't part of the perturbation, as in the released
code. rho = 0 is SCAFFOLD with option 2.
"""

from collections.abc import Callable
from dataclasses import dataclass

from typing_extensions import override

from fedstrat.local.sam import perturbed_gradient
from fedstrat.strategies.scaffold import SCAFFOLD, ScaffoldRule
from fedstrat.strategies.settings import hyper


class FedGAMMA(SCAFFOLD):
    """Control variates of sharpness-aware gradients. Twice FedAvg's bytes, both ways."""

    rho: float = hyper(default=0.01, ge=0.0, symbol="rho", doc="radius of the perturbation")
    option = 2  # not a setting of FedGAMMA: c_i is the mean of its own gradients


@dataclass
class FedGAMMARule(ScaffoldRule):
    """Corrects the gradient at the perturbed weights by c - c_i and renews c_i."""

    rho: float
    passes = 2

    @override
    def backward(self, again: Callable[[], None]) -> None:
        here = {n: y for n, y, _ in self.trainable}
        perturbed_gradient(here, {n: grad for n, _, grad in self.trainable}, self.rho, again)
