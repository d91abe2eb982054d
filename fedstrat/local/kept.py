"""Models that a worker keeps between client calls, and what they hold: the same arrays aren't loaded twice."""

import weakref
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from flwr.app import Array, ArrayRecord

from fedstrat.payloads import load_arrays, load_into


class Kept:
    """A model whose whole state is in its ``state_dict``, and which only client calls of this package write to.

    Args:
        model: It must stay on its device.

    Attributes:
        entries: Its ``state_dict``, live.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.entries: dict[str, torch.Tensor] = model.state_dict()
        self._parameters = list(model.parameters())
        self._initial = {name: tensor.clone() for name, tensor in self.entries.items()}
        self._holds: dict[str, _Content] = {}

    def reset(self, *, weights: bool) -> None:
        """Set the model back to how it was kept first; without ``weights`` only drop its gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        if weights:
            self.forget()
            for name, tensor in self._initial.items():
                self.entries[name].copy_(tensor)

    def forget(self) -> None:
        """Load whatever comes next."""
        self._holds = {}

    def load(self, record: ArrayRecord, *, stays: bool) -> None:
        """Load a received model, unless it is here: ``stays`` says that nothing writes to it before the next load.

        Raises:
            PayloadError: As :func:`fedstrat.payloads.load_arrays`.
        """
        came, held = {name: _content(array) for name, array in record.items()}, self._holds
        self.forget()
        if not (came.keys() == held.keys() and all(_same(came[name], held[name]) for name in came)):
            load_into(self.entries, record)
        if stays:
            self._holds = came


_Content: TypeAlias = tuple[bytes, str, str, tuple[int, ...]]


def _content(array: Array) -> _Content:
    return array.data, array.dtype, array.stype, tuple(array.shape)


def _same(came: _Content, held: _Content) -> bool:
    # Bytes don't change, and these are still in use: where both are one object, they hold the same numbers.
    return came[0] is held[0] and came[1:] == held[1:]


_KEPT: "weakref.WeakKeyDictionary[torch.nn.Module, Kept]" = weakref.WeakKeyDictionary()


def keep(model: torch.nn.Module) -> Kept:
    """Keep a model; :class:`Kept` says which can be."""
    kept = _KEPT[model] = Kept(model)
    return kept


def is_kept(model: torch.nn.Module) -> bool:
    """Whether a model is kept, and so stays on its device."""
    return model in _KEPT


def forget(model: torch.nn.Module) -> None:
    """Load the next model anew: this one is written to."""
    if model in _KEPT:
        _KEPT[model].forget()


def entries(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The ``state_dict`` of any model, live; that of a kept one without going through its modules."""
    kept = _KEPT.get(model)
    return model.state_dict() if kept is None else kept.entries


def load(
    model: torch.nn.Module,
    record: ArrayRecord,
    names: Iterable[str] | Callable[[str], bool] | None = None,
    *,
    stays: bool = False,
) -> None:
    """Load a received ArrayRecord into any model, strictly.

    Args:
        model: The model.
        record: What came.
        names: As of :func:`fedstrat.payloads.load_arrays`, which says what is raised, too.
        stays: Whether nothing writes to the model before the next load: a kept one then needn't load these arrays anew.
    """
    kept = _KEPT.get(model)
    if kept is not None and names is None:
        kept.load(record, stays=stays)
    else:
        forget(model)
        load_arrays(model, record, names)
