"""What messages hold: tensors as Flower Arrays, the layout of a model, and the typed payloads of the algorithms.

Decoding is zero-copy: a tensor is a read-only view of the received bytes wherever their layout allows it.
Declared shapes are checked against the number of bytes before anything is allocated, and nothing is unpickled.
"""

import dataclasses
import functools
import io
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict

from fedstrat.aggregation.gram import widened
from fedstrat.errors import ConfigError, PayloadError, nearest
from fedstrat.naming import kebab

Params = Mapping[str, torch.Tensor]
"""Named tensors in a fixed order. Never written to after they were handed over."""

RAW = "fedstrat.raw"
"""Serialisation type of our own records: little-endian C-order bytes, dtype named as in torch.

Code that doesn't know it fails loudly, instead of, say, clipping a control variate as if it were weights."""

_NUMPY = "numpy.ndarray"
_MAX_NPY_HEADER = 10_000
_MAX_HEADERS = 1024
_MAX_DIMENSIONS = 32
_MAX_NUMBERS = 2**60
_NAMES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool",
          "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
_WITHOUT_NUMPY = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_NUMPY_DTYPES = {dtype: np.dtype(name) for name, dtype in _DTYPES.items() if dtype not in _WITHOUT_NUMPY}
_INTEGER = frozenset({int})


# --- tensors <-> Arrays ----------------------------------------------------------------------------------


def raw_array(tensor: torch.Tensor) -> Array:
    """Encode a tensor of any dtype as an Array of our own serialisation type (one copy)."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return Array(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), RAW, data)


def numpy_array(tensor: torch.Tensor) -> Array:
    """Encode a tensor as every Flower app does (npy, one copy); dtypes that NumPy lacks become :func:`raw_array`."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype in _WITHOUT_NUMPY:
        return raw_array(plain)
    shape = tuple(plain.shape)
    header, name = _npy_header(shape, plain.dtype)
    return Array(name, shape, _NUMPY, b"".join((header, plain.numpy().data)))


