"""``fedstrat run`` without Flower: requests, plans, logs, verdicts, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.common.config import flatten_dict, parse_config_args
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedstrat.cli import app
from fedstrat.errors import ConfigError, DataError, RunFailedError, UnknownSettingError
from fedstrat.runs import capacity, connections, launch, warden
from fedstrat.runs.flowercli import FlowerCLI, Status
from fedstrat.runs.follow import judge
from fedstrat.runs.inprocess import Engine
from fedstrat.runs.interrupts import Interrupted, signals_interrupt
from fedstrat.runs.overrides import read_app, read_pairs, write_toml
from fedstrat.runs.relay import Relay

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {
    "algorithm": "craft",
    "num-clients": 50,
    "craft.server-lr": 0.1,
    "fedavgm.nesterov": False,
    "dir": "",
}


# --- -c ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["algorithm=scaffold"], {"algorithm": "scaffold"}),
        (['algorithm="scaffold" num-clients=3'], {"algorithm": "scaffold", "num-clients": 3}),
        (["craft.server-lr=1"], {"craft.server-lr": 1.0}),
        (
            ["craft.server-lr=1e-3", "craft.server-lr=.5"],
            {"craft.server-lr": 0.5},
        ),
        (["fedavgm.nesterov=true"], {"fedavgm.nesterov": True}),
        (["dir='/my data' num-clients=2"], {"dir": "/my data", "num-clients": 2}),
        (["dir=2024-01-01"], {"dir": "2024-01-01"}),
        (["dir=100", "algorithm=100,50"], {"dir": "100", "algorithm": "100,50"}),
        (['dir="C:\\data"'], {"dir": "C:\\data"}),
        (["num-clients=many"], {"num-clients": "many"}),
        (["dir="], {"dir": ""}),
        ([" "], {}),
    ],
)
def test_pairs(arguments, expected):
    found = read_pairs(arguments, DEFAULTS)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_quoted_pairs_mean_what_they_mean_to_flower():
    arguments = ["algorithm='a b' num-clients=7 craft.server-lr=2e-1", 'dir="x=y z" fedavgm.nesterov=true']
    assert read_pairs(arguments, DEFAULTS) == parse_config_args(arguments)


def test_a_toml_file_is_read_as_flower_reads_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('algorithm = "fedavg"\n[craft]\nserver-lr = 0.7\n')
    assert read_pairs([str(file)], DEFAULTS) == parse_config_args([str(file)])


@pytest.mark.parametrize(
    "argument", ["craft", "num-clients=3 and more", "dir=/my data", "=3", "num-clients=[1]", "no.toml"]
)
def test_what_is_no_pair_is_refused_and_quoted(argument):
    with pytest.raises(ConfigError, match=r"-c "):
        read_pairs([argument], DEFAULTS)


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UnknownSettingError, match=r"'craft.server-rl'; did you mean 'craft.server-lr'\?"):
        read_pairs(["craft.server-rl=1"], DEFAULTS)


@pytest.mark.parametrize(
    ("key", "meant"), [("train.learning-rate", "train.lr"), ("lr", "train.lr"), ("num_clients", "num-clients")]
)
def test_a_key_by_another_name_is_understood(key, meant):
    with pytest.raises(UnknownSettingError, match=rf"no key '{key}'; did you mean '{meant}'\?"):
        read_pairs([f"{key}=1"], read_app(ROOT))


TEXT = st.text(st.characters(blacklist_categories=("Cs",)))
SCALARS = TEXT | st.booleans() | st.integers(-99, 99) | st.floats(allow_nan=False)
KEYS = st.from_regex(r"[a-z]+(-[a-z]+)?(\.[0-9])?", fullmatch=True)


@given(st.dictionaries(KEYS, SCALARS))
def test_toml_reads_back_to_the_same_values(flat):
    leaves = {key for key in flat if "." not in key}
    flat = {key: value for key, value in flat.items() if key.partition(".")[0] not in leaves - {key}}
    assert flatten_dict(tomllib.loads(write_toml(flat))) == flat


def test_the_shipped_app_reads_as_flower_reads_it():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert read_app(ROOT) == flatten_dict(config)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "doesn't exist"),
        ("[", "can't read"),
        ("[tool]", "isn't a Flower app"),
        ("[tool.flwr.app.config]\na=1", "'algorithm'"),
    ],
)
def test_a_folder_that_holds_no_app_is_refused(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / "pyproject.toml").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_app(tmp_path)


def test_the_app_is_the_one_here_else_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch.find_app(None) == ROOT
    (tmp_path / "pyproject.toml").write_text('[tool.flwr.app.config]\nalgorithm = "craft"\n')
    assert launch.find_app(None) == tmp_path


def test_a_forgotten_c_is_said_at_once():
    result = CliRunner().invoke(app, ["run", "algorithm=fedavg"])
    assert isinstance(result.exception, ConfigError)
    assert 'did you mean -c "algorithm=fedavg"?' in str(result.exception)


@pytest.mark.parametrize("command", ["run", "compare", "report", "partition", "keys make", "keys check"])
def test_help_is_plain(command):
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "\\" not in result.output
    if command == "run":
        assert "[default: ray]" in result.output
        assert "CONNECTION is a SuperLink connection" in result.output


# --- how many clients at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "cores", "gpus", "at_once", "limit"),
    [
        (50, 2, [], 2, "2 cores"),
        (50, 1, [], 1, "1 core "),
        (3, 8, [], 3, "no more clients"),
        (50, 16, [80e9], 16, "16 cores"),
        (50, 16, [8e9], 5, "1 GPU "),  # 8 GB / 1.5 GB
        (50, 16, [8e9, 24e9], 10, "2 GPUs"),  # the smaller one counts
        (50, 16, [1e9], 1, "GPU memory"),
        (2, 16, [80e9] * 4, 2, "no more clients"),
    ],
)
def test_the_machine_is_shared_out(clients, cores, gpus, at_once, limit):
    share = capacity.plan(clients, cores, [int(size) for size in gpus])
    assert share.at_once == at_once
    assert limit in share.limit
    if gpus:
        # What Ray's pool makes of it: clients per GPU, whole GPUs apart.
        assert int(1 / share.gpu_share) * share.gpus >= at_once
        assert int(share.gpus / share.gpu_share) >= at_once
        assert share.gpus <= len(gpus)
    else:
        assert (share.gpus, share.gpu_share) == (0, 0.0)


def test_the_quota_of_a_container_counts_in_whole_cores(tmp_path):
    assert capacity._quota(tmp_path) == []
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert capacity._quota(tmp_path) == [2]
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert capacity._quota(tmp_path) == []


def test_a_gpu_that_was_asked_for_must_be_there():
    for device, gpus in (("cuda", []), ("cuda:0", []), ("cuda:1", [1])):
        with pytest.raises(ConfigError, match=rf"train.device={device}: .*PyTorch finds (no|1) CUDA device here"):
            capacity.choose_gpus(device, gpus)
    assert capacity.choose_gpus("cuda", [1, 1]) == ([0, 1], "")
    assert capacity.choose_gpus("cuda:1", [1, 1]) == ([1], "")
    assert capacity.choose_gpus("cpu", [1, 1]) == ([], "")


def test_auto_takes_gpus_and_warns_only_without_one():
    assert capacity.choose_gpus("auto", [1]) == ([0], "")
    gpus, warning = capacity.choose_gpus("auto", [])
    assert gpus == []
    assert "CPU" in warning


def test_chosen_gpus_are_counted_among_the_visible_ones():
    assert capacity.visible_devices([1], {"CUDA_VISIBLE_DEVICES": "5, 7"}) == "7"
    assert capacity.visible_devices([0, 1], {}) == "0,1"


# --- the log ----------------------------------------------------------------------------------------------

LOG = """\
Using SuperLink: fedstrat (127.0.0.1:1)
\x1b[92mINFO \x1b[0m:      Starting Flower Simulation
\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
\x1b[92mINFO \x1b[0m:      \tflwr federation simulation-config
Successfully installed fedstrat to /tmp/x.
/v/site-packages/ray/_private/worker.py:2051: FutureWarning: Tip: In future
  warnings.warn(
results: /r/20260102-craft
round 1/2  loss 0.7
\x1b[93mWARNING \x1b[0m:   round 2: client 3 is dropped: ValueError: \x1b[36mray::X\x1b[39m
and the rest of Ray's text
\x1b[93mWARNING \x1b[0m:   round 2: client 4 is dropped: ValueError: \x1b[36mray::X\x1b[39m
\x1b[92mINFO \x1b[0m:      [ROUND 2]
(ClientAppActor pid=1) round 9/9 from a client
round 2/2  loss 0.6
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
  File "x.py", line 1, in f
ValueError: first

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "y.py", line 1, in f
fedstrat.errors.RunFailedError: 3 failed rounds
"""


def test_the_relay_shows_what_is_for_the_user():
    shown: list[str] = []
    relay = Relay(shown.append)
    for line in LOG.splitlines(keepends=True):
        relay.feed(line)
    assert shown == [
        "round 1/2  loss 0.7",
        "warning: round 2: client 3 is dropped: ValueError: ray::X",
        "round 2/2  loss 0.6",
    ]
    assert relay.results == "/r/20260102-craft"
    assert relay.last_exception == "fedstrat.errors.RunFailedError: 3 failed rounds"


def test_a_verbose_relay_shows_every_line_without_control_codes():
    shown: list[str] = []
    relay = Relay(shown.append, verbose=True)
    for line in LOG.splitlines(keepends=True):
        relay.feed(line)
    assert len(shown) == len(LOG.splitlines()) - 1  # the results folder comes at the end
    assert not any("\x1b" in line for line in shown)


class FakeCLI(FlowerCLI):
    """Flower's commands with canned answers: streams that break, and statuses (None: unreachable)."""

    def __init__(self, streams, statuses, patience):
        super().__init__("x", {}, Path(), patience)
        object.__setattr__(self, "streams", iter(streams))
        object.__setattr__(self, "statuses", iter(statuses))

    def _stream(self, run_id):
        yield from next(self.streams)

    def status(self, run_id):
        name = next(self.statuses)
        if name is None:
            raise RunFailedError("unreachable")
        return Status(name, "")


def test_a_broken_stream_is_taken_up_where_it_broke(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    cli = FakeCLI([["a", "b"], [], ["a", "b", "c"]], ["running", None, "finished:completed"], patience=60.0)
    lines: list[str] = []
    assert cli.follow("1", lines.append) == Status("finished:completed", "")
    assert lines == ["a", "b", "c"]


def test_a_superlink_that_is_gone_ends_the_wait():
    with pytest.raises(RunFailedError, match="unreachable"):
        FakeCLI([["a"]], [None], patience=0.0).follow("1", lambda _: None)


# --- the verdict ------------------------------------------------------------------------------------------

FAILED = Status("finished:failed", "Simulation failed with exception: boom")


@pytest.mark.parametrize(
    ("status", "summary", "complaint"),
    [
        (Status("finished:completed", ""), '{"rounds_succeeded": 1}', None),
        (Status("finished:completed", ""), '{"rounds_succeeded": 0}', "no round of the run succeeded"),
        (Status("finished:completed", ""), "{}", "without a valid .*summary.json"),
        (Status("finished:completed", ""), None, "without a valid .*summary.json"),
        (FAILED, '{"rounds_succeeded": 9}', "failed: boom\n"),
        (Status("finished:failed", "Task failed with unknown error."), None, "ValueError: from the log"),
        (Status("finished:stopped", ""), '{"rounds_succeeded": 9}', "stopped"),
    ],
)
def test_the_verdict_needs_a_complete_run_and_a_round(tmp_path, status, summary, complaint):
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    if complaint is None:
        judge(status, "", tmp_path, must_exist=True)
        return
    with pytest.raises(RunFailedError, match=complaint) as caught:
        judge(status, "ValueError: from the log", tmp_path, must_exist=True)
    assert str(tmp_path / "run.log") in str(caught.value)


def test_results_on_another_machine_are_left_to_flowers_status(tmp_path):
    completed = Status("finished:completed", "")
    judge(completed, "", tmp_path / "elsewhere", must_exist=False)
    judge(completed, "", None, must_exist=False)
    (tmp_path / "summary.json").write_text('{"rounds_succeeded": 0}')
    with pytest.raises(RunFailedError, match="no round"):
        judge(completed, "", tmp_path, must_exist=False)


# --- places -----------------------------------------------------------------------------------------------


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    folders = [launch._make(tmp_path / "results", "x") for _ in range(3)]
    assert [folder.name for folder in folders] == ["x", "x-2", "x-3"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="results-dir="):
        launch._make(tmp_path / "file", "x")


def plan(**values):
    flat = {
        "dataset.dir": "",
        "resume": "",
        "state-dir": "",
        "results-dir": "",
        "num-clients": 4,
        "train.device": "cpu",
        "aggregation-device": "cpu",
    }
    flat |= {key.replace("__", ".").replace("_", "-"): value for key, value in values.items()}
    config = SimpleNamespace(
        algorithm="craft",
        dataset=SimpleNamespace(name="digits"),
        train=SimpleNamespace(device=flat["train.device"]),
        num_clients=flat["num-clients"],
        aggregation_device=flat["aggregation-device"],
        resume=flat["resume"],
        results_dir=flat["results-dir"],
        flat=flat,
    )
    return launch._Plan(ROOT, config, {}, verbose=False)


def test_paths_are_the_users_although_the_apps_run_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = plan(dataset__dir="data")
    folder = launch._take_folder(request)
    assert folder.parent == tmp_path / "results"
    assert request.given == {
        "dataset.dir": str(tmp_path / "data"),
        "results-dir": str(folder),
        "state-dir": str(folder / "state"),
    }
    request = plan(state_dir="/s", results_dir="out")
    folder = launch._take_folder(request)
    assert folder.parent == tmp_path / "out"
    assert request.given == {"state-dir": "/s", "results-dir": str(folder)}


def test_a_resumed_run_goes_on_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    request = plan(resume="results/x")
    assert launch._take_folder(request) == tmp_path / "results/x"
    assert request.given["resume"] == request.given["results-dir"] == str(tmp_path / "results/x")
    request = plan(resume="results/x", results_dir="out")
    assert launch._take_folder(request) == tmp_path / "results/x"  # where its history and checkpoints are
    assert request.given["state-dir"] == str(tmp_path / "results/x/state")


def test_a_simulation_settles_the_device_once(monkeypatch, capsys):
    monkeypatch.setattr(capacity, "gpu_memory", list)
    request = plan(train__device="auto")
    environment, share = launch._share_machine(request)
    assert request.given == {"train.device": "cpu"}
    assert environment == dict(os.environ)
    assert share.gpus == 0
    assert capsys.readouterr().err.count("warning: ") == 1

    monkeypatch.setattr(capacity, "gpu_memory", lambda: [80 * 10**9] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    request = plan(train__device="cuda:1")
    environment, share = launch._share_machine(request)
    assert request.given == {"train.device": "cuda"}  # the only one that Ray shows to the client
    assert environment["CUDA_VISIBLE_DEVICES"] == "4"
    assert share.gpus == 1
    assert capsys.readouterr().err == ""


def test_the_servers_gpu_must_be_there_and_be_seen(monkeypatch):
    monkeypatch.setattr(capacity, "gpu_memory", list)
    with pytest.raises(ConfigError, match="aggregation-device=cuda: expected a CUDA device, but PyTorch finds no"):
        launch._share_machine(plan(train__device="cpu", aggregation_device="cuda"))
    monkeypatch.setattr(capacity, "gpu_memory", lambda: [80 * 10**9] * 2)
    request = plan(train__device="cpu", aggregation_device="cuda:1")
    assert "CUDA_VISIBLE_DEVICES" not in launch._share_machine(request)[0]
    assert "aggregation-device" not in request.given
    request = plan(train__device="cuda:1", aggregation_device="cuda:1")
    launch._share_machine(request)
    assert request.given["aggregation-device"] == "cuda"
    with pytest.raises(
        ConfigError, match=r"aggregation-device=cuda:0: with train.device=cuda:1 a simulation sees that"
    ):
        launch._share_machine(plan(train__device="cuda:1", aggregation_device="cuda:0"))


def test_a_simulation_needs_clients():
    with pytest.raises(ConfigError, match="num-clients=0"):
        launch._share_machine(plan(num_clients=0))


@pytest.mark.parametrize(
    ("pair", "complaint"),
    [
        ("dataset.name=npz dataset.dir={0}/none", "{0}/none"),
        ("dataset.partition=natural", "says who each|say who each"),
        ("dataset.min-size=100", "50 clients with at least 100 samples"),
        ("model.name=no_such_package.module:Net", "no module 'no_such_package'"),
        ("model.name=pathlib:Pathh", "did you mean 'Path'"),
    ],
)
@pytest.mark.parametrize("engine", list(Engine))
def test_what_every_client_would_fail_at_is_found_before_the_start(tmp_path, monkeypatch, engine, pair, complaint):
    monkeypatch.setattr(launch, "_share_machine", lambda *_: pytest.fail("it was started"))
    request = launch.RunRequest(pairs=[pair.format(tmp_path)], app=ROOT, results_dir=tmp_path / "out", engine=engine)
    with pytest.raises((ConfigError, DataError), match=complaint.format(tmp_path)) as caught:
        launch.launch(request)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pairs", "unread"),
    [
        ("algorithm=fedavg craft.server-lr=0.3 fedprox.mu=0.7 train.lr=0.2", "craft.server-lr, fedprox.mu"),
        ("algorithm=fedavg craft.server-lr=0.1", ""),  # the default
        ("algorithm=craft craft.server-lr=0.3", ""),
        ("algorithm=ditto ditto.aggregator=craft craft.server-lr=0.3", ""),
        ("algorithm=ditto ditto.aggregator=fedavg craft.server-lr=0.3", "craft.server-lr"),
    ],
)
def test_settings_of_another_algorithm_are_named(capsys, pairs, unread):
    launch._plan(launch.RunRequest(pairs=[pairs], app=ROOT))
    algorithm = pairs.split()[0].removeprefix("algorithm=")
    expected = f"warning: the algorithm is {algorithm}, which doesn't read {unread}\n" if unread else ""
    assert capsys.readouterr().err == expected


def test_an_app_with_data_of_its_own_and_real_nodes_are_not_asked_for_ours(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.flwr.app.config]\nalgorithm = "fedavg"\nnum-clients = 5000\n')
    assert launch._plan(launch.RunRequest(app=tmp_path)).config.num_clients == 5000
    monkeypatch.setattr(connections, "settings", lambda *_: {})
    monkeypatch.setattr(connections, "check_trust", lambda _: None)
    pairs = ["dataset.partition=natural model.name=no_such_package:Net"]
    launch._plan(launch.RunRequest("site", pairs, app=ROOT))
    launch._plan(launch.RunRequest(pairs=["num-clients=0 dataset.partition=natural"], app=ROOT))


def test_a_model_in_the_app_is_found_for_ray(tmp_path, monkeypatch):
    config = '[tool.flwr.app.config]\nalgorithm = "fedavg"\n[tool.flwr.app.config.model]\nname = "mlp"\n'
    (tmp_path / "pyproject.toml").write_text(config)
    (tmp_path / "model_in_the_app.py").write_text("def make():\n    pass\n")
    monkeypatch.delitem(sys.modules, "model_in_the_app", raising=False)
    before = list(sys.path)
    launch._plan(launch.RunRequest(pairs=["model.name=model_in_the_app:make"], app=tmp_path))
    assert sys.path == before


def test_connections_come_from_flowers_own_file(tmp_path):
    assert connections.settings(tmp_path, "local") == {}  # Flower will write its file
    local, site = '[superlink.local]\naddress = ":local:"\n', '[superlink.site]\naddress = "h:1"\n'
    (tmp_path / "config.toml").write_text(f'[superlink]\ndefault = "local"\n{local}{site}')
    assert connections.settings(tmp_path, "site") == {"address": "h:1"}
    with pytest.raises(ConfigError, match=r"'sitr' .*did you mean 'site'\? It holds: local, site"):
        connections.settings(tmp_path, "sitr")
    with pytest.raises(ConfigError, match="'default'"):
        connections.settings(tmp_path, "default")


# --- the end ----------------------------------------------------------------------------------------------


def test_the_first_signal_interrupts_and_later_ones_are_ignored():
    before = signal.getsignal(signal.SIGTERM)

    def ended_while_cleaning_up() -> None:
        with signals_interrupt():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as caught:
        ended_while_cleaning_up()
    assert (caught.value.number, caught.value.name) == (15, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before


# Starts a process in a session of its own whose parent ends at once, deaf to SIGTERM; then waits, or not.
BREEDER = '''
import subprocess, sys, time
child = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(600)
"""
middle = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], start_new_session=True)
"""
subprocess.run([sys.executable, "-c", middle, child, sys.argv[1]])
time.sleep(float(sys.argv[2]))
'''


def wait_for_pid(file: Path) -> int:
    deadline = time.monotonic() + 20.0
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(file.read_text())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def quick_warden(tmp_path):
    """A copy of the warden that doesn't wait long for processes that we know to stay."""
    script = tmp_path / "warden.py"
    script.write_text(
        Path(warden.__file__)
        .read_text()
        .replace(f"LINGER_SECONDS = {warden.LINGER_SECONDS}", "LINGER_SECONDS = 0.2")
        .replace(f"KILL_SECONDS = {warden.KILL_SECONDS}", "KILL_SECONDS = 0.3")
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    return [
        sys.executable,
        "-I",
        str(script),
        str(folder),
        sys.executable,
        "-c",
        BREEDER,
        str(tmp_path / "pid"),
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over to the warden")
@pytest.mark.parametrize("end", ["pipe", "command", "term"])
def test_the_warden_leaves_nothing_behind(tmp_path, quick_warden, end):
    with subprocess.Popen([*quick_warden, "0" if end == "command" else "600"], stdin=subprocess.PIPE) as process:
        orphan = wait_for_pid(tmp_path / "pid")
        if end == "pipe":
            process.stdin.close()
        if end == "term":
            process.terminate()
        code = process.wait(20.0)
    assert code == 0 if end == "command" else code != 0
    assert not is_alive(orphan)
    assert not (tmp_path / "folder").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans over to the warden")
def test_the_warden_notices_that_its_owner_was_killed(tmp_path, quick_warden):
    owner = textwrap.dedent("""
        import subprocess, sys, time
        process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", owner, *quick_warden, "600"]) as process:
        orphan = wait_for_pid(tmp_path / "pid")
        process.kill()
    deadline = time.monotonic() + 20.0
    while (is_alive(orphan) or (tmp_path / "folder").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(orphan)
    assert not (tmp_path / "folder").exists()


def test_the_name_of_a_run_sorts_by_time():
    class Config:
        algorithm = "craft"

        class dataset:
            name = "digits"

    assert launch.run_name(Config, datetime(2026, 1, 2, 3, 4, 5)) == "20260102-030405-craft-digits"
