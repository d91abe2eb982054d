"""SCAFFOLD: stochastic controlled averaging.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, https://arxiv.org/abs/1910.06378 (Algorithm 1).

    client i   y <- y - eta_l (g_i(y) - c_i + c)              K_i steps from y = x
               option 1   c_i+ = grad f_i(x)
               option 2   c_i+ = c_i - c + (x - y_i) / (K_i eta_l)
               sends y_i and dc_i = c_i+ - c_i;  c_i <- c_i+ once the server has accepted
    server     x <- x + eta_g mean_S (y_i - x)
               c <- c + (1/N) sum_S dc_i                      so  c = (1/N) sum_{all N} c_i  after every round

Differs from the paper: the client divides by sum_k eta_{l,k} per parameter, which is K_i eta_l at a constant rate. N is
the number of distinct clients seen; when it grows to N', c <- c N / N' (a newcomer's c_i is 0). weighting = "examples"
optimises sum_i p_i f_i: means over S with p renormalised on S, dc_i with p_i over all N, so c = sum_i p_i c_i. A client
that lost its c_i counts as one that left for ever and a new one, which keeps the identity exact.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from typing_extensions import override

from fedstrat.aggregation.mean import mean_step, moved, normalised, weighted_sum
from fedstrat.local.rule import FullGradient, LocalRule, Tensors, global_norm
from fedstrat.payloads import Broadcast, Params, Payload, Update, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import Clients, ServerState


@dataclass(frozen=True)
class ScaffoldBroadcast(Payload):
    """c."""

    control: Params


@dataclass(frozen=True)
class ScaffoldUpdate(Payload):
    """dc_i = c_i+ - c_i."""

    control_delta: Params


@dataclass(frozen=True, kw_only=True)
class ScaffoldState(ServerState):
    """The model, c and the weight that every client seen has in it.

    Attributes:
        control: c, one tensor per parameter.
        weights: Client id -> its weight in c: 1 (uniform) or its number of examples.
        departed: Summed weight of clients that lost their c_i.
    """

    control: Params
    weights: Mapping[str, float]
    departed: float = 0.0

    @property
    def total(self) -> float:
        """N, or the number of all examples."""
        return sum(self.weights.values()) + self.departed


class SCAFFOLD(FedStrategy[ScaffoldState, ScaffoldUpdate]):
    """Control variates correct the drift of local steps. Twice FedAvg's bytes, both ways."""

    payload = ScaffoldUpdate
    needs = ("num-steps", "lr-sum")
    stateful_clients = True
    shows_non_finite = True

    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the averaged displacement")
    option: Literal[1, 2] = hyper(default=2, doc="how c_i is renewed: 1 gradient at x, 2 displacement")
    weighting: Literal["uniform", "examples"] = hyper(default="uniform", doc="weight of a client's objective")

    @property
    @override
    def need_examples(self) -> bool:
        return self.weighting == "examples"

    @override
    def init_state(self, params: Params) -> ScaffoldState:
        return ScaffoldState(params=params, control=zeros_like(params), weights={})

    @override
    def admit(self, state: ScaffoldState, clients: Clients) -> ScaffoldState:
        new = {c: n if self.need_examples else 1.0 for c, n in clients.items() if c not in state.weights}
        return self._rescaled(dataclasses.replace(state, weights={**state.weights, **new}), state.total)

    @override
    def forget(self, state: ScaffoldState, client: str) -> ScaffoldState:
        departed = state.departed + state.weights.get(client, 0.0)
        return self._rescaled(dataclasses.replace(state, departed=departed), state.total)

    def _rescaled(self, state: ScaffoldState, total_before: float) -> ScaffoldState:
        scale = total_before / state.total if state.total else 1.0
        return dataclasses.replace(state, control={n: c * scale for n, c in state.control.items()})

    @override
    def broadcast(self, state: ScaffoldState, client: str) -> Broadcast[ScaffoldBroadcast]:
        return Broadcast(state.params, ScaffoldBroadcast(state.control))

    @override
    def aggregate(self, state: ScaffoldState, updates: Sequence[Update[ScaffoldUpdate]]) -> ScaffoldState:
        weights = [state.weights[u.client] for u in updates]
        after = mean_step(state.params, [u.params for u in updates], normalised(weights), self.server_lr)
        share = [w / state.total for w in weights]  # over all N, not over S
        change = {n: weighted_sum([u.extra.control_delta[n] for u in updates], share) for n in state.control}
        control = moved(state.control, change)
        self.note(control_norm=float(global_norm(list(control.values()))))
        return dataclasses.replace(state, params=after, control=control)


@dataclass
class ScaffoldRule(LocalRule[ScaffoldBroadcast, ScaffoldUpdate]):
    """Corrects every gradient by c - c_i and renews c_i."""

    option: int
    receives = ScaffoldBroadcast
    keeps_state = True
    keeps_initial = True
    acts_on_all = True
    refuses_momentum = "c_i is the mean gradient of plain SGD steps; with momentum the displacement isn't K eta_l g"

    @property
    @override
    def needs_calls(self) -> tuple[str, ...]:
        return ("full_gradient",) if self.option == 1 else ()

    @override
    def start(self, received: ScaffoldBroadcast, state: Tensors | None) -> None:
        c = received.control
        self.c_i = zeros_like(c) if state is None else {n: state[n].to(c[n].device) for n in c}
        self.correction = {n: c[n] - self.c_i[n] for n in c}
        self.gradient_at_x: Tensors | None = None

    @override
    def prepare(self, full_gradient: FullGradient) -> None:
        self.gradient_at_x = full_gradient()

    @override
    def correct_gradients(self) -> None:
        if live := self.trainable:
            torch._foreach_add_([grad for _, _, grad in live], [self.correction[name] for name, _, _ in live])

    @override
    def finish(self) -> tuple[ScaffoldUpdate, Tensors]:
        if self.num_steps == 0:
            renewed: Tensors = self.c_i
        elif self.gradient_at_x is not None:
            at_x = self.with_decay(self.gradient_at_x, self.initial)
            renewed = {n: g.to(self.c_i[n].dtype) for n, g in at_x.items()}
        else:
            renewed = {n: self._mean_gradient(n, y.detach()) for n, y in self.params.items()}
        return ScaffoldUpdate({n: renewed[n] - self.c_i[n] for n in renewed}), renewed

    def _mean_gradient(self, name: str, y: torch.Tensor) -> torch.Tensor:
        c_i, lr_sum = self.c_i[name], self.lr_sums[name]
        if lr_sum == 0.0:
            return c_i  # this parameter took no step
        displacement = self.initial[name].to(c_i.dtype) - y.to(c_i.dtype)
        return displacement.div_(lr_sum).sub_(self.correction[name])  # in place: a new tensor each costs more than that
