"""Replies that can't be used: each is refused by our own named error, costs no memory and changes nothing."""

import contextlib
import copy
import math
import random
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstrat
from fedstrat.errors import PayloadError
from fedstrat.payloads import RAW, Layout, Params, Payload, Update, numpy_array, raw_array, view
from fedstrat.strategies.intake import (
    Expected,
    Ignored,
    Keys,
    Rounded,
    clip_update,
    mean_metrics,
    read_counts,
    read_update,
)
from tests.unit.asked import Asked

NPY = "numpy.ndarray"
REPLIES = 6_000
EVALUATIONS = 1_500
ROUNDS = 600
ARRAYS = 1_500


@dataclass(frozen=True)
class Sent(Payload):
    control_delta: Params


MODEL = {
    "conv.weight": torch.randn(4, 3, 2, 2),
    "conv.bias": torch.randn(4),
    "norm.running_mean": torch.randn(4),
    "norm.num_batches_tracked": torch.tensor(7),
    "brain": torch.randn(3, 5, dtype=torch.bfloat16),
    "half": torch.randn(6, dtype=torch.float16),
    "nothing": torch.zeros(0, 3),
}
LAYOUT = Layout.of(MODEL)
KEYS = Keys("arrays", "num-examples")
GOOD: dict[str, Any] = {
    "arrays": fedstrat.to_arrays(MODEL),
    **Sent({n: MODEL[n].float() for n in LAYOUT.trainable}).encode(),
    "metrics": MetricRecord({"num-examples": 20, "num-steps": 4, "lr-sum": 0.4, "train-loss": 1.5}),
    "client": ConfigRecord({"client-id": "3", "trained-round": 1, "state": "ok"}),
}


EXPECTED = Expected(1, LAYOUT, KEYS, Sent, ("lr-sum",))


def reply() -> RecordDict:
    """A good reply."""
    return RecordDict({name: record.copy() for name, record in GOOD.items()})


PARAMS, BUFFERS = LAYOUT.split(MODEL)
ROUNDED = replace(EXPECTED, rounded=Rounded(PARAMS, BUFFERS, torch.bfloat16))


def displaced() -> RecordDict:
    """A good reply that holds displacements of 1/4, and one buffer that changed."""
    content = reply()
    del content["arrays"]
    quarter = {n: torch.full_like(p, 0.25, dtype=torch.bfloat16) for n, p in PARAMS.items()}
    content["delta"] = ArrayRecord({n: raw_array(d) for n, d in quarter.items()})
    content["buffers"] = ArrayRecord({"norm.num_batches_tracked": raw_array(torch.tensor(8))})
    return content


def read(content: RecordDict, expected: Expected = EXPECTED) -> Update[Any] | Ignored:
    return read_update(content, "3", expected)


# --- single replies --------------------------------------------------------------------------------------


def test_a_good_reply_is_read():
    update = read(reply())
    assert isinstance(update, Update)
    assert (update.client, update.num_examples, update.num_steps, update.lr_sum) == ("3", 20, 4, 0.4)
    assert update.metrics["train-loss"] == 1.5
    assert list(update.params) == ["conv.weight", "conv.bias", "brain", "half", "nothing"]
    assert list(update.buffers) == ["norm.running_mean", "norm.num_batches_tracked"]
    for name, tensor in {**update.params, **update.buffers}.items():
        assert torch.equal(tensor, MODEL[name])
    assert torch.equal(update.extra.control_delta["conv.bias"], MODEL["conv.bias"])


def test_a_plain_flower_client_is_read():
    content = RecordDict({"whatever": fedstrat.to_arrays(MODEL), "m": MetricRecord({"num-examples": 5})})
    update = read(content, Expected(1, LAYOUT, KEYS, Payload))
    assert isinstance(update, Update)
    assert update.num_examples == 5
    assert update.num_steps == 1
    assert math.isnan(update.lr_sum)


