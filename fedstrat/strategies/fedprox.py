"""FedProx: a proximal term and gamma-inexact local solutions.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
https://arxiv.org/abs/1812.06127 (Algorithm 2, Definition 2).

    client i   h_i(y; x) = f_i(y) + (mu/2) |y - x|^2
               y <- y - eta_l [ g_i(y) + mu (y - x) ]         until gamma-inexact, at most E epochs
               gamma-inexact:  |grad f_i(y) + mu (y - x)| <= gamma |grad f_i(x)|
    server     as FedAvg

The gradients of the test go over all local data, with weight decay, at every epoch's end. Needs
eta_l < 2 / (L + mu); eta_l mu > 2 diverges.

Differs from the paper: devices are sampled uniformly and averaged with weights n_k, as the released code does (the
analysis samples with p_k and averages uniformly). gamma = 0 switches the test off, instead of asking for the exact
minimum, so mu = 0, gamma = 0 is FedAvg.
"""

from dataclasses import dataclass

from typing_extensions import override

from fedstrat.local.rule import FullGradient, LocalRule, global_norm
from fedstrat.strategies.fedavg import FedAvg
from fedstrat.strategies.settings import hyper

_TINY = 1e-12


class FedProx(FedAvg):
    """A proximal term keeps local models near the global one; stragglers may stop early."""

    mu: float = hyper(default=0.1, ge=0.0, symbol="mu", doc="weight of the proximal term", flower_name="proximal_mu")
    gamma: float = hyper(
        default=0.0, ge=0.0, le=1.0, symbol="gamma", doc="inexactness that stops local training; 0: off"
    )
    server_lr = 1.0  # not a setting of FedProx
    drop_stragglers = False  # nor this: it takes their partial work

    @override
    def flower_config(self) -> dict[str, float]:
        return {"proximal-mu": self.mu}

    @property
    @override
    def asks(self) -> tuple[str, ...]:
        # Flower's own clients read proximal-mu, but don't stop early.
        return ("num-steps",) if self.gamma > 0.0 else super().asks


@dataclass
class FedProxRule(LocalRule[None, None]):
    """Adds mu (y - x) to every gradient; stops when gamma-inexact."""

    mu: float
    gamma: float
    keeps_initial = True

    @property
    @override
    def needs_calls(self) -> tuple[str, ...]:
        return ("full_gradient", "should_stop") if self.gamma > 0.0 else ()

    @override
    def prepare(self, full_gradient: FullGradient) -> None:
        self.gradient_at_x = full_gradient()
        self.done = self._norm_at_x() <= _TINY

    def _norm_at_x(self) -> float:
        return float(global_norm(list(self.with_decay(self.gradient_at_x, self.initial).values())))

    @override
    def correct_gradients(self) -> None:
        if self.mu:
            for name, y, grad in self.trainable:
                grad.add_(y - self.initial[name], alpha=self.mu)

    @override
    def should_stop(self, full_gradient: FullGradient) -> bool:
        if self.gamma <= 0.0:
            return False
        here = self.with_decay(full_gradient(), self.params)
        proximal = [g.add(self.params[n].detach() - self.initial[n], alpha=self.mu) for n, g in here.items()]
        return float(global_norm(proximal)) <= self.gamma * self._norm_at_x()
