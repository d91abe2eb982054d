"""Tensors as Flower Arrays and back, hostile bytes, the layout of a model, and the algorithms' own payloads."""

import gc
import sys
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from torch import nn

import fedstrat
from fedstrat.errors import ConfigError, PayloadError
from fedstrat.flower import borrow_identity, return_identity
from fedstrat.payloads import (
    RAW,
    Layout,
    Params,
    Payload,
    check_like,
    decode,
    is_finite,
    numpy_array,
    raw_array,
    view,
)

NPY = "numpy.ndarray"
DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits."""

    def bits(t: torch.Tensor) -> bytes:
        return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""

    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def npy(header: object, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An npy file by hand: magic, version, header length, header, data."""
    text = header if isinstance(header, bytes) else repr(header).encode()
    width = 2 if version[0] == 1 else 4
    return b"\x93NUMPY" + bytes(version) + len(text).to_bytes(width, "little") + text + data


def header(descr: object, shape: object, fortran: bool = False) -> dict[str, object]:
    return {"descr": descr, "fortran_order": fortran, "shape": shape}


# --- tensors <-> Arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("encode", [raw_array, numpy_array])
def test_every_dtype_and_layout_round_trips(encode, dtype):
    plain = torch.tensor([[1, 0, 2], [3, 4, 5]]).to(dtype)
    for tensor in (plain, plain.t(), plain[:, 1], plain[::2, ::2], plain[0, 0], plain[:0], plain[:, :0]):
        array = encode(tensor)
        assert same(view(array, "x"), tensor)
        assert array.shape == tuple(tensor.shape)


