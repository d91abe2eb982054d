"""Clients that fail, are late or slow, nodes that never come, workers that die: what a run does then."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedstrat
from fedstrat.errors import PayloadError, RunFailedError
from fedstrat.payloads import decode, raw_array
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS, FedAvg, cohort, intake, rounds
from fedstrat.strategies.cohort import wait_for_nodes
from tests.strategies import small
from tests.strategies.small import CLIENTS, Recorder, bits, frozen, start

SETTINGS: dict[str, dict[str, Any]] = {"fedcspack": {"pack_size": 4}}


def make(algorithm: str, **settings: Any) -> Any:
    own = {"seed": 7, "fraction_evaluate": 0.0, **SETTINGS.get(algorithm, {}), **settings}
    return ALGORITHMS[algorithm].strategy(**own)


def nan(content: RecordDict) -> RecordDict:
    """The reply with its first floating number NaN."""
    for record, arrays in content.array_records.items():
        for name, array in arrays.items():
            if "float" in array.dtype:
                broken = decode(arrays, "test")[name].clone()
                broken.view(-1)[0] = torch.nan
                return small.with_array(content, name, raw_array(broken), record)
    raise AssertionError("no floating array in the reply")


# --- NaN -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_where_every_reply_is_nan_the_run_ends_and_the_last_good_model_stays(algorithm: str) -> None:
    """Two good rounds, then NaN from all five: the run fails after 2 such rounds, all as it was after round 2."""
    states: list[Any] = []

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return nan(content) if t > 2 else content

    strategy = make(algorithm, max_failed_rounds=2)
    grid = Recorder(small.client_app(small.convex), alter=alter)
    reports: list[Any] = []

    def keep(report: Any) -> None:
        reports.append(report)
        states.append(frozen([strategy.state, strategy.buffers, strategy.accepted]))

    with pytest.raises(RunFailedError, match=r"^2 failed rounds in a row, the last in round 4.*finite") as caught:
        start(strategy, grid, small.convex, 9, on_round=keep)
    assert [report.aggregated for report in reports] == [True, True, False, False]
    for report in reports[2:]:
        assert report.failed.keys() == set(CLIENTS)
    assert states[3] == states[2] == states[1] != states[0]
    good = start(make(algorithm), Recorder(small.client_app(small.convex)), small.convex, 2)
    assert bits(caught.value.result.arrays) == bits(good.result.arrays)


def test_one_client_of_five_with_nan_is_dropped_by_name_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flwr")

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return nan(content) if client == "3" else content

    run = start(make("scaffold"), Recorder(small.client_app(small.convex), alter=alter), small.convex, 1)
    assert run.reports[0].trained == ("0", "1", "2", "4")
    lines = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert lines == ["round 1: client 3 is dropped: arrays/weight: " + run.reports[0].failed["3"].split(": ", 1)[1]]


SHOWING = [name for name, entry in ALGORITHMS.items() if entry.strategy.shows_non_finite]


def broken(name: str, value: float) -> Callable[[RecordDict], RecordDict]:
    """Puts a number into the last place of one array of a reply."""

    def alter(content: RecordDict) -> RecordDict:
        tensor = decode(content["arrays"], "test")[name].clone()
        tensor.view(-1)[-1] = value
        return small.with_array(content, name, raw_array(tensor))

    return alter


BROKEN: dict[str, dict[str, Callable[[RecordDict], RecordDict]]] = {
    "nan": {"3": broken("output.bias", math.nan)},
    "infinities that cancel": {"0": broken("scale", math.inf), "4": broken("scale", -math.inf)},
    "a tied name's": {"1": broken("again.weight", math.nan)},
    "a buffer's": {"2": broken("norm.running_var", math.inf), "3": broken("hidden.bias", math.nan)},
    "all": {client: broken("hidden.weight", math.inf) for client in CLIENTS},
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("algorithm", SHOWING)
def test_whom_the_step_shows_is_dropped_as_if_looked_at_first(
    algorithm: str, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything that a run leaves behind is that of a strategy that looks at every reply before its step."""
    caplog.set_level(logging.WARNING, logger="flwr")

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return BROKEN[case].get(client, lambda same: same)(content) if t == 2 else content

    def left_by(showing: bool) -> Any:
        caplog.clear()
        cls = type("Own", (ALGORITHMS[algorithm].strategy,), {"shows_non_finite": showing})
        strategy = cls(seed=7, fraction_evaluate=0.0, evaluate_in_train=True, trainable=small.TRAINED)
        app = small.client_app(small.everything, test_data=small.batches)
        run = start(strategy, Recorder(app, alter=alter), small.everything, 3)
        assert run.reports[1].trained == tuple(c for c in CLIENTS if c not in BROKEN[case])
        assert run.reports[1].failed.keys() == BROKEN[case].keys()
        lines = [record.getMessage() for record in caplog.records]
        reports = [dataclasses.replace(report, seconds=0.0) for report in run.reports]
        left = [run.models, strategy.state, strategy.buffers, strategy.accepted, strategy.seen, strategy.moving]
        return frozen(left), reports, sorted(lines)

    assert left_by(showing=True) == left_by(showing=False)


