"""The one-line handlers: where settings come from, which loaders they take, and that they leave the process alone."""

import copy
import shutil
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import fedstrat
from fedstrat.data.loaders import Batches
from fedstrat.errors import ConfigError, PayloadError, RuleError
from fedstrat.payloads import decode
from tests.strategies.small import FEATURES, TRAINED, batches, convex, everything
from tests.unit.asked import Asked


class Number(nn.Module):
    """One number y; with the loss below its gradient is 1, so K steps move it by the sum of their rates."""

    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.y * torch.ones(len(x))


def slope(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


THREE = [(torch.zeros(2, 1), torch.zeros(2))] * 3


def asked_for(run: dict[str, Any] | None = None, node: dict[str, Any] | None = None, **fedavg: Any) -> Asked:
    return Asked(fedstrat.FedAvg(**fedavg), Number(), run, {"partition-id": 0, **(node or {})})


def train(asked: Asked, server_round: int = 1, config: dict[str, Any] | None = None, **given: Any) -> Any:
    """The metrics of a reply of three batches."""
    loader = given.pop("loader", THREE)
    message = asked.message(server_round, config)
    reply = fedstrat.train(message, asked.context, Number(), loader, loss_fn=slope, **given)
    metrics = reply.content["metrics"]
    assert float(decode(reply.content["arrays"], "x")["y"]) == pytest.approx(-metrics["lr-sum"])
    return metrics


# --- settings ------------------------------------------------------------------------------------------------

RUN = {"train.lr": 0.125, "train.local-epochs": 4}


@pytest.mark.parametrize(
    ("run", "config", "given", "lr"),
    [
        (RUN, {"lr": 0.25}, {"lr": 0.5}, 0.5),
        (RUN, {"lr": 0.25}, {}, 0.25),
        (RUN, {}, {}, 0.125),
        ({"train.local-epochs": 4}, {"lr": 1}, {}, 1.0),
    ],
)
def test_the_rate_is_the_argument_s_then_the_message_s_then_the_run_s(run, config, given, lr):
    metrics = train(asked_for(run), config=config, **given)
    assert metrics["lr-sum"] == pytest.approx(12 * lr)


@pytest.mark.parametrize(
    ("config", "given", "epochs"),
    [
        ({"local-epochs": 3, "epochs": 5}, {"epochs": 2}, 2),
        ({"local-epochs": 3, "epochs": 5}, {}, 3),
        ({"epochs": 5}, {}, 5),
        ({}, {}, 4),
    ],
)
def test_the_epochs_are_the_argument_s_then_the_message_s_then_the_run_s(config, given, epochs):
    assert train(asked_for(RUN), config=config, **given)["num-steps"] == 3 * epochs


@pytest.mark.parametrize(
    ("run", "given", "message"),
    [
        ({"train.local-epochs": 1}, {}, r"no lr; pass lr=.*'lr' into train_config.*'train\.lr' into the run config"),
        (
            {"train.lr": 0.1},
            {},
            r"no epochs; pass epochs=.*'local-epochs' into train_config.*'train\.local-epochs' into the run config",
        ),
    ],
)
def test_a_setting_found_nowhere_is_an_error_that_says_where_to_put_it(run, given, message):
    with pytest.raises(ConfigError, match=message):
        train(asked_for(run), **given)


SCHEDULED = {"train.lr-decay": 0.5, "num-server-rounds": 10, **RUN}


@pytest.mark.parametrize(
    ("schedule", "server_round", "lr"),
    [
        ("constant", 3, 0.125),
        ("exponential", 1, 0.125),
        ("exponential", 3, 0.125 * 0.25),
        ("cosine", 1, 0.125),
        ("cosine", 6, 0.0625),  # halfway: (1 + cos(pi/2)) / 2
    ],
)
def test_a_schedule_sets_the_rate_of_a_round(schedule, server_round, lr):
    asked = asked_for({**SCHEDULED, "train.lr-schedule": schedule})
    assert train(asked, server_round)["lr-sum"] == pytest.approx(12 * lr)


def test_a_rate_given_by_hand_or_by_the_message_follows_no_schedule():
    asked = asked_for({**SCHEDULED, "train.lr-schedule": "exponential"})
    assert train(asked, 3, {"lr": 0.25})["lr-sum"] == pytest.approx(12 * 0.25)
    assert train(asked, 3, lr=0.5)["lr-sum"] == pytest.approx(12 * 0.5)


def test_an_unknown_schedule_is_named():
    with pytest.raises(ConfigError, match=r"train\.lr-schedule: expected 'constant', .* but got 'linear'"):
        train(asked_for({**SCHEDULED, "train.lr-schedule": "linear"}))


def test_momentum_decay_and_clipping_come_from_the_run_config():
    # y = 0, slope 1 clipped to 0.5: m = 0.5, then 0.5 + 0.9 * 0.5 = 0.95 (decay 2 adds 2 y = -1.0 before the clip:
    # 1 - 2 * 0.5 = 0 at y = -0.5, so m = 0.9 * 0.5 = 0.45), lr 1.
    asked = asked_for({"train.lr": 1.0, "train.momentum": 0.9, "train.weight-decay": 2.0, "train.clip-norm": 0.5})
    reply = fedstrat.train(asked.message(), asked.context, Number(), THREE[:2], loss_fn=slope, epochs=1)
    assert float(decode(reply.content["arrays"], "x")["y"]) == pytest.approx(-(0.5 + 0.45))


def test_a_rule_s_refusal_reaches_the_user():
    asked = Asked(fedstrat.SCAFFOLD(), convex(), {"train.momentum": 0.9, **RUN})
    with pytest.raises(RuleError, match="use momentum 0"):
        fedstrat.train(asked.message(), asked.context, convex(), batches(0))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda", "'cuda' was asked for, but this machine has 0 CUDA"), ("cuda:3", "'cuda:3'"), ("gpu", "'gpu'")],
)
@pytest.mark.usefixtures("no_gpu")
def test_a_device_that_is_not_there_is_an_error(device: str, message: str):
    asked = asked_for({"train.device": device, **RUN})
    with pytest.raises(ConfigError, match=rf"train\.device: .*{message}"):
        train(asked)
    with pytest.raises(ConfigError, match=rf"train\.device: .*{message}"):
        fedstrat.evaluate(evaluation(asked), asked.context, Number(), [])


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_the_cpu_where_there_is_no_gpu():
    assert train(asked_for({"train.device": "auto", **RUN}))["num-steps"] == 12


