"""What the server remembers between rounds, and what a checkpoint holds of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fedstrat.errors import StateError
from fedstrat.payloads import Params


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Server state of an algorithm; subclasses add what theirs remembers.

    Fields are named tensors, numbers, strings, or mappings and tuples of such, so that a checkpoint can hold any.

    Attributes:
        params: The global model's trainable parameters, x.
    """

    params: Params


Clients = Mapping[str, float]
"""Client id -> its number of training examples (1.0 where nobody asked)."""

State = TypeVar("State", bound=ServerState)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that the rounds after ``round`` depend on.

    Attributes:
        round: The last finished round.
        algorithm: Name in ALGORITHMS.
        experiment_id: Key of the clients' state.
        settings: The strategy's scalar settings.
        model: The whole global model.
        trainable: Names of its trainable parameters.
        tensors: ``field -> named tensors`` of the server state, without ``params``.
        numbers: The other fields of the server state.
        accepted: Client id -> last round in which its reply was accepted.
        seen: Ids of all clients seen.
        moving: Buffers that ever changed.
        metrics: Flower's Result so far, as plain numbers.
    """

    round: int
    algorithm: str
    experiment_id: str
    settings: Mapping[str, Any]
    model: Params
    trainable: tuple[str, ...]
    tensors: Mapping[str, Params]
    numbers: Mapping[str, Any]
    accepted: Mapping[str, int]
    seen: tuple[str, ...]
    moving: tuple[str, ...]
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    _FREE = frozenset({
        "round_timeout", "connect_timeout", "min_replies", "max_failed_rounds", "fraction_evaluate",
        "evaluate_in_train", "min_evaluate_nodes", "min_available_nodes", "aggregation_device",
    })  # fmt: skip
    """Settings that may change at a resume: they don't decide what is computed."""

    def check(self, algorithm: str, settings: Mapping[str, Any]) -> None:
        """Refuse to go on with another algorithm or other settings.

        Raises:
            StateError: Names the first key that differs.
        """
        if algorithm != self.algorithm:
            raise StateError(f"the checkpoint is of '{self.algorithm}', but this strategy is '{algorithm}'")
        for name, before in self.settings.items():
            if name not in self._FREE and settings.get(name) != before:
                raise StateError(
                    f"the checkpoint was made with {name} = {before!r}, but this strategy has {settings.get(name)!r};"
                    " resume with the same settings, or begin a new run"
                )


def pack_state(state: ServerState) -> tuple[dict[str, Params], dict[str, Any]]:
    """Tell the tensor fields of a state (without ``params``) from its other fields."""
    tensors, numbers = {}, {}
    for f in dataclasses.fields(state):
        value = getattr(state, f.name)
        if f.name == "params":
            continue
        if isinstance(value, Mapping) and value and all(isinstance(v, torch.Tensor) for v in value.values()):
            tensors[f.name] = value
        else:
            numbers[f.name] = value
    return tensors, numbers


def unpack_state(fresh: State, tensors: Mapping[str, Params], numbers: Mapping[str, Any]) -> State:
    """Put the fields of :func:`pack_state` into a fresh state.

    Raises:
        StateError: The fields are those of another state.
    """
    names = {f.name for f in dataclasses.fields(fresh)} - {"params"}
    if set(tensors) | set(numbers) != names:
        raise StateError(
            f"the checkpoint's state has the fields {sorted({*tensors, *numbers})}, but this version expects"
            f" {sorted(names)}"
        )
    return dataclasses.replace(fresh, **tensors, **numbers)
