"""``streaming``: replies are added to a running mean one by one, and the run is that of all at once up to rounding."""

import dataclasses
import gc
import math
import random
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn

from fedstrat.aggregation.mean import RunningMean, aggregate_buffers
from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.flower import exchange_in_turn
from fedstrat.payloads import decode, raw_array
from fedstrat.runs import config
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS, FedAvg
from tests.strategies import small
from tests.strategies.small import CLIENTS, Recorder, bits, start

BY_MEAN = [name for name, entry in ALGORITHMS.items() if entry.strategy.steps_by_mean]


def make(algorithm: str, **settings: Any) -> Any:
    own = {"seed": 7, "fraction_evaluate": 0.0, "trainable": small.TRAINED, **settings}
    return ALGORITHMS[algorithm].strategy(**own)


def spoil(t: int, client: str, content: RecordDict) -> RecordDict | None:
    """In round 2 one client sends NaN, one the wrong shape, one nothing."""
    if t != 2 or client in ("0", "3"):
        return content
    if client == "4":
        return None
    scale = torch.tensor(torch.nan) if client == "1" else torch.zeros(2)
    return small.with_array(content, "scale", raw_array(scale))


@pytest.mark.parametrize("settings", [{}, {"max_update_norm": 0.05}, {"evaluate_in_train": True}])
@pytest.mark.parametrize("algorithm", BY_MEAN)
def test_the_run_is_that_of_all_replies_at_once(algorithm: str, settings: dict[str, Any]) -> None:
    app = small.client_app(small.everything, test_data=small.batches)

    def run(*, streaming: bool) -> Any:
        strategy = make(algorithm, streaming=streaming, **settings)
        done = start(strategy, Recorder(app, alter=spoil), small.everything, 3, diagnostics="off")
        return done, strategy

    (plain, before), (streamed, after) = run(streaming=False), run(streaming=True)
    assert streamed.reports[1].trained == ("0", "3")
    for one, other in zip(plain.models, streamed.models, strict=True):
        np.testing.assert_allclose(small.vector(other), small.vector(one), rtol=1e-5, atol=2e-6)
        for name, array in one.items():
            assert (other[name].dtype, other[name].shape) == (array.dtype, array.shape)
            assert array.dtype != "int64" or other[name].data == array.data
    assert (after.accepted, after.seen, after.moving) == (before.accepted, before.seen, before.moving)
    for one, other in zip(plain.reports, streamed.reports, strict=True):
        assert other.train == pytest.approx(one.train, rel=1e-4)
        assert other.traffic == one.traffic
        assert (other.trained, other.failed) == (one.trained, one.failed)
        assert (other.received is None) == (one.received is None) == (not settings.get("evaluate_in_train"))