@pytest.mark.parametrize(("setting", "inside"), [({"train.threads": 3}, 3), ({"train.threads": 0}, 2), ({}, 2)])
def test_threads_are_set_inside_and_restored_afterwards(setting: dict[str, int], inside: int):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []

    def spy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) == 3:
            raise ZeroDivisionError
        return slope(outputs, targets)

    try:
        asked = asked_for({**RUN, **setting})
        with pytest.raises(ZeroDivisionError):
            fedstrat.train(asked.message(), asked.context, Number(), THREE, loss_fn=spy)
        assert seen == [inside] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_batch_hook_sees_every_batch_and_may_replace_it():
    seen = []

    def hook(batch: Any) -> Any:
        seen.append(batch[0].tolist())
        return (batch[0] * 10, batch[1]) if len(seen) == 2 else None

    used = []

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        used.append(outputs.detach().tolist())
        return outputs.mean()

    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    asked = Asked(fedstrat.FedAvg(), model)
    loader = [(torch.full((1, 1), float(i)), torch.zeros(1)) for i in range(3)]
    fedstrat.train(asked.message(), asked.context, model, loader, loss_fn=loss, lr=0.0, epochs=1, batch_hook=hook)
    assert seen == [[[0.0]], [[1.0]], [[2.0]]]
    assert used == [[[0.0]], [[10.0]], [[2.0]]]


# --- loaders -------------------------------------------------------------------------------------------------


def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, FEATURES, generator=generator), torch.arange(count) % 3


def loaders(count: int) -> dict[str, Iterable[Any]]:
    x, y = data(count)
    return {
        "DataLoader": DataLoader(TensorDataset(x, y), batch_size=4),
        "Batches": Batches(x, y, 4, shuffle=False),
        "list": [(x[i : i + 4], y[i : i + 4]) for i in range(0, count, 4)],
    }


