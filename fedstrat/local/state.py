"""Client state that survives: pending until the server says that it accepted the reply it belongs to.

Two places to keep it, with the same two slots, ``accepted`` and ``pending``, keyed by experiment id and client id:

* a directory of atomically written safetensors files, for state of any size, across restarts and resumed runs;
* Flower's ``Context.state`` for small state where no directory is given. It lives in memory: a restarted SuperNode
  forgets it, and Flower loses large contents without a word, so it is refused above :data:`CONTEXT_LIMIT_BYTES`.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol
from urllib.parse import quote

import safetensors
import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context

from fedstrat.errors import StateError
from fedstrat.payloads import decode, raw_record

CONTEXT_LIMIT_BYTES = 8 * 2**20
"""Largest state that Context.state is trusted with."""

_LONGEST_NAME = 120

Tensors = Mapping[str, torch.Tensor]
Slot = Literal["accepted", "pending"]


class StateLostError(StateError):
    """The server accepted a reply of this client whose state is gone."""


class Store(Protocol):
    """Two slots of named tensors with the round they belong to."""

    def round(self, slot: Slot) -> int | None:
        """The round of a slot; None when it is empty."""

    def read(self, slot: Slot) -> dict[str, torch.Tensor]:
        """The tensors of a slot that isn't empty."""

    def write(self, slot: Slot, tensors: Tensors, server_round: int) -> None:
        """Fill a slot, atomically."""

    def promote(self) -> None:
        """Make pending accepted, atomically."""

    def clear(self, slot: Slot) -> None:
        """Empty a slot."""


def settle(store: Store, accepted_round: int) -> dict[str, torch.Tensor] | None:
    """Bring the slots in line with what the server accepted, and return the accepted state.

    Args:
        store: Where this client's state is.
        accepted_round: The last round in which the server accepted this client's reply; 0 for none.

    Returns:
        The state to start from; None at the first participation.

    Raises:
        StateLostError: The server accepted a reply whose state isn't here.
    """
    if accepted_round == 0:
        store.clear("pending")
        store.clear("accepted")
        return None
    if store.round("pending") == accepted_round:
        store.promote()
    elif store.round("accepted") == accepted_round:
        store.clear("pending")  # that reply never counted
    else:
        raise StateLostError(
            f"the server accepted this client's reply of round {accepted_round}, but the state kept here is of round"
            f" {store.round('accepted')} (pending: {store.round('pending')}); keep state-dir on a volume that survives"
        )
    return store.read("accepted")


def peek(store: Store, accepted_round: int) -> dict[str, torch.Tensor] | None:
    """The state that the server has accepted, without changing the slots; None where there is none.

    Evaluation reads like this: it comes before the round's checkpoint, so nothing may be committed yet.
    """
    for slot in ("pending", "accepted"):
        if accepted_round and store.round(slot) == accepted_round:
            return store.read(slot)
    return None


class DirectoryStore:
    """State in ``<directory>/<experiment id>/<client id>/{accepted,pending}.safetensors``."""

    def __init__(self, directory: Path, experiment_id: str, client: str) -> None:
        self.folder = directory / _file_name(experiment_id) / f"client-{_file_name(client)}"

    def _path(self, slot: Slot) -> Path:
        return self.folder / f"{slot}.safetensors"

    def round(self, slot: Slot) -> int | None:
        """The round of a slot; None when it is empty or unreadable."""
        try:
            with safetensors.safe_open(self._path(slot), framework="pt") as file:
                return int(file.metadata()["round"])
        except (FileNotFoundError, safetensors.SafetensorError, KeyError, TypeError, ValueError):
            return None

    def read(self, slot: Slot) -> dict[str, torch.Tensor]:
        """The tensors of a slot."""
        return safetensors.torch.load_file(self._path(slot))

    def write(self, slot: Slot, tensors: Tensors, server_round: int) -> None:
        """Write a slot: to a temporary file, then moved into place, so a crash leaves the old or the new."""
        data = safetensors.torch.save(
            {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, {"round": str(server_round)}
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(slot), data)
        except OSError as error:
            raise StateError(
                f"client state of round {server_round} can't be written to {self.folder} ({error.strerror}); the state"
                " before is intact; free space or point state-dir to another volume"
            ) from error

    def promote(self) -> None:
        """Make pending accepted."""
        self._path("pending").replace(self._path("accepted"))

    def clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self._path(slot).unlink(missing_ok=True)


class ContextStore:
    """State in Flower's ``Context.state``: small, in memory."""

    def __init__(self, context: Context, experiment_id: str) -> None:
        self.state = context.state
        about = self.state.config_records.get("fedstrat.state")
        if about is None or about.get("experiment-id") != experiment_id:
            about = ConfigRecord({"experiment-id": experiment_id})
            for slot in ("accepted", "pending"):
                self.state.pop(f"fedstrat.{slot}", None)
        self.about = about
        self.state["fedstrat.state"] = about

    def round(self, slot: Slot) -> int | None:
        """The round of a slot; None when it is empty."""
        kept = self.about.get(f"{slot}-round")
        return kept if isinstance(kept, int) and f"fedstrat.{slot}" in self.state else None

    def read(self, slot: Slot) -> dict[str, torch.Tensor]:
        """The tensors of a slot."""
        return decode(self.state.array_records[f"fedstrat.{slot}"], f"state/{slot}")

    def write(self, slot: Slot, tensors: Tensors, server_round: int) -> None:
        """Fill a slot.

        Raises:
            StateError: The state is too large for Context.state.
        """
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > CONTEXT_LIMIT_BYTES:
            raise StateError(
                f"this client's state has {size / 1e6:.1f} MB, but Flower's Context.state is only trusted with"
                f" {CONTEXT_LIMIT_BYTES / 1e6:.1f} MB (it loses more without an error); set state-dir in the run"
                " config or in the node config to a folder"
            )
        self.state[f"fedstrat.{slot}"] = raw_record(tensors)
        self.about[f"{slot}-round"] = server_round

    def promote(self) -> None:
        """Make pending accepted."""
        self.state["fedstrat.accepted"] = self.state.pop("fedstrat.pending")
        self.about["accepted-round"] = self.about.pop("pending-round")

    def clear(self, slot: Slot) -> None:
        """Empty a slot."""
        self.state.pop(f"fedstrat.{slot}", None)
        self.about.pop(f"{slot}-round", None)


def open_store(context: Context, experiment_id: str, client: str) -> Store:
    """Open this client's state: in ``state-dir`` of the node config, else of the run config, else in Context.state."""
    directory = str(context.node_config.get("state-dir") or context.run_config.get("state-dir") or "")
    if directory:
        return DirectoryStore(Path(directory).expanduser(), experiment_id, client)
    return ContextStore(context, experiment_id)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a whole file or leave the old one: temporary file, fsync, rename."""
    with _temporary(path) as (descriptor, temporary):
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, str]]:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        yield descriptor, temporary
    finally:
        Path(temporary).unlink(missing_ok=True)


def _file_name(text: str) -> str:
    """A file name for any id: quoted, or hashed where that is no good name."""
    name = quote(text, safe="")
    good = name and not name.startswith(".") and len(name) <= _LONGEST_NAME
    return name if good else "sha256-" + hashlib.sha256(text.encode()).hexdigest()
