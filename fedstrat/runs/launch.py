"""``fedstrat run``: ``flwr run`` that waits for the end of the run and tells how it ended.

Without a connection it starts a SuperLink of its own, which simulates the clients on this machine, and ends
it again. The run succeeded if Flower calls it completed and at least one round aggregated a model.
"""

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedstrat.errors import ConfigError, RunFailedError
from fedstrat.runs import capacity, cluster, connections
from fedstrat.runs.flowercli import NO_TALKING, FlowerCLI, scripts_first
from fedstrat.runs.follow import Submission, follow
from fedstrat.runs.inprocess import Engine, import_from, run_in_process
from fedstrat.runs.interrupts import Interrupted, signals_interrupt
from fedstrat.runs.overrides import Scalar, read_app, read_pairs
from fedstrat.runs.resume import check_resumable, close_folder, recorded_settings
from fedstrat.runs.superlink import LocalSuperLink

if TYPE_CHECKING:
    from fedstrat.runs.config import RunConfig

_PATH_KEYS = ("dataset.dir", "resume", "state-dir")


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for.

    Attributes:
        connection: Name of a SuperLink connection in Flower's config.toml; None simulates on this machine.
        pairs: The arguments of ``-c``.
        app: Folder of the Flower app; None looks in the working directory, then where fedstrat lies.
        results_dir: Folder in which the run makes its results folder.
        verbose: Whether to show the whole log.
        ray_address: ``HOST:PORT`` of a Ray cluster to simulate on; "" simulates on this machine alone.
        engine: What simulates the clients.
        settings: Run-config values that stand above those of ``pairs``.
        folder: The results folder itself, which isn't there yet; None makes one named after the time.
    """

    connection: str | None = None
    pairs: Sequence[str] = ()
    app: Path | None = None
    results_dir: Path | None = None
    verbose: bool = False
    ray_address: str = ""
    engine: Engine = Engine.RAY
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    folder: Path | None = None


@dataclass(frozen=True)
class _Plan:
    """A request that was found right."""

    app: Path
    config: "RunConfig"
    given: dict[str, Scalar]
    verbose: bool
    folder: Path | None = None

    def submission(self, federation: str, folder: Path | None) -> Submission:
        return Submission(self.app, self.given, federation, folder, self.verbose)


def launch(request: RunRequest) -> int:
    """Run what was asked for, show its progress and at last its results folder.

    Returns:
        0 if the run succeeded, 1 if it failed, 128 + the signal's number if a signal ended it.

    Raises:
        ConfigError: The request is wrong; nothing was started.
        DataError: The data of a simulation can't be read or shared out; nothing was started.
        UntrustedError: The connection leads to a SuperLink that must not be trusted; nothing was started.
    """
    plan = _plan(request)
    folder: Path | None = None
    code = 0
    ending: tuple[Literal["failed", "interrupted"], str] | None = None
    with signals_interrupt():
        try:
            if request.connection is None:
                environment, share = _share_machine(plan, request.ray_address)
                folder = _take_folder(plan)
                _announce(plan)
                _simulate(plan, request, environment, share, folder)
            else:
                cli, folder = _connect(plan, request.connection)
                _announce(plan)
                with tempfile.TemporaryDirectory(prefix="fedstrat-") as scratch:
                    submission = plan.submission(_federation(plan.config.num_clients), folder)
                    folder = follow(cli, submission, Path(scratch))
        except RunFailedError as error:
            complain("error", str(error))
            code, ending = 1, ("failed", str(error))
        except Interrupted as interrupt:
            complain("error", f"ended by {interrupt.name}; the run was stopped")
            code, ending = 128 + interrupt.number, ("interrupted", f"ended by {interrupt.name}")
        if folder is not None and ending is not None:
            close_folder(folder, *ending)  # a ServerApp that was killed couldn't
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only goes if nothing was written
        if code == 0 or folder.exists():
            _say(str(folder))
    return code


def _plan(request: RunRequest) -> _Plan:
    """Find the app and check what is asked of it."""
    if request.connection is not None and request.ray_address:
        raise ConfigError("--ray-address is for a simulation, and a connection for what is behind it; give one of them")
    if request.ray_address and request.engine is not Engine.RAY:
        raise ConfigError(f"--ray-address is for the engine ray, not for {request.engine}; give one of them")
    if request.connection is not None and request.engine is not Engine.RAY:
        raise ConfigError(
            f"--engine {request.engine} simulates the clients in this process, but the connection"
            f" '{request.connection}' has nodes of its own; leave out one of the two"
        )
    if request.connection is not None:
        # First: it takes a moment, all else seconds.
        connections.check_trust(connections.settings(connections.flwr_home(), request.connection))
    app = find_app(request.app)
    defaults = read_app(app)
    pairs = read_pairs(request.pairs, defaults)
    given = pairs | dict(request.settings)
    if given.get("resume"):
        folder = Path(str(given["resume"])).expanduser()
        if request.connection is None:  # else it may lie on another machine
            check_resumable(folder)
        before = recorded_settings(folder)
        given = {name: value for name, value in before.items() if name in defaults} | given
    if request.results_dir is not None:
        given["results-dir"] = str(request.results_dir)
    config = check(defaults, given)
    if request.connection is None and config.num_clients:
        _check_clients(config, app, defaults, request.engine)
    if unread := [name for name in _of_others(config, pairs) if pairs[name] != defaults[name]]:
        complain("warning", f"the algorithm is {config.algorithm}, which doesn't read {', '.join(unread)}")
    return _Plan(app, config, given, request.verbose, request.folder)


def _of_others(config: "RunConfig", names: Iterable[str]) -> list[str]:
    """Those of the keys that belong to algorithms which take no part in the run."""
    from fedstrat.runs.keys import algorithms  # noqa: PLC0415  (imports torch)

    used = {config.algorithm, config.flat.get(f"{config.algorithm}.aggregator")}
    unused = tuple(f"{name}." for name in algorithms() if name not in used)
    return [name for name in names if name.startswith(unused)]


def _check_clients(config: "RunConfig", app: Path, defaults: Mapping[str, Scalar], engine: Engine) -> None:
    """Find out once, and now, what every simulated client would fail at: its data, and a model of the user's own.

    An app without these keys has data and a model of its own, which nobody but its clients knows.

    Raises:
        ConfigError: The model can't be imported.
        DataError: The data can't be read, or the partition can't exist.
    """
    from fedstrat.data import sources  # noqa: PLC0415
    from fedstrat.data.clients import shared  # noqa: PLC0415
    from fedstrat.models.custom import find_factory  # noqa: PLC0415  (imports torch)

    if "dataset.name" in defaults:
        shared(config.flat)
        if engine is Engine.RAY:  # the clients load it in processes of their own
            sources.forget()
    if "model.name" in defaults and ":" in config.model.name:
        # Ray's workers also find what lies in the app.
        with import_from(app) if engine is Engine.RAY else contextlib.nullcontext():
            find_factory(config.model.name)


def complain(kind: str, text: str) -> None:
    """Print a warning or an error to the user."""
    print(f"{kind}: {text}", file=sys.stderr, flush=True)


def find_app(folder: Path | None) -> Path:
    """The folder of the app: as given, else the working directory, else the checkout that holds fedstrat.

    Raises:
        ConfigError: None of them holds a Flower app.
    """
    if folder is not None:
        return folder.expanduser().resolve()
    for place in (Path.cwd(), Path(__file__).resolve().parents[2]):
        with contextlib.suppress(ConfigError):
            read_app(place)
            return place
    raise ConfigError(
        f"expected a fedstrat app in the working directory, but {Path.cwd()} has no pyproject.toml with "
        "[tool.flwr.app.config]; pass the folder of one with --app"
    )


def check(defaults: Mapping[str, Scalar], given: Mapping[str, Scalar]) -> "RunConfig":
    """Check the run config as the ServerApp will.

    Raises:
        ConfigError: A value of the wrong type, out of range, or at odds with another.
    """
    from fedstrat.runs import config  # noqa: PLC0415  (imports torch)

    # An app made from ours may have keys of its own, which only its own code can check.
    known = config.keys()
    return config.parse({key: value for key, value in {**defaults, **given}.items() if key in known})


def run_name(config: "RunConfig", now: datetime) -> str:
    """Name of a results folder, for example ``20260102-030405-craft-digits``."""
    return f"{now:%Y%m%d-%H%M%S}-{config.algorithm}-{config.dataset.name}"


def _share_machine(plan: _Plan, ray_address: str = "") -> tuple[dict[str, str], capacity.Capacity]:
    """Choose GPUs and the number of clients at once for a simulation; returns the environment for it too."""
    config = plan.config
    if config.num_clients < 1:
        raise ConfigError("num-clients=0: expected 1 or more, because a local simulation makes the clients")
    device, server = config.train.device, config.aggregation_device
    gpu_memory = functools.cache(capacity.gpu_memory)  # it takes a process that imports torch
    if server.startswith("cuda"):
        capacity.choose_gpus(server, gpu_memory(), "aggregation-device")
    if ray_address:
        share = cluster.plan(cluster.nodes(ray_address), device)
        if device == "auto":
            plan.given["train.device"] = "cuda" if share.gpu_share else "cpu"
        return dict(os.environ), share
    gpu_bytes = gpu_memory() if device == "auto" or device.startswith("cuda") else []
    gpus, warning = capacity.choose_gpus(device, gpu_bytes)
    environment = dict(os.environ)
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = capacity.visible_devices(gpus, os.environ)
        if ":" in device and server.startswith("cuda"):
            if server not in ("cuda", device):
                raise ConfigError(
                    f"aggregation-device={server}: with train.device={device} a simulation sees that GPU alone"
                )
            plan.given["aggregation-device"] = "cuda"
    if device == "auto" or gpus:
        plan.given["train.device"] = "cuda" if gpus else "cpu"  # nobody chooses, or warns, a second time
    if warning:
        complain("warning", warning)
    cores = capacity.usable_cores()
    return environment, capacity.plan(config.num_clients, cores, [gpu_bytes[index] for index in gpus])


def _simulate(
    plan: _Plan, request: RunRequest, environment: dict[str, str], share: capacity.Capacity, folder: Path
) -> None:
    """Run the simulation on the engine that was asked for."""
    if request.engine is Engine.IN_PROCESS:
        run_in_process(plan.submission("", folder), plan.config.num_clients)
        return
    _say(f"clients at once: {share.at_once} ({share.limit})")
    with LocalSuperLink(environment, request.ray_address) as superlink:
        submission = plan.submission(share.federation(plan.config.num_clients), folder)
        follow(superlink.cli, submission, superlink.folder)


def _take_folder(plan: _Plan) -> Path:
    """Make the results folder of a run on this machine, and every path absolute: the apps run elsewhere."""
    config = plan.config
    for key in _PATH_KEYS:
        value = str(config.flat[key])
        if value:
            plan.given[key] = str(Path(value).expanduser().absolute())
    resumed = Path(str(plan.given.get("resume", "")))
    if config.resume:
        folder = resumed  # goes on where it stopped
    elif plan.folder is not None:
        folder = _make(plan.folder.expanduser().absolute().parent, plan.folder.name)
    else:
        parent = Path(config.results_dir or "results").expanduser().absolute()
        folder = _make(parent, run_name(config, datetime.now().astimezone()))
    plan.given["results-dir"] = str(folder)
    plan.given.setdefault("state-dir", str((resumed if config.resume else folder) / "state"))
    return folder


def _make(parent: Path, name: str) -> Path:
    """Make a folder of that name, or with a number behind it, that nobody else has."""
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():
                raise ConfigError(f"results-dir={parent}: expected a folder, but there is a file") from None
            number += 1
        except OSError as error:
            raise ConfigError(f"results-dir={parent}: can't make a folder there: {error.strerror}") from None
        else:
            return folder


def _connect(plan: _Plan, connection: str) -> tuple[FlowerCLI, Path | None]:
    """Flower's commands against a named connection, and the results folder if it's on this machine."""
    flwr_home = connections.flwr_home()
    address = str(connections.settings(flwr_home, connection).get("address", ""))
    environment = scripts_first(os.environ) | NO_TALKING
    if not address or address.startswith(":local"):
        if plan.config.resume:
            check_resumable(Path(plan.config.resume).expanduser())
        flwr_home.mkdir(parents=True, exist_ok=True)
        # Flower may start this one, here and in the working directory of its command. Packages there win over
        # the app's own, so that must not be where the user is.
        return FlowerCLI(connection, environment, flwr_home), _take_folder(plan)
    parent = plan.config.results_dir
    if parent and not Path(parent).is_absolute():
        raise ConfigError(
            f"results-dir={parent}: expected an absolute path, because with the connection '{connection}' "
            "it is a folder on the machine of the SuperLink"
        )
    if parent:
        name = run_name(plan.config, datetime.now().astimezone())
        plan.given["results-dir"] = str(Path(parent) / name)
    return FlowerCLI(connection, environment, Path.cwd()), None


def _federation(num_clients: int) -> str:
    """For a SuperLink that simulates; one with real nodes ignores it."""
    return f"num-supernodes={num_clients} client-resources-num-cpus=1" if num_clients else ""


def _announce(plan: _Plan) -> None:
    config = plan.config
    clients = f"{config.num_clients or 'any number of'} client{'s' * (config.num_clients != 1)}"
    rounds = f"{config.num_server_rounds} round{'s' * (config.num_server_rounds != 1)}"
    _say(f"{config.algorithm} on {config.dataset.name}: {clients}, {rounds}")


def _say(text: str) -> None:
    print(text, flush=True)