@pytest.mark.parametrize("count", [0, 1, 3, 10])
@pytest.mark.parametrize("strategy", [fedstrat.FedAvg, fedstrat.SCAFFOLD, fedstrat.FedVSSAM])
def test_every_loader_gives_the_same_and_small_clients_survive(strategy: Any, count: int):
    ends = []
    for loader in loaders(count).values():
        asked = Asked(strategy(), convex())
        model = convex()
        reply = fedstrat.train(asked.message(), asked.context, model, loader, lr=0.1, epochs=2)
        metrics = reply.content["metrics"]
        assert metrics["num-examples"] == count
        assert metrics["num-steps"] == 2 * -(-count // 4)
        assert ("train-loss" in metrics) == (count > 0)
        asked.strategy.aggregate_train(1, [reply])
        assert asked.strategy.trained == (("0",) if count else ())
        ends.append(copy.deepcopy(model.state_dict()))
        moved = any(not torch.equal(t, convex().state_dict()[n]) for n, t in model.state_dict().items())
        assert moved == (count > 0)
    assert all(torch.equal(end[n], ends[0][n]) for end in ends[1:] for n in ends[0])


@pytest.mark.parametrize("algorithm", ["FedAvg", "FedSAM"])
@pytest.mark.parametrize(
    ("options", "rounding"),
    [
        ({"train.amp": "bf16"}, 0.25),
        ({"train.channels-last": True}, 1e-4),
        pytest.param(
            {"train.compile": True},
            1e-4,
            marks=[pytest.mark.slow, pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")],
        ),
    ],
)
def test_reduced_precision_and_memory_format_change_the_result_by_rounding_alone(algorithm, options, rounding):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 3, 6, 6, generator=generator), torch.arange(8) % 4) for _ in range(3)]
    dtypes = []

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))

    def loss_fn(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtypes.append(outputs.dtype)
        return nn.functional.cross_entropy(outputs, y)

    def moved(run: dict[str, object]) -> dict[str, torch.Tensor]:
        asked = Asked(getattr(fedstrat, algorithm)(), net())
        asked.context.run_config = {"train.device": "cpu", **run}
        fedstrat.train(asked.message(), asked.context, model := net(), batches, loss_fn=loss_fn, lr=0.1, epochs=1)
        return {n: t.detach() - net().state_dict()[n] for n, t in model.state_dict().items()}

    plain, changed = moved({}), moved(options)
    assert (torch.bfloat16 in dtypes) == ("train.amp" in options)
    for name, step in plain.items():
        assert changed[name].dtype == torch.float32
        assert float((changed[name] - step).norm()) < rounding * float(step.norm())


def test_the_training_loss_is_the_mean_over_examples_of_the_last_epoch():
    # Batches of 2 and 1 examples with losses 1 and 4: (2 * 1 + 1 * 4) / 3
    losses = iter([9.0, 9.0, 1.0, 4.0])

    def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.mean() * 0 + next(losses)

    asked = asked_for()
    loader = [(torch.zeros(2, 1), torch.zeros(2)), (torch.zeros(1, 1), torch.zeros(1))]
    reply = fedstrat.train(asked.message(), asked.context, Number(), loader, loss_fn=loss, lr=0.1, epochs=2)
    assert reply.content["metrics"]["train-loss"] == pytest.approx(2.0)


def test_training_is_plain_sgd_with_cross_entropy():
    model, twin = convex(), convex()
    asked = Asked(fedstrat.FedAvg(), model)
    fedstrat.train(asked.message(), asked.context, model, batches(1), lr=0.1, epochs=2)
    sgd = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in batches(1):
            sgd.zero_grad()
            cross_entropy(twin(x), y).backward()
            sgd.step()
    assert all(torch.equal(t, twin.state_dict()[n]) for n, t in model.state_dict().items())


def test_a_model_of_other_names_is_named():
    asked = Asked(fedstrat.FedAvg(), convex())
    with pytest.raises(PayloadError, match=r"arrays: '0\.weight' is missing; this model has 2 arrays, 2 came"):
        fedstrat.train(asked.message(), asked.context, nn.Sequential(convex()), batches(0), lr=0.1, epochs=1)
    with pytest.raises(PayloadError, match=r"arrays: '0\.weight' is missing"):
        fedstrat.evaluate(evaluation(asked), asked.context, nn.Sequential(convex()), batches(0))


# --- gamma-inexact local training ------------------------------------------------------------------------------


def steps(gamma: float, mu: float = 0.1, epochs: int = 30) -> int:
    asked = Asked(fedstrat.FedProx(mu=mu, gamma=gamma), convex())
    reply = fedstrat.train(asked.message(), asked.context, convex(), batches(2), lr=0.3, epochs=epochs)
    return reply.content["metrics"]["num-steps"]


def test_a_smaller_gamma_never_takes_fewer_steps():
    taken = [steps(gamma) for gamma in (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 1e-6)]
    assert taken == sorted(taken)
    assert taken[0] == len(batches(2))  # x itself is 1-inexact, but one epoch is always run
    assert taken[-1] == 30 * len(batches(2))  # at most E epochs
    assert len(set(taken)) > 3
    assert steps(0.0) == 30 * len(batches(2))


def test_training_stops_at_the_first_epoch_that_is_gamma_inexact():
    gamma, mu = 0.5, 0.1
    x = torch.cat([x for x, _ in batches(2)])
    y = torch.cat([y for _, y in batches(2)])

    def gradient(model: nn.Module) -> torch.Tensor:
        parts = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
        return torch.cat([p.flatten() for p in parts])

    def flat(model: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    twin, start = convex(), flat(convex())
    bound = gamma * gradient(twin).norm()
    epochs = 0
    while epochs == 0 or (gradient(twin) + mu * (flat(twin) - start)).norm() > bound:
        for bx, by in batches(2):
            grads = torch.autograd.grad(cross_entropy(twin(bx), by), list(twin.parameters()))
            with torch.no_grad():
                for p, g, at in zip(twin.parameters(), grads, convex().parameters(), strict=True):
                    p.sub_(0.3 * (g + mu * (p - at)))
        epochs += 1
    assert 1 < epochs < 30
    assert steps(gamma, mu) == epochs * len(batches(2))


def test_a_client_that_is_already_at_its_optimum_takes_no_step():
    asked = Asked(fedstrat.FedProx(gamma=0.5), Number())
    loader = [(torch.zeros(2, 1), torch.zeros(2))]
    reply = fedstrat.train(
        asked.message(), asked.context, Number(), loader, loss_fn=lambda out, _: out.square().mean(), lr=0.1, epochs=5
    )
    assert reply.content["metrics"]["num-steps"] == 0
    assert float(decode(reply.content["arrays"], "x")["y"]) == 0.0


# --- evaluation and queries --------------------------------------------------------------------------------------


def evaluation(asked: Asked, arrays: ArrayRecord | None = None) -> Message:
    asked.grid.get_node_ids()
    content = {"arrays": arrays or asked.arrays, "config": ConfigRecord({"server-round": 1})}
    return Message(RecordDict(content), asked.context.node_id, "evaluate")


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_evaluation_counts(count: int):
    model = everything().train()
    model.norm.running_mean.fill_(0.3)
    asked = Asked(fedstrat.FedAvg(trainable=TRAINED), model)
    x, y = data(count)
    twin = copy.deepcopy(model).eval()
    for loader in loaders(count).values():
        empty = everything().train()
        reply = fedstrat.evaluate(evaluation(asked), asked.context, empty, loader)
        assert set(reply.content) == {"metrics", "client"}
        metrics = reply.content["metrics"]
        assert set(metrics) == {"num-examples", "num-correct", "loss-sum"}
        assert metrics["num-examples"] == count
        with torch.no_grad():
            assert metrics["num-correct"] == sum(int(twin(x[i : i + 1]).argmax() == y[i]) for i in range(count))
            expected = float(cross_entropy(twin(x), y, reduction="sum")) if count else 0.0
        assert metrics["loss-sum"] == pytest.approx(expected, rel=1e-5)
        assert reply.content["client"]["client-id"] == "0"
        assert empty.training
        assert all(torch.equal(t, empty.state_dict()[n]) for n, t in model.state_dict().items())


def test_evaluation_takes_another_loss():
    asked = asked_for()
    asked.arrays = fedstrat.to_arrays({"y": torch.tensor(2.0)})

    class Column(Number):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:, None]

    metrics = fedstrat.evaluate(evaluation(asked), asked.context, Column(), THREE, loss_fn=slope).content["metrics"]
    assert metrics["loss-sum"] == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("node", "client"), [({"client-id": "ward", "partition-id": 3}, "ward"), ({"partition-id": 3}, "3"), ({}, None)]
)
def test_a_query_tells_the_client_s_id_and_its_examples_only_when_asked(node: dict[str, Any], client: str | None):
    asked = Asked(fedstrat.FedAvg(), Number(), node_config=node or {"other": 1})
    asked.grid.get_node_ids()

    def fail() -> int:
        raise AssertionError("counted without being asked")

    def about(need: bool, **given: Any) -> dict[str, Any]:
        message = Message(RecordDict({"c": ConfigRecord({"fedstrat.need-num-examples": need})}), 1000, "query")
        return dict(fedstrat.query(message, asked.context, **given).content["client"])

    name = client or str(asked.context.node_id)
    assert about(False, num_examples=fail) == {"client-id": name}
    assert about(True, num_examples=lambda: 7) == {"client-id": name, "num-examples": 7}
    assert about(True, num_examples=8) == {"client-id": name, "num-examples": 8}
    assert about(True) == {"client-id": name}