def test_displacements_are_read_as_the_model_that_they_restore():
    update = read(displaced(), ROUNDED)
    assert isinstance(update, Update)
    assert list(update.params) == list(LAYOUT.trainable)
    for name, y in update.params.items():
        assert torch.equal(y, (MODEL[name].float() + 0.25).to(MODEL[name].dtype))
        assert y.dtype == MODEL[name].dtype
    assert torch.equal(update.buffers["norm.running_mean"], MODEL["norm.running_mean"])
    assert update.buffers["norm.num_batches_tracked"] == 8
    # A whole model is as good, and counts where both came.
    assert torch.equal(read(reply(), ROUNDED).params["brain"], MODEL["brain"])
    both = displaced()
    both["arrays"] = GOOD["arrays"].copy()
    assert torch.equal(read(both, ROUNDED).params["brain"], MODEL["brain"])
    # Nobody asked for them.
    with pytest.raises(PayloadError, match=r"expected an ArrayRecord 'arrays', but got \['buffers', 'client',"):
        read(displaced())


METRICS_REFUSED = [
    ("num-examples", -1, "metrics/num-examples: expected a number of 0 to 2\\^53, but got -1"),
    ("num-examples", math.nan, "metrics/num-examples: expected one finite number, but got nan"),
    ("num-examples", math.inf, "metrics/num-examples: expected one finite number, but got inf"),
    ("num-examples", [20], r"metrics/num-examples: expected one finite number, but got \[20\]"),
    ("num-examples", 10**400, "metrics/num-examples"),
    ("num-steps", -1, "num-steps"),
    ("num-steps", math.nan, "metrics/num-steps: expected one finite number"),
    ("num-steps", [1, 2], "metrics/num-steps: expected one finite number"),
    ("lr-sum", -0.1, "lr-sum"),
    ("lr-sum", math.inf, "metrics/lr-sum: expected one finite number"),
]


@pytest.mark.parametrize(("name", "value", "message"), METRICS_REFUSED, ids=range(len(METRICS_REFUSED)))
def test_a_number_that_is_none_is_refused_by_name(name, value, message):
    content = reply()
    content["metrics"][name] = value
    with pytest.raises(PayloadError, match=message):
        read(content)


@pytest.mark.parametrize("name", ["num-examples", "lr-sum"])
def test_a_missing_number_is_refused_by_name(name):
    content = reply()
    del content["metrics"][name]
    with pytest.raises(PayloadError, match=f"metrics/{name}"):
        read(content)


def test_a_reply_without_the_client_half_says_what_is_needed():
    content = reply()
    del content["control-delta"]
    with pytest.raises(PayloadError, match=r"'control-delta' is missing.*fedstrat\.train"):
        read(content)


@pytest.mark.parametrize("trained", [0, 2, "1", [1]])
def test_a_reply_to_another_round_is_refused(trained):
    content = reply()
    content["client"]["trained-round"] = trained
    with pytest.raises(PayloadError, match="expected round 1"):
        read(content)


def test_no_examples_and_lost_state_are_no_update_but_no_error():
    content = reply()
    content["metrics"]["num-examples"] = 0
    assert isinstance(read(content), Ignored)
    content = RecordDict({"client": ConfigRecord({"state": "lost"}), "metrics": MetricRecord({"num-examples": 5})})
    assert isinstance(read(content), Ignored)


def test_two_metric_records_or_two_models_are_refused():
    content = reply()
    content["more"] = MetricRecord({"num-examples": 20})
    with pytest.raises(PayloadError, match="expected one MetricRecord, but got 2"):
        read(content)
    content = reply()
    content["a"], content["b"] = content["arrays"], content["arrays"]
    del content["arrays"]
    with pytest.raises(PayloadError, match="expected an ArrayRecord 'arrays'"):
        read(content)


@pytest.mark.parametrize("name", list(MODEL))
def test_any_entry_that_is_not_finite_or_not_of_its_dtype_is_refused_by_name(name):
    content, tensor = reply(), MODEL[name]
    content["arrays"][name] = numpy_array(tensor.to(torch.int32))
    with pytest.raises(PayloadError, match=f"arrays/{name}: expected {str(tensor.dtype)[6:]}, but got int32"):
        read(content)
    if tensor.is_floating_point() and tensor.numel():
        bad = tensor.clone()
        bad.view(-1)[-1] = torch.nan
        content["arrays"][name] = numpy_array(bad)
        with pytest.raises(PayloadError, match=f"arrays/{name}: expected finite"):
            read(content)


