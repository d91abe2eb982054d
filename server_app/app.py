"""The ServerApp: run config -> model, strategy -> rounds -> results folder."""

import os
from datetime import UTC, datetime
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedstrat
from fedstrat.errors import FedstratError
from fedstrat.metrics.rounds import RoundReport
from fedstrat.models import trainable_names
from fedstrat.payloads import decode
from fedstrat.runs import config, report
from fedstrat.runs.history import RunFolder
from fedstrat.runs.model import build_model
from fedstrat.runs.progress import Progress
from fedstrat.seeding import derive
from fedstrat.strategies.cohort import wait_for_nodes

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one experiment; raises when it failed, after the results folder says so."""
    run = config.parse(context.run_config)
    torch.manual_seed(derive(run.seed, "model"))
    model = build_model(run.flat)
    strategy = run.strategy(trainable=trainable_names(model))
    folder = RunFolder(
        _folder(run),
        run.flat,
        num_parameters=sum(p.numel() for p in model.parameters()),
        run_id=context.run_id,
    )
    print(f"results: {folder.path}", flush=True)
    progress = Progress()

    def on_round(finished: RoundReport) -> None:
        folder.record(finished)
        print(progress.line(finished), flush=True)

    result = None
    status, error = "failed", ""
    try:
        nodes = wait_for_nodes(grid, run.num_clients, run.connect_timeout)
        print(f"{len(nodes)} nodes are connected", flush=True)
        result = strategy.start(
            grid=grid,
            initial_arrays=fedstrat.to_arrays(model),
            num_rounds=run.num_server_rounds,
            on_round=on_round,
            evaluate_every=run.evaluate_every,
        )
        status = "completed"
    except FedstratError as failure:
        result = getattr(failure, "result", None)
        error = str(failure)
        raise
    except BaseException as failure:
        error = f"{type(failure).__name__}: {failure}"
        raise
    finally:
        # The last good model is saved whatever happened.
        sha256 = folder.save_model(decode(result.arrays, "model")) if result is not None else None
        folder.finish(status, error=error, model_sha256=sha256)  # type: ignore[arg-type]
        report.draw(folder.path)


def _folder(run: config.RunConfig) -> Path:
    """``results-dir`` is this run's own folder; without one, $FEDSTRAT_RESULTS or ~/.fedstrat/results holds it."""
    if run.results_dir:
        return Path(run.results_dir).expanduser()
    home = Path(os.environ.get("FEDSTRAT_RESULTS") or Path.home() / ".fedstrat" / "results")
    return home / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{run.algorithm}-{run.dataset.name}"
