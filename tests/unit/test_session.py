"""LocalSession: four lines around a foreign loop, what it says on the wire, and what it remembers."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import fedstrat
from fedstrat import LocalSession
from fedstrat.data.loaders import Batches
from fedstrat.errors import PayloadError, RuleError
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS, Algorithm, FedAvg
from tests.strategies.small import FEATURES, TRAINED, everything
from tests.unit.asked import Asked

TORCH = torch.Generator().manual_seed(1)
X, Y = torch.randn(10, FEATURES, generator=TORCH), torch.arange(10) % 3
LOADER = [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])]
STRATEGIES: dict[str, Any] = {
    "FedAvg": fedstrat.FedAvg,
    "FedAvgM": fedstrat.FedAvgM,
    "FedProx": fedstrat.FedProx,
    "SCAFFOLD": fedstrat.SCAFFOLD,
    "CRAFT": fedstrat.CRAFT,
    "ConFIG": fedstrat.ConFIG,
    "FedSAM": fedstrat.FedSAM,
    "MoFedSAM": fedstrat.MoFedSAM,
    "FedVSSAM": fedstrat.FedVSSAM,
}
DOWN = {"SCAFFOLD": "control", "MoFedSAM": "direction", "FedVSSAM": "direction"}
RULE_SETTINGS: dict[str, dict[str, Any]] = {
    "FedProx": {"fedstrat.mu": 0.1, "fedstrat.gamma": 0.0, "proximal-mu": 0.1},
    "SCAFFOLD": {"fedstrat.option": 2},
    "FedSAM": {"fedstrat.rho": 0.05},
    "MoFedSAM": {"fedstrat.rho": 0.05, "fedstrat.alpha": 0.1},
    "FedVSSAM": {
        "fedstrat.rho": 0.05, "fedstrat.gamma-l": 0.4, "fedstrat.perturb": "mixed", "fedstrat.update": "mixed",
    },
}  # fmt: skip


def epoch(optimizer: Any, model: nn.Module) -> None:
    for x, y in LOADER:
        optimizer.step(lambda x=x, y=y: cross_entropy(model(x), y))


def answer(asked: Asked, server_round: int = 1, model: nn.Module | None = None) -> Message:
    model = everything() if model is None else model
    with LocalSession(asked.message(server_round), asked.context, model) as session:
        epoch(session.optimizer(lr=0.1), model)
        return session.reply(num_examples=len(X), metrics={"train-loss": 0.5})


# --- the wire contract -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_goes_down(name: str):
    strategy = STRATEGIES[name](trainable=TRAINED)
    asked = Asked(strategy, everything())
    message = asked.message(3, {"lr": 0.5, "mine": "x"})
    extra = DOWN.get(name)
    assert set(message.content) == {"arrays", "config", *([extra] if extra else [])}
    assert list(message.content["arrays"]) == list(everything().state_dict())
    assert dict(message.content["config"]) == {
        "server-round": 3,
        "lr": 0.5,
        "mine": "x",
        "fedstrat.algorithm": name.lower(),
        "fedstrat.experiment-id": strategy.experiment_id,
        "fedstrat.accepted-round": 0,
        "fedstrat.pack-content": "none",
        **RULE_SETTINGS.get(name, {}),
    }
    if extra:
        assert tuple(message.content[extra]) == TRAINED
        assert {array.stype for array in message.content[extra].values()} == {"fedstrat.raw"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_comes_up(name: str):
    asked = Asked(STRATEGIES[name](trainable=TRAINED), everything(), node_config={"partition-id": 7})
    model = everything()
    reply = answer(asked, 1, model)
    content = reply.content
    assert set(content) == {"arrays", "metrics", "client", *(["control-delta"] if name == "SCAFFOLD" else [])}
    assert dict(content["metrics"]) == {
        "num-examples": 10,
        "num-steps": 3,
        "lr-sum": pytest.approx(0.3),
        "train-loss": 0.5,
    }
    about = {"client-id": "7", "trained-round": 1, "state": "ok"}
    assert dict(content["client"]) == {**about, "trainable": list(TRAINED)}
    sent = decode(content["arrays"], "arrays")
    assert list(sent) == list(model.state_dict())
    assert all(torch.equal(sent[n], t) for n, t in model.state_dict().items())
    assert {array.stype for array in content["arrays"].values()} == {"numpy.ndarray"}
    if name == "SCAFFOLD":
        assert tuple(content["control-delta"]) == TRAINED
        assert {array.stype for array in content["control-delta"].values()} == {"fedstrat.raw"}
    # Only the first reply tells the trainable names.
    asked.accept(1, reply)
    again = answer(asked, 2)
    assert dict(again.content["client"]) == {**about, "trained-round": 2}


def test_other_trainable_names_end_the_run_showing_both_lists():
    strategy = fedstrat.FedAvg()  # takes the frozen embedding for trained
    asked = Asked(strategy, everything())
    reply = answer(asked)
    with pytest.raises(fedstrat.errors.RunFailedError, match=r"client 0 .*embed\.weight.*trainable="):
        strategy.aggregate_train(1, [reply])


def test_control_of_other_parameters_is_an_error_with_both_lists_at_the_client():
    asked = Asked(fedstrat.SCAFFOLD(), everything())
    with (
        pytest.raises(RuleError, match=r"record 'control': the server trains \['embed.weight'\]"),
        LocalSession(asked.message(), asked.context, everything()),
    ):
        pass


# --- the four lines ------------------------------------------------------------------------------------------


def test_the_four_lines_of_the_documentation():
    seen = {}

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(FEATURES, 3)

    loader, dataset, loss_fn = LOADER, TensorDataset(X, Y), cross_entropy
    app = ClientApp()

    @app.train()
    def train(msg, context):
        model = Net()
        with LocalSession(msg, context, model) as session:
            optimizer = session.optimizer(lr=0.01)
            for x, y in loader:
                optimizer.step(lambda: loss_fn(model(x), y))  # noqa: B023 - as users write it
            seen[session.client] = session.server_round
            return session.reply(num_examples=len(dataset), metrics={"train-loss": 1.0})

    start = nn.Linear(FEATURES, 3)
    twin = copy.deepcopy(start)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.01)
    for _ in range(2):
        for x, y in LOADER:
            sgd.zero_grad()
            cross_entropy(twin(x), y).backward()
            sgd.step()
    result = fedstrat.FedAvg(fraction_evaluate=0.0).start(
        grid=InProcessGrid(app, 2), initial_arrays=ArrayRecord(start.state_dict()), num_rounds=2
    )
    # Both clients have the same data, so their mean is either's model.
    assert seen == {"0": 2, "1": 2}
    assert torch.allclose(decode(result.arrays, "x")["weight"], twin.weight, atol=1e-6)
    assert result.train_metrics_clientapp[2]["train-loss"] == 1.0


def test_the_optimizer_takes_a_rate_or_a_base_and_passes_the_options_on():
    asked = Asked(fedstrat.FedAvg(trainable=TRAINED), everything())
    model = everything()
    with LocalSession(asked.message(), asked.context, model) as session:
        for wrong in ({}, {"lr": 0.1, "base": torch.optim.SGD(model.parameters(), lr=0.1)}):
            with pytest.raises(RuleError, match=r"either lr=.* or base="):
                session.optimizer(**wrong)
        made = session.optimizer(lr=0.1, momentum=0.5, weight_decay=0.25, clip_norm=2.0)
        assert made.param_groups[0]["momentum"] == 0.5
        assert made.param_groups[0]["weight_decay"] == 0.0
        assert made.clip_norm == 2.0
        own = torch.optim.Adam(model.parameters(), lr=0.1)
        assert session.optimizer(base=own).base is own


def test_momentum_is_refused_with_the_reason():
    asked = Asked(fedstrat.SCAFFOLD(trainable=TRAINED), everything())
    with (
        LocalSession(asked.message(), asked.context, everything()) as session,
        pytest.raises(RuleError, match=r"with momentum 0\.9: c_i is the mean gradient"),
    ):
        session.optimizer(lr=0.1, momentum=0.9)


# --- calls that rules need -----------------------------------------------------------------------------------


@dataclass
class NeedsLossBefore(LocalRule[None, None]):
    """As q-FedAvg's."""

    @property
    @override
    def needs_calls(self) -> tuple[str, ...]:
        return ("loss_before",)