def test_counts_of_an_evaluation():
    def counts(**metrics: Any) -> Any:
        return read_counts(RecordDict({"metrics": MetricRecord(metrics)}), KEYS)

    assert counts(**{"num-examples": 9, "num-correct": 4, "loss-sum": 2.5}) == (4, 2.5, 9)
    assert counts(**{"num-examples": 9, "accuracy": 0.5}) is None
    assert counts(**{"num-examples": 9, "num-correct": 4, "loss-sum": math.inf}) == (4, math.inf, 9)
    for wrong in (
        {"num-examples": 9, "num-correct": 10},
        {"num-examples": 9, "num-correct": -1},
        {"num-examples": 9, "num-correct": math.nan},
        {"num-examples": -9, "num-correct": 0},
        {"num-correct": 4},
    ):
        with pytest.raises(PayloadError, match="metrics/num-"):
            counts(**wrong)


def test_clipping_scales_the_displacement_and_not_the_weights():
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    update = Update(
        client="0",
        num_examples=1,
        num_steps=1,
        lr_sum=1.0,
        extra=Payload(),
        params={"a": torch.tensor([4.0, 2.0]), "b": torch.tensor([7.0])},  # y - x = (3, 0), (4): norm 5
    )
    clipped = clip_update(update, params, 2.5, server_round=1)
    assert clipped.params["a"].tolist() == [2.5, 2.0]
    assert clipped.params["b"].tolist() == [5.0]
    assert clip_update(update, params, 5.0, server_round=1).params["b"].tolist() == [7.0]


def test_metrics_are_weighted_means_over_those_who_report_them():
    def of(**metrics: Any) -> RecordDict:
        return RecordDict({"m": MetricRecord(metrics)})

    records = [
        of(n=1, loss=1.0, each=[1.0, 3.0]),
        of(n=3, loss=2.0, each=[5.0, 7.0]),
        of(n=4, only=9.0),
        of(n=0, zero=1),
    ]
    # loss (1*1 + 3*2) / 4, each ((1*1 + 3*5) / 4, (1*3 + 3*7) / 4)
    assert mean_metrics(records, "n") == {"loss": 1.75, "each": [4.0, 6.0], "only": 9.0}


# --- thousands of mutated replies ------------------------------------------------------------------------

NUMBERS: list[Any] = [
    0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.5, 1e308, -1e-300, math.nan, math.inf, -math.inf, [], [1],
    [math.nan, 1.0],
]  # fmt: skip
SETTINGS: list[Any] = [*[n for n in NUMBERS if n != []], "", "1", "ok", True, b"\xff", ["a", "b"]]
SHAPES = [
    (), (0,), (1,), (-1,), (4,), (2**62,), (2**31, 2**31), (2**32, 2**32), (2**64,), (0, 2**62), (0, 2**62, 4),
    (2**62, 0, 4), (0, 2**70), (3, 4, 2, 2), (1,) * 70, (True, 4), (4, 3, 2, 2, 1),
]  # fmt: skip
NAMES = [
    "float32", "float64", "float16", "bfloat16", "int64", "int8", "bool", "complex64", "object", "<f4", ">f4", "|S0",
    "|V0", "<U3", "datetime64[s]", "", "float8_e5m2", "uint64", "[('a', '<f4')]",
]  # fmt: skip
HEADERS = [
    b"{'descr': (), 'fortran_order': False, 'shape': (4,), }",
    b"{'descr': [], 'fortran_order': False, 'shape': (4,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (4,), }",
    b"{'descr': '<f4', 'fortran_order': 1, 'shape': [4], }",
    b"{'descr': '<f4', 'fortran_order': True, 'shape': (4611686018427387904,), }",
    b"{'descr': ('<f4', (1099511627776,)), 'fortran_order': False, 'shape': (4,), }",
    b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,)",
    b"{" * 3_000,
    b"9" * 9_000,
    b"",
]


