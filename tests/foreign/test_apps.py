"""Somebody's apps, as they wrote them, run with Flower's FedAvg; then with ours after editing few of their lines.

An edit is text: what stands in the app, and what stands there afterwards. The numbers of lines that a user writes are
those of the tables in docs/embedding.md.
"""

import difflib
import gc
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fedstrat.errors import RunFailedError
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS

APPS = {
    name: (Path(__file__).parent / f"{name}.py").read_text() for name in ("quickstart", "batchnorm", "accumulation")
}
NODES = 4

Edit = tuple[str, str]

SMALL = {"fedcspack": {"pack_size": 16}}  # these models are smaller than its default pack
IMPORT = "from flwr.serverapp.strategy import FedAvg\n"


def server_line(algorithm: str, **settings: Any) -> list[Edit]:
    """The server's line, and its import."""
    name = ALGORITHMS[algorithm].strategy.__name__
    given = "".join(f"{k}={v!r}, " for k, v in {**SMALL.get(algorithm, {}), **settings}.items())
    return [(IMPORT, f"from fedstrat import {name}\n"), ("strategy = FedAvg(", f"strategy = {name}({given}")]


# --- what a client half costs in each app --------------------------------------------------------------------------

SESSION: dict[str, list[Edit]] = {
    "quickstart": [
        ("from torch import nn\n", "from fedstrat import LocalSession\nfrom torch import nn\n"),
        (
            '    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())\n    optimizer',
            "    with LocalSession(msg, context, net) as session:\n    optimizer",
        ),
        (
            '    optimizer = torch.optim.SGD(net.parameters(), lr=msg.content["config"]["lr"])\n',
            '        optimizer = session.optimizer(lr=msg.content["config"]["lr"])\n',
        ),
        ("    loss = fit(net, loader, optimizer)\n", "        loss = fit(net, loader, optimizer)\n"),
        (
            '    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})\n'
            '    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})\n'
            "    return Message(content=content, reply_to=msg)\n",
            '        return session.reply(len(loader.dataset), {"train_loss": loss})\n',
        ),
    ],
    "accumulation": [
        ("ACCUMULATE = 2\n", "from fedstrat import LocalSession\nACCUMULATE = 2\n"),
        (
            '    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())\n',
            "    with LocalSession(msg, ctx, model) as session:\n",
        ),
        (
            '    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"] * 0.9 ** cfg["server-round"],'
            ' momentum=cfg["momentum"])\n'
            "    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)\n"
            "    loss = train_loop(model, optimizer, schedule, batches)\n"
            "    n = sum(len(target) for _, target in batches)\n"
            "    reply = RecordDict()\n"
            '    reply["arrays"] = ArrayRecord(model.state_dict())\n'
            '    reply["metrics"] = MetricRecord({"num-examples": n, "loss": loss})\n'
            "    return Message(reply, reply_to=msg)\n",
            '        sgd = torch.optim.SGD(model.parameters(), lr=cfg["lr"] * 0.9 ** cfg["server-round"],'
            ' momentum=cfg["momentum"])\n'
            "        optimizer = session.optimizer(base=sgd)\n"
            "        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)\n"
            "        loss = train_loop(model, optimizer, schedule, batches)\n"
            '        return session.reply(sum(len(target) for _, target in batches), {"loss": loss})\n',
        ),
    ],
    "batchnorm": [
        ("CLASSES = 3\n", "from fedstrat import LocalSession\nCLASSES = 3\n"),
        (
            '    model.load_state_dict(message.content["weights"].to_torch_state_dict())\n    model.train()\n',
            "    with LocalSession(message, context, model) as session:\n        model.train()\n",
        ),
        (
            "    sgd = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)\n"
            "    total = 0.0\n"
            "    for x, y in batches:\n"
            "        sgd.zero_grad()\n"
            "        loss = torch.nn.functional.cross_entropy(model(x), y)\n"
            "        loss.backward()\n"
            "        sgd.step()\n"
            "        total += loss.item() * len(y)\n"
            "    n = sum(len(y) for _, y in batches)\n"
            '    numbers = {"rows": n, "loss": total / n, "recall": recall_per_class(model, batches)}\n'
            '    reply = RecordDict({"weights": ArrayRecord(model.state_dict()), "numbers": MetricRecord(numbers)})\n'
            "    return Message(reply, reply_to=message)\n",
            "        sgd = session.optimizer(lr=0.05, weight_decay=1e-3)\n"
            "        total = 0.0\n"
            "        for x, y in batches:\n"
            "            loss = sgd.step(lambda: torch.nn.functional.cross_entropy(model(x), y))\n"
            "            total += loss.item() * len(y)\n"
            "        n = sum(len(y) for _, y in batches)\n"
            '        return session.reply(n, {"rows": n, "loss": total / n, "recall": recall_per_class(model, batches)})\n',
        ),
    ],
}
CLOSURE: list[Edit] = [
    (
        "            optimizer.zero_grad()\n"
        "            loss = criterion(net(images), labels)\n"
        "            loss.backward()\n"
        "            optimizer.step()\n",
        "            loss = optimizer.step(lambda: criterion(net(images), labels))\n",
    )
]
OWN_OBJECTIVE: list[Edit] = [
    ("def fit(net, loader, optimizer, epochs=1):\n", "def fit(net, loader, optimizer, session, epochs=1):\n"),
    ("fit(net, loader, optimizer)\n", "fit(net, loader, optimizer, session)\n"),
    ("loss = criterion(net(images), labels)\n", "loss = session.loss(images, labels, criterion)\n"),
]


