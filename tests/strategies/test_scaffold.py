"""SCAFFOLD's numbers worked out by hand, and its invariant when clients join late, through real messages.

Every client holds one number y and minimises slope * y, with a slope that the test tells it: its raw gradient
is known, and by option 2 its next control variate c_i+ is the mean of its slopes in the round.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn

import fedstrat
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.zeros((), dtype=torch.float64))


def number(record: ArrayRecord) -> float:
    return float(decode(record, "test")["y"])


@dataclass
class Seen:
    """What passed over the wire: (round, client) -> c as received, x - y, and c_i+ - c_i as sent."""

    control: dict[tuple[int, int], float] = field(default_factory=dict)
    displacement: dict[tuple[int, int], float] = field(default_factory=dict)
    control_delta: dict[tuple[int, int], float] = field(default_factory=dict)

    def clients(self, round_number: int) -> list[int]:
        return [client for t, client in self.control if t == round_number]

    def own_control(self, client: int, before_round: int) -> float:
        """c_i as the sum of everything the client sent."""
        return sum(delta for (t, i), delta in self.control_delta.items() if i == client and t < before_round)


def client_app(
    slope: Callable[[int, int], float], seen: Seen, examples: Callable[[int], int] = lambda _: 10
) -> ClientApp:
    """Four epochs of five batches at lr 0.1: 20 steps, so the displacement is 2 * (slope - c_i + c)."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        client, t = int(context.node_config["partition-id"]), int(msg.content["config"]["server-round"])
        model = Number()
        with fedstrat.LocalSession(msg, context, model) as session:
            x = model.y.item()
            optimizer = session.optimizer(lr=0.1)
            for _ in range(4 * 5):
                optimizer.step(lambda: slope(t, client) * model.y)
            seen.displacement[t, client] = x - model.y.item()
            reply = session.reply(num_examples=examples(client), metrics={"train-loss": 0.0})
        seen.control[t, client] = number(msg.content["control"])
        seen.control_delta[t, client] = number(reply.content["control-delta"])
        return reply

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return fedstrat.query(msg, context, num_examples=examples(int(context.node_config["partition-id"])))

    return app


def start(strategy: fedstrat.SCAFFOLD, grid: InProcessGrid, num_rounds: int, **options: Any) -> None:
    strategy.start(grid=grid, initial_arrays=ArrayRecord(Number().state_dict()), num_rounds=num_rounds, **options)


def test_new_control_of_a_client():
    # Three clients; only client 0 has a slope, 0.3 in round 1: c_0 = 0.3 and c = 0.3 / 3 = 0.1.
    # Round 2: 20 steps of 0.1 along 1.2 - 0.3 + 0.1 = 1 move by 2, and c_0+ = 0.3 - 0.1 + 2 / 2 = 1.2.
    seen = Seen()
    app = client_app(lambda t, client: {1: 0.3, 2: 1.2}[t] if client == 0 else 0.0, seen)
    start(fedstrat.SCAFFOLD(fraction_evaluate=0.0, min_available_nodes=3), InProcessGrid(app, 3), 2)
    assert seen.control[2, 0] == pytest.approx(0.1)
    assert seen.own_control(0, before_round=2) == pytest.approx(0.3)
    assert seen.displacement[2, 0] == pytest.approx(2.0)
    assert seen.own_control(0, before_round=3) == pytest.approx(1.2)


def test_new_control_of_the_server():
    # N = 4, c = 0, two clients sampled whose controls change by 0.4 and 0.8: c = (0.4 + 0.8) / 4 = 0.3.
    seen = Seen()
    slopes: dict[int, float] = {}
    app = client_app(lambda _, client: slopes.setdefault(client, 0.8 if slopes else 0.4), seen)
    strategy = fedstrat.SCAFFOLD(fraction_train=0.5, fraction_evaluate=0.0, min_available_nodes=4)
    start(strategy, InProcessGrid(app, 4), 2)
    assert sorted(seen.control_delta[1, client] for client in seen.clients(1)) == pytest.approx([0.4, 0.8])
    assert [seen.control[2, client] for client in seen.clients(2)] == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_control_is_the_mean_of_all_clients_controls_with_a_late_joiner(weighting: str):
    seen, sizes = Seen(), [10, 30, 5, 20]
    app = client_app(lambda t, client: (client + 1) * 0.1 * t**0.5, seen, lambda client: sizes[client])
    grid = InProcessGrid(app, 4)
    late_id, late = grid.contexts.popitem()

    def let_join(report: Any) -> None:
        if report.round == 2:
            grid.contexts[late_id] = late

    strategy = fedstrat.SCAFFOLD(
        weighting=weighting,
        fraction_evaluate=0.0,
        min_available_nodes=3,
        min_train_nodes=3,
        fraction_train=1.0,
    )
    start(strategy, grid, 5, on_round=let_join)
    assert [len(seen.clients(t)) for t in (1, 2, 3, 4, 5)] == [3, 3, 4, 4, 4]
    for t, n in ((2, 3), (4, 4), (5, 4)):
        mass = [sizes[i] if weighting == "examples" else 1 for i in range(n)]
        mean = sum(mass[i] * seen.own_control(i, before_round=t) for i in range(n)) / sum(mass)
        assert [seen.control[t, i] for i in range(n)] == pytest.approx([mean] * n)


def test_control_is_the_mean_of_all_clients_controls_under_partial_participation():
    seen = Seen()
    app = client_app(lambda t, client: (client - 2) * 0.3 / t, seen)
    strategy = fedstrat.SCAFFOLD(fraction_train=0.4, fraction_evaluate=0.0, min_available_nodes=5, seed=4)
    start(strategy, InProcessGrid(app, 5), 7)
    assert len({tuple(seen.clients(t)) for t in range(1, 8)}) > 2
    for t in range(2, 8):
        mean = sum(seen.own_control(i, before_round=t) for i in range(5)) / 5
        for i in seen.clients(t):
            assert seen.control[t, i] == pytest.approx(mean)
            # option 2 keeps the mean raw gradient of the client's own steps
            assert seen.own_control(i, before_round=t + 1) == pytest.approx((i - 2) * 0.3 / t)