def make_array(dtype: str, shape: Any, stype: str, data: bytes) -> Array:
    """An Array as it may come out of a socket: Flower checks types only when one is made by hand."""
    array = Array("float32", (0,), NPY, b"")
    array.dtype, array.shape, array.stype, array.data = dtype, shape, stype, data
    return array


def mutate_array(rng: random.Random, array: Array) -> tuple[str, Array]:
    """Change one thing about an Array."""
    dtype, shape, stype, data = array.dtype, array.shape, array.stype, array.data
    how = rng.choice(["dtype", "shape", "stype", "cut", "grown", "flip", "header", "npy", "values", "empty"])
    if how == "dtype":
        dtype = rng.choice(NAMES)
    elif how == "shape":
        shape = rng.choice([*SHAPES, shape[::-1], (*shape, 1), shape[1:]])
    elif how == "stype":
        stype = rng.choice([RAW, NPY, "", "pickle"])
    elif how == "cut":
        data = data[: rng.randrange(len(data) + 1)]
    elif how == "grown":
        data += bytes(rng.randrange(1, 9))
    elif how == "flip" and data:
        position = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(128, len(data)))
        data = data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]
    elif how == "header":
        text = rng.choice(HEADERS)
        data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(16)
        stype = NPY
    elif how == "npy":
        other = np.zeros(
            rng.choice([(), (4,), (2, 2), (0, 3)]), dtype=rng.choice(["f2", "f4", ">f8", "i8", "u2", "U3"])
        )
        made = Array(other)
        dtype, shape, stype, data = made.dtype, made.shape, made.stype, made.data
    elif how == "values":
        value = rng.choice([math.nan, math.inf, -math.inf, 0.0, 3e38])
        filled = torch.full([4, 3, 2, 2], value)
        return how, rng.choice([raw_array, numpy_array])(filled)
    elif how == "empty":
        data = b""
    return f"{how} {dtype!r} {shape} {stype!r} {len(data)} bytes", make_array(dtype, shape, stype, data)


def mutate(rng: random.Random, content: RecordDict) -> str:
    """Change one thing about a reply; returns what."""
    name = rng.choice(list(content)) if content else ""
    how = rng.choice(["entry", "entry", "entry", "entry", "drop entry", "rename", "new entry", "drop", "swap", "extra"])
    if not content or how == "extra":
        where = rng.choice(["extra", "arrays", "metrics", "client", "control-delta"])
        content.pop(where, None)
        content[where] = rng.choice([ArrayRecord(), MetricRecord(), ConfigRecord(), *reply().values()])
        return f"extra record {where}"
    record: Any = content[name]
    if how == "drop":
        del content[name]
    elif how == "swap":
        other = rng.choice([n for n in content if n != name] or ["other"])
        one, two = content.pop(name), content.pop(other, ConfigRecord())
        content[name], content[other] = two, one
    elif how == "new entry" or not record:
        key = rng.choice(["more", "", "client-id", "num-examples"])
        record[key] = (
            numpy_array(torch.zeros(2))
            if isinstance(record, ArrayRecord)
            else rng.choice(NUMBERS if isinstance(record, MetricRecord) else SETTINGS)
        )
    else:
        key = rng.choice(list(record))
        value = record[key]
        if how in ("drop entry", "rename"):
            del record[key]
        if how == "rename":
            record[key + "x"] = value
        if how == "entry":
            if isinstance(record, ArrayRecord):
                what, record[key] = mutate_array(rng, value)
                return f"{name}/{key}: {what}"
            record[key] = rng.choice(NUMBERS if isinstance(record, MetricRecord) else SETTINGS)
            return f"{name}/{key} = {record[key]!r}"[:80]
        return f"{how} {name}/{key}"
    return f"{how} {name}"


@contextlib.contextmanager
def memory_limit(extra_bytes: int) -> Iterator[None]:
    """Let this process have no more than that much more address space, so that a huge allocation fails."""
    statm = Path("/proc/self/statm")
    if not statm.exists():  # not Linux: tracemalloc still watches Python and NumPy
        yield
        return
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + extra_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def size_of(content: RecordDict) -> int:
    return sum(len(a.data) for record in content.array_records.values() for a in record.values())