def call(line: str) -> list[Edit]:
    before = "        loss = fit(net, loader, optimizer)\n"
    return [(before, f"        {line}\n{before}")]


LOSS_BEFORE = call("session.loss_before(loader, nn.functional.cross_entropy)")
FULL_GRADIENT = call("session.full_gradient(loader, nn.functional.cross_entropy)")
PERSONAL = call("session.train_personal(loader, nn.functional.cross_entropy, lr=0.1, epochs=1)")
STOP = [
    *OWN_OBJECTIVE[:2],
    ("            running += loss.item()\n", "            running += loss.item()\n" + " " * 8
     + "if session.should_stop(loader, criterion):\n            break\n"),
]  # fmt: skip

SERVER_ONLY = ["fedavgm", "craft", "config", "fedmgdaplus", "normalisedfedavgm"]
WITH_SESSION: dict[str, list[Edit]] = {
    "fedprox": [],
    "scaffold": [],
    "fednova": [],
    "fedacg": [],
    "fedcspack": [],
    "fedspu": [],
    **dict.fromkeys(("fedsam", "mofedsam", "fedvssam", "fedgamma", "fedsmoo"), CLOSURE),
    **dict.fromkeys(("qfedavg", "afl", "fedfv", "fedlf"), LOSS_BEFORE),
    **dict.fromkeys(("moon", "fedntd"), OWN_OBJECTIVE),
    "ditto": PERSONAL,
}
WRITTEN = {"SESSION": 5, "CLOSURE": 1, "LOSS_BEFORE": 1, "PERSONAL": 1, "OWN_OBJECTIVE": 2}


# --- running an app ------------------------------------------------------------------------------------------------


def edited(app: str, edits: list[Edit]) -> str:
    source = APPS[app]
    for before, after in edits:
        assert source.count(before) >= 1, before
        source = source.replace(before, after, 1)
    # The session's block: what an edit left at the old depth belongs to it.
    return source.replace(" as session:\n    optimizer", " as session:\n        optimizer")


def written(app: str, edits: list[Edit]) -> int:
    """Lines that a user writes: those that a diff adds."""
    diff = difflib.ndiff(APPS[app].splitlines(), edited(app, edits).splitlines())
    return sum(line.startswith("+ ") for line in diff)


def run(app: str, edits: list[Edit]) -> RecordDict:
    """Execute the edited app in this process; returns what it left in the ServerApp's state."""
    module = types.ModuleType(f"foreign_{app}")
    exec(compile(edited(app, edits), f"{app}.py", "exec"), module.__dict__)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    grid = Watched(module.client, NODES)
    module.main(grid, context)
    # Nobody asked these apps for a query handler: then clients go by their node ids.
    assert not [error for error in grid.errors if "query" not in str(error)]
    context.state["first"] = grid.first
    return context.state


class Watched(InProcessGrid):
    """Keeps the first model that is sent."""

    first: ArrayRecord | None = None

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            models = [r for n, r in message.content.array_records.items() if n in ("arrays", "weights")]
            self.first = self.first or next(iter(models), None)
        return super().push_messages(messages)


