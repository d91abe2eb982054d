"""The ServerApp: run config -> model, strategy -> rounds -> results folder."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

import fedstrat
from fedstrat.errors import FedstratError, StateError
from fedstrat.flower import exchange
from fedstrat.metrics.fairness import Fairness
from fedstrat.metrics.rounds import RoundReport
from fedstrat.models import trainable_names
from fedstrat.payloads import decode
from fedstrat.runs import config, report
from fedstrat.runs.checkpoint import CheckpointFolder
from fedstrat.runs.goals import Goals
from fedstrat.runs.history import RunFolder
from fedstrat.runs.model import initial_model
from fedstrat.runs.progress import Progress
from fedstrat.runs.writers import Writers
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.cohort import wait_for_nodes
from fedstrat.strategies.state import Snapshot

app = ServerApp()

_ROUND_SECONDS = 3600.0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment; raises when it failed, after the results folder says so."""
    run = config.parse(context.run_config)
    model = initial_model(run.flat)
    strategy = run.strategy(trainable=trainable_names(model))
    path = _folder(run)
    checkpoints = CheckpointFolder(path / "checkpoints", every=run.checkpoint_every)
    snapshot = _snapshot(run, checkpoints)
    folder = RunFolder(
        path,
        run.flat,
        resume=snapshot is not None,
        num_parameters=sum(p.numel() for p in model.parameters()),
        run_id=context.run_id,
    )
    print(f"results: {path}", flush=True)
    progress, goals = Progress(), Goals(run.target_accuracy, run.patience)
    writers = Writers(run, path)
    if snapshot is not None:
        _go_back(folder, goals, snapshot.round, run.num_server_rounds)

    def on_round(finished: RoundReport) -> None:
        folder.record(finished)
        writers(finished)
        print(progress.line(finished), flush=True)

    arrays, error = None, ""
    validation: dict[str, Fairness | None] = {}
    status: Literal["completed", "failed", "interrupted"] = "failed"
    try:
        with _signals_interrupt():
            nodes = wait_for_nodes(grid, run.num_clients, run.connect_timeout, ask=True)
            print(f"{len(nodes)} nodes are connected", flush=True)
            result = strategy.start(
                grid=grid,
                initial_arrays=fedstrat.to_arrays(model),
                num_rounds=snapshot.round if snapshot is not None and goals.reason else run.num_server_rounds,
                on_round=on_round,
                evaluate_every=run.evaluate_every,
                should_end=goals,
                checkpoints=checkpoints,
                resume=snapshot,
                diagnostics=run.diagnostics,
            )
        arrays = result.arrays
        if run.dataset.validation_fraction:
            validation = _validate(run, strategy, grid, arrays)
        status = "completed"
        if goals.reason:
            print(f"ended early: {goals.reason}", flush=True)
    except FedstratError as failure:
        arrays = getattr(getattr(failure, "result", None), "arrays", None) or arrays or strategy.arrays
        error = str(failure)
        raise
    except KeyboardInterrupt:
        arrays, status, error = strategy.arrays, "interrupted", "interrupted; resume goes on after the last checkpoint"
        raise
    except BaseException as failure:
        arrays, error = strategy.arrays, f"{type(failure).__name__}: {failure}"
        raise
    finally:
        # The last good model is saved whatever happened.
        sha256 = folder.save_model(decode(arrays, "model")) if arrays is not None else None
        folder.finish(status, error=error, model_sha256=sha256, validation=validation)
        writers.close()
        report.draw(folder.path)


def _go_back(folder: RunFolder, goals: Goals, server_round: int, num_rounds: int) -> None:
    """Forget what came after the round that is resumed from."""
    folder.keep_until(server_round)
    for line in folder.history:
        goals.take(line["round"], line["mean"])
    if goals.reason:
        print(f"the goal was reached before: {goals.reason}", flush=True)
    if not goals.reason and server_round >= num_rounds:
        print(
            f"nothing is left to do: the run has its {server_round} round{'s' * (server_round != 1)};"
            " resume with a larger num-server-rounds to go on",
            flush=True,
        )
        return
    print(f"resuming after round {server_round}", flush=True)


def _validate(
    run: config.RunConfig, strategy: FedStrategy[Any, Any], grid: Grid, arrays: ArrayRecord
) -> dict[str, Fairness | None]:
    """Score the final model, and personal ones where there are some, on what the clients held back from training."""
    last = run.num_server_rounds
    try:
        asked = list(strategy.configure_evaluate(last, arrays, ConfigRecord({"part": "validation"}), grid))
    except FedstratError as error:  # the run itself is done
        print(f"warning: nobody could be asked for validation scores: {error}", flush=True)
        return {}
    strategy.aggregate_evaluate(last, exchange(grid, asked, run.round_timeout or _ROUND_SECONDS))
    return {"validation": strategy.fairness, "validation_personal": strategy.personal}


def _snapshot(run: config.RunConfig, checkpoints: CheckpointFolder) -> Snapshot | None:
    if not run.resume:
        return None
    if run.checkpoint_every == 0:
        raise StateError("resume needs checkpoints, but checkpoint-every is 0; set it to 1 or more")
    return checkpoints.latest()


def _folder(run: config.RunConfig) -> Path:
    """``results-dir`` is this run's own folder; without one, $FEDSTRAT_RESULTS or ~/.fedstrat/results holds it."""
    if run.resume:
        return Path(run.resume).expanduser()
    if run.results_dir:
        return Path(run.results_dir).expanduser()
    home = Path(os.environ.get("FEDSTRAT_RESULTS") or Path.home() / ".fedstrat" / "results")
    return home / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{run.algorithm}-{run.dataset.name}"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: results are written, the last checkpoint stands."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