class NeedsIt(FedAvg):
    pass


CALLS = {
    "full_gradient": lambda: fedstrat.SCAFFOLD(option=1, trainable=TRAINED),
    "should_stop": lambda: fedstrat.FedProx(gamma=0.5, trainable=TRAINED),
    "loss_before": lambda: NeedsIt(trainable=TRAINED),
}


@pytest.mark.parametrize("missing", CALLS)
def test_a_missing_call_is_an_error_that_names_it(missing: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ALGORITHMS, "needsit", Algorithm(NeedsIt, NeedsLossBefore))
    asked = Asked(CALLS[missing](), everything())
    model = everything()

    def run(*calls: str) -> Message:
        with LocalSession(asked.message(), asked.context, model) as session:
            for call in calls:
                if call != "should_stop":
                    getattr(session, call)(LOADER, cross_entropy)
            epoch(session.optimizer(lr=0.1), model)
            if "should_stop" in calls:
                session.should_stop(LOADER, cross_entropy)
            return session.reply(num_examples=10)

    every = ["full_gradient", "loss_before", "should_stop"]
    with pytest.raises(RuleError, match=rf"needs session\.{missing}\(loader, loss_fn\)"):
        run(*[call for call in every if call != missing])
    metrics = run(*every).content["metrics"]
    if missing == "loss_before":
        model.load_state_dict(everything().state_dict())
        model.eval()
        assert metrics["loss-before"] == pytest.approx(cross_entropy(model(X), Y).item(), rel=1e-6)