def settled(state: RecordDict) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy() for name, tensor in decode(state["result"], "result").items()}


def moved(state: RecordDict) -> bool:
    """Whether the final model is finite, and another one than the first that was sent."""
    first = {name: tensor.double().numpy() for name, tensor in decode(state["first"], "first").items()}
    last = settled(state)
    return all(np.isfinite(a).all() for a in last.values()) and any((a != first[n]).any() for n, a in last.items())


@pytest.fixture(autouse=True)
def alone() -> Any:
    yield
    gc.collect()


# --- Flower's FedAvg and ours ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("app", APPS)
def test_as_it_is_and_with_our_fedavg_an_app_gives_the_same(app: str, capsys: pytest.CaptureFixture[str]) -> None:
    edits = server_line("fedavg")
    assert written(app, edits) == 1  # the import
    theirs, ours = run(app, []), run(app, edits)
    assert theirs.keys() == ours.keys()
    for name, expected in settled(theirs).items():
        # Flower averages counters of batches as floats; ours stay integers.
        np.testing.assert_allclose(settled(ours)[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, record in theirs.metric_records.items():
        assert dict(ours[name]) == pytest.approx(dict(record), rel=1e-5)
    out = capsys.readouterr().out
    assert len(set(out.splitlines())) == (1 if app == "quickstart" else 0)  # what the app prints is the same too


@pytest.mark.parametrize("algorithm", SERVER_ONLY)
@pytest.mark.parametrize("app", APPS)
def test_the_server_line_is_enough_where_clients_train_plainly(app: str, algorithm: str) -> None:
    edits = server_line(algorithm)
    assert written(app, edits) == 2
    theirs, ours = run(app, []), run(app, edits)
    assert moved(ours)
    assert theirs.keys() == ours.keys()
    for name, record in theirs.metric_records.items():
        assert record.keys() == ours[name].keys()
    if app == "quickstart":
        losses = list(ours["losses"].values())
        assert losses[-1] < losses[0]
    assert any(not np.allclose(a, settled(theirs)[n]) for n, a in settled(ours).items())


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"fedavg", "fedprox", *SERVER_ONLY}))
def test_without_the_client_half_the_first_round_says_what_to_add(algorithm: str) -> None:
    with pytest.raises(RunFailedError, match=r"missing.*with LocalSession\(msg, context, model\)"):
        run("quickstart", server_line(algorithm, max_failed_rounds=1))


def test_fedprox_with_gamma_needs_the_client_half_although_flowers_clients_read_mu() -> None:
    assert moved(run("quickstart", server_line("fedprox")))
    with pytest.raises(RunFailedError, match=r"num-steps is missing.*with LocalSession"):
        run("quickstart", server_line("fedprox", gamma=0.5, max_failed_rounds=1))


# --- a few lines of the client ---------------------------------------------------------------------------------------


def test_every_algorithm_is_here() -> None:
    assert {"fedavg", *SERVER_ONLY, *WITH_SESSION} == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", WITH_SESSION)
def test_the_quickstart_app_with_a_client_half(algorithm: str) -> None:
    more = WITH_SESSION[algorithm]
    names = {
        id(CLOSURE): "CLOSURE",
        id(LOSS_BEFORE): "LOSS_BEFORE",
        id(OWN_OBJECTIVE): "OWN_OBJECTIVE",
        id(PERSONAL): "PERSONAL",
    }
    client = [*SESSION["quickstart"], *more]
    assert written("quickstart", client) == WRITTEN["SESSION"] + (WRITTEN[names[id(more)]] if more else 0)
    state = run("quickstart", [*server_line(algorithm), *client])
    assert moved(state)
    losses = list(state["losses"].values())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("app", APPS)