def test_a_round_without_a_good_reply_changes_nothing() -> None:
    def silent(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return content if t == 1 else None

    strategy = make("fedavgm", streaming=True, max_failed_rounds=2, trainable=None)
    grid = Recorder(small.client_app(small.convex), alter=silent)
    with pytest.raises(RunFailedError, match=r"0 usable replies.*no reply in time \(clients 0, 1, 2, 3, 4\)") as caught:
        start(strategy, grid, small.convex, 4)
    good = start(
        make("fedavgm", streaming=True, trainable=None), Recorder(small.client_app(small.convex)), small.convex, 1
    )
    assert bits(caught.value.result.arrays) == bits(good.result.arrays)


def one_round() -> tuple[FedAvg, list[Message]]:
    """A strategy that has sent its messages, and the replies in the order of these."""
    strategy = make("fedavg", streaming=True)
    grid = InProcessGrid(small.client_app(small.everything), len(CLIENTS))
    arrays = small.initial(small.everything)
    sent = list(strategy.configure_train(1, arrays, ConfigRecord({}), grid))
    return strategy, list(grid.pull_messages(grid.push_messages(sent)))


def test_equal_bits_whatever_the_order_of_a_list() -> None:
    found = set()
    for seed in range(6):
        strategy, replies = one_round()
        random.Random(seed).shuffle(replies)
        arrays, _ = strategy.aggregate_train(1, replies)
        found.add(tuple(array.data for array in arrays.values()))
    strategy, replies = one_round()
    arrays, _ = strategy.aggregate_train(1, iter(replies))
    assert found == {tuple(array.data for array in arrays.values())}


def test_each_reply_is_let_go_of_before_the_next_but_one() -> None:
    strategy, replies = one_round()
    references = [weakref.ref(reply) for reply in replies]
    replies.reverse()
    alive: list[int] = []

    def arriving() -> Iterator[Message]:
        while replies:
            gc.collect()
            alive.append(sum(ref() is not None for ref in references) - len(replies))
            yield replies.pop()

    _, metrics = strategy.aggregate_train(1, arriving())
    assert metrics is not None
    assert len(alive) == len(CLIENTS)
    assert max(alive) <= 1
    del strategy
    gc.collect()
    assert not any(ref() for ref in references)


class Slow:
    """A grid in which each message's reply is there after so many looks at it."""

    def __init__(self, looks: dict[str, float]) -> None:
        self.looks, self.asked = looks, []

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        return [str(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        (asked,) = message_ids
        self.asked.append(asked)
        return [f"reply to {asked}"] if self.asked.count(asked) > self.looks[asked] else []


def test_replies_are_pulled_one_by_one_in_the_order_of_the_messages() -> None:
    grid: Any = Slow({"a": 2, "b": 0, "c": 1})
    arriving = exchange_in_turn(grid, ["a", "", "b", "c"], 60.0)  # "": a message that wasn't accepted
    assert next(arriving) == "reply to a"
    assert grid.asked == ["a", "a", "a"]
    assert list(arriving) == ["reply to b", "reply to c"]
    assert grid.asked[3:] == ["b", "c", "c"]


def test_after_the_timeout_what_is_there_is_still_pulled() -> None:
    grid: Any = Slow({"a": 0, "lost": math.inf, "c": 0, "late": 1})
    begun = time.monotonic()
    assert list(exchange_in_turn(grid, ["a", "lost", "c", "late"], 0.12)) == ["reply to a", "reply to c"]
    assert 0.12 <= time.monotonic() - begun < 30.0
    assert list(exchange_in_turn(grid, [], 60.0)) == []


def test_the_running_mean_by_hand() -> None:
    """Weights 1 and 3: 1 + (1 * 2 + 3 * (-2)) / 4 = 0, 10 + (1 * 4 + 3 * 0) / 4 = 11; the larger counter."""
    x = {"a": torch.tensor([1.0]), "b": torch.tensor([10.0], dtype=torch.float16), "n": torch.tensor(5)}
    mean = RunningMean(x)
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([14.0], dtype=torch.float16), "n": torch.tensor(9)}
    mean.add(one, 1.0)
    mean.add({"a": torch.tensor([-1.0]), "b": x["b"], "n": torch.tensor(7)}, 3.0)
    found = mean.model()
    assert {n: t.tolist() for n, t in found.items()} == {"a": [0.0], "b": [11.0], "n": 9}
    assert (found["a"].dtype, found["n"].dtype) == (torch.float64, torch.int64)
    assert one["a"].tolist() == [3.0]


def test_a_running_mean_of_buffers_is_aggregated_as_they_are() -> None:
    rng = np.random.default_rng(0)
    dtypes = [torch.float32, torch.float64, torch.complex64, torch.bfloat16, torch.float8_e5m2, torch.int32, torch.bool]

    def buffers() -> dict[str, torch.Tensor]:
        return {str(d): torch.tensor(rng.normal(size=(3, 2)) * 3.0).to(d) for d in dtypes} | {"0": torch.zeros(0)}

    old, clients, weights = buffers(), [buffers() for _ in range(7)], [float(i) for i in range(1, 8)]
    mean = RunningMean(old)
    for client, weight in zip(clients, weights, strict=True):
        mean.add(client, weight)
    expected = aggregate_buffers(old, clients, [w / sum(weights) for w in weights])
    found = aggregate_buffers(old, [mean.model()], [1.0])
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        wide = value.dtype if value.dtype.itemsize > 1 else torch.float32
        torch.testing.assert_close(found[name].to(wide), value.to(wide))


def test_a_running_mean_never_writes_into_what_it_is_given() -> None:
    x, y = {"a": torch.zeros(3, dtype=torch.float64)}, {"a": torch.ones(3, dtype=torch.float64)}
    mean = RunningMean(x)
    mean.add(y, 2.0)
    mean.add(y, 2.0)
    assert mean.model()["a"].tolist() == [1.0, 1.0, 1.0]
    assert (x["a"].tolist(), y["a"].tolist()) == ([0.0] * 3, [1.0] * 3)


def test_own_metrics_functions_get_everything_but_arrays() -> None:
    given: list[list[str]] = []

    def aggregated(contents: list[RecordDict], _: str) -> MetricRecord:
        given.extend(sorted(content) for content in contents)
        return MetricRecord({"clients": len(contents)})

    strategy = make("fedavg", streaming=True, train_metrics_aggr_fn=aggregated)
    done = start(strategy, Recorder(small.client_app(small.everything)), small.everything, 1)
    assert given == [["client", "metrics"]] * len(CLIENTS)
    assert done.reports[0].train == {"clients": 5.0}


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(BY_MEAN)))
def test_methods_that_need_all_updates_refuse(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="can't run with streaming=True: its step reads more of the updates"):
        ALGORITHMS[algorithm].strategy(streaming=True)
    with pytest.raises(ConfigError, match=f"'streaming' lets go of each update, but '{algorithm}' needs all"):
        config.parse({"algorithm": algorithm, "streaming": True})


