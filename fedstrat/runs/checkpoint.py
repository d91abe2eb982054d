"""Checkpoints: one atomically written safetensors file a round, the last few kept."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from fedstrat.errors import StateError
from fedstrat.local.state import write_atomically
from fedstrat.strategies.state import Snapshot

logger = logging.getLogger("flwr")

_FORMAT = 1
_TENSOR_FIELDS = ("model", "tensors")


class CheckpointFolder:
    """``<folder>/round-000012.safetensors`` for the last rounds.

    Args:
        folder: Where they are; made when the first is saved.
        every: Save every so many rounds; 0 switches checkpoints off. Methods whose clients keep accepted state are
            saved every round.
        keep: How many are kept, >= 1; the one before the last serves where the last is damaged.
    """

    def __init__(self, folder: Path, *, every: int = 1, keep: int = 2) -> None:
        self.folder, self.every, self.keep = folder, every, keep

    def due(self, server_round: int, *, every_round: bool, last: bool) -> bool:
        """Whether this round is saved."""
        return self.every > 0 and (every_round or last or server_round % self.every == 0)

    def save(self, snapshot: Snapshot) -> None:
        """Save a snapshot atomically, then drop the oldest.

        Raises:
            StateError: The folder can't be written.
        """
        tensors = {f"model/{n}": t for n, t in snapshot.model.items()}
        for field, named in snapshot.tensors.items():
            tensors |= {f"state/{field}/{n}": t for n, t in named.items()}
        about = {
            f.name: getattr(snapshot, f.name) for f in dataclasses.fields(snapshot) if f.name not in _TENSOR_FIELDS
        }
        # The order of the model's arrays isn't kept by the format, so it is written down.
        about |= {"format": _FORMAT, "arrays": list(snapshot.model), "fields": list(snapshot.tensors)}
        # Tied tensors share memory, which the format refuses.
        data = safetensors.torch.save(
            {n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, {"fedstrat": json.dumps(about)}
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path(snapshot.round), data)
        except OSError as error:
            raise StateError(
                f"the checkpoint of round {snapshot.round} can't be written to {self.folder} ({error.strerror}); the"
                " ones before are intact: free space and resume"
            ) from error
        for old in self._files()[: -self.keep]:
            old.unlink(missing_ok=True)

    def latest(self) -> Snapshot:
        """Read the newest checkpoint that is whole; a damaged one is said so and the one before it is taken.

        Raises:
            StateError: There is none.
        """
        problems = []
        for path in reversed(self._files()):
            try:
                return read(path)
            except StateError as error:
                logger.warning("%s; trying the one before", error)
                problems.append(str(error))
        raise StateError("; ".join(problems) or f"there is no checkpoint in {self.folder}; resume needs one")

    def _path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round:06d}.safetensors"

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("round-*.safetensors"))


def read(path: Path) -> Snapshot:
    """Read one checkpoint.

    Raises:
        StateError: It is truncated, or no checkpoint of this version.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["fedstrat"])
            if about.pop("format") != _FORMAT:
                raise StateError(f"the checkpoint {path} has another format than this version writes")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        model = {name: tensors[f"model/{name}"] for name in about.pop("arrays")}
        fields = {field: _named(tensors, f"state/{field}/", list(model)) for field in about.pop("fields")}
        about |= {name: tuple(about[name]) for name in ("trainable", "seen", "moving")}
        return Snapshot(**about, model=model, tensors=fields)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise StateError(f"the checkpoint {path} is damaged or foreign ({type(error).__name__}: {error})") from None


def _named(tensors: dict[str, Any], prefix: str, order: list[str]) -> dict[str, Any]:
    """The tensors under a prefix, parameters in the model's order."""
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    position = {name: i for i, name in enumerate(order)}
    return {name: tensors[prefix + name] for name in sorted(names, key=lambda n: (position.get(n, len(order)), n))}