@pytest.mark.parametrize("algorithm", SHOWING)
def test_good_replies_are_not_searched(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    checked = "fedstrat.payloads.check_finite"
    monkeypatch.setattr(checked, lambda tensors, what: seen.extend(f"{what}/{name}" for name in tensors))
    start(make(algorithm), Recorder(small.client_app(small.convex)), small.convex, 1)
    assert not any(name.startswith("arrays/") for name in seen)
    start(make("craft"), Recorder(small.client_app(small.convex)), small.convex, 1)
    assert seen.count("arrays/weight") == seen.count("arrays/bias") == len(CLIENTS)


def test_a_step_of_ones_own_is_not_trusted_to_show_them() -> None:
    class Hiding(FedAvg):
        def aggregate(self, state: Any, updates: Any) -> Any:
            return super().aggregate(state, updates[:1])

    class Showing(Hiding):
        shows_non_finite = True

    assert FedAvg.shows_non_finite
    assert not Hiding.shows_non_finite
    assert Showing.shows_non_finite
    assert {"fedavg", "fedprox", "scaffold"} <= set(SHOWING)
    assert not {"craft", "config", "qfedavg", "ditto", "fedlf"} & set(SHOWING)


@pytest.mark.parametrize("setting", [{"max_update_norm": 1e6}, {}])
def test_clipping_names_them_too(setting: dict[str, float]) -> None:
    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return nan(content) if client == "3" else content

    run = start(make("fedavg", **setting), Recorder(small.client_app(small.convex), alter=alter), small.convex, 1)
    assert run.reports[0].failed == {"3": "arrays/weight: expected finite numbers, but it holds NaN or infinity"}


# --- too few replies -------------------------------------------------------------------------------------------------


def test_failed_rounds_are_counted_in_a_row() -> None:
    """Rounds 1, 3, 5 fail: never two in a row. Then 7 and 8: the run ends."""
    failing = {1, 3, 5, 7, 8}
    raises = [(t, client) for t in failing for client in CLIENTS]
    grid = Recorder(small.client_app(small.convex, raises=raises))
    reports: list[Any] = []
    with pytest.raises(RunFailedError, match=r"2 failed rounds in a row, the last in round 8.*the disk is full"):
        start(make("fedavg", max_failed_rounds=2), grid, small.convex, 12, on_round=reports.append)
    assert [report.round for report in reports if not report.aggregated] == sorted(failing)


@pytest.mark.parametrize(("length", "cut"), [(1900, False), (2100, True)])
def test_a_long_reason_is_whole_or_visibly_cut(length: int, cut: bool) -> None:
    reason = f"<class 'fedstrat.errors.DataError'>:<'{'x' * length}'>"
    with pytest.raises(PayloadError) as caught:
        intake.content_of(cast("Message", SimpleNamespace(has_error=lambda: True, error=Error(2, reason))))
    assert ("x" * length in str(caught.value)) is not cut
    assert str(caught.value).endswith("x …") is cut


def test_the_reason_comes_first_and_few_clients_are_named() -> None:
    strategy = make("fedavg")
    strategy.failed = {str(i): "the disk is full" for i in range(1000)} | {"a": "no reply in time"}
    assert strategy.failure_reasons() == (
        "the disk is full (clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 others); no reply in time (client a)"
    )
    strategy.failed = {str(i): "x" for i in range(11)}
    assert strategy.failure_reasons().endswith("9 and 1 other)")


@pytest.mark.parametrize(("min_replies", "aggregated"), [(1, True), (3, True), (4, False), (5, False)])
def test_min_replies_counts_good_ones(min_replies: int, aggregated: bool) -> None:
    """Of five clients one is silent and one sends NaN: three are left."""

    def alter(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return {"1": None, "2": nan(content)}.get(client, content) if t == 1 else content

    run = start(make("fedavg", min_replies=min_replies), Recorder(small.client_app(small.convex), alter=alter),
                small.convex, 2)  # fmt: skip
    assert [report.aggregated for report in run.reports] == [aggregated, True]
    assert run.reports[0].trained == (("0", "3", "4") if aggregated else ())


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "waits"),
    [(None, [9.0] * 4), (2.5, [2.5] * 4), ([1.0, 2.0], [1.0, 2.0, 2.0, 2.0]), ([], [9.0] * 4)],
)
def test_a_round_waits_as_long_as_its_own_timeout_says(
    given: Any, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    exchange = rounds.exchange

    def watched(grid: Any, messages: list[Message], timeout: float) -> list[Message]:
        seen.append(timeout)
        return exchange(grid, messages, timeout)

    monkeypatch.setattr(rounds, "exchange", watched)
    strategy = make("fedavg", round_timeout=given, seed=None)
    start(strategy, Recorder(small.client_app(small.convex)), small.convex, 4, timeout=9.0)
    assert seen[::2] == waits  # training; evaluation has nobody to ask
    assert strategy.round_timeout == given


def test_a_silent_client_costs_its_round_the_timeout_and_is_named() -> None:
    def alter(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return None if client == "4" else content

    grid = Recorder(small.client_app(small.convex), alter=alter)
    run = start(make("fedavg", round_timeout=0.05), grid, small.convex, 1, timeout=3600.0)
    assert run.reports[0].failed == {"4": "no reply in time"}
    assert 0.05 <= run.reports[0].seconds < 60.0


def test_too_few_nodes_end_the_run_naming_the_clients_that_are_there() -> None:
    places = [{"client-id": name, "partition-id": i} for i, name in enumerate(("site-b", "10", "site-a", "9"))]
    grid = InProcessGrid(small.client_app(small.convex), 4, node_configs=places)
    strategy = make("fedavg", min_available_nodes=6, connect_timeout=0.01)
    expected = r"at least 6 connected nodes within 0\.01 s, but 4 are connected \(clients 9, 10, site-a, site-b\)"
    with pytest.raises(RunFailedError, match=expected) as caught:
        strategy.start(grid, small.initial(small.convex), num_rounds=2)
    assert bits(caught.value.result.arrays) == bits(small.initial(small.convex))


def test_nodes_whose_client_nobody_knows_go_by_their_ids() -> None:
    grid = InProcessGrid(ClientApp(), 2)
    with pytest.raises(RunFailedError, match=r"2 are connected \(node 1000, node 1001\); start more nodes"):
        wait_for_nodes(grid, 3, 0.0, ask=True)
    with pytest.raises(RunFailedError, match=r"2 are connected \(client x, node 1001\)"):
        wait_for_nodes(grid, 3, 0.0, known={1000: "x"})
    grid.contexts.clear()
    with pytest.raises(RunFailedError, match=r"0 are connected \(none\)"):
        wait_for_nodes(grid, 3, 0.0, ask=True)


# --- clipping --------------------------------------------------------------------------------------------------------


def test_max_update_norm_by_hand() -> None:
    """x = 0 in R^2. Client 0 moves to (3, 4), norm 5, client 1 to (0.6, 0.8), norm 1; both weigh alike.

    Clipped to 2 the first moves to (1.2, 1.6), so x becomes ((1.2 + 0.6)/2, (1.6 + 0.8)/2) = (0.9, 1.2).
    """

    def line() -> nn.Module:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def steps(session: fedstrat.LocalSession, model: Any, client: int) -> None:
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[3.0, 4.0], [0.6, 0.8]][client])[None])

    def run(**settings: Any) -> np.ndarray:
        grid = Recorder(small.own_loop(line, steps, examples=lambda _: 10), 2)
        return small.vector(start(make("fedavg", **settings), grid, line, 1).result.arrays)

    np.testing.assert_allclose(run(max_update_norm=2.0), [0.9, 1.2], rtol=1e-6)
    np.testing.assert_allclose(run(), [1.8, 2.4], rtol=1e-6)
    np.testing.assert_allclose(run(max_update_norm=5.5), [1.8, 2.4], rtol=1e-6)


