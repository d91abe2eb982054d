"""Objectives with a term of their own, MOON's and FedNTD's: what they reduce to, and loops that leave them out."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedstrat import MOON, FedAvg, FedFV, FedLF, FedNTD
from fedstrat.errors import RuleError, RunFailedError
from fedstrat.strategies.fedntd import FedNTDRule, not_true_divergence
from fedstrat.strategies.moon import MOONRule, cosine
from tests.strategies import small
from tests.strategies.small import Recorder, bits

COMMON = {"seed": 3, "fraction_evaluate": 0.0}


# --- MOON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "settings", "rounds"),
    [(MOON, {"mu": 0.0}, 3), (MOON, {"mu": 5.0}, 1), (FedNTD, {"beta": 0.0}, 3)],
    ids=["no contrast", "no model before", "no distillation"],
)
def test_is_fedavg_bit_by_bit(algorithm: Any, settings: dict[str, Any], rounds: int) -> None:
    # With normalisation and dropout: the frozen models draw no random numbers and move no statistics.
    common = {**COMMON, "trainable": small.TRAINED}
    run = small.run(algorithm(**common, **settings), small.everything, rounds + 1, epochs=2)
    fedavg = small.run(FedAvg(**common), small.everything, rounds + 1, epochs=2)
    assert [bits(m) for m in run.models[: rounds + 1]] == [bits(m) for m in fedavg.models[: rounds + 1]]
    assert (bits(run.models[-1]) == bits(fedavg.models[-1])) == (rounds > 1)


def begun(rule: Any, model: nn.Module, state: Any = None) -> Any:
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rule.begin(params, {n: t for n, t in model.state_dict().items() if n not in params}, None, state)
    return rule


def gradient(rule: Any, model: nn.Module, at: Any = lambda model: None) -> np.ndarray:
    """Of the rule's objective minus cross-entropy, after the model was changed by ``at``."""
    (x, y), *_ = small.batches(1, None)
    parts = []
    rule.loss(model, x, y, cross_entropy)  # the received model is kept
    at(model)
    for loss in (lambda: rule.loss(model, x, y, cross_entropy), lambda: cross_entropy(model(x), y)):
        model.zero_grad()
        loss().backward()
        parts.append(np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]))
    return parts[0] - parts[1]


def shift(model: nn.Module) -> None:
    with torch.no_grad():
        for k, p in enumerate(p for p in model.parameters() if p.requires_grad):
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(k)))


def test_contrast_with_itself_has_no_slope() -> None:
    model = small.everything().eval()
    same = begun(MOONRule(mu=5.0, temperature=0.5), model).personal_model()
    assert np.abs(gradient(begun(MOONRule(mu=5.0, temperature=0.5), model, same), model, shift)).max() < 1e-6
    other = small.everything().eval()
    shift(other)
    state = begun(MOONRule(mu=5.0, temperature=0.5), other).personal_model()
    model = small.everything().eval()
    assert np.abs(gradient(begun(MOONRule(mu=5.0, temperature=0.5), model, state), model, shift)).max() > 1e-3


def test_contrast_is_bounded_and_frozen_models_are_at_rest() -> None:
    model, other, tau = small.everything(), small.everything(), 0.3
    shift(other)
    state = begun(MOONRule(mu=1.0, temperature=tau), other).personal_model()
    rule = begun(MOONRule(mu=1.0, temperature=tau), model, state)
    (x, y), *_ = small.batches(1, None)
    model.train()
    rule.loss(model, x, y, cross_entropy)
    assert model.training
    for frozen, of in zip(rule.frozen, (model, other), strict=True):
        assert not any(module.training for module in frozen.modules())
        assert not any(p.requires_grad for p in frozen.parameters())
        assert all(torch.equal(p, q) for p, q in zip(frozen.parameters(), of.parameters(), strict=True))
        assert not {p.data_ptr() for p in frozen.parameters()} & {p.data_ptr() for p in model.parameters()}
    model.eval()
    for k in range(5):
        shift(model)
        term = (rule.loss(model, k * x, y, cross_entropy) - cross_entropy(model(k * x), y)).item()
        assert math.log1p(math.exp(-2 / tau)) - 1e-6 <= term <= math.log1p(math.exp(2 / tau)) + 1e-6


