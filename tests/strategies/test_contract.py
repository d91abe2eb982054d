"""What every algorithm must do, whatever it computes. Whoever stands in ALGORITHMS and passes is admitted."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from torch.nn.functional import cross_entropy

import fedstrat
from fedstrat.errors import RunFailedError, UnknownSettingError
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Params, Payload, decode, raw_array
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.strategies import ALGORITHMS, Algorithm
from tests.strategies import small
from tests.strategies.small import SIZES, TRAINED, Recorder, Run, bits, frozen, start

# Three clients with 2, 3 and 1 batches of 12, 20 and 8 examples.
CLIENTS, EXAMPLES = ("0", "1", "2"), SIZES[:3]

SETTINGS: dict[str, dict[str, Any]] = {"fedcspack": {"pack_size": 4}}  # the small models have several packs, too
MULTIPLES = {
    # what travels down and up in multiples of the model
    "scaffold": (2, 2),
    "fedgamma": (2, 2),
    "fedsmoo": (2, 2),
    "mofedsam": (2, 1),
    "fedvssam": (2, 1),
    **dict.fromkeys(
        ("fedavg", "fedavgm", "fedprox", "craft", "config", "fedsam", "ditto", "fedacg", "fednova"), (1, 1)
    ),
    **dict.fromkeys(("qfedavg", "afl", "fedfv", "fedlf", "fedmgdaplus", "moon", "fedntd", "normalisedfedavgm"), (1, 1)),
}


@pytest.fixture(params=ALGORITHMS, scope="module")
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return ALGORITHMS[request.param]


def make(algorithm: Algorithm, **settings: Any) -> Any:
    """The strategy with its defaults: everybody trains, nobody evaluates."""
    own = next((SETTINGS[n] for n, a in ALGORITHMS.items() if a is algorithm and n in SETTINGS), {})
    return algorithm.strategy(**{"seed": 7, "fraction_evaluate": 0.0, "trainable": TRAINED, **own, **settings})


def make_convex(algorithm: Algorithm, **settings: Any) -> Any:
    return make(algorithm, trainable=None, **settings)


def grid(*, alter: small.Alter | None = None, arrange: Any = None, places: Any = None, **clients: Any) -> Recorder:
    """Three clients that train the model with everything in it."""
    return Recorder(
        small.client_app(small.everything, **clients),
        len(CLIENTS),
        alter=alter,
        arrange=arrange or (lambda replies: replies),
        node_configs=places,
    )


def whole(client: int) -> small.Loader:
    return small.batches(client, None)


@dataclass
class Straight:
    """Three rounds without a mishap, evaluated on the clients, with an eye on the three pure methods."""

    strategy: Any
    grid: Recorder
    run: Run
    calls: list[str] = field(default_factory=list)
    impure: list[str] = field(default_factory=list)
    payloads: list[tuple[Payload, Params]] = field(default_factory=list)


@pytest.fixture(scope="module")
def straight(algorithm: Algorithm) -> Straight:
    seen = Straight(make(algorithm, fraction_evaluate=1.0), grid(), Run(None))

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.calls.append(name)
            before = frozen(args)
            result = method(*args)
            if frozen(args) != before:
                seen.impure.append(f"{name} writes to its arguments")
            if frozen(method(*args)) != frozen(result):
                seen.impure.append(f"{name} gives another result for the same arguments")
            if name == "broadcast":
                seen.payloads.append((result.extra, args[0].params))
            elif name == "aggregate":
                seen.payloads += [(update.extra, args[0].params) for update in args[1]]
            return result

        return call

    for name in ("init_state", "broadcast", "aggregate"):
        setattr(seen.strategy, name, watched(name, getattr(seen.strategy, name)))
    seen.run = start(seen.strategy, seen.grid, small.everything)
    return seen


def with_record(content: RecordDict, name: str) -> tuple[str, Array]:
    """The record of a reply that holds an array, and the array."""
    return next((record, arrays[name]) for record, arrays in content.array_records.items() if name in arrays)


# --- the model keeps its form ----------------------------------------------------------------------------------------


def test_a_model_with_everything_in_it_keeps_its_form(algorithm: Algorithm, straight: Straight) -> None:
    before, after = straight.run.models[0], straight.run.result.arrays
    assert [(n, a.dtype, a.shape) for n, a in after.items()] == [(n, a.dtype, a.shape) for n, a in before.items()]
    assert after["norm.num_batches_tracked"].dtype == "int64"
    assert after["norm.num_batches_tracked"].numpy() == 3 * 3  # rounds times batches of the largest client
    assert after["again.weight"].data == after["hidden.weight"].data
    # What is frozen stays, and what the loss doesn't reach; everything else moves.
    changed = {name for name in before if before[name].data != after[name].data}
    movable = set(before) - {"embed.weight", "unused"}
    assert changed == movable if algorithm.strategy.sends_model else changed <= movable
    assert changed & set(TRAINED)
    # Into the client's model, as Flower's apps and as ours load it.
    model, again = small.everything(), small.everything()
    model.load_state_dict(after.to_torch_state_dict(), strict=True)
    fedstrat.load_arrays(again, after)
    assert frozen(dict(model.state_dict())) == frozen(dict(again.state_dict()))
    assert again.again.weight is again.hidden.weight


def test_running_statistics_are_the_mean_weighted_by_examples(straight: Straight) -> None:
    for name in ("norm.running_mean", "norm.running_var"):
        values = [with_record(trip.reply, name)[1] for trip in straight.grid.of(1)]
        mean = np.average([decode(ArrayRecord({name: v}), "test")[name].numpy() for v in values], 0, EXAMPLES)
        np.testing.assert_allclose(straight.run.models[1][name].numpy(), mean, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_any_floating_dtype(algorithm: Algorithm, dtype: torch.dtype) -> None:
    def result(of: torch.dtype) -> Run:
        clients = {"loader": lambda client: small.batches(client, dtype=of), "num_nodes": 3}
        return small.run(make_convex(algorithm), lambda: small.convex(of), 2, **clients)

    run = result(dtype)
    assert {a.dtype for a in run.result.arrays.values()} == {str(dtype).removeprefix("torch.")}
    fedstrat.load_arrays(small.convex(dtype), run.result.arrays)
    x, y = small.vector(run.models[0]), small.vector(run.result.arrays)
    assert 0.02 < np.abs(y - x).max() < 2.0
    if dtype == torch.float64:
        np.testing.assert_allclose(y, small.vector(result(torch.float32).result.arrays), atol=1e-4)


def test_layers_frozen_on_one_side_only_end_the_run(algorithm: Algorithm) -> None:
    with pytest.raises(RunFailedError, match=r"embed\.weight.*trainable"):
        start(make(algorithm, trainable=None), grid(), small.everything, 1)


# --- pure functions, pure inputs -------------------------------------------------------------------------------------


def test_the_mathematics_is_pure(straight: Straight) -> None:
    assert straight.impure == []
    counts = {name: straight.calls.count(name) for name in ("init_state", "broadcast", "aggregate")}
    assert counts == {"init_state": 1, "broadcast": 9, "aggregate": 3}


def test_what_the_caller_hands_over_is_not_mutated(algorithm: Algorithm) -> None:
    arrays, config, nodes = small.initial(small.everything), ConfigRecord({"who": "me", "tags": ["a", "b"]}), grid()
    before = frozen([arrays, config])
    options = {"train_config": config, "evaluate_config": config, "num_rounds": 2}
    result = make(algorithm).start(grid=nodes, initial_arrays=arrays, **options)
    assert frozen([arrays, config]) == before
    assert result.arrays is not arrays
    assert all(trip.sent["config"]["tags"] == ["a", "b"] for trip in nodes.trips)


def test_decoding_undoes_encoding(straight: Straight) -> None:
    assert len(straight.payloads) == 3 * len(CLIENTS) * 2
    for sent, params in straight.payloads:
        received = type(sent).decode(RecordDict(dict(sent.encode())), params, "nobody")
        assert type(received) is type(sent)
        assert frozen(received) == frozen(sent)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_decoding_undoes_encoding_for_any_dtype_and_shape(algorithm: Algorithm, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"layer.weight": (3, 4), "layer.bias": (3,), "scale": (), "empty": (0, 2)}
    params = {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in shapes.items()}
    assert frozen(decode(fedstrat.to_arrays(params), "arrays")) == frozen(params)
    held = torch.float64 if dtype == torch.float64 else torch.float32
    for payload in (algorithm.rule.receives, algorithm.strategy.payload):
        if payload is None or not payload.per_parameter:
            continue
        names = [f.name for f in dataclasses.fields(payload)]
        sent = payload(**{f: {n: torch.randn(p.shape, dtype=held) for n, p in params.items()} for f in names})
        assert frozen(payload.decode(RecordDict(dict(sent.encode())), params, "nobody")) == frozen(sent)


# --- bits ------------------------------------------------------------------------------------------------------------


def test_neither_places_nor_the_order_of_replies_change_a_bit(algorithm: Algorithm, straight: Straight) -> None:
    shuffle = random.Random(1).sample
    places = [{"partition-id": i, "num-partitions": 3} for i in (2, 0, 1)]
    nodes = grid(places=places, arrange=lambda replies: shuffle(replies, len(replies)))
    run = start(make(algorithm), nodes, small.everything)
    assert [bits(m) for m in run.models] == [bits(m) for m in straight.run.models]
    assert run.result.train_metrics_clientapp == straight.run.result.train_metrics_clientapp


def test_cohorts_follow_the_seed(algorithm: Algorithm) -> None:
    def cohorts_and_model(seed: int, order: tuple[int, ...]) -> tuple[list[list[str]], Any]:
        places = [{"partition-id": i} for i in order]
        nodes = Recorder(small.client_app(small.convex), node_configs=places)
        run = start(make_convex(algorithm, seed=seed, fraction_train=0.4), nodes, small.convex)
        return [nodes.cohort(t) for t in (1, 2, 3)], bits(run.result.arrays)

    cohorts, model = cohorts_and_model(5, (0, 1, 2, 3, 4))
    assert {len(cohort) for cohort in cohorts} == {2}
    assert cohorts_and_model(5, (3, 0, 4, 2, 1)) == (cohorts, model)
    others, other = cohorts_and_model(6, (0, 1, 2, 3, 4))
    assert others != cohorts
    assert other != model


def test_clients_are_known_without_a_seed(algorithm: Algorithm) -> None:
    run = small.run(make_convex(algorithm, seed=None), small.convex, 2, num_nodes=3)
    assert [report.trained for report in run.reports] == [CLIENTS, CLIENTS]
    assert [dict(report.failed) for report in run.reports] == [{}, {}]


def test_flowers_own_loop_gives_the_same_bits(algorithm: Algorithm, straight: Straight) -> None:
    theirs = Strategy.start(make(algorithm, fraction_evaluate=1.0), grid(), straight.run.models[0], num_rounds=3)
    ours = straight.run.result
    assert bits(theirs.arrays) == bits(ours.arrays)
    assert theirs.train_metrics_clientapp == ours.train_metrics_clientapp
    assert theirs.evaluate_metrics_clientapp == ours.evaluate_metrics_clientapp


def test_records_may_have_other_names(algorithm: Algorithm, straight: Straight) -> None:
    renamed = make(algorithm, arrayrecord_key="model", configrecord_key="settings", fraction_evaluate=1.0)
    nodes = grid()
    run = start(renamed, nodes, small.everything, 2)
    assert {"model", "settings"} <= set(nodes.trips[0].sent)
    assert not {"arrays", "config"} & set(nodes.trips[0].sent)
    assert [bits(m) for m in run.models] == [bits(m) for m in straight.run.models[:3]]
    assert run.reports[1].fairness == straight.run.reports[1].fairness


def test_a_resumed_run_is_the_straight_one(algorithm: Algorithm, straight: Straight, tmp_path: Path) -> None:
    nodes, folder = grid(), CheckpointFolder(tmp_path)
    start(make(algorithm), nodes, small.everything, 2, checkpoints=folder)
    resumed = start(make(algorithm), nodes, small.everything, 3, checkpoints=folder, resume=folder.latest())
    assert [report.round for report in resumed.reports] == [3]
    assert bits(resumed.result.arrays) == bits(straight.run.result.arrays)
    assert resumed.result.train_metrics_clientapp == straight.run.result.train_metrics_clientapp


# --- bytes -----------------------------------------------------------------------------------------------------------


def array_bytes(content: RecordDict) -> int:
    itemsizes = {"bfloat16": 2, "bool": 1}
    return sum(
        int(np.prod(a.shape)) * (itemsizes.get(a.dtype) or np.dtype(a.dtype).itemsize)
        for record in content.array_records.values()
        for a in record.values()
    )


def wire_bytes(content: RecordDict) -> int:
    """As Flower counts, but equal arrays of one message once: the tied weights, and tensors that are all zero."""
    data = {a.data for record in content.array_records.values() for a in record.values()}
    arrays = [a for record in content.array_records.values() for a in record.values()]
    repeated = sum(len(a.data) for a in arrays) - sum(map(len, data))
    return sum(record.count_bytes() for record in content.values()) - repeated


def test_bytes_are_counted_on_what_travels(straight: Straight) -> None:
    for report in straight.run.reports:
        trips, traffic = straight.grid.of(report.round), report.traffic
        assert traffic.train_down_payload == sum(array_bytes(trip.sent) for trip in trips)
        assert traffic.train_up_payload == sum(array_bytes(trip.reply) for trip in trips)
        assert traffic.train_down_wire == sum(wire_bytes(trip.sent) for trip in trips)
        assert traffic.train_up_wire == sum(wire_bytes(trip.reply) for trip in trips)
        assert traffic.evaluate_down_wire > traffic.evaluate_up_wire > 0


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200)], ids=str)
def test_one_client_with_enormous_numbers_never_ends_a_run(
    algorithm: Algorithm, dtype: torch.dtype, size: float
) -> None:
    """Finite, so it may count; the step is taken or refused, with a reason, and diagnostics bear it."""

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return tampered(content, lambda w: w.fill_(size)) if (t, client) == (2, "1") else content

    nodes = Recorder(
        small.client_app(lambda: small.convex(dtype), lambda client: small.batches(client, dtype=dtype)),
        len(CLIENTS),
        alter=alter,
    )
    run = start(make_convex(algorithm, max_failed_rounds=9), nodes, lambda: small.convex(dtype), 3)
    assert [report.round for report in run.reports] == [1, 2, 3]
    assert run.reports[0].aggregated


@pytest.mark.parametrize("name", [name for name in MULTIPLES if name in ALGORITHMS])
def test_multiples_of_the_model_that_travel(name: str) -> None:
    traffic = small.run(make_convex(ALGORITHMS[name]), small.convex, 1, num_nodes=3).reports[0].traffic
    per_client = 4 * (small.FEATURES + 1) * small.CLASSES  # float32
    down, up = MULTIPLES[name]
    assert traffic.train_down_payload == 3 * down * per_client
    assert traffic.train_up_payload == 3 * up * per_client


def test_the_readme_tells_the_same_multiples() -> None:
    """Every algorithm has its row; what packs and sub-models have is measured in their own tests."""
    lines = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| `")]
    told = {row[0].strip("`"): tuple(row[2:4]) for row in rows if row[0].strip("`") in ALGORITHMS}
    expected = {name: tuple(map(str, multiples)) for name, multiples in MULTIPLES.items()}
    assert told == {**expected, "fedcspack": ("≤ 1", "< 1"), "fedspu": ("≈ r²", "≈ r²")}
    assert set(told) == set(ALGORITHMS)


# --- mishaps: in each round after the first, another one happens to client 1 -----------------------------------------


def spot(content: RecordDict) -> tuple[str, str]:
    """An array of a reply to tamper with: a weight of the model, or of what travels instead."""
    places = [(r, n) for r in ("arrays", "sub-model") for n in ("hidden.weight", "weight")] + [("packs", "value")]
    return next((r, n) for r, n in places if n in content.array_records.get(r, {}))


def tampered(content: RecordDict, change: Callable[[torch.Tensor], torch.Tensor]) -> RecordDict:
    record, name = spot(content)
    array = raw_array(change(decode(content[record], "test")[name].clone()))
    return small.with_array(content, name, array, record)


def cut_short(content: RecordDict) -> RecordDict:
    record, name = spot(content)
    array = content[record][name]
    return small.with_array(content, name, Array(array.dtype, array.shape, array.stype, array.data[:-1]), record)


def with_infinite_statistic(content: RecordDict) -> RecordDict:
    record, array = with_record(content, "norm.running_var")
    infinite = raw_array(torch.full(tuple(array.shape), torch.inf))
    return small.with_array(content, "norm.running_var", infinite, record)


def with_nan_in_an_extra(content: RecordDict) -> RecordDict | None:
    extras = {r: content[r] for r in content.array_records if r not in ("arrays", "buffers")}
    if not extras:
        return None
    record, name = next((r, n) for r, arrays in extras.items() for n, a in arrays.items() if "float" in a.dtype)
    nan = torch.full(tuple(content[record][name].shape), torch.nan)
    return small.with_array(content, name, raw_array(nan), record)


def other_metrics(content: RecordDict, **metrics: float) -> RecordDict:
    changed = {name.replace("_", "-"): value for name, value in metrics.items()}
    return small.replaced(content, metrics=MetricRecord({**content["metrics"], **changed}))


Happens = Callable[[RecordDict], RecordDict | None]
MISHAPS: dict[str, tuple[Happens, str]] = {
    # what happens to the reply, and what the report must say about it ({} is the array in question)
    "lost": (lambda _: None, "no reply"),
    "NaN": (lambda c: tampered(c, lambda t: t.fill_(torch.nan)), "{}"),
    "infinite statistic": (with_infinite_statistic, "/norm.running_var"),
    "missing array": (lambda c: small.with_array(c, spot(c)[1], None, spot(c)[0]), "{}"),
    "surplus array": (lambda c: small.with_array(c, "hiden.weight", raw_array(torch.ones(1)), spot(c)[0]), "hiden"),
    "other shape": (lambda c: tampered(c, lambda t: t[None]), "{}"),
    "other dtype": (lambda c: tampered(c, torch.Tensor.int), "{}"),
    "cut short": (cut_short, "{}"),
    "no arrays": (lambda c: RecordDict({n: r for n, r in c.items() if n != spot(c)[0]}), ""),
    "two metric records": (lambda c: small.replaced(c, more=MetricRecord({"a": 1})), "MetricRecord"),
    "negative examples": (lambda c: other_metrics(c, num_examples=-1), "metrics/num-examples"),
    "endless examples": (lambda c: other_metrics(c, num_examples=1.7e308), "metrics/num-examples"),
    "NaN examples": (lambda c: other_metrics(c, num_examples=float("nan")), "metrics/num-examples"),
    "another round": (
        lambda c: small.replaced(c, client=ConfigRecord({**c["client"], "trained-round": 1})),
        "round 1",
    ),
    "NaN in an extra": (with_nan_in_an_extra, ""),
    "no examples": (lambda c: other_metrics(c, num_examples=0), ""),
    "raises": (lambda c: c, "the disk is full"),
}
ROUND_OF = {name: t for t, name in enumerate(MISHAPS, start=2)}
LAST = len(MISHAPS) + 2
OTHERS = ("0", "2")


@dataclass
class Troubled:
    run: Run
    array: str


@pytest.fixture(scope="module")
def troubled(algorithm: Algorithm) -> Troubled:
    """The run with the mishaps."""
    names = {t: name for name, t in ROUND_OF.items()}
    arrays: set[str] = set()

    def alter(t: int, client: str, content: RecordDict) -> RecordDict | None:
        arrays.add(spot(content)[1])
        return MISHAPS[names[t]][0](content) if client == "1" and t in names else content

    nodes = grid(alter=alter, loader=whole, raises=[(ROUND_OF["raises"], "1")])
    run = start(make(algorithm), nodes, small.everything, LAST)
    (array,) = arrays
    return Troubled(run, array)


@pytest.fixture(scope="module")
def absent(algorithm: Algorithm) -> Run:
    """The run in which client 1 isn't there in those rounds, so it isn't sampled."""
    nodes = grid(loader=whole)
    context = nodes.contexts[1001]

    def leave_and_return(report: Any) -> None:
        if report.round == 1:
            del nodes.contexts[1001]
        elif report.round == LAST - 1:
            nodes.contexts[1001] = context

    run = start(make(algorithm), nodes, small.everything, LAST, on_round=leave_and_return)
    assert [nodes.cohort(t) for t in (1, 2, LAST)] == [[*CLIENTS], [*OTHERS], [*CLIENTS]]
    return run


@pytest.mark.parametrize("mishap", MISHAPS)
def test_a_reply_that_cannot_be_used_is_as_if_the_client_were_not_sampled(
    troubled: Troubled, absent: Run, mishap: str
) -> None:
    t = ROUND_OF[mishap]
    report = troubled.run.reports[t - 1]
    assert report.trained == OTHERS
    # A client without examples has done nothing wrong; all others are named with the reason.
    assert report.failed.keys() == (set() if mishap == "no examples" else {"1"})
    assert MISHAPS[mishap][1].format(troubled.array) in report.failed.get("1", "")
    assert bits(troubled.run.models[t]) == bits(absent.models[t])


def test_after_a_mishap_a_client_goes_on_from_what_was_accepted(troubled: Troubled, absent: Run) -> None:
    assert bits(troubled.run.models[LAST]) == bits(absent.models[LAST])
    assert troubled.run.reports[LAST - 1].trained == CLIENTS
    assert not troubled.run.reports[LAST - 1].failed


def test_a_client_without_data_takes_part_without_counting(algorithm: Algorithm) -> None:
    nodes = grid(loader=lambda client: [] if client == 1 else small.batches(client))
    run = start(make(algorithm, fraction_evaluate=1.0), nodes, small.everything, 2)
    for report in run.reports:
        assert report.trained == OTHERS
        assert not report.failed
        assert report.fairness.num_clients == 2


def test_a_client_that_lost_its_state_starts_afresh(algorithm: Algorithm) -> None:
    nodes = grid()

    def forget(report: Any) -> None:
        if report.round == 2:
            nodes.contexts[1001].state = RecordDict()

    run = start(make(algorithm), nodes, small.everything, 4, on_round=forget)
    without = OTHERS if algorithm.strategy.stateful_clients else CLIENTS
    assert [report.trained for report in run.reports] == [CLIENTS, CLIENTS, without, CLIENTS]
    assert not any(report.failed for report in run.reports)
    assert np.isfinite(small.vector(run.result.arrays)).all()


# --- rounds without an update ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds_before", [0, 2])
def test_a_round_without_replies_changes_nothing(algorithm: Algorithm, rounds_before: int) -> None:
    strategy, nodes = make(algorithm), grid()
    arrays = small.initial(small.everything)
    for t in range(1, rounds_before + 1):
        replies = nodes.send_and_receive(strategy.configure_train(t, arrays, ConfigRecord(), nodes))
        arrays, _ = strategy.aggregate_train(t, replies)
    lost = rounds_before + 1
    first = list(strategy.configure_train(lost, arrays, ConfigRecord(), nodes))
    before = frozen(strategy.state)
    assert strategy.aggregate_train(lost, []) == (None, None)
    assert frozen(strategy.state) == before
    second = list(strategy.configure_train(lost + 1, arrays, ConfigRecord(), nodes))
    assert [frozen(m.content.array_records) for m in second] == [frozen(m.content.array_records) for m in first]


@pytest.fixture(scope="module")
def first_round(algorithm: Algorithm) -> Run:
    return small.run(make_convex(algorithm), small.convex, 1, num_nodes=3)


@pytest.mark.parametrize("why", ["lost", "raises", "NaN"])
def test_a_failed_first_round_is_survived(algorithm: Algorithm, first_round: Run, why: str) -> None:
    def alter(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return MISHAPS[why][0](content) if t == 1 else content

    raises = [(1, client) for client in CLIENTS] if why == "raises" else []
    # Without statistics and dropout, so that only the rounds that count make a difference.
    nodes = Recorder(small.client_app(small.convex, raises=raises), 3, alter=alter)
    late = start(make_convex(algorithm), nodes, small.convex, 2)
    assert [report.aggregated for report in late.reports] == [False, True]
    assert late.reports[0].failed.keys() == set(CLIENTS)
    assert late.reports[0].train == {}
    assert [bits(m) for m in late.models[1:]] == [bits(m) for m in first_round.models]


def test_rounds_that_all_fail_end_the_run_with_the_clients_reason(algorithm: Algorithm) -> None:
    raises = [(t, client) for t in range(1, 9) for client in CLIENTS]
    for settings, rounds in (({"max_failed_rounds": 2}, 8), ({}, 1)):
        with pytest.raises(RunFailedError, match="the disk is full") as caught:
            small.run(make_convex(algorithm, **settings), small.convex, rounds, num_nodes=3, raises=raises)
        assert bits(caught.value.result.arrays) == bits(small.initial(small.convex))


def test_too_few_replies_change_nothing(algorithm: Algorithm, first_round: Run) -> None:
    def alter(t: int, client: str, content: RecordDict) -> RecordDict | None:
        return None if (t, client) == (1, "2") else content

    nodes = Recorder(small.client_app(small.convex), 3, alter=alter)
    run = start(make_convex(algorithm, min_replies=3), nodes, small.convex, 2)
    assert [report.aggregated for report in run.reports] == [False, True]
    assert run.reports[0].failed.keys() == {"2"}
    assert [bits(m) for m in run.models[1:]] == [bits(m) for m in first_round.models]


def test_a_round_in_which_nobody_is_asked_reports_nothing(algorithm: Algorithm) -> None:
    nodes = Recorder(small.client_app(small.convex), 2)

    def leave(report: Any) -> None:
        if report.round == 1:
            del nodes.contexts[1001]

    half = make_convex(algorithm, fraction_train=0.5, min_train_nodes=0, min_available_nodes=1)
    run = start(half, nodes, small.convex, 2, on_round=leave)
    assert len(run.reports[0].trained) == 1
    report = run.reports[1]
    assert (report.aggregated, report.trained, dict(report.failed), dict(report.diagnostics)) == (False, (), {}, {})
    assert bits(run.models[2]) == bits(run.models[1])


# --- clients that don't move -----------------------------------------------------------------------------------------

STILL: dict[str, dict[str, Any]] = {
    "no step": {"epochs": 0},
    "no learning rate": {"lr": 0.0},
    "no gradient": {"loss_fn": lambda outputs, _: 0.0 * outputs.sum()},
}


@pytest.mark.parametrize("how", STILL)
def test_clients_that_do_not_move_leave_the_initial_model(algorithm: Algorithm, how: str) -> None:
    if how == "no gradient" and algorithm.rule.loss is not LocalRule.loss:
        pytest.skip("its objective has terms of its own")
    run = start(make(algorithm), grid(**STILL[how]), small.everything, 2)
    for model in run.models[1:]:
        assert {n: bits(model)[n] for n in TRAINED} == {n: bits(run.models[0])[n] for n in TRAINED}
    assert all(report.aggregated for report in run.reports)


@pytest.mark.parametrize("how", ["no step", "no learning rate"])
def test_clients_that_stop_moving_leave_the_model_finite(algorithm: Algorithm, how: str) -> None:
    schedule = {"no step": {"epochs": lambda t: int(t < 2)}, "no learning rate": {"lr": lambda t: 0.1 * (t < 2)}}
    run = start(make(algorithm), grid(**schedule[how]), small.everything, 3)
    assert all(report.aggregated for report in run.reports)
    assert np.isfinite(small.vector(run.result.arrays)).all()


# --- learning --------------------------------------------------------------------------------------------------------

DECAY = 0.1


def gradient(w: np.ndarray) -> np.ndarray:
    """Of the mean over clients of (cross-entropy + DECAY/2 |w|^2)."""
    clients = [small.gradient(w, *small.rows(int(client))) for client in CLIENTS]
    return np.mean(clients, axis=0) + DECAY * w


def test_it_comes_nearer_the_optimum_of_a_convex_problem(algorithm: Algorithm) -> None:
    optimum = np.zeros((small.CLASSES, small.FEATURES + 1))
    for _ in range(1500):
        optimum -= 0.2 * gradient(optimum)
    assert np.abs(gradient(optimum)).max() < 1e-9

    def distance(model: ArrayRecord) -> float:
        return float(np.linalg.norm(small.matrix(model) - optimum))

    clients = {"loader": whole, "lr": 0.2, "epochs": 3, "run_config": {"train.weight-decay": DECAY}}
    run = small.run(make_convex(algorithm), small.convex, 12, num_nodes=3, **clients)
    # Loose, since some step by a fixed length and some are after a fairer point than the optimum of the mean.
    assert distance(run.result.arrays) < 0.95 * distance(run.models[0])


# --- metrics and settings --------------------------------------------------------------------------------------------


def test_metrics_are_means_weighted_by_examples(straight: Straight) -> None:
    for report in straight.run.reports:
        losses = [trip.reply["metrics"]["train-loss"] for trip in straight.grid.of(report.round)]
        assert len(set(losses)) == 3
        assert report.train["train-loss"] == pytest.approx(np.average(losses, weights=EXAMPLES))
        assert straight.run.result.train_metrics_clientapp[report.round]["train-loss"] == report.train["train-loss"]


def test_evaluation_counts_on_every_clients_own_data(straight: Straight) -> None:
    for report in straight.run.reports:
        counts, model = {}, small.everything()
        fedstrat.load_arrays(model, straight.run.models[report.round])
        model.eval()
        for client in CLIENTS:
            ((x, y),) = whole(int(client))
            outputs = model(x)
            loss = cross_entropy(outputs, y, reduction="sum").item()
            counts[client] = (int((outputs.argmax(1) == y).sum()), pytest.approx(loss, rel=1e-5), len(y))
        assert report.counts == counts
        evaluated = straight.run.result.evaluate_metrics_clientapp[report.round]
        assert evaluated["accuracy"] == pytest.approx(sum(c for c, _, _ in counts.values()) / sum(EXAMPLES))
        assert evaluated["accuracy-mean"] == pytest.approx(np.mean([c / n for c, _, n in counts.values()]))
        assert evaluated["loss"] == pytest.approx(report.fairness.loss)


def test_own_aggregation_functions_are_called(algorithm: Algorithm) -> None:
    def count(records: list[RecordDict], key: str) -> MetricRecord:
        assert key == "num-examples"
        return MetricRecord({"replies": len(records), "examples": sum(r["metrics"][key] for r in records)})

    settings = {"train_metrics_aggr_fn": count, "evaluate_metrics_aggr_fn": count, "fraction_evaluate": 1.0}
    result = small.run(make_convex(algorithm, **settings), small.convex, 1, num_nodes=3).result
    expected = {"replies": 3, "examples": sum(EXAMPLES)}
    assert dict(result.train_metrics_clientapp[1]) == expected
    assert dict(result.evaluate_metrics_clientapp[1]) == expected


def test_an_unknown_setting_is_named_with_the_nearest(algorithm: Algorithm) -> None:
    with pytest.raises(UnknownSettingError, match=r"'fraction_trian'.*'fraction_train'") as caught:
        algorithm.strategy(fraction_trian=0.5)
    assert algorithm.strategy.__name__ in str(caught.value)


@pytest.mark.parametrize("bad", [{"fraction_train": 1.5}, {"fraction_train": float("nan")}, {"seed": "1"}], ids=str)
def test_a_setting_of_the_wrong_type_or_range_is_named(algorithm: Algorithm, bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"'{name}'"):
        algorithm.strategy(**bad)