def test_a_session_changes_nothing_for_fedavg(app: str) -> None:
    theirs, ours = run(app, []), run(app, [*server_line("fedavg"), *SESSION[app]])
    for name, expected in settled(theirs).items():
        np.testing.assert_allclose(settled(ours)[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, record in theirs.metric_records.items():
        assert dict(ours[name]) == pytest.approx(dict(record), rel=1e-5)


@pytest.mark.parametrize(
    "algorithm",
    ["fedprox", "scaffold", "fednova", "fedcspack", "fedsam", "mofedsam", "fedvssam", "fedgamma", "fedsmoo", "craft"],
)
def test_the_app_with_batchnorm_and_a_client_half(algorithm: str) -> None:
    state = run("batchnorm", [*server_line(algorithm), *SESSION["batchnorm"]])
    assert moved(state)
    assert decode(state["result"], "result")["1.num_batches_tracked"].dtype == torch.int64
    assert int(decode(state["result"], "result")["1.num_batches_tracked"]) == 9  # SAM's second pass doesn't count
    assert len(state["train"]) == len(state["evaluate"]) == 2 * 3


@pytest.mark.parametrize("algorithm", ["fedprox", "fednova", "fedacg", "fedcspack", "craft", "fedavgm"])
def test_momentum_accumulation_and_a_schedule_with_a_client_half(algorithm: str) -> None:
    state = run("accumulation", [*server_line(algorithm), *SESSION["accumulation"]])
    assert moved(state)
    losses = list(state["losses"].values())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ("scaffold", "with momentum the displacement isn't"),
        ("fedvssam", "h is the mean direction of plain SGD steps"),
        ("fedsam", r"evaluates each batch twice; call optimizer\.step\(lambda"),
    ],
)
def test_what_a_rule_cant_honour_is_refused_with_the_reason(algorithm: str, reason: str) -> None:
    with pytest.raises(RunFailedError, match=reason):
        run("accumulation", [*server_line(algorithm, max_failed_rounds=1), *SESSION["accumulation"]])


@pytest.mark.parametrize(
    ("algorithm", "settings", "more"),
    [("scaffold", {"option": 1}, FULL_GRADIENT), ("fedprox", {"gamma": 0.5}, [*FULL_GRADIENT, *STOP])],
)
def test_further_calls_of_a_session_serve_a_foreign_loop(algorithm: str, settings: Any, more: list[Edit]) -> None:
    server = server_line(algorithm, **settings)
    assert moved(run("quickstart", [*server, *SESSION["quickstart"], *more]))
    short = server_line(algorithm, max_failed_rounds=1, **settings)
    with pytest.raises(RunFailedError, match=r"session\.full_gradient\("):
        run("quickstart", [*short, *SESSION["quickstart"]])


# --- a part of the model is exchanged --------------------------------------------------------------------------------

PARTIAL: list[Edit] = [
    (
        "class Net(nn.Module):\n",
        'def shared(name):\n    return name.startswith("encoder")\n\n\nclass Net(nn.Module):\n',
    ),
    ("LocalSession(msg, context, net)", "LocalSession(msg, context, net, shared)"),
    (
        '    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())\n    loss, accuracy',
        '    fedstrat.load_arrays(net, msg.content["arrays"], shared)\n    loss, accuracy',
    ),
    ("import torch\n", "import fedstrat\nimport torch\n"),
    (
        "initial_arrays=ArrayRecord(Net().state_dict())",
        "initial_arrays=ArrayRecord({n: t for n, t in Net().state_dict().items() if shared(n)})",
    ),
    ("    net, loader = Net(), load_data", "    torch.manual_seed(0)\n    net, loader = Net(), load_data"),
]


@pytest.mark.parametrize("algorithm", ["fedavg", "craft", "scaffold", "fedvssam", "fedcspack", "fedprox", "fednova"])
def test_only_the_chosen_part_of_a_model_travels_and_trains(algorithm: str) -> None:
    more = CLOSURE if algorithm == "fedvssam" else []
    state = run("quickstart", [*server_line(algorithm), *SESSION["quickstart"], *more, *PARTIAL])
    assert list(state["result"]) == ["encoder.0.weight", "encoder.0.bias"]
    whole = run("quickstart", [])  # begins at the same point
    assert not np.allclose(settled(state)["encoder.0.weight"], settled(whole)["encoder.0.weight"])
    if algorithm == "fedavg":
        frozen = ("    net, loader = Net()", "    net, loader = Net().requires_grad_(False)")
        thawed = ("    optimizer =", "    net.encoder.requires_grad_(True)\n    optimizer =")
        other = settled(run("quickstart", [frozen, thawed]))
        for name, array in settled(state).items():
            np.testing.assert_allclose(array, other[name], atol=1e-6)