def test_asking_whether_to_stop_without_the_gradient_at_x_is_an_error_that_names_the_call():
    asked = Asked(fedstrat.FedProx(gamma=0.5, trainable=TRAINED), everything())
    model = everything()
    with LocalSession(asked.message(), asked.context, model) as session:
        epoch(session.optimizer(lr=0.1), model)
        with pytest.raises(RuleError, match=r"session\.full_gradient"):
            session.should_stop(LOADER, cross_entropy)


@pytest.mark.parametrize("call", ["full_gradient", "loss_before"])
def test_a_call_that_comes_after_the_first_step_is_an_error(call: str, monkeypatch: pytest.MonkeyPatch):
    # It would be the gradient (the loss) at y instead of x, without a word.
    monkeypatch.setitem(ALGORITHMS, "needsit", Algorithm(NeedsIt, NeedsLossBefore))
    asked = Asked(CALLS[call](), everything())
    model = everything()
    with LocalSession(asked.message(), asked.context, model) as session:
        epoch(session.optimizer(lr=0.1), model)
        with pytest.raises(RuleError, match="before the first step"):
            getattr(session, call)(LOADER, cross_entropy)


# --- the pass over all local data ----------------------------------------------------------------------------


def random_net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))


def dataloader() -> DataLoader:
    return DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))


