"""Client state: pending until accepted, the same in both stores, whole or absent on disk, inside its folder."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flwr.app import Context, RecordDict

from fedstrat.errors import StateError
from fedstrat.local.state import (
    CONTEXT_LIMIT_BYTES,
    ContextStore,
    DirectoryStore,
    StateLostError,
    Store,
    open_store,
    settle,
    write_atomically,
)

Make = Callable[..., Store]


def context(node_config: dict[str, str] | None = None, run_config: dict[str, str] | None = None) -> Context:
    return Context(run_id=1, node_id=2, node_config=node_config or {}, state=RecordDict(), run_config=run_config or {})


@pytest.fixture(params=["directory", "context"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens the same client's store anew, as every call of a ClientApp does."""
    node = context()

    def build(experiment: str = "exp", client: str = "7") -> Store:
        if request.param == "directory":
            return DirectoryStore(tmp_path, experiment, client)
        return ContextStore(node, experiment)

    return build


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2, 3), value), "d": torch.tensor(value, dtype=torch.float64), "e": torch.zeros(0, 2)}


def values(store: Store) -> dict[str, float | None]:
    """What each slot holds."""
    return {
        slot: None if store.round(slot) is None else float(store.read(slot)["d"]) for slot in ("accepted", "pending")
    }


def fill(store: Store, accepted: int | None, pending: int | None) -> None:
    """Put the state of these rounds into the slots; the state of round r is r."""
    for slot, server_round in (("accepted", accepted), ("pending", pending)):
        if server_round is not None:
            store.write(slot, tensors(server_round), server_round)


def test_tensors_come_back_bit_for_bit_with_their_round(make: Make):
    sent = {**tensors(0.1), "t": torch.arange(6.0).reshape(2, 3).t(), "b": torch.randn(3, dtype=torch.bfloat16)}
    make().write("pending", sent, 12)
    store = make()
    got = store.read("pending")
    assert store.round("pending") == 12
    assert store.round("accepted") is None
    assert set(got) == set(sent)
    assert all(torch.equal(got[n], t) and got[n].dtype == t.dtype and got[n].shape == t.shape for n, t in sent.items())


# Slots before, what the server says, and the slots after with what the client starts from.
SETTLED = {
    "first round": ((None, None), 0, (None, None), None),
    "first reply wasn't accepted": ((None, 3), 0, (None, None), None),
    "server forgot this client": ((3, 5), 0, (None, None), None),
    "first reply accepted": ((None, 3), 3, (3, None), 3),
    "reply accepted": ((3, 5), 5, (5, None), 5),
    "reply lost": ((3, 5), 3, (3, None), 3),
    "nothing new": ((3, None), 3, (3, None), 3),
}


@pytest.mark.parametrize("case", SETTLED)
def test_settling_takes_what_the_server_accepted(make: Make, case: str):
    before, accepted_round, after, start = SETTLED[case]
    fill(make(), *before)
    got = settle(make(), accepted_round)
    assert (None if got is None else float(got["d"])) == start
    store = make()
    assert (store.round("accepted"), store.round("pending")) == after
    assert values(store) == dict(zip(("accepted", "pending"), after, strict=True))
    # The same message again, as after a restart of the client, comes to the same.
    again = settle(make(), accepted_round)
    assert (None if again is None else float(again["d"])) == start


LOST = {
    "nothing kept": ((None, None), 4),
    "older state": ((3, None), 4),
    "older state, other reply pending": ((3, 6), 4),
    "newer state than the server's": ((5, None), 4),
}


@pytest.mark.parametrize("case", LOST)
def test_state_of_another_round_is_lost_and_says_so(make: Make, case: str):
    before, accepted_round = LOST[case]
    fill(make(), *before)
    with pytest.raises(StateLostError, match=rf"reply of round {accepted_round}.*of round {before[0]}.*{before[1]}"):
        settle(make(), accepted_round)
    # The server then forgets the client, which starts afresh.
    assert settle(make(), 0) is None
    assert values(make()) == {"accepted": None, "pending": None}


def test_a_second_reply_of_a_round_takes_the_first_one_s_place(make: Make):
    fill(make(), None, 3)
    make().write("pending", tensors(30.0), 3)
    got = settle(make(), 3)
    assert got is not None
    assert float(got["d"]) == 30.0


def test_another_experiment_starts_afresh(make: Make):
    fill(make(), 3, 5)
    other = make(experiment="other")
    assert values(other) == {"accepted": None, "pending": None}
    fill(other, 1, None)
    assert values(make(experiment="other")) == {"accepted": 1.0, "pending": None}


