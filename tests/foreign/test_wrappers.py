"""Flower's differential-privacy wrappers and its mods: what runs under them, and that everything else is refused."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import (
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

import fedstrat
from fedstrat import CRAFT, MOON, FedAvg, FedNTD, FedProx, FedSAM
from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS
from tests.strategies import small

NODES = 3
WRAPPERS: dict[str, Callable[[Any, float], Any]] = {
    "server fixed": lambda s, noise: DifferentialPrivacyServerSideFixedClipping(s, noise, 0.05, NODES),
    "server adaptive": lambda s, noise: DifferentialPrivacyServerSideAdaptiveClipping(
        s, noise, NODES, 0.05, clipped_count_stddev=0.0
    ),
    "client fixed": lambda s, noise: DifferentialPrivacyClientSideFixedClipping(s, noise, 0.05, NODES),
    "client adaptive": lambda s, noise: DifferentialPrivacyClientSideAdaptiveClipping(
        s, noise, NODES, 0.05, clipped_count_stddev=0.0
    ),
}
MODS = {"client fixed": [fixedclipping_mod], "client adaptive": [adaptiveclipping_mod]}
AVERAGES = {"fedavg", "fedprox", "fedsam", "moon", "fedntd"}
ONE_RECORD = sorted(
    name
    for name, entry in ALGORITHMS.items()
    if entry.rule.receives is None and entry.rule.sends_model and name not in AVERAGES
)


def app(model: Callable[[], torch.nn.Module] = small.convex, mods: Any = (), examples: int | None = 8) -> ClientApp:
    """Clients of 8 examples each, unless all are asked for."""
    inner = small.client_app(model, lambda client: small.batches(client, examples=examples))
    outer = ClientApp(mods=list(mods))

    @outer.train()
    def train(msg: Message, context: Context) -> Message:
        return inner(msg, context)

    @outer.query()
    def query(msg: Message, context: Context) -> Message:
        return inner(msg, context)

    return outer


def run(strategy: Any, clients: ClientApp, model: Callable[[], torch.nn.Module] = small.convex, rounds: int = 3) -> Any:
    return strategy.start(InProcessGrid(clients, NODES), small.initial(model), num_rounds=rounds)


# --- what works --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("algorithm", [FedAvg, FedProx, FedSAM, FedNTD, MOON])
def test_averages_of_equal_weights_work_under_every_wrapper(kind: str, algorithm: Any) -> None:
    result = run(WRAPPERS[kind](algorithm(fraction_evaluate=0.0), 0.0), app(mods=MODS.get(kind, ())))
    start = small.vector(small.initial(small.convex))
    moved = np.linalg.norm(small.vector(result.arrays) - start)
    assert 0 < moved < 3 * 0.05 * (1 + 1e-5) * (1.8 if "adaptive" in kind else 1)  # three steps, each clipped


@pytest.mark.parametrize("kind", WRAPPERS)
def test_our_fedavg_under_a_wrapper_is_flowers(kind: str) -> None:
    ours, theirs = (
        run(WRAPPERS[kind](s(fraction_evaluate=0.0), 0.0), replying_plainly(MODS.get(kind, ())))
        for s in (FedAvg, FlowerFedAvg)
    )
    np.testing.assert_allclose(small.vector(ours.arrays), small.vector(theirs.arrays), atol=1e-6)


def replying_plainly(mods: Any) -> ClientApp:
    """A Flower client of somebody else, whose weight is always 1."""
    client = ClientApp(mods=list(mods))

    @client.train()
    def train(msg: Message, context: Context) -> Message:
        model = small.convex()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in small.batches(small.client_of(context)):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            sgd.step()
        content = RecordDict({"arrays": fedstrat.to_arrays(model), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    return client


def test_the_noise_of_a_wrapper_stays_in_the_model() -> None:
    np.random.seed(0)
    noisy = run(WRAPPERS["server fixed"](FedAvg(fraction_evaluate=0.0), 30.0), app())
    plain = run(WRAPPERS["server fixed"](FedAvg(fraction_evaluate=0.0), 0.0), app())
    gap = small.vector(noisy.arrays) - small.vector(plain.arrays)
    # Three rounds of noise of deviation 30 * 0.05 / 3, each begun where the last noise left the model.
    assert 0.5 * np.sqrt(3) * 0.5 < gap.std() < 2 * np.sqrt(3) * 0.5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_size_mods_work_with_everything(name: str, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ALGORITHMS[name].strategy
    with caplog.at_level(logging.INFO, "flwr"):
        logging.getLogger("flwr").propagate = True
        sized = run(strategy(fraction_evaluate=0.0, seed=1), app(mods=[message_size_mod, arrays_size_mod]), rounds=2)
    plain = run(strategy(fraction_evaluate=0.0, seed=1), app(), rounds=2)
    assert small.bits(sized.arrays) == small.bits(plain.arrays)


def test_local_differential_privacy_works_with_fedavg() -> None:
    np.random.seed(0)
    result = run(FedAvg(fraction_evaluate=0.0), app(mods=[LocalDpMod(0.05, 0.01, 50.0, 1e-5)]))
    moved = np.linalg.norm(small.vector(result.arrays) - small.vector(small.initial(small.convex)))
    assert 0 < moved < 3 * 0.05 + 0.1


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - AVERAGES))
def test_every_other_step_is_refused_before_anything_is_sent(name: str, kind: str) -> None:
    grid = InProcessGrid(app(mods=MODS.get(kind, ())), NODES)
    wrapped = WRAPPERS[kind](ALGORITHMS[name].strategy(fraction_evaluate=0.0), 0.0)
    cls = ALGORITHMS[name].strategy.__name__
    with pytest.raises(ConfigError, match=rf"^{cls} can't run under DifferentialPrivacy.*: its server step isn't the"):
        wrapped.start(grid, small.initial(small.convex), num_rounds=1)
    assert not any(context.state for context in grid.contexts.values())


def test_a_step_of_ones_own_is_refused_until_it_says_that_it_averages() -> None:
    class Bold(FedAvg):
        def aggregate(self, state: Any, updates: Any) -> Any:
            return super().aggregate(state, updates)

    class Sure(Bold):
        refuses_privacy = None

    class Median:
        def aggregate(self, state: Any, updates: Any) -> Any:
            return state

    class Mixed(Median, FedAvg):  # type: ignore[misc]
        pass

    class Sworn(Mixed):
        steps_by_mean = True

    class Same(FedAvg):
        pass

    assert FedAvg.refuses_privacy is None
    assert "isn't the plain mean" in str(Bold.refuses_privacy)
    assert Sure.refuses_privacy is None
    assert "isn't the plain mean" in str(Mixed.refuses_privacy)
    assert [(c.shows_non_finite, c.steps_by_mean) for c in (Bold, Mixed, Sworn, Same)] == [
        (False, False), (False, False), (False, True), (True, True),
    ]  # fmt: skip


def test_a_scaled_step_unequal_weights_and_arrays_that_cant_be_clipped_are_refused() -> None:
    wrap = WRAPPERS["server fixed"]
    with pytest.raises(ConfigError, match=r"server_lr scales the step.*use server_lr=1\.0"):
        run(wrap(FedAvg(server_lr=0.5, fraction_evaluate=0.0), 1.0), app())
    with pytest.raises(
        ConfigError, match=r"equal weights, but the clients' 'num-examples' are 8 to 20.*weighted_by_key"
    ):
        run(wrap(FedAvg(fraction_evaluate=0.0), 1.0), app(examples=None))
    with pytest.raises(ConfigError, match=r"can't clip 'scale', which is a scalar"):
        run(wrap(FedAvg(fraction_evaluate=0.0), 1.0), app(small.everything), small.everything)

    def normalised() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.BatchNorm1d(small.FEATURES), small.convex())

    with pytest.raises(ConfigError, match=r"can't clip '0\.num_batches_tracked', which is int64"):
        run(wrap(FedAvg(fraction_evaluate=0.0), 1.0), app(normalised), normalised)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - AVERAGES))
def test_noise_on_the_client_is_refused_around_everything_else(name: str) -> None:
    strategy = ALGORITHMS[name].strategy(fraction_evaluate=0.0, max_failed_rounds=1)
    with pytest.raises(
        RunFailedError, match=r"can't run under LocalDpMod: its server step|LocalDpMod expects exactly one"
    ):
        run(strategy, app(mods=[LocalDpMod(0.05, 0.01, 50.0, 1e-5)]))


@pytest.mark.parametrize("mod", [fixedclipping_mod, adaptiveclipping_mod])
def test_clipping_mods_without_their_wrapper_fail_and_say_so(mod: Any) -> None:
    with pytest.raises(RunFailedError, match=r"clipping_norm"):
        run(FedAvg(fraction_evaluate=0.0, max_failed_rounds=1), app(mods=[mod]))
    config = ConfigRecord({"clipping_norm": 0.05})
    refused = CRAFT(fraction_evaluate=0.0, max_failed_rounds=1)
    with pytest.raises(RunFailedError, match=rf"craft can't run under {mod.__name__}: its server step"):
        refused.start(InProcessGrid(app(mods=[mod]), NODES), small.initial(small.convex), train_config=config)


def test_the_methods_that_average_are_those_that_inherit_the_step() -> None:
    assert {n for n, entry in ALGORITHMS.items() if entry.strategy.refuses_privacy is None} == AVERAGES
    for cls in (FedProx, FedSAM, FedNTD, MOON):
        assert cls.aggregate is FedAvg.aggregate