@functools.lru_cache(maxsize=_MAX_HEADERS)
def _npy_header(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, str]:
    """The header and the dtype's name, which are the same for a model's arrays in every round."""
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(numpy_dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue(), str(numpy_dtype)


def view(array: Array, what: str) -> torch.Tensor:
    """Decode an Array without copying, as a read-only tensor.

    Args:
        array: A received Array, npy or :data:`RAW`.
        what: Its name in errors, for example ``"arrays/conv1.weight"``.

    Raises:
        PayloadError: Bytes, dtype and declared shape contradict each other, or the serialisation is unknown.
    """
    shape = tuple(array.shape)
    if len(shape) > _MAX_DIMENSIONS or not _INTEGER.issuperset(map(type, shape)) or _impossible(shape):
        raise PayloadError(f"{what}: expected a shape of few non-negative integers, but got {str(shape)[:200]}")
    data = array.data
    if array.stype == RAW:
        dtype = _DTYPES.get(array.dtype)
        if dtype is None:
            raise PayloadError(f"{what}: expected a dtype of {', '.join(_NAMES)}, but got '{array.dtype}'")
        _check_size(what, shape, math.prod(shape) * dtype.itemsize, len(data))
        return _readonly(data, dtype, 0, shape)
    if array.stype != _NUMPY:
        raise PayloadError(f"{what}: expected serialisation '{_NUMPY}' or '{RAW}', but got '{array.stype}'")
    return _view_npy(array, shape, what)


def _impossible(shape: tuple[int, ...]) -> bool:
    smallest = min(shape, default=1)
    # An empty array needs no bytes whatever its other sizes are, so these are bounded apart.
    return smallest < 0 or (smallest == 0 and math.prod(max(n, 1) for n in shape) > _MAX_NUMBERS)


@dataclass(frozen=True)
class _Header:
    """What an npy header says, where the numbers begin, and what it is for us.

    Attributes:
        num_bytes: What its numbers need.
        plain: Whether its dtype is one of single numbers.
        native: The dtype in torch where the bytes can be looked at as they are; None elsewhere.
    """

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    name: str
    start: int
    num_bytes: int
    plain: bool
    native: torch.dtype | None


@functools.lru_cache(maxsize=_MAX_HEADERS)
def _read_header(head: bytes) -> _Header:
    """Parse and check an npy header; the same few come in every round from every client."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy repairs some malformed headers, with a warning
        stream = io.BytesIO(head)
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(stream, max_header_size=_MAX_NPY_HEADER)
    # Python integers: a huge declared shape neither overflows nor allocates.
    num_bytes = math.prod(shape) * dtype.itemsize
    plain = not (dtype.hasobject or not dtype.itemsize or dtype.names or dtype.subdtype)
    native = _DTYPES.get(str(dtype)) if dtype.isnative and not (fortran and len(shape) > 1) else None
    return _Header(shape, fortran, dtype, str(dtype), stream.tell(), num_bytes, plain, native)


def _view_npy(array: Array, shape: tuple[int, ...], what: str) -> torch.Tensor:
    data = array.data
    # Exactly the header where its length is told as NumPy writes it; whatever else comes is for NumPy to judge.
    end = 10 + int.from_bytes(data[8:10], "little") if data[6:7] == b"\1" else _MAX_NPY_HEADER + 12
    try:
        header = _read_header(data[: min(end, _MAX_NPY_HEADER + 12)])
    except Exception as error:
        raise PayloadError(f"{what}: the bytes aren't a readable npy array ({type(error).__name__}: {error})") from None
    dtype = header.dtype
    if header.shape != shape or header.name != array.dtype or not header.plain:
        raise PayloadError(
            f"{what}: declared as {array.dtype}{list(shape)}, but its bytes say {dtype}{list(header.shape)}; expected"
            " the same"
        )
    _check_size(what, shape, header.num_bytes, len(data) - header.start)
    if header.native is not None:
        return _readonly(data, header.native, header.start, shape)
    flat = np.frombuffer(data, dtype=dtype, offset=header.start)
    ordered = flat.reshape(shape[::-1]).T if header.fortran else flat.reshape(shape)
    try:
        return torch.from_numpy(np.array(ordered, dtype.newbyteorder("="), order="C"))
    except TypeError:
        raise PayloadError(f"{what}: torch has no dtype for {dtype}; send a floating or integer array") from None


def _check_size(what: str, shape: tuple[int, ...], expected: int, num_bytes: int) -> None:
    if expected != num_bytes:
        raise PayloadError(
            f"{what}: shape {list(shape)} needs {expected} bytes, but {num_bytes} came; it was cut or mislabelled"
        )


def _readonly(data: bytes, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    if start == len(data):
        return torch.empty(shape, dtype=dtype)
    _silence_once()
    numpy_dtype = _NUMPY_DTYPES.get(dtype)
    if numpy_dtype is None:
        return torch.frombuffer(data, dtype=dtype, offset=start).view(shape)
    return torch.from_numpy(np.ndarray(shape, numpy_dtype, data, start))  # the same in less than half the time


@functools.cache
def _silence_once() -> None:
    # torch warns of the first read-only buffer and array of a process. Decoded tensors are never written to.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        torch.frombuffer(b"\0", dtype=torch.uint8)
        torch.from_numpy(np.frombuffer(b"\0", dtype=np.uint8))


def decode(record: ArrayRecord, what: str) -> dict[str, torch.Tensor]:
    """Decode every Array of a record, in its order."""
    return {name: view(array, f"{what}/{name}") for name, array in record.items()}


# --- models <-> ArrayRecords -----------------------------------------------------------------------------


def to_arrays(model: torch.nn.Module | Params) -> ArrayRecord:
    """Encode a model's whole ``state_dict`` (or named tensors), bfloat16 included.

    Args:
        model: A module, or a mapping name -> tensor.

    Returns:
        An ArrayRecord with every key of the ``state_dict``, in its order.
    """
    tensors = model.state_dict() if isinstance(model, torch.nn.Module) else model
    return _record((name, numpy_array(tensor)) for name, tensor in tensors.items())


def raw_record(tensors: Params) -> ArrayRecord:
    """Encode named tensors as an ArrayRecord of our own serialisation type."""
    return _record((name, raw_array(tensor)) for name, tensor in tensors.items())


def _record(arrays: Iterable[tuple[str, Array]]) -> ArrayRecord:
    """A record of these very Arrays: of a dictionary Flower's constructor makes each anew."""
    record = ArrayRecord()
    for name, array in arrays:
        record[name] = array
    return record


def chosen(model: torch.nn.Module, names: Iterable[str] | Callable[[str], bool] | None) -> frozenset[str]:
    """The entries of a model's ``state_dict`` that ``names`` (names, a predicate, or None: all) choose.

    Raises:
        ConfigError: A name that the model doesn't have, or nothing is chosen.
    """
    own = model.state_dict()
    if names is None:
        return frozenset(own)
    wanted = frozenset(n for n in own if names(n)) if callable(names) else frozenset(names)
    unknown = sorted(wanted - set(own))
    if unknown:
        raise ConfigError(f"names: the model has no array '{unknown[0]}'{nearest(unknown[0], own)}")
    if not wanted and own:
        raise ConfigError(f"names: expected some of the model's {len(own)} arrays, but none is chosen")
    return wanted


def load_arrays(
    model: torch.nn.Module, record: ArrayRecord, names: Iterable[str] | Callable[[str], bool] | None = None
) -> None:
    """Load a received ArrayRecord into a model, strictly.

    Args:
        model: The model.
        record: What came.
        names: Entries of the ``state_dict`` that are exchanged, as names or a predicate; None: all.

    Raises:
        PayloadError: Names, shapes or dtypes differ from the model's, or an Array can't be decoded.
        ConfigError: ``names`` holds one that the model doesn't have.
    """
    some = chosen(model, names)
    load_into({n: t for n, t in model.state_dict().items() if n in some}, record)


def load_into(own: Params, record: ArrayRecord) -> None:
    """As :func:`load_arrays`, into the live tensors of a model's ``state_dict`` that are exchanged."""
    received = decode(record, "arrays")
    check_like(received, own, "arrays", owner="this model")
    with torch.no_grad():
        for name, tensor in received.items():
            own[name].copy_(tensor)


def check_like(
    got: Params, expected: Params, what: str, *, owner: str, finite: bool = False, unless: Collection[str] = ()
) -> None:
    """Check names, shapes, dtypes and, if asked, finiteness of named tensors, ``unless`` they are of these.

    Raises:
        PayloadError: The first difference, with its record and entry.
    """
    for name in expected:
        if name not in got:
            raise PayloadError(f"{what}: '{name}' is missing; {owner} has {len(expected)} arrays, {len(got)} came")
    for name, tensor in got.items():
        if name not in expected:
            raise PayloadError(f"{what}: {owner} has no array '{name}'{nearest(name, expected)}")
        like = expected[name]
        if tensor.shape != like.shape:
            raise PayloadError(f"{what}/{name}: expected shape {list(like.shape)}, but got {list(tensor.shape)}")
        if tensor.dtype != like.dtype:
            raise PayloadError(f"{what}/{name}: expected {_name(like.dtype)}, but got {_name(tensor.dtype)}")
        if finite and name not in unless:
            check_finite({name: tensor}, what)


def check_finite(tensors: Params, what: str) -> None:
    """Check that all numbers are finite.

    Raises:
        PayloadError: The first tensor of which one isn't.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise PayloadError(f"{what}/{name}: expected finite numbers, but it holds NaN or infinity")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no entry is NaN or infinite; reads the tensor once and allocates nothing."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(widened(tensor))  # NaN propagates into both
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- which arrays are trainable parameters ----------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The arrays of the global model, told apart at the boundary: algorithms only see parameters.

    Attributes:
        arrays: Every array's name -> an empty tensor's shape and dtype, in the order of the ``state_dict``.
        trainable: Names of the trainable parameters; a tied tensor once, under its first name.
        tied: Further names of tied tensors -> the name under which they are trained.
    """

    arrays: Mapping[str, torch.Tensor]
    trainable: tuple[str, ...]
    tied: Mapping[str, str]

    @classmethod
    def of(cls, tensors: Params, trainable: Iterable[str] | Callable[[str], bool] | None = None) -> Self:
        """Tell parameters, tied names and buffers apart.

        Args:
            tensors: The initial model.
            trainable: Names, or a predicate on names. None takes the floating arrays whose last name part
                isn't ``running_mean`` or ``running_var``.

        Raises:
            ConfigError: A name that the model doesn't have, or an array that can't be trained.
        """
        if trainable is None:
            chosen = [n for n, t in tensors.items() if t.is_floating_point() and not _is_statistic(n)]
        elif callable(trainable):
            chosen = [n for n in tensors if trainable(n)]
        else:
            chosen = list(trainable)
            for name in chosen:
                if name not in tensors:
                    raise ConfigError(f"trainable: the model has no array '{name}'{nearest(name, tensors)}")
        for name in chosen:
            if not tensors[name].is_floating_point():
                raise ConfigError(f"trainable: '{name}' is {_name(tensors[name].dtype)}; only floating arrays train")
        tied = _tied(tensors)
        # Whichever of its names was given, a tied tensor is trained under its first.
        trained = {tied.get(name, name) for name in chosen}
        return cls(
            arrays={n: torch.empty_like(t, device="meta") for n, t in tensors.items()},
            trainable=tuple(n for n in tensors if n in trained),
            tied={n: first for n, first in tied.items() if first in trained},
        )

    @functools.cached_property
    def buffers(self) -> tuple[str, ...]:
        """Names of everything that isn't trained: statistics, counters, frozen weights."""
        trained = {*self.trainable, *self.tied}
        return tuple(n for n in self.arrays if n not in trained)

    def params_like(self) -> dict[str, torch.Tensor]:
        """The trainable parameters as tensors without data, for checks of shape and dtype."""
        return {n: self.arrays[n] for n in self.trainable}

    def split(self, tensors: Params) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Split a whole model into (parameters, buffers)."""
        return {n: tensors[n] for n in self.trainable}, {n: tensors[n] for n in self.buffers}

    def join(self, params: Params, buffers: Params) -> dict[str, torch.Tensor]:
        """Put a whole model together again, tied names included, in the original order."""
        return {
            n: params[self.tied[n]] if n in self.tied else params[n] if n in params else buffers[n] for n in self.arrays
        }


def _is_statistic(name: str) -> bool:
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _tied(tensors: Params) -> dict[str, str]:
    """Find tied weights by their contents, since identity isn't kept over the wire.

    Equal random contents don't happen by chance. Constant tensors (fresh biases and norms) are equal without being
    tied and are left apart.
    """
    seen: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        flat = tensor.detach().reshape(-1).contiguous()
        if bool((flat == flat[0]).all()):
            continue
        key = (tuple(tensor.shape), tensor.dtype, flat.view(torch.uint8).numpy().tobytes())
        if key in seen:
            tied[name] = seen[key]
        else:
            seen[key] = name
    return tied


# --- what an algorithm sends beside the model -----------------------------------------------------------


@dataclass(frozen=True)
class Payload:
    """What an algorithm sends beside the model: a frozen dataclass whose fields are named tensors.

    The field ``control_delta`` travels as the ArrayRecord ``control-delta``. By default a field holds one
    tensor per trainable parameter, of its shape, in :func:`state_dtype`.
    """

    per_parameter: ClassVar[bool] = True
    """Whether every field holds one tensor per parameter."""

    @property
    def on_initial(self) -> bool:
        """Whether it changes the initial model, which the client has built by itself, in place of one that was sent."""
        return False

    def check_initial(self, model: Params) -> None:
        """Compare the model as the client has built it with the run's initial one, where ``on_initial``.

        Raises:
            StateLostError: It is another one.
        """

    @classmethod
    def names(cls) -> list[str]:
        """The fields, which travel as records of the same name in kebab-case."""
        return [f.name for f in dataclasses.fields(cls)]

    def encode(self) -> dict[str, ArrayRecord]:
        """Encode every field as an ArrayRecord of our own serialisation type."""
        return {kebab(name): raw_record(getattr(self, name)) for name in self.names()}

    @classmethod
    def decode(cls, content: RecordDict, params: Params, sender: str) -> Self:
        """Decode and check the fields against the trainable parameters.

        Raises:
            PayloadError: A record is missing or doesn't fit; the message says which client half is needed.
        """
        values = {}
        for name in cls.names():
            record = content.array_records.get(kebab(name))
            if record is None:
                raise PayloadError(
                    f"record '{kebab(name)}' is missing; {sender}: train with fedstrat.train(…), or inside"
                    " `with LocalSession(msg, context, model) as session:` and reply with session.reply(…)"
                )
            values[name] = decode(record, kebab(name))
        payload = cls(**values)
        payload.check(params)
        return payload

    def check(self, params: Params) -> None:
        """Check every field: one finite tensor per parameter, of its shape, in :func:`state_dtype`."""
        names = self.names()
        like = {n: p if p.dtype == state_dtype(p) else p.to(state_dtype(p)) for n, p in params.items()} if names else {}
        for name in names:
            check_like(getattr(self, name), like, kebab(name), owner="the global model", finite=True)


NOTHING = Payload()
"""The payload of algorithms that send only the model."""

Down = TypeVar("Down", bound=Payload)
Up = TypeVar("Up", bound=Payload)


@dataclass(frozen=True)
class Broadcast(Generic[Down]):
    """What the server sends one client: the model's parameters, and the algorithm's own payload.

    Without parameters (None) the payload says how the client's own model changes; buffers that ever changed go along.
    """

    params: Params | None
    extra: Down


@dataclass(frozen=True, kw_only=True)
class Update(Generic[Up]):
    """One client's accepted reply.

    Attributes:
        client: The client's id.
        num_examples: Its number of training examples, > 0.
        num_steps: Local steps taken, K_i.
        lr_sum: Sum of the learning rates of those steps, Lambda_i; NaN from clients that don't report it.
        params: Its trained parameters y_i: read-only views of the received bytes.
        buffers: Everything else of its model.
        metrics: All its numbers.
        extra: The algorithm's own payload.
    """

    client: str
    num_examples: float
    num_steps: int
    lr_sum: float
    params: Params
    extra: Up
    buffers: Params = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


def state_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of state that belongs to a parameter: its own, but never below float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def zeros_like(params: Params) -> dict[str, torch.Tensor]:
    """One zero tensor per parameter, in :func:`state_dtype`."""
    return {n: torch.zeros_like(p, dtype=state_dtype(p)) for n, p in params.items()}