class Watch:
    """Runs decoders, and keeps what none may do: raise anything but PayloadError, or take much memory.

    All run under ``memory_limit``; every fourth one's memory is counted to the byte, which is slow.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: dict[str, str] = {}
        self.runs = 0

    def run(self, decoder: Callable[[], Any], what: str, message_bytes: int) -> Any:
        result = None
        if self.runs % 4 == 0:
            tracemalloc.start()
        self.runs += 1
        try:
            result = decoder()
            self.outcomes["read"] += 1
        except PayloadError:
            self.outcomes["refused"] += 1
        except Exception as error:  # that is what is looked for
            self.faults.setdefault(f"{type(error).__name__}: {str(error)[:60]}", what)
        _, peak = tracemalloc.get_traced_memory()  # 0 where it isn't traced
        tracemalloc.stop()
        if peak > 4 * message_bytes + 8_000_000:  # an npy header may be 10 kB of Python to parse
            self.faults.setdefault("memory", f"{what}: {peak} bytes for a message of {message_bytes}")
        return result


@pytest.mark.parametrize(
    ("good", "expected", "replies"),
    [(reply, EXPECTED, REPLIES), (displaced, ROUNDED, REPLIES // 3)],
    ids=["models", "displacements"],
)
def test_6000_mutated_replies_are_read_or_refused(good, expected, replies):
    """One to three mutations each: read, or refused with PayloadError, within their own size."""
    rng = random.Random(1)
    before = {name: tensor.clone() for name, tensor in MODEL.items()}
    watch = Watch()
    read(good(), expected)  # torch imports parts of itself at its first use
    with memory_limit(2**30):
        for _ in range(replies):
            content = good()
            what = "; ".join(mutate(rng, content) for _ in range(rng.randint(1, 3)))
            update = watch.run(lambda content=content: read(content, expected), what, size_of(content))
            if isinstance(update, Update):
                assert update.num_examples > 0, what
                assert math.isfinite(update.num_examples), what
                assert all(p.isfinite().all() for p in {**update.params, **update.buffers}.values()), what
                assert {n: (p.shape, p.dtype) for n, p in update.params.items()} == {
                    n: (MODEL[n].shape, MODEL[n].dtype) for n in LAYOUT.trainable
                }, what
    assert not watch.faults
    assert watch.outcomes["refused"] > replies / 2
    assert watch.outcomes["read"] > replies / 50
    assert all(torch.equal(tensor, before[name]) for name, tensor in MODEL.items())


def test_1500_mutated_evaluations_are_read_or_refused():
    rng = random.Random(2)
    watch = Watch()
    with memory_limit(2**30):
        for _ in range(EVALUATIONS):
            metrics = MetricRecord({"num-examples": 9, "num-correct": 4, "loss-sum": 2.5})
            content = RecordDict({"metrics": metrics, "client": ConfigRecord({"client-id": "3"})})
            what = "; ".join(mutate(rng, content) for _ in range(rng.randint(1, 3)))
            counts = watch.run(lambda content=content: read_counts(content, KEYS), what, size_of(content))
            if counts is not None:
                assert 0 <= counts[0] <= counts[2], what
    assert not watch.faults
    assert watch.outcomes["refused"] > EVALUATIONS / 10
    assert watch.outcomes["read"] > EVALUATIONS / 10


def test_600_mutated_rounds_move_model_and_state_only_by_what_could_be_read():
    """600 rounds of SCAFFOLD whose one reply is mutated: a refused reply leaves every bit of model and state."""
    rng = random.Random(3)
    model = torch.nn.BatchNorm1d(3)
    strategy = fedstrat.SCAFFOLD(max_failed_rounds=10**9)
    asked = Asked(strategy, model)
    refused = 0
    for server_round in range(1, ROUNDS + 1):
        message = asked.message(server_round)
        with fedstrat.LocalSession(message, asked.context, model) as session:
            session.optimizer(lr=0.1).step(lambda: model(torch.randn(4, 3)).square().sum())
            answer = session.reply(num_examples=4)
        answer.content["client"].pop("trainable", None)  # differing names end a run, by decision
        what = mutate(rng, answer.content)
        before = copy.deepcopy((strategy.state, strategy.buffers, strategy.accepted))
        arrays, _ = strategy.aggregate_train(server_round, [answer])
        assert (arrays is None) == bool(strategy.failed or not strategy.trained), what
        if arrays is None:
            refused += 1
            assert_equal((strategy.state, strategy.buffers, strategy.accepted), before, what)
        else:
            asked.arrays = arrays
        assert all(p.isfinite().all() for p in strategy.state.params.values()), what
    assert ROUNDS / 4 < refused < ROUNDS


def assert_equal(a: Any, b: Any, what: str) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), what
    elif isinstance(a, dict):
        assert list(a) == list(b), what
        for name in a:
            assert_equal(a[name], b[name], what)
    elif isinstance(a, tuple):
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other, what)
    elif hasattr(a, "__dataclass_fields__"):
        for name in a.__dataclass_fields__:
            assert_equal(getattr(a, name), getattr(b, name), what)
    else:
        assert a == b, what


# --- single arrays, made up by hypothesis ----------------------------------------------------------------

EXTREMES = [2**31, 2**62, 2**63, 2**70, True, False, None, 0.5, "", "<f4", "|S0", "|O", "f4,f4"]
LEAVES = st.one_of(st.integers(-5, 5), st.sampled_from(EXTREMES))
NESTED = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner)), max_leaves=6
)
DESCR = st.one_of(
    st.sampled_from(["<f4", ">f4", "<f8", "<i8", "|u1", "|b1", "|V0", "|S0", "<U2", "|O", "<M8[s]"]), NESTED
)
DIMENSIONS = st.lists(st.one_of(st.integers(0, 4), st.sampled_from([2**31, 2**62, 2**64, -1])), max_size=4).map(tuple)
KEY = st.sampled_from(["descr", "fortran_order", "shape", "more"])
HEADER = st.one_of(
    st.fixed_dictionaries({"descr": DESCR, "fortran_order": st.one_of(st.booleans(), NESTED), "shape": DIMENSIONS}),
    st.dictionaries(KEY, NESTED),
    NESTED,
).map(lambda made: repr(made).encode())
TEXT = st.one_of(
    HEADER, st.binary(max_size=40), st.text("{}[]()'\",:0123456789<f4shape \\\nL", max_size=40).map(str.encode)
)


@settings(max_examples=ARRAYS, deadline=None, database=None, derandomize=True)
@given(
    dtype=st.sampled_from(NAMES),
    shape=DIMENSIONS,
    stype=st.sampled_from([NPY, NPY, NPY, RAW]),
    text=TEXT,
    version=st.sampled_from([1, 1, 1, 2, 3]),
    lies=st.integers(-2, 2),
    data=st.binary(max_size=32),
)
def test_1500_made_up_arrays_are_decoded_or_refused(dtype, shape, stype, text, version, lies, data):
    length = max(0, len(text) + lies).to_bytes(2 if version == 1 else 4, "little")
    whole = b"\x93NUMPY" + bytes([version, 0]) + length + text + data if stype == NPY else data
    watch = Watch()
    with memory_limit(2**30):
        tensor = watch.run(lambda: view(make_array(dtype, shape, stype, whole), "x"), f"{dtype} {shape}", len(whole))
    assert not watch.faults
    if tensor is not None:
        assert tensor.shape == shape
        assert tensor.nbytes <= len(whole)


def test_a_reply_of_another_round_after_its_round_closed_changes_nothing():
    model = torch.nn.Linear(3, 1)
    strategy = fedstrat.SCAFFOLD()
    asked = Asked(strategy, model)

    def answer(server_round: int) -> Message:
        with fedstrat.LocalSession(asked.message(server_round), asked.context, model) as session:
            session.optimizer(lr=0.1).step(lambda: model(torch.ones(4, 3)).square().sum())
            return session.reply(num_examples=4)

    late = answer(1)
    asked.message(2)
    before = copy.deepcopy((strategy.state, strategy.accepted))
    arrays, _ = strategy.aggregate_train(2, [late])
    assert arrays is None
    assert strategy.failed == {"0": "it answers round 1, expected round 2"}
    assert_equal((strategy.state, strategy.accepted), before, "late")