def test_context_state_of_an_earlier_experiment_is_dropped_and_other_state_kept():
    node = context()
    store = ContextStore(node, "one")
    fill(store, 3, 5)
    node.state["mine"] = node.state["fedstrat.state"].copy()
    ContextStore(node, "two")
    assert values(ContextStore(node, "one")) == {"accepted": None, "pending": None}
    assert "mine" in node.state
    assert not node.state.array_records


def test_context_state_has_a_limit():
    node = context()
    fill(ContextStore(node, "exp"), 3, None)
    most = {"w": torch.zeros(CONTEXT_LIMIT_BYTES // 4)}
    ContextStore(node, "exp").write("pending", most, 5)
    with pytest.raises(StateError, match=r"8\.4 MB.*set state-dir"):
        ContextStore(node, "exp").write("pending", {**most, "b": torch.zeros(1)}, 6)
    assert ContextStore(node, "exp").round("pending") == 5


# --- the directory ---------------------------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def open_files() -> int:
    """How many files this process has open; 0 where the system doesn't tell."""
    descriptors = Path("/proc/self/fd")
    return len(list(descriptors.iterdir())) if descriptors.exists() else 0


def fail(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("module", "call"), [(os, "replace"), (os, "fsync"), (tempfile, "mkstemp")])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: str
):
    store = DirectoryStore(tmp_path, "exp", "7")
    fill(store, 3, 5)
    before = files(tmp_path)
    opened = open_files()
    monkeypatch.setattr(module, call, fail)
    with pytest.raises(StateError, match=rf"round 6.*{store.folder}.*No space left on device"):
        store.write("pending", tensors(6), 6)
    monkeypatch.undo()
    assert files(tmp_path) == before
    assert values(store) == {"accepted": 3.0, "pending": 5.0}
    assert open_files() == opened


def test_a_folder_that_can_t_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    store = DirectoryStore(tmp_path / "file", "exp", "7")
    with pytest.raises(StateError, match=str(store.folder)):
        store.write("pending", tensors(1), 1)


def test_write_atomically_never_shows_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "state"
    target.write_bytes(b"old")
    seen = []
    real = os.replace

    def spy(source: str, destination: Path) -> None:
        seen.append((target.read_bytes(), Path(source).read_bytes(), Path(source).parent == tmp_path))
        real(source, destination)

    monkeypatch.setattr(os, "replace", spy)
    write_atomically(target, b"new and longer")
    assert seen == [(b"old", b"new and longer", True)]
    assert files(tmp_path) == {"state": b"new and longer"}


@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: b"\xff" * 64, lambda d: d[:-1]]
)
def test_a_damaged_file_counts_as_lost(tmp_path: Path, damage: Callable[[bytes], bytes]):
    store = DirectoryStore(tmp_path, "exp", "7")
    fill(store, 3, None)
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    path.write_bytes(damage(path.read_bytes()))
    assert store.round("accepted") is None
    with pytest.raises(StateLostError):
        settle(store, 3)


ODD = ["..", ".", "../../escape", "a/b", "/etc/passwd", "a\\b", "a b", "", "~", "ü", "Клиника №7 " * 12, "\n", "%2e%2e"]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_odd_ids_stay_inside_the_directory(tmp_path: Path, odd: str):
    home = tmp_path / "home"
    for store in (DirectoryStore(home, "exp", odd), DirectoryStore(home, odd, "7")):
        assert settle(store, 0) is None
        fill(store, None, 2)
        got = settle(store, 2)
        assert got is not None
        assert float(got["d"]) == 2.0
    found = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(found) == 2
    # <home>/<experiment>/<client>/<slot>
    assert all(len(p.relative_to(home).parts) == 3 for p in found)


def test_different_ids_never_share_a_folder(tmp_path: Path):
    ids = [*ODD, "client-7", "7", "07", "Клиника №7 " * 12 + "b"]
    stores = [DirectoryStore(tmp_path, "exp", client) for client in ids]
    for i, store in enumerate(stores):
        fill(store, i + 1, None)
    assert [store.round("accepted") for store in stores] == list(range(1, len(ids) + 1))


def test_where_state_is_kept(tmp_path: Path):
    node, run = str(tmp_path / "node"), str(tmp_path / "run")
    chosen = [
        open_store(context({"state-dir": node}, {"state-dir": run}), "exp", "7"),
        open_store(context({}, {"state-dir": run}), "exp", "7"),
        open_store(context({}, {"state-dir": ""}), "exp", "7"),
        open_store(context(), "exp", "7"),
    ]
    assert [type(store) for store in chosen] == [DirectoryStore, DirectoryStore, ContextStore, ContextStore]
    assert isinstance(chosen[0], DirectoryStore)
    assert isinstance(chosen[1], DirectoryStore)
    assert chosen[0].folder.is_relative_to(node)
    assert chosen[1].folder.is_relative_to(run)
