"""Rounds on their way to TensorBoard and Weights & Biases, where the run config asks for them.

Both packages are optional (``pip install 'fedstrat[tensorboard]'``, ``'fedstrat[wandb]'``). Neither may cost a run:
whatever goes wrong is one warning, and the writer that it went wrong in stays silent from then on.
"""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedstrat.metrics.rounds import RoundReport

if TYPE_CHECKING:
    from fedstrat.runs.config import RunConfig

logger = logging.getLogger("flwr")

_SCORES = ("mean", "accuracy", "best10", "worst10", "std", "loss")


class Writer(Protocol):
    """Where numbers go."""

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers."""

    def close(self) -> None:
        """Write what is left, after the last round."""


class Writers:
    """The writers that a run config asks for, as one ``on_round`` function.

    Args:
        run: Reads ``tensorboard`` and ``wandb-project``.
        folder: The results folder; TensorBoard's files go into ``tensorboard`` in it.
    """

    def __init__(self, run: "RunConfig", folder: Path) -> None:
        self._open: dict[str, Writer] = {}
        if run.tensorboard:
            self._try("TensorBoard", lambda: self._start("TensorBoard", TensorBoardWriter(folder / "tensorboard")))
        if run.wandb_project:
            self._try("Weights & Biases", lambda: self._start("Weights & Biases", WandbWriter(run, folder)))

    def __call__(self, report: RoundReport) -> None:
        """Write a finished round."""
        numbers = scalars(report)
        for name, writer in list(self._open.items()):
            self._try(name, lambda writer=writer: writer.write(report.round, numbers))  # type: ignore[misc]

    def close(self) -> None:
        """Close all writers."""
        for name, writer in list(self._open.items()):
            self._try(name, writer.close)
        self._open.clear()

    def _start(self, name: str, writer: Writer) -> None:
        self._open[name] = writer

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except ImportError:
            extra = "tensorboard" if name == "TensorBoard" else "wandb"
            logger.warning("%s isn't installed, so nothing goes there: pip install 'fedstrat[%s]'", name, extra)
        except Exception as error:
            self._open.pop(name, None)
            logger.warning("%s failed, so nothing more goes there; the run goes on: %s", name, _without_keys(error))


class TensorBoardWriter:
    """TensorBoard's event files.

    Args:
        folder: Where they go.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (optional)

        self._writer: Any = SummaryWriter(str(folder))

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Write a round's numbers, so that they can be looked at while the run goes on."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


class WandbWriter:
    """A run of Weights & Biases, with the run config as its config.

    Never asks for a key: without one, log in before (``wandb login``), or keep the run on this machine
    (``WANDB_MODE=offline``).

    Args:
        run: The run config; reads ``wandb-project``.
        folder: The results folder, whose name names the run.
    """

    def __init__(self, run: "RunConfig", folder: Path) -> None:
        import wandb  # noqa: PLC0415  (optional)

        settings = wandb.Settings(silent=True, login_timeout=30, init_timeout=60)
        self._run: Any = wandb.init(
            project=run.wandb_project, name=folder.name, dir=str(folder), config=dict(run.flat), settings=settings
        )

    def write(self, number: int, numbers: Mapping[str, float]) -> None:
        """Send a round's numbers."""
        self._run.log(dict(numbers), step=number)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def scalars(report: RoundReport) -> dict[str, float]:
    """Return a round's numbers by name: ``test/…``, ``personal/…``, ``train/…``, ``diagnostics/…``, ``bytes/…``."""
    numbers: dict[str, float] = {}
    for prefix, scores in (("test", report.fairness), ("personal", report.personal)):
        if scores is not None:
            numbers |= {f"{prefix}/{name}": float(getattr(scores, name)) for name in _SCORES}
    for prefix, table in (("train", report.train), ("server", report.server), ("diagnostics", report.diagnostics)):
        numbers |= {f"{prefix}/{name}": float(value) for name, value in table.items()}
    numbers |= {f"layers/{layer}/{name}": float(v) for layer, part in report.layers.items() for name, v in part.items()}
    return numbers | {
        "bytes/train-down": float(report.traffic.train_down_payload),
        "bytes/train-up": float(report.traffic.train_up_payload),
        "seconds": report.seconds,
        "clients/trained": float(len(report.trained)),
        "clients/failed": float(len(report.failed)),
    }


def _without_keys(error: Exception) -> str:
    """The first line of an error, without what the environment keeps secret."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    for name, value in os.environ.items():
        if value and len(value) >= 6 and name.endswith(("KEY", "TOKEN", "SECRET", "PASSWORD")):
            text = text.replace(value, "***")
    return text