def test_the_run_config_switches_it_on() -> None:
    assert config.parse({"algorithm": "fedprox", "streaming": True}).strategy().streaming
    assert not config.parse({"algorithm": "fedprox"}).strategy().streaming
    assert {"fedavg", "fedprox", "fedavgm", "fedacg"} <= set(BY_MEAN)


def test_a_step_of_ones_own_has_to_say_that_the_mean_is_enough() -> None:
    class Own(FedAvg):
        def aggregate(self, state: Any, updates: Any) -> Any:
            return dataclasses.replace(super().aggregate(state, updates[:1]))

    with pytest.raises(ConfigError, match="streaming"):
        Own(streaming=True)


def test_double_precision_is_kept() -> None:
    def run(*, streaming: bool) -> np.ndarray:
        app = small.client_app(small.double, loader=lambda c: small.batches(c, dtype=torch.float64))
        strategy = make("fedavgm", streaming=streaming, trainable=None)
        return small.vector(start(strategy, Recorder(app), small.double, 3).result.arrays)

    np.testing.assert_allclose(run(streaming=True), run(streaming=False), rtol=1e-13, atol=1e-14)


def test_the_mean_of_a_large_model_keeps_small_displacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client i moves by i spacings of float32 numbers, weighs i + 1: sum (i + 1) i / 15 = 8/3 spacings.

    The mean model itself lies between two such numbers.
    """
    monkeypatch.setattr("fedstrat.aggregation.gram.EXACT_NUMBERS", 0)

    def far() -> nn.Module:
        model = nn.Linear(2, 3)
        nn.init.constant_(model.weight, 1000.0)
        nn.init.constant_(model.bias, -2000.0)
        return model

    def steps(session: Any, model: Any, client: int) -> None:
        with torch.no_grad():
            model.weight += 6.103515625e-05 * client
            model.bias -= 0.0001220703125 * client

    app = small.own_loop(far, steps, examples=lambda client: client + 1)
    strategy = make("fedavgm", streaming=True, trainable=None)
    start(strategy, Recorder(app), far, 1)
    momentum = strategy.state.momentum
    assert momentum["weight"].flatten().tolist() == pytest.approx([8 / 3 * 6.103515625e-05] * 6, rel=1e-6)
    assert momentum["bias"].tolist() == pytest.approx([-8 / 3 * 0.0001220703125] * 3, rel=1e-6)
    assert decode(small.initial(far), "x")["bias"].tolist() == [-2000.0] * 3