def test_a_representation_of_length_zero_has_no_slope() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    s = cosine(z, torch.ones(2, 3))
    s.sum().backward()
    assert s.tolist() == [0.0, 0.0]
    assert not z.grad.any()


# --- FedNTD ----------------------------------------------------------------------------------------------------------


def test_two_classes_leave_nothing_to_distil() -> None:
    def two() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return nn.Linear(small.FEATURES, 2)

    def loader(client: int) -> small.Loader:
        return [(x, y % 2) for x, y in small.batches(client)]

    run, fedavg = (small.run(strategy(**COMMON), two, 3, loader=loader, epochs=2) for strategy in (FedNTD, FedAvg))
    assert np.abs(small.vector(run.models[-1]) - small.vector(fedavg.models[-1])).max() < 1e-6


def test_distillation_from_itself_has_no_slope() -> None:
    model = small.everything().eval()
    assert np.abs(gradient(begun(FedNTDRule(beta=3.0, temperature=0.7), model), model)).max() < 1e-6
    assert np.abs(gradient(begun(FedNTDRule(beta=3.0, temperature=0.7), model), model, shift)).max() > 1e-3


def test_the_true_class_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, q_g = (torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.arange(7) % 5
    value = not_true_divergence(q.requires_grad_(), q_g, labels, 0.7)
    value.backward()
    rows = torch.arange(7)
    assert not q.grad[rows, labels].any()
    assert q.grad.abs().sum() > 0.1
    total = 0.0
    for b in rows.tolist():
        p, p_g = (np.exp(np.delete(t[b].detach().numpy(), labels[b]) / 0.7) for t in (q, q_g))
        p, p_g = p / p.sum(), p_g / p_g.sum()
        total += float(p_g @ np.log(p_g / p))
    assert value.item() == pytest.approx(0.7**2 * total / 7)


@pytest.mark.parametrize("labels", [torch.zeros(4, 3), torch.zeros(4), torch.zeros(3, dtype=torch.int64)], ids=str)
def test_labels_that_are_no_classes_are_named(labels: torch.Tensor) -> None:
    with pytest.raises(RuleError, match=r"integer labels of shape \(batch,\)"):
        not_true_divergence(torch.zeros(4, 3), torch.zeros(4, 3), labels, 1.0)


# --- loops of one's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [MOON, FedNTD])
def test_a_loop_that_leaves_the_objective_out_is_told(algorithm: Any) -> None:
    def plain(session: Any, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))

    def late(session: Any, model: nn.Module, client: int) -> None:
        plain(session, model, client)
        session.loss(*small.batches(client)[0], cross_entropy)

    for steps in (plain, late):
        with pytest.raises(RunFailedError, match=r"session\.loss\(x, y, loss_fn\)"):
            small.start(algorithm(**COMMON), Recorder(small.own_loop(small.convex, steps)), small.convex, 1)


@pytest.mark.parametrize("algorithm", [FedFV, FedLF])
def test_a_loop_that_leaves_the_loss_at_x_out_is_told(algorithm: Any) -> None:
    def plain(session: Any, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))

    with pytest.raises(RunFailedError, match=r"session\.loss_before\(loader, loss_fn\)"):
        small.start(algorithm(**COMMON), Recorder(small.own_loop(small.convex, plain)), small.convex, 1)


def test_a_model_without_a_split_is_told() -> None:
    def bare() -> nn.Module:
        return nn.Linear(small.FEATURES, small.CLASSES)

    with pytest.raises(RunFailedError, match=r"features\(x\) and classify\(z\)"):
        small.run(MOON(**COMMON), bare, 1)
