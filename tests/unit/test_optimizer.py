"""RuleOptimizer: the order inside a step, closures, what each rule refuses, and the two passes of the SAM family.

Expected numbers are worked out in NumPy or by hand next to them.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstrat.errors import RuleError
from fedstrat.local.optimizer import RuleOptimizer
from fedstrat.local.rule import LocalRule
from fedstrat.strategies.fedavg import FedAvgRule
from fedstrat.strategies.fedprox import FedProxRule
from fedstrat.strategies.fedsam import FedSAMRule
from fedstrat.strategies.fedvssam import FedVSSAMBroadcast, FedVSSAMRule
from fedstrat.strategies.mofedsam import MoFedSAMBroadcast, MoFedSAMRule
from fedstrat.strategies.scaffold import ScaffoldBroadcast, ScaffoldRule

SGD = torch.optim.SGD
Params = dict[str, nn.Parameter]


def parameters(**values: Any) -> Params:
    return {name: nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in values.items()}


def tensors(**values: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def begun(rule: LocalRule[Any, Any], params: Params, received: Any = None, state: Any = None) -> LocalRule[Any, Any]:
    rule.begin(params, {}, received, state)
    return rule


def scaffold(
    params: Params, c: dict[str, torch.Tensor], c_i: dict[str, torch.Tensor] | None = None
) -> LocalRule[Any, Any]:
    return begun(ScaffoldRule(option=2), params, ScaffoldBroadcast(c), c_i)


def fedvssam(params: Params, h: dict[str, torch.Tensor], rho: float = 0.1, **switches: str) -> LocalRule[Any, Any]:
    rule = FedVSSAMRule(rho=rho, gamma_l=0.4, **{"perturb": "mixed", "update": "mixed", **switches})
    return begun(rule, params, FedVSSAMBroadcast(h))


def optimizer(rule: LocalRule[Any, Any], lr: float = 0.1, momentum: float = 0.0, **options: Any) -> RuleOptimizer:
    return RuleOptimizer(SGD(rule.params.values(), lr=lr, momentum=momentum), rule, **options)


def linear(params: Params, **slopes: Any) -> Callable[[], torch.Tensor]:
    """A loss whose gradient is the slopes, everywhere."""
    return lambda: sum((torch.tensor(s, dtype=torch.float64) * params[n]).sum() for n, s in slopes.items())


def values(params: Params) -> dict[str, list[float]]:
    return {n: p.detach().flatten().tolist() for n, p in params.items()}


# --- the order inside a step -------------------------------------------------------------------------------


def test_decay_then_clip_then_correction_then_step():
    # y = (0, 2), g = (6, 6), lambda = 1: g + lambda y = (6, 8) of norm 10, clipped to norm 5 = (3, 4),
    # c - c_i = (1, 1) - (0, 2) = (1, -1): (4, 3), and y - 0.1 (4, 3) = (-0.4, 1.7).
    params = parameters(w=[0.0, 2.0])
    rule = scaffold(params, tensors(w=[1.0, 1.0]), tensors(w=[0.0, 2.0]))
    optimizer(rule, weight_decay=1.0, clip_norm=5.0).step(linear(params, w=[6.0, 6.0]))
    assert values(params)["w"] == pytest.approx([-0.4, 1.7], abs=1e-12)


def test_clipping_takes_one_norm_over_all_parameters():
    # (3, 0) and (4): norm 5, to 1: (0.6, 0), (0.8)
    params = parameters(a=[0.0, 0.0], b=[0.0])
    optimizer(begun(FedAvgRule(), params), lr=1.0, clip_norm=1.0).step(linear(params, a=[3.0, 0.0], b=[4.0]))
    assert values(params)["a"] == pytest.approx([-0.6, 0.0], abs=1e-12)
    assert values(params)["b"] == pytest.approx([-0.8], abs=1e-12)


@pytest.mark.parametrize("slope", [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
def test_a_gradient_within_the_bound_stays_as_it_is(slope: list[float]):
    params = parameters(w=[0.0, 0.0])
    optimizer(begun(FedAvgRule(), params), lr=1.0, clip_norm=5.0).step(linear(params, w=slope))
    assert values(params)["w"] == [-s for s in slope]


def test_the_proximal_term_comes_after_clipping():
    # Step 1 at y = x moves by -0.1 * 1 (clipped from 10); step 2: clipped 1 + mu (y - x) = 1 - 0.5 * 0.1 = 0.95.
    params = parameters(w=[2.0])
    opt = optimizer(begun(FedProxRule(mu=0.5, gamma=0.0), params), clip_norm=1.0)
    opt.step(linear(params, w=[10.0]))
    assert values(params)["w"] == pytest.approx([1.9], abs=1e-12)
    opt.step(linear(params, w=[10.0]))
    assert values(params)["w"] == pytest.approx([1.9 - 0.095], abs=1e-12)


def test_sgd_s_own_weight_decay_is_taken_over_by_group():
    # SGD would add it after the clip and the correction. a decays by 1, b by 0: (1 + 2) and 1, then c - c_i = 0.5.
    params = parameters(a=[2.0], b=[2.0])
    rule = scaffold(params, tensors(a=[0.5], b=[0.5]))
    base = SGD([{"params": [params["a"]], "weight_decay": 1.0}, {"params": [params["b"]]}], lr=0.1)
    RuleOptimizer(base, rule).step(linear(params, a=[1.0], b=[1.0]))
    assert values(params) == {"a": pytest.approx([2 - 0.35]), "b": pytest.approx([2 - 0.15])}
    assert [group["weight_decay"] for group in base.param_groups] == [0.0, 0.0]


def test_steps_and_rates_are_counted():
    params = parameters(w=[0.0])
    rule = begun(FedAvgRule(), params)
    opt = optimizer(rule)
    for lr in (0.1, 0.2, 0.05):
        opt.param_groups[0]["lr"] = lr
        opt.step(linear(params, w=[1.0]))
    assert rule.num_steps == 3
    assert rule.lr_sum == pytest.approx(0.35)
    assert values(params)["w"] == pytest.approx([-0.35])


# --- closures, and steps without one ---------------------------------------------------------------------


RULES: dict[str, Callable[[Params], LocalRule[Any, Any]]] = {
    "fedavg": lambda p: begun(FedAvgRule(), p),
    "fedprox": lambda p: begun(FedProxRule(mu=0.1, gamma=0.0), p),
    "scaffold": lambda p: scaffold(p, tensors(w=[0.5, 0.5])),
    "fedsam": lambda p: begun(FedSAMRule(rho=0.1), p),
    "mofedsam": lambda p: begun(MoFedSAMRule(rho=0.1, alpha=0.1), p, MoFedSAMBroadcast(tensors(w=[0.5, 0.5]))),
    "fedvssam": lambda p: fedvssam(p, tensors(w=[0.5, 0.5])),
}
ONE_PASS = ["fedavg", "fedprox", "scaffold"]
TWO_PASS = ["fedsam", "mofedsam", "fedvssam"]


def quadratic(params: Params) -> torch.Tensor:
    return (torch.tensor([1.0, 3.0], dtype=torch.float64) * params["w"] ** 2).sum() / 2


@pytest.mark.parametrize("name", RULES)
def test_a_closure_may_call_backward_itself_or_leave_it_to_us(name: str):
    ends = []
    for calls_backward in (False, True):
        params = parameters(w=[1.0, -2.0])
        opt = optimizer(RULES[name](params))
        first = []

        def closure(params: Params = params, calls: bool = calls_backward, first: list[float] = first) -> torch.Tensor:
            loss = quadratic(params)
            first.append(loss.item())
            if calls:
                loss.backward()
            return loss

        for _ in range(3):
            params["w"].grad = torch.full((2,), 100.0, dtype=torch.float64)  # of an earlier step: cleared first
            returned = opt.step(closure)
        assert returned.item() == first[-1 if name in ONE_PASS else -2]  # the loss at y, not at the perturbed weights
        assert len(first) == (3 if name in ONE_PASS else 6)
        ends.append(values(params)["w"])
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", RULES)
def test_a_closure_that_called_backward_may_return_a_float(name: str):
    params = parameters(w=[1.0, -2.0])

    def closure() -> float:
        loss = quadratic(params)
        loss.backward()
        return loss.item()

    # (1 * 1 + 3 * 4) / 2
    assert optimizer(RULES[name](params)).step(closure) == 6.5


@pytest.mark.parametrize("returned", [None, 1.0, torch.tensor(1.0)])
def test_a_closure_that_brings_no_gradient_is_an_error(returned: Any):
    params = parameters(w=[1.0, -2.0])
    with pytest.raises(RuleError, match=r"expected the closure to return the loss, or to call loss\.backward"):
        optimizer(RULES["fedavg"](params)).step(lambda: returned)
    assert values(params)["w"] == [1.0, -2.0]


@pytest.mark.parametrize("name", ONE_PASS)
def test_rules_of_one_pass_take_a_step_after_backward(name: str):
    one, two = parameters(w=[1.0, -2.0]), parameters(w=[1.0, -2.0])
    with_closure, without = optimizer(RULES[name](one)), optimizer(RULES[name](two))
    for _ in range(3):
        with_closure.step(lambda: quadratic(one))
        without.zero_grad()
        quadratic(two).backward()
        assert without.step() is None
    assert values(one) == values(two)
    assert without.rule.num_steps == 3


def test_gradients_accumulate_until_the_step():
    # Two halves of a batch: 0.5 * 2 + 0.5 * 4 = 3, + c - c_i = 0.5
    params = parameters(w=[0.0, 0.0])
    opt = optimizer(RULES["scaffold"](params))
    for slope in (2.0, 4.0):
        (linear(params, w=[slope, slope])() * 0.5).backward()
    opt.step()
    assert values(params)["w"] == pytest.approx([-0.35, -0.35])
    assert opt.rule.num_steps == 1


@pytest.mark.parametrize("name", TWO_PASS)
def test_rules_of_two_passes_refuse_a_step_without_closure(name: str):
    params = parameters(w=[1.0, -2.0])
    opt = optimizer(RULES[name](params))
    quadratic(params).backward()
    with pytest.raises(RuleError, match=r"evaluates each batch twice; call optimizer\.step\(lambda"):
        opt.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(quadratic(params)).backward()
    with pytest.raises(RuleError, match="without a GradScaler"):
        scaler.step(opt)
    assert values(params)["w"] == [1.0, -2.0]
    assert opt.rule.num_steps == 0


def test_a_grad_scaler_unscales_first_and_a_skipped_step_does_not_count():
    params = parameters(w=[1.0, -2.0])
    rule = RULES["scaffold"](params)
    opt = optimizer(rule, weight_decay=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor, expected in ((math.inf, [1.0, -2.0]), (1.0, [1 - 0.1 * (1 + 0.5 + 0.5), -2 - 0.1 * (-6 - 1 + 0.5)])):
        opt.zero_grad()
        scaler.scale(quadratic(params) * factor).backward()
        scaler.step(opt)
        scaler.update()
        assert values(params)["w"] == pytest.approx(expected)
    assert rule.num_steps == 1
    assert rule.lr_sum == pytest.approx(0.1)


# --- what rules refuse -----------------------------------------------------------------------------------

BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "momentum in one group": lambda p: SGD([{"params": list(p)}, {"params": [], "momentum": 0.9}], lr=0.1),
    "maximize": lambda p: SGD(p, lr=0.1, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ["scaffold", "mofedsam", "fedvssam"])
def test_rules_that_read_the_displacement_refuse_other_optimizers_with_the_reason(name: str, base: str):
    params = parameters(w=[1.0, -2.0])
    with pytest.raises(RuleError, match=r"needs torch\.optim\.SGD without momentum, but got .*: (c_i|h) is the mean"):
        RuleOptimizer(BASES[base](params.values()), RULES[name](params))


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedsam"])
@pytest.mark.parametrize("base", ["momentum", "Adam"])
def test_the_others_take_them_and_step_as_they_do(name: str, base: str):
    params, plain = parameters(w=[1.0, -2.0]), parameters(w=[1.0, -2.0])
    opt, alone = RuleOptimizer(BASES[base](params.values()), RULES[name](params)), BASES[base](plain.values())
    for _ in range(3):
        opt.step(lambda: quadratic(params))
        y = plain["w"].detach()
        g = y * torch.tensor([1.0, 3.0])
        if name == "fedprox":
            g = g + 0.1 * (y - torch.tensor([1.0, -2.0]))
        if name == "fedsam":
            g = (y + 0.1 * g / g.norm()) * torch.tensor([1.0, 3.0])
        plain["w"].grad = g
        alone.step()
    assert values(params)["w"] == pytest.approx(values(plain)["w"], abs=1e-12)


@pytest.mark.parametrize("name", ["mofedsam", "fedvssam"])
def test_groups_of_different_rates_are_refused_where_the_server_divides(name: str):
    params = parameters(w=[1.0, -2.0], v=[1.0])
    received = tensors(w=[0.0, 0.0], v=[0.0])
    make = {"mofedsam": lambda: begun(MoFedSAMRule(0.1, 0.1), params, MoFedSAMBroadcast(received))}
    rule = make.get(name, lambda: fedvssam(params, received))()
    base = SGD([{"params": [params["w"]]}, {"params": [params["v"]], "lr": 0.2}], lr=0.1)
    with pytest.raises(RuleError, match=r"one learning rate.*\[0\.1, 0\.2\]"):
        RuleOptimizer(base, rule)


@pytest.mark.parametrize("name", ["mofedsam", "fedvssam"])
def test_rates_that_part_later_are_refused_too(name: str):
    params = parameters(w=[1.0, -2.0], v=[1.0])
    received = tensors(w=[0.0, 0.0], v=[0.0])
    make = {"mofedsam": lambda: begun(MoFedSAMRule(0.1, 0.1), params, MoFedSAMBroadcast(received))}
    rule = make.get(name, lambda: fedvssam(params, received))()
    opt = RuleOptimizer(SGD([{"params": [params["w"]]}, {"params": [params["v"]]}], lr=0.1), rule)
    opt.step(lambda: quadratic(params) + params["v"].sum())
    opt.param_groups[1]["lr"] = 0.2  # as a scheduler with a function per group does
    with pytest.raises(RuleError, match="one learning rate"):
        opt.step(lambda: quadratic(params) + params["v"].sum())


def test_scaffold_divides_each_parameter_by_its_own_rates():
    # Raw gradients 3 and 5 at rates 0.1 and 0.2, two steps, the second at half the rate: c_i+ is the mean gradient.
    params = parameters(a=[0.0], b=[0.0])
    rule = scaffold(params, tensors(a=[0.5], b=[-0.5]), tensors(a=[1.0], b=[2.0]))
    opt = RuleOptimizer(SGD([{"params": [params["a"]]}, {"params": [params["b"]], "lr": 0.2}], lr=0.1), rule)
    for factor in (1.0, 0.5):
        for group in opt.param_groups:
            group["lr"] *= factor
        opt.step(linear(params, a=[3.0], b=[5.0]))
    sent, renewed = rule.finish()
    assert {n: t.item() for n, t in renewed.items()} == {"a": pytest.approx(3.0), "b": pytest.approx(5.0)}
    assert {n: t.item() for n, t in sent.control_delta.items()} == {"a": pytest.approx(2.0), "b": pytest.approx(3.0)}


def test_an_optimizer_of_another_model_or_of_a_part_is_refused():
    params, other = parameters(w=[1.0, -2.0], v=[1.0]), parameters(w=[1.0, -2.0])
    with pytest.raises(RuleError, match="a parameter that the session's model doesn't have"):
        RuleOptimizer(SGD(other.values(), lr=0.1), begun(FedAvgRule(), params))
    rule = scaffold(params, tensors(w=[0.0, 0.0], v=[0.0]))
    with pytest.raises(RuleError, match=r"acts on every trainable parameter, but the optimizer lacks \['v'\]"):
        RuleOptimizer(SGD([params["w"]], lr=0.1), rule)
    RuleOptimizer(SGD([params["w"]], lr=0.1), begun(FedAvgRule(), params)).step(lambda: quadratic(params))


# --- parameters outside of the batch's graph -------------------------------------------------------------


def test_a_parameter_that_the_batch_does_not_reach_gets_scaffold_s_correction():
    # u isn't in the loss: its raw gradient is 0, c - c_i = 2 - 0.5 moves it by -0.15 a step, and c_i+ = 0.
    params = parameters(w=[1.0, -2.0], u=[1.0])
    rule = scaffold(params, tensors(w=[0.0, 0.0], u=[2.0]), tensors(w=[0.0, 0.0], u=[0.5]))
    opt = optimizer(rule)
    for _ in range(2):
        opt.step(lambda: quadratic(params))
    assert values(params)["u"] == pytest.approx([0.7])
    assert rule.finish()[1]["u"].item() == pytest.approx(0.0, abs=1e-12)


def test_a_frozen_parameter_stays():
    params = parameters(w=[1.0, -2.0])
    frozen = nn.Parameter(torch.tensor([5.0]), requires_grad=False)
    rule = begun(FedSAMRule(rho=0.1), params)
    opt = RuleOptimizer(SGD([*params.values(), frozen], lr=0.1, weight_decay=0.1), rule)
    opt.step(lambda: quadratic(params) * frozen[0].double())
    assert frozen.item() == 5.0


# --- two passes ------------------------------------------------------------------------------------------

A, Y = np.array([1.0, 3.0]), np.array([1.0, -2.0])  # f = sum a y^2 / 2, gradient a y
B, Z = 2.0, 0.5  # and another tensor: + b z^2 / 2


def two(params: Params) -> torch.Tensor:
    return quadratic(params) + B * (params["z"] ** 2).sum() / 2


def gradient(y: np.ndarray) -> np.ndarray:
    """Of both tensors as one vector (w, z)."""
    return np.array([*A, B]) * y


def whole() -> Params:
    return parameters(w=Y.tolist(), z=[Z])


def vector(params: Params) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in params.values()])


START = np.array([*Y, Z])
H = np.array([0.5, -1.0, 2.0])
DIRECTION = {"w": torch.tensor(H[:2]), "z": torch.tensor(H[2:])}


@pytest.mark.parametrize("rho", [0.0, 0.1, 2.0])
def test_fedsam_takes_the_gradient_at_the_perturbed_weights_with_one_norm_over_all_tensors(rho: float):
    params = whole()
    optimizer(begun(FedSAMRule(rho=rho), params)).step(lambda: two(params))
    g = gradient(START)
    assert vector(params) == pytest.approx(START - 0.1 * gradient(START + rho * g / np.linalg.norm(g)), abs=1e-12)


@pytest.mark.parametrize(("weight_decay", "clip_norm"), [(0.0, 0.0), (0.5, 0.0), (0.5, 2.0)])
def test_mofedsam_mixes_h_into_the_step_only(weight_decay: float, clip_norm: float):
    params = whole()
    rule = begun(MoFedSAMRule(rho=0.3, alpha=0.2), params, MoFedSAMBroadcast(DIRECTION))
    optimizer(rule, weight_decay=weight_decay, clip_norm=clip_norm).step(lambda: two(params))
    g = gradient(START)
    sharp = gradient(START + 0.3 * g / np.linalg.norm(g)) + weight_decay * START
    if clip_norm:
        sharp *= clip_norm / np.linalg.norm(sharp)
    assert vector(params) == pytest.approx(START - 0.1 * (0.2 * sharp + 0.8 * H), abs=1e-11)


@pytest.mark.parametrize("perturb", ["mixed", "gradient"])
@pytest.mark.parametrize("update", ["mixed", "gradient"])
@pytest.mark.parametrize(("weight_decay", "clip_norm"), [(0.0, 0.0), (0.5, 2.0)])
def test_fedvssam_by_hand(perturb: str, update: str, weight_decay: float, clip_norm: float):
    params = whole()
    rule = fedvssam(params, DIRECTION, rho=0.3, perturb=perturb, update=update)
    optimizer(rule, weight_decay=weight_decay, clip_norm=clip_norm).step(lambda: two(params))
    g = gradient(START)
    b = 0.6 * H + 0.4 * g if perturb == "mixed" else g
    sharp = gradient(START + 0.3 * b / np.linalg.norm(b)) + weight_decay * START
    if clip_norm:
        sharp *= clip_norm / np.linalg.norm(sharp)
    u = 0.6 * H + 0.4 * sharp if update == "mixed" else sharp
    assert vector(params) == pytest.approx(START - 0.1 * u, abs=1e-11)


def test_fedvssam_s_direction_counts_parameters_that_the_batch_does_not_reach():
    # z isn't in the loss: g_z = 0 but b_z = 0.6 h_z, which belongs to |b|, and u_z = 0.6 h_z.
    params = whole()
    optimizer(fedvssam(params, DIRECTION, rho=0.3)).step(lambda: quadratic(params))
    g = np.array([*(A * Y), 0.0])
    b = 0.6 * H + 0.4 * g
    sharp = np.array([*A, 0.0]) * (START + 0.3 * b / np.linalg.norm(b))
    assert vector(params) == pytest.approx(START - 0.1 * (0.6 * H + 0.4 * sharp), abs=1e-11)


@pytest.mark.parametrize("name", TWO_PASS)
def test_weights_come_back_bit_for_bit(name: str):
    torch.manual_seed(0)
    before = torch.randn(1000) * torch.logspace(-3, 3, 1000)
    params = {"w": nn.Parameter(before.clone())}
    h = {"w": torch.randn(1000)}
    make: dict[str, Callable[[], LocalRule[Any, Any]]] = {
        "fedsam": lambda: begun(FedSAMRule(rho=0.05), params),
        "mofedsam": lambda: begun(MoFedSAMRule(0.05, 0.1), params, MoFedSAMBroadcast(h)),
        "fedvssam": lambda: fedvssam(params, h, rho=0.05),
    }
    seen = []

    def closure() -> torch.Tensor:
        seen.append(params["w"].detach().clone())
        return params["w"].square().sum()

    optimizer(make[name](), lr=0.0).step(closure)
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(params["w"], before)


def test_weights_come_back_when_the_second_pass_fails():
    params = whole()
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return two(params)

    with pytest.raises(ZeroDivisionError):
        optimizer(begun(FedSAMRule(rho=0.5), params)).step(closure)
    assert vector(params).tolist() == START.tolist()


@pytest.mark.parametrize("rho", [0.0, 0.1])
@pytest.mark.parametrize("name", TWO_PASS)
def test_a_zero_gradient_brings_no_nan(name: str, rho: float):
    params = parameters(w=[0.0, 0.0])
    zero = tensors(w=[0.0, 0.0])
    make: dict[str, Callable[[], LocalRule[Any, Any]]] = {
        "fedsam": lambda: begun(FedSAMRule(rho=rho), params),
        "mofedsam": lambda: begun(MoFedSAMRule(rho, 0.1), params, MoFedSAMBroadcast(zero)),
        "fedvssam": lambda: fedvssam(params, zero, rho=rho),
    }
    optimizer(make[name](), clip_norm=1.0).step(lambda: quadratic(params))
    assert values(params)["w"] == [0.0, 0.0]


def test_rho_0_is_plain_training_to_the_bit_at_the_price_of_one_pass():
    plain, sharp = parameters(w=[0.1, -2.0]), parameters(w=[0.1, -2.0])
    passes = []
    one, other = optimizer(begun(FedAvgRule(), plain)), optimizer(begun(FedSAMRule(rho=0.0), sharp))
    for _ in range(5):
        one.step(lambda: quadratic(plain))
        other.step(lambda: [passes.append(1), quadratic(sharp)][1])
    assert values(plain) == values(sharp)
    assert len(passes) == 5


def batch_norm_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))


def sam_step(model: nn.Module, closure: Callable[[], torch.Tensor], rho: float = 0.5) -> None:
    rule = begun(FedSAMRule(rho=rho), dict(model.named_parameters()))
    optimizer(rule, buffers=list(model.buffers())).step(closure)


def test_running_statistics_are_those_after_the_first_pass():
    model = batch_norm_model()
    once = copy.deepcopy(model)
    x = torch.randn(8, 4)
    once(x)
    sam_step(model, lambda: model(x).square().sum())
    assert torch.equal(model[1].running_mean, once[1].running_mean)
    assert torch.equal(model[1].running_var, once[1].running_var)
    assert model[1].num_batches_tracked.item() == 1
    assert not torch.equal(model[0].weight, once[0].weight)


def test_both_passes_see_the_same_dropout_masks_and_the_next_batch_others():
    model = nn.Sequential(nn.Linear(1, 64), nn.Dropout(0.5))
    masks = []

    def closure() -> torch.Tensor:
        out = model(torch.ones(3, 1))
        masks.append((out != 0).tolist())
        return out.square().sum()

    torch.manual_seed(5)
    sam_step(model, closure)
    sam_step(model, closure)
    assert masks[0] == masks[1]
    assert masks[2] == masks[3]
    assert masks[0] != masks[2]
    # The random numbers drawn are those of plain training: a step of SAM doesn't shift what comes after it.
    after = torch.rand(3)
    torch.manual_seed(5)
    closure()
    closure()
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("where", ["around the model", "around the step"])
def test_sam_under_bf16_autocast(where: str):
    torch.manual_seed(0)
    model, x, rho = nn.Linear(6, 3), torch.randn(5, 6), 3.0
    twin = copy.deepcopy(model)

    def loss(of: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return of(x).float().square().sum()

    rule = begun(FedSAMRule(rho=rho), dict(model.named_parameters()))
    opt = optimizer(rule, lr=0.01)
    if where == "around the model":
        opt.step(lambda: loss(model))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            opt.step(lambda: model(x).float().square().sum())

    start = [p.detach().clone() for p in twin.parameters()]
    g = torch.autograd.grad(loss(twin), list(twin.parameters()))
    norm = torch.cat([t.flatten() for t in g]).norm()
    with torch.no_grad():
        for p, t in zip(twin.parameters(), g, strict=True):
            p.add_(rho * t / norm)
    sharp = torch.autograd.grad(loss(twin), list(twin.parameters()))
    for p, s, t in zip(model.parameters(), start, sharp, strict=True):
        assert torch.allclose(p, s - 0.01 * t, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(g[0], sharp[0], rtol=0.1)  # the perturbation shows at all


# --- a torch Optimizer among torch's own tools -------------------------------------------------------------


def test_a_scheduler_of_torch_drives_the_base_and_the_count():
    params = parameters(w=[0.0])
    rule = begun(FedAvgRule(), params)
    opt = optimizer(rule)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for _ in range(3):
        opt.step(linear(params, w=[1.0]))
        scheduler.step()
    assert rule.lr_sum == pytest.approx(0.1 + 0.05 + 0.025)
    assert values(params)["w"] == pytest.approx([-0.175])


def test_it_is_a_torch_optimizer_that_shares_groups_and_state_with_its_base():
    params = parameters(w=[1.0, -2.0])
    base = SGD(params.values(), lr=0.1, momentum=0.9)
    opt = RuleOptimizer(base, begun(FedAvgRule(), params))
    assert isinstance(opt, torch.optim.Optimizer)
    opt.step(lambda: quadratic(params))
    assert opt.param_groups is base.param_groups
    assert "momentum_buffer" in opt.state[params["w"]]


def test_state_dict_continues_where_it_was_saved():
    params, fresh = parameters(w=[1.0, -2.0]), parameters(w=[1.0, -2.0])
    opt = optimizer(begun(FedAvgRule(), params), momentum=0.9)
    for _ in range(2):
        opt.step(lambda: quadratic(params))
    with torch.no_grad():
        fresh["w"].copy_(params["w"])
    opt.param_groups[0]["lr"] = 0.05
    loaded = optimizer(begun(FedAvgRule(), fresh), lr=0.3, momentum=0.9)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(2):
        opt.step(lambda: quadratic(params))
        loaded.step(lambda: quadratic(fresh))
    assert values(params) == values(fresh)
    # The groups are still shared with the base: a rate set now counts.
    loaded.param_groups[0]["lr"] = 0.0
    before = values(fresh)
    loaded.step(lambda: quadratic(fresh))
    assert values(fresh) == before
    assert loaded.rule.lr_sum == pytest.approx(0.1)


@pytest.mark.parametrize("lr", [None, 0.5])
def test_a_group_added_later_takes_part(lr: float | None):
    params = parameters(a=[1.0], b=[1.0])
    opt = RuleOptimizer(SGD([params["a"]], lr=0.1), begun(FedAvgRule(), params), weight_decay=1.0)
    opt.add_param_group({"params": [params["b"]]} | ({} if lr is None else {"lr": lr}))
    opt.step(linear(params, a=[1.0], b=[1.0]))
    # gradient 1 + decay 1
    assert values(params) == {"a": pytest.approx([0.8]), "b": pytest.approx([1 - 2 * (lr or 0.1)])}
    assert opt.rule.lr_sums == {"a": 0.1, "b": lr or 0.1}


def test_zero_grad_clears_or_zeroes():
    params = parameters(w=[1.0, -2.0])
    opt = optimizer(begun(FedAvgRule(), params))
    quadratic(params).backward()
    opt.zero_grad(set_to_none=False)
    assert params["w"].grad.tolist() == [0.0, 0.0]
    opt.zero_grad()
    assert params["w"].grad is None