# --- stragglers ------------------------------------------------------------------------------------------------------

EPOCHS = 5


def epochs_run(algorithm: str, **settings: Any) -> list[dict[str, int]]:
    """Round by round, client -> epochs: every client has one batch, so its steps are its epochs."""
    strategy = make(algorithm, straggler_share=0.5, **settings)
    grid = Recorder(small.client_app(small.convex, loader=lambda c: small.batches(c, None), epochs=EPOCHS))
    start(strategy, grid, small.convex, 3)
    return [{trip.client: int(trip.reply["metrics"]["num-steps"]) for trip in grid.of(t)} for t in (1, 2, 3)]


@pytest.fixture(scope="module")
def of_fedavg() -> list[dict[str, int]]:
    return epochs_run("fedavg")


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "fedavg"])
def test_stragglers_are_the_same_for_every_algorithm(algorithm: str, of_fedavg: list[dict[str, int]]) -> None:
    epochs = epochs_run(algorithm)
    if algorithm in ("fedsam", "mofedsam", "fedvssam", "fedgamma", "fedsmoo", "ditto"):
        # Whatever counts as a step there, who does less is the same.
        assert [{c for c, k in r.items() if k < max(r.values())} for r in epochs] == [
            {c for c, k in r.items() if k < EPOCHS} for r in of_fedavg
        ]
    else:
        assert epochs == of_fedavg