def test_flower_reads_what_numpy_array_writes_byte_for_byte():
    for value in (np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7), np.zeros((3, 0), np.float16)):
        ours, theirs = numpy_array(torch.from_numpy(value)), Array(value)
        assert (ours.dtype, ours.shape, ours.stype, ours.data) == (
            theirs.dtype, theirs.shape, theirs.stype, theirs.data,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", ["<f4", ">f4", ">f8", ">i8", "<f2", "|u1", "|b1", "<c8"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 3, 4), (3, 0)])
def test_every_npy_that_flower_writes_is_read(dtype, order, shape):
    value = np.asarray(np.arange(np.prod(shape)).reshape(shape) % 2, dtype=dtype, order=order)
    tensor = view(Array(value), "x")
    assert tensor.shape == shape
    assert np.array_equal(tensor.numpy(), value)
    assert tensor.is_contiguous()


def test_an_npy_of_version_2_is_read():
    value = np.arange(3, dtype=np.float32)
    data = npy(header("<f4", (3,)), value.tobytes(), version=(2, 0))
    assert view(Array("float32", (3,), NPY, data), "x").tolist() == [0, 1, 2]


@pytest.mark.parametrize("encode", [raw_array, numpy_array])
def test_decoding_copies_nothing(encode):
    array = encode(torch.arange(100_000, dtype=torch.float32))
    received = np.frombuffer(array.data, dtype=np.uint8)
    start = received.__array_interface__["data"][0]
    tracemalloc.start()
    tensor = view(array, "x")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert start <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= start + len(array.data)
    assert peak < 40_000  # a tenth of the array


@pytest.mark.parametrize("encode", [raw_array, numpy_array])
def test_a_decoded_tensor_keeps_its_bytes(encode):
    original = torch.randn(1000)
    array = encode(original)
    references = sys.getrefcount(array.data)
    tensor = view(array, "x")
    assert sys.getrefcount(array.data) > references
    del array
    gc.collect()
    assert torch.equal(tensor, original)


# --- hostile bytes ---------------------------------------------------------------------------------------

FOUR = np.arange(4, dtype=np.float32)
GOOD = npy(header("<f4", (4,)), FOUR.tobytes())

CONTRADICTIONS = {
    "bytes cut": (Array("float32", (4,), NPY, GOOD[:-1]), "cut or mislabelled"),
    "bytes left over": (Array("float32", (4,), NPY, GOOD + b"\0"), "cut or mislabelled"),
    "header cut": (Array("float32", (4,), NPY, GOOD[:20]), "npy"),
    "no bytes": (Array("float32", (4,), NPY, b""), "npy"),
    "magic": (Array("float32", (4,), NPY, b"\x00" + GOOD[1:]), "npy"),
    "version": (Array("float32", (4,), NPY, npy(header("<f4", (4,)), FOUR.tobytes(), (9, 0))), "npy"),
    "header too long": (
        Array("float32", (4,), NPY, npy(repr(header("<f4", (4,))).encode().ljust(10_001), FOUR.tobytes())),
        "npy",
    ),
    "header's end missing": (
        Array("float32", (4,), NPY, npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4,), ", FOUR.tobytes())),
        "npy",
    ),
    "header too deep": (Array("float32", (4,), NPY, npy(b"(" * 9_000, FOUR.tobytes())), "npy"),
    "header of Python 2": (
        Array("float32", (4,), NPY, npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4L,), }", FOUR.tobytes())),
        "npy",
    ),
    "header runs code": (
        Array("float32", (4,), NPY, npy(b"{'descr': exit(), 'fortran_order': False, 'shape': (4,)}", FOUR.tobytes())),
        "npy",
    ),
    "no dtype": (Array("float32", (4,), NPY, npy(header((), (4,)), FOUR.tobytes())), "npy"),
    "declared shape": (Array("float32", (2, 2), NPY, GOOD), r"float32\[2, 2\].*float32\[4\]"),
    "declared dtype": (Array("int32", (4,), NPY, GOOD), r"int32\[4\].*float32\[4\]"),
    "pickled objects": (Array("object", (4,), NPY, npy(header("|O", (4,)), bytes(32))), ""),
    "fields": (Array("[('a', '<f4')]", (4,), NPY, npy(header([("a", "<f4")], (4,)), bytes(16))), ""),
    "sub-arrays": (Array("('<f4', (2,))", (4,), NPY, npy(header(("<f4", (2,)), (4,)), bytes(32))), ""),
    "text": (Array("<U1", (4,), NPY, npy(header("<U1", (4,)), bytes(16))), "no dtype"),
    "dates": (Array("datetime64[s]", (4,), NPY, npy(header("<M8[s]", (4,)), bytes(32))), "no dtype"),
    "items of no bytes": (Array("|S0", (4,), NPY, npy(header("|S0", (4,)))), ""),
    "void of no bytes": (Array("|V0", (2**62,), NPY, npy(header("|V0", (2**62,)))), ""),
    "more dimensions than NumPy has": (Array("float32", (1,) * 70, NPY, npy(header("<f4", (1,) * 70), bytes(4))), ""),
    "negative shape": (Array("float32", (-4,), RAW, bytes(16)), "non-negative"),
    "two negatives": (Array("float32", (-2, -2), RAW, bytes(16)), "non-negative"),
    "shape of booleans": (Array("float32", (True, 4), RAW, bytes(16)), ""),
    "raw cut": (Array("float32", (4,), RAW, bytes(15)), "16 bytes, but 15 came"),
    "raw of no dtype": (Array("object", (4,), RAW, bytes(32)), "'object'"),
    "raw of NumPy's spelling": (Array("<f4", (4,), RAW, bytes(16)), "'<f4'"),
    "unknown serialisation": (Array("float32", (4,), "pickle", GOOD), "serialisation.*'pickle'"),
    "huge raw": (Array("float32", (2**62,), RAW, bytes(16)), "cut or mislabelled"),
    "huge npy": (Array("float32", (2**62,), NPY, npy(header("<f4", (2**62,)), bytes(16))), "cut or mislabelled"),
    "product wraps to 0": (Array("float32", (2**32, 2**32), RAW, b""), "cut or mislabelled"),
    "product wraps to 16": (Array("float32", (2**62 + 1, 4), RAW, bytes(16)), "cut or mislabelled"),
    "empty but huge raw": (Array("float32", (0, 2**62, 4), RAW, b""), ""),
    "empty but huge npy": (Array("float32", (0, 2**62, 4), NPY, npy(header("<f4", (0, 2**62, 4)))), ""),
    "empty beyond 64 bits": (Array("float32", (0, 2**70), RAW, b""), ""),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_named_and_cost_no_memory(case):
    array, message = CONTRADICTIONS[case]
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError, match=f"arrays/conv.weight.*{message}"):
            view(array, "arrays/conv.weight")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8_000_000  # parsing a 10 kB header takes a few MB at most


# --- models <-> ArrayRecords -----------------------------------------------------------------------------