LOADERS = {
    "DataLoader with a generator": dataloader,
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
    "Batches": lambda: Batches(X, Y, 4, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "list": lambda: LOADER,
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_full_gradient_is_autograd_s_over_the_whole_data(kind: str):
    asked = Asked(fedstrat.SCAFFOLD(option=1), random_net())
    model, loader = random_net(), LOADERS[kind]()
    with LocalSession(asked.message(), asked.context, model) as session:
        session.full_gradient(loader, cross_entropy)
        epoch(session.optimizer(lr=0.1), model)
        sent = decode(session.reply(num_examples=10).content["control-delta"], "x")
    twin = random_net().eval()
    expected = torch.autograd.grad(cross_entropy(twin(X), Y), list(twin.parameters()))
    for (name, got), want in zip(sent.items(), expected, strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize("call", ["full_gradient", "should_stop", "loss_before"])
@pytest.mark.parametrize("kind", LOADERS)
def test_a_pass_over_all_data_changes_nothing_that_comes_after_it(kind: str, call: str):
    asked = Asked(fedstrat.FedProx(gamma=1e-9), random_net())
    model, loader = random_net(), LOADERS[kind]()
    with LocalSession(asked.message(), asked.context, model) as session:
        session.full_gradient(loader, cross_entropy)
        model.train()
        model[1].eval()  # a module's own mode stays
        for p in model.parameters():
            p.grad = torch.full_like(p, 7.0)
        before = copy.deepcopy(model.state_dict())
        randomness = torch.get_rng_state()
        for _ in loader:  # an epoch: the generators move on
            pass
        torch.set_rng_state(randomness)
        again = copy.deepcopy(loader)
        getattr(session, call)(loader, cross_entropy)
        assert torch.equal(torch.get_rng_state(), randomness)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert [module.training for module in model] == [True, False, True, True]
        assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in model.parameters())
        order = [y.tolist() for _, y in loader]
        torch.set_rng_state(randomness)
        assert order == [y.tolist() for _, y in again]


# --- what is remembered --------------------------------------------------------------------------------------


def remembered(asked: Asked, folder: Path) -> dict[str, Any]:
    """All that a client remembers: its Context.state and its files."""
    state = {name: dict(record) for name, record in asked.context.state.items()}
    return state | {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(params=["context", "directory"])
def scaffold(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Asked, Path]:
    run = {"state-dir": str(tmp_path / "state")} if request.param == "directory" else {}
    return Asked(fedstrat.SCAFFOLD(trainable=TRAINED), everything(), run), tmp_path


def control(asked: Asked, server_round: int) -> tuple[dict[str, torch.Tensor], Message]:
    """c_i of a client's session at its start, and its reply."""
    model = everything()
    with LocalSession(asked.message(server_round), asked.context, model) as session:
        c_i = copy.deepcopy(session.rule.c_i)
        epoch(session.optimizer(lr=0.1), model)
        return c_i, session.reply(num_examples=10)


def added(c_i: dict[str, torch.Tensor], reply: Message) -> dict[str, torch.Tensor]:
    delta = decode(reply.content["control-delta"], "x")
    return {n: c + delta[n] for n, c in c_i.items()}


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.allclose(a[n], b[n], atol=1e-6) for n in a)


def test_state_is_pending_until_the_server_says_that_it_accepted(scaffold: tuple[Asked, Path]):
    asked, _ = scaffold
    first, reply_1 = control(asked, 1)
    assert all(not c.any() for c in first.values())
    asked.accept(1, reply_1)
    second, lost_on_the_way = control(asked, 2)  # its reply never arrives
    assert close(second, added(first, reply_1))
    assert not close(added(second, lost_on_the_way), second)
    asked.strategy.aggregate_train(2, [])
    third, reply_3 = control(asked, 3)
    assert close(third, second)
    asked.accept(3, reply_3)
    fourth, _ = control(asked, 4)
    assert close(fourth, added(third, reply_3))


def test_an_exception_in_the_block_changes_nothing_that_is_remembered(scaffold: tuple[Asked, Path]):
    asked, folder = scaffold
    first, reply = control(asked, 1)
    asked.accept(1, reply)
    model = everything()
    message = asked.message(2)
    with LocalSession(message, asked.context, model):
        pass  # what the message says about round 1 is taken in
    before, randomness = remembered(asked, folder), torch.get_rng_state()

    def fail() -> None:
        with LocalSession(message, asked.context, model) as session:
            epoch(session.optimizer(lr=0.1), model)
            torch.rand(3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert remembered(asked, folder) == before
    assert torch.equal(torch.get_rng_state(), randomness)
    asked.strategy.aggregate_train(2, [])
    assert close(control(asked, 3)[0], added(first, reply))


def test_an_error_in_the_reply_changes_nothing_that_is_remembered(tmp_path: Path):
    asked = Asked(fedstrat.SCAFFOLD(option=1, trainable=TRAINED), everything(), {"state-dir": str(tmp_path)})
    model = everything()
    with LocalSession(asked.message(), asked.context, model) as session:
        epoch(session.optimizer(lr=0.1), model)
        with pytest.raises(RuleError, match="full_gradient"):
            session.reply(num_examples=10)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_lost_state_is_told_and_carries_no_update(scaffold: tuple[Asked, Path]):
    asked, folder = scaffold
    asked.accept(1, control(asked, 1)[1])
    asked.context.state.clear()
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    model = everything()
    with LocalSession(asked.message(2), asked.context, model) as session:
        assert session.lost
        epoch(session.optimizer(lr=0.1), model)  # a loop needn't know
        reply = session.reply(num_examples=10)
    assert set(reply.content) == {"metrics", "client"}
    assert reply.content["client"]["state"] == "lost"
    asked.strategy.aggregate_train(2, [reply])
    assert asked.strategy.trained == ()
    # The server forgot it, so it starts afresh and takes part again.
    c_i, reply = control(asked, 3)
    assert all(not c.any() for c in c_i.values())
    asked.accept(3, reply)


def test_state_of_another_experiment_is_not_used(scaffold: tuple[Asked, Path]):
    asked, _ = scaffold
    asked.accept(1, control(asked, 1)[1])
    asked.strategy.reset()
    c_i, _ = control(asked, 1)
    assert all(not c.any() for c in c_i.values())


# --- messages that don't fit -----------------------------------------------------------------------------------


def test_a_message_of_no_algorithm_says_what_is_needed():
    asked = Asked(fedstrat.FedAvg(), everything())
    message = asked.message()
    message.content["config"] = ConfigRecord({"server-round": 1})
    with pytest.raises(PayloadError, match=r"names no algorithm.*use one on the server"):
        LocalSession(message, asked.context, everything())


def test_an_unknown_algorithm_suggests_the_nearest():
    asked = Asked(fedstrat.SCAFFOLD(), everything())
    message = asked.message()
    message.content["config"]["fedstrat.algorithm"] = "scafold"
    with pytest.raises(RuleError, match=r"'scafold'.*did you mean 'scaffold'\?"):
        LocalSession(message, asked.context, everything())


def test_a_model_of_other_names_or_shapes_is_named():
    asked = Asked(fedstrat.FedAvg(), nn.Linear(4, 3))
    for model, expected in (
        (nn.Sequential(nn.Linear(4, 3)), r"arrays: '0\.weight' is missing"),
        (nn.Linear(4, 3, bias=False), r"arrays: this model has no array 'bias'"),
        (nn.Linear(5, 3), r"arrays/weight: expected shape \[3, 5\], but got \[3, 4\]"),
        (nn.Linear(4, 3).double(), "arrays/weight: expected float64, but got float32"),
    ):
        with pytest.raises(PayloadError, match=expected), LocalSession(asked.message(), asked.context, model):
            pass


def test_two_models_in_one_message_are_refused():
    asked = Asked(fedstrat.FedAvg(), nn.Linear(4, 3))
    message = asked.message()
    message.content["other"] = message.content["arrays"]
    with (
        pytest.raises(PayloadError, match=r"expected one ArrayRecord with the model, but got \['arrays', 'other'\]"),
        LocalSession(message, asked.context, nn.Linear(4, 3)),
    ):
        pass


# --- randomness --------------------------------------------------------------------------------------------------


def test_a_seed_fixes_the_client_s_randomness_by_client_and_round():
    def draw(seed: int | None, client: int, server_round: int) -> float:
        asked = Asked(fedstrat.FedAvg(seed=seed), nn.Linear(1, 1), node_config={"partition-id": client})
        with LocalSession(asked.message(server_round), asked.context, nn.Linear(1, 1)):
            return torch.rand(1).item()

    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert draw(1, 0, 1) == draw(1, 0, 1)
    assert len({draw(1, 0, 1), draw(1, 0, 2), draw(1, 1, 1), draw(2, 0, 1)}) == 4
    assert torch.equal(torch.get_rng_state(), before) is False  # the models drew their weights outside of the block
    torch.manual_seed(0)
    asked = Asked(fedstrat.FedAvg(seed=3), nn.Linear(1, 1))
    message, model = asked.message(), nn.Linear(1, 1)
    expected = torch.get_rng_state()
    with LocalSession(message, asked.context, model):
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), expected)


def test_what_the_session_tells():
    asked = Asked(fedstrat.FedAvg(seed=1), nn.Linear(1, 1), node_config={"client-id": "ward-3", "partition-id": 2})
    session = LocalSession(asked.message(4, {"lr": 0.5}), asked.context, nn.Linear(1, 1))
    assert session.client == "ward-3"
    assert session.server_round == 4
    assert session.config == {"lr": 0.5, "server-round": 4}
    assert isinstance(asked.context, Context)
    assert isinstance(asked.context.state, RecordDict)