def test_a_share_of_the_cohort_runs_fewer_epochs(of_fedavg: list[dict[str, int]]) -> None:
    for t in of_fedavg:
        slow = [k for k in t.values() if k != EPOCHS]
        assert len(slow) == 2  # floor(0.5 * 5)
        assert all(1 <= k < EPOCHS for k in slow)
    assert epochs_run("fedavg") == of_fedavg
    assert epochs_run("fedavg", seed=8) != of_fedavg


def test_fedavg_may_drop_its_stragglers(of_fedavg: list[dict[str, int]]) -> None:
    kept = epochs_run("fedavg", drop_stragglers=True)
    assert kept == [{c: k for c, k in t.items() if k == EPOCHS} for t in of_fedavg]


def test_a_stragglers_share_is_uniform_and_never_whole() -> None:
    shares = [u for t in range(2000) for u in cohort.stragglers([*range(10)], 0.39, 1, t).values()]
    assert len(shares) == 2000 * 3  # floor(3.9)
    assert 0.0 <= min(shares) < 0.01
    assert 0.99 < max(shares) < 1.0
    assert np.histogram(shares, 4, (0, 1))[0] == pytest.approx(1500, abs=150)


def test_one_epoch_cannot_be_less() -> None:
    grid = Recorder(small.client_app(small.convex, loader=lambda c: small.batches(c, None)))
    start(make("fedavg", straggler_share=1.0), grid, small.convex, 1)
    assert {trip.reply["metrics"]["num-steps"] for trip in grid.of(1)} == {1}


# --- dead workers of the simulation engine ---------------------------------------------------------------------------

RAY = (  # as flwr 1.39 writes the death of a Ray worker into an error reply
    "<class 'ray.exceptions.ActorDiedError'>:<'The actor died unexpectedly before finishing this task.\n"
    "\tclass_name: ClientAppActor\n\tactor_id: 7f1c2c2a0a2d7b5d3a1ed17701000000\n\tpid: 9745\n"
    "\tnamespace: 1a7d5b5b-0000\n\tip: 172.17.0.2\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker"
    " unexpectedly exits with a connection error code 2. End of file.'>"
)


class DeadWorkers(Recorder):
    """From some message on, replies of one type to some clients are what Flower makes of a dead worker."""

    def __init__(self, kind: str, after: int, reason: str = RAY) -> None:
        super().__init__(small.client_app(small.convex))
        self.kind, self.after, self.reason = kind, after, reason

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for i, reply in enumerate(replies):
            if reply.metadata.message_type != self.kind:
                continue
            self.after -= 1
            if self.after < 0:
                dead = Message(RecordDict(), 1, self.kind)
                dead.__dict__["_content"], dead.__dict__["_error"] = None, Error(0, self.reason)
                dead.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
                replies[i] = dead
        return replies


@pytest.mark.parametrize(("kind", "after", "done"), [("query", 2, 0), ("train", 7, 1), ("evaluate", 12, 3)])
def test_a_dead_worker_ends_the_run_by_name(kind: str, after: int, done: int) -> None:
    """The last good model is kept: that of the round before, or of the round whose evaluation it was."""
    grid = DeadWorkers(kind, after)
    expected = r"Ray worker.*died \(ActorDiedError, process 9745; killed, or crashed\).*resume"
    with pytest.raises(RunFailedError, match=expected) as caught:
        start(make("scaffold", fraction_evaluate=1.0), grid, small.convex, 9)
    good = start(make("scaffold"), Recorder(small.client_app(small.convex)), small.convex, 3)
    assert bits(caught.value.result.arrays) == bits(good.models[done])


def test_a_worker_out_of_memory_is_told_apart() -> None:
    reason = "<class 'ray.exceptions.OutOfMemoryError'>:<'Task was killed due to the node running low on memory.'>"
    with pytest.raises(RunFailedError, match=r"OutOfMemoryError; out of memory\)"):
        start(make("fedavg"), DeadWorkers("train", 0, reason), small.convex, 1)


def test_a_clients_own_error_that_speaks_of_dead_workers_is_only_its_own() -> None:
    reason = "<class 'flwr.clientapp.client_app.ClientAppException'>:<'ActorDiedError: the worker died'>"
    with pytest.raises(RunFailedError, match=r"no round of 1 succeeded: its app failed.*\(clients 0, 1, 2, 3, 4\)"):
        start(make("fedavg"), DeadWorkers("train", 0, reason), small.convex, 1)