class Mixed(nn.Module):
    """Every kind of array: half and brain floats, a tie, a counter, an empty buffer, a frozen weight, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.half = nn.Linear(3, 3, dtype=torch.float16)
        self.brain = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(3, 2, 2).to(memory_format=torch.channels_last)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.head2 = nn.Linear(3, 5, bias=False).requires_grad_(False)
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.norm.num_batches_tracked.fill_(2**40)


def test_a_model_round_trips_through_to_arrays_and_load_arrays():
    model, other = Mixed(), Mixed()
    record = fedstrat.to_arrays(model)
    assert list(record) == list(model.state_dict())
    fedstrat.load_arrays(other, record)
    for name, tensor in model.state_dict().items():
        assert same(other.state_dict()[name], tensor), name
    assert other.head.weight is other.embed.weight
    assert not other.head2.weight.requires_grad
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_flower_s_own_record_of_a_model_is_loaded():
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    model.num_batches_tracked.fill_(5)
    nn.init.normal_(model.weight)
    fedstrat.load_arrays(other, ArrayRecord(model.state_dict()))
    assert all(same(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_loading_writes_into_the_model_and_never_into_the_message():
    model = nn.Linear(2, 2)
    record = fedstrat.to_arrays(nn.Linear(2, 2))
    before = record["weight"].data
    fedstrat.load_arrays(model, record)
    with torch.no_grad():
        model.weight.fill_(0.0)
    assert record["weight"].data == before
    assert model.weight.requires_grad
    assert model.weight.is_leaf


def test_a_record_that_doesn_t_fit_leaves_the_model_as_it_was():
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arrays = {"weight": numpy_array(torch.ones(2, 2)), "bias": numpy_array(torch.ones(3))}
    with pytest.raises(PayloadError, match=r"arrays/bias: expected shape \[2\], but got \[3\]"):
        fedstrat.load_arrays(model, ArrayRecord(arrays))
    assert all(same(tensor, before[name]) for name, tensor in model.state_dict().items())


W, B = torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ({"w": W}, "control: 'b' is missing; the global model has 2 arrays, 1 came"),
        ({"w": W, "b": B, "bb": B}, "control: the global model has no array 'bb'; did you mean 'b'?"),
        ({"w": W.t(), "b": B}, r"control/w: expected shape \[2, 3\], but got \[3, 2\]"),
        ({"w": W[None], "b": B}, r"control/w: expected shape \[2, 3\], but got \[1, 2, 3\]"),
        ({"w": W, "b": B.double()}, "control/b: expected float32, but got float64"),
        ({"w": W, "b": B.long()}, "control/b: expected float32, but got int64"),
        ({"w": W, "b": torch.tensor([0.0, torch.nan])}, "control/b: expected finite numbers"),
        ({"w": W, "b": torch.tensor([-torch.inf, 0.0])}, "control/b: expected finite numbers"),
        ({"w": W, "b": torch.tensor([torch.inf, 0.0])}, "control/b: expected finite numbers"),
    ],
)
def test_differences_name_record_and_entry(got, message):
    with pytest.raises(PayloadError, match=message):
        check_like(got, {"w": W, "b": B}, "control", owner="the global model", finite=True)


def test_numbers_may_be_anything_where_finiteness_is_not_asked_for():
    check_like({"b": torch.tensor([torch.nan])}, {"b": torch.zeros(1)}, "arrays", owner="this model")


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point or d.is_complex], ids=str)
def test_nan_is_seen_in_every_dtype(dtype):
    good = torch.ones(5).to(dtype)
    assert is_finite(good)
    assert is_finite(good[:0])
    bad = good.clone()
    bad[3] = torch.nan
    assert not is_finite(bad)


def test_an_imaginary_infinity_is_seen():
    assert not is_finite(torch.tensor([1 + 1j, complex(0.0, float("inf"))]))


def test_integers_are_finite():
    assert is_finite(torch.tensor([2**62]))


# --- the layout of a model ---------------------------------------------------------------------------------


def test_everything_floating_but_running_statistics_trains():
    layout = Layout.of(Mixed().state_dict())
    assert layout.trainable == (
        "nothing", "embed.weight", "half.weight", "half.bias", "brain.weight", "brain.bias", "norm.weight",
        "norm.bias", "conv.weight", "conv.bias", "head2.weight",
    )  # fmt: skip
    assert layout.buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert layout.tied == {"head.weight": "embed.weight"}


def test_names_keep_the_order_of_the_model_and_leave_the_rest_out():
    layout = Layout.of(Mixed().state_dict(), ["norm.bias", "half.weight"])
    assert layout.trainable == ("half.weight", "norm.bias")
    assert "embed.weight" in layout.buffers
    assert "norm.weight" in layout.buffers


def test_a_predicate_chooses_by_name():
    layout = Layout.of(Mixed().state_dict(), lambda name: name.startswith("half."))
    assert layout.trainable == ("half.weight", "half.bias")


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"no array 'half.wieght'; did you mean 'half.weight'\?"):
        Layout.of(Mixed().state_dict(), ["half.wieght"])


@pytest.mark.parametrize("trainable", [["norm.num_batches_tracked"], lambda name: "tracked" in name])
def test_integers_do_not_train(trainable):
    with pytest.raises(ConfigError, match=r"'norm.num_batches_tracked' is int64"):
        Layout.of(Mixed().state_dict(), trainable)


@pytest.mark.parametrize(
    "trainable", [["embed.weight", "head.weight"], ["embed.weight"], ["head.weight"], lambda n: n == "head.weight"]
)
def test_a_tied_weight_trains_once_under_its_first_name_whichever_is_given(trainable):
    layout = Layout.of(Mixed().state_dict(), trainable)
    assert layout.trainable == ("embed.weight",)
    assert layout.tied == {"head.weight": "embed.weight"}
    assert not {"embed.weight", "head.weight"} & set(layout.buffers)


def test_frozen_ties_are_buffers():
    layout = Layout.of(Mixed().state_dict(), ["half.weight"])
    assert {"embed.weight", "head.weight"} <= set(layout.buffers)
    assert layout.tied == {}


def test_equal_constants_of_equal_shape_are_not_tied():
    model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))  # weights of ones, biases of zeros
    layout = Layout.of(model.state_dict())
    assert layout.trainable == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert layout.tied == {}


def test_equal_contents_of_another_shape_are_not_tied():
    x = torch.randn(6)
    assert Layout.of({"a": x, "b": x.reshape(2, 3)}).tied == {}


def test_join_puts_order_and_ties_back():
    tensors = Mixed().state_dict()
    layout = Layout.of(tensors)
    params, buffers = layout.split(tensors)
    assert list(params) == list(layout.trainable)
    whole = layout.join({n: p + 1 for n, p in params.items()}, buffers)
    assert list(whole) == list(tensors)
    assert torch.equal(whole["head.weight"], tensors["embed.weight"] + 1)
    assert torch.equal(whole["half.weight"], tensors["half.weight"] + 1)
    assert torch.equal(whole["norm.running_var"], tensors["norm.running_var"])


# --- the algorithms' own payloads ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent(Payload):
    control_delta: Params


PARAMS = {"w": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "d": torch.zeros(1).double()}


def like_params(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    # State is never below float32: bfloat16 parameters have float32 control variates.
    return {"w": torch.randn(2, 3), "half": torch.randn(2), "d": torch.randn(1).double(), **changes}


def test_a_payload_travels_in_our_own_serialisation():
    sent = Sent(like_params())
    records = sent.encode()
    assert list(records) == ["control-delta"]
    assert all(array.stype == "fedstrat.raw" for array in records["control-delta"].values())
    got = Sent.decode(RecordDict(records), PARAMS, "client 3")
    assert list(got.control_delta) == ["w", "half", "d"]
    assert all(same(t, sent.control_delta[n]) for n, t in got.control_delta.items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (like_params(w=torch.zeros(3, 2)), "control-delta/w: expected shape"),
        (like_params(half=torch.zeros(2, dtype=torch.bfloat16)), "control-delta/half: expected float32"),
        (like_params(d=torch.zeros(1)), "control-delta/d: expected float64"),
        (like_params(w=torch.full((2, 3), torch.inf)), "control-delta/w: expected finite"),
        (like_params(more=torch.zeros(1)), "control-delta: the global model has no array 'more'"),
    ],
)
def test_a_payload_is_checked_against_the_parameters(tensors, message):
    with pytest.raises(PayloadError, match=message):
        Sent.decode(RecordDict(Sent(tensors).encode()), PARAMS, "client 3")


def test_a_missing_payload_says_which_client_half_is_needed():
    with pytest.raises(PayloadError, match=r"'control-delta' is missing; client 3: train with fedstrat\.train"):
        Sent.decode(RecordDict(), PARAMS, "client 3")


def test_flower_s_own_aggregation_fails_loudly_on_a_payload():
    borrow_identity()
    try:
        content = RecordDict({**Sent(like_params()).encode(), "metrics": MetricRecord({"num-examples": 1})})
        reply = Message(content, 1, "train")
        with pytest.raises(TypeError, match=RAW):
            FlowerFedAvg().aggregate_train(1, [reply])
    finally:
        return_identity()


def test_decode_names_the_record():
    with pytest.raises(PayloadError, match=r"^control/w: "):
        decode(ArrayRecord({"w": Array("float32", (1,), RAW, b"")}), "control")
