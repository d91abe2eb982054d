"""``fedstrat keys``: what it makes is what TLS and Flower take, again and again."""

import json
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve
from typer.testing import CliRunner

from fedstrat.cli import app
from fedstrat.deploy import preflight, registration
from fedstrat.deploy.authority import Authority, Pair, names_in
from fedstrat.deploy.keyring import Keyring
from fedstrat.deploy.registration import Operator
from fedstrat.errors import ConfigError, RunFailedError


def make(folder: Path, *nodes: str, **options) -> list[str]:
    ring = Keyring(folder)
    ring.make(nodes, **options)
    return ring.said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- what is made ------------------------------------------------------------------------------------------


def test_every_folder_holds_what_its_reader_needs_and_no_more(tmp_path):
    make(tmp_path, "site-a", "site-b")
    held = {path.name: sorted(file.name for file in path.rglob("*") if file.is_file()) for path in tmp_path.iterdir()}
    server = ["ca.crt", "executor.secret", "server.crt", "server.key"]
    node = sorted([*server, "auth.key", "auth.pub"])
    assert held == {
        "ca": ["ca.crt", "ca.key"],
        "superlink": server,
        "superlink-executor": ["ca.crt", "executor.secret"],
        "site-a": node,
        "site-a-executor": ["ca.crt", "executor.secret"],
        "site-b": node,
        "site-b-executor": ["ca.crt", "executor.secret"],
        "operator": ["ca.crt", "site-a.pub", "site-b.pub"],
    }
    files = contents(tmp_path)
    for name in ("superlink", "site-a", "site-b"):
        assert files[f"{name}/executor.secret"] == files[f"{name}-executor/executor.secret"]
    secrets = {files[f"{name}/executor.secret"] for name in ("superlink", "site-a", "site-b")}
    assert len(secrets) == 3
    for path in tmp_path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        public = path.suffix in {".crt", ".pub"}
        assert mode == (0o700 if path.is_dir() else 0o644 if public else 0o600), path


def test_a_nodes_key_is_one_that_flower_takes(tmp_path):
    make(tmp_path, "site-a")
    private = serialization.load_ssh_private_key((tmp_path / "site-a/auth.key").read_bytes(), password=None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert uses_nist_ec_curve(private.public_key())
    public = serialization.load_ssh_public_key((tmp_path / "operator/nodes/site-a.pub").read_bytes())
    assert public == private.public_key()


def test_names_and_addresses_are_in_the_certificate(tmp_path):
    make(tmp_path, "site-a", addresses=["fl.example.org", "10.0.0.7", "2001:db8::1"])
    here = ["localhost", "127.0.0.1", "::1"]
    superlink = names_in((tmp_path / "superlink/server.crt").read_bytes())
    assert sorted(superlink) == sorted(["superlink", *here, "fl.example.org", "10.0.0.7", "2001:db8::1"])
    assert sorted(names_in((tmp_path / "site-a/server.crt").read_bytes())) == sorted(["site-a", *here])


# --- making again -------------------------------------------------------------------------------------------


def test_making_again_changes_nothing(tmp_path):
    make(tmp_path, "site-a", addresses=["2001:DB8:0::1"])
    before = contents(tmp_path)
    assert make(tmp_path, "site-a", addresses=["2001:db8::1"]) == []
    assert make(tmp_path) == []
    assert contents(tmp_path) == before


def test_another_node_leaves_the_others_alone(tmp_path):
    make(tmp_path, "site-a")
    before = contents(tmp_path)
    make(tmp_path, "site-b")
    after = contents(tmp_path)
    assert {name for name in after if after[name] != before.get(name)} == {name for name in after if "site-b" in name}


def test_another_address_renews_only_the_superlinks_certificate_and_keeps_its_names(tmp_path):
    make(tmp_path, "site-a", addresses=["one.example.org"])
    before = contents(tmp_path)
    (line,) = make(tmp_path, addresses=["two.example.org"])
    assert "it isn't valid for two.example.org" in line
    after = contents(tmp_path)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"superlink/server.crt", "superlink/server.key"}
    assert {"one.example.org", "two.example.org"} <= set(names_in(after["superlink/server.crt"]))


def test_what_ends_soon_and_what_must_is_renewed(tmp_path):
    make(tmp_path, "site-a", days=30)
    before = contents(tmp_path)
    said = make(tmp_path)
    assert len(said) == 2
    assert all("renewed (it ends on " in line for line in said)
    middle = contents(tmp_path)
    assert len(make(tmp_path, renew=True)) == 2
    after = contents(tmp_path)
    certificates = {f"{place}/server.{kind}" for place in ("superlink", "site-a") for kind in ("crt", "key")}
    for older, newer in ((before, middle), (middle, after)):
        assert {name for name in newer if newer[name] != older[name]} == certificates


def test_a_new_authority_reissues_certificates_but_keeps_nodes_keys(tmp_path):
    make(tmp_path, "site-a")
    before = contents(tmp_path)
    (tmp_path / "ca").rename(tmp_path.parent / f"{tmp_path.name}-old")
    said = make(tmp_path)
    assert any("copy every folder to its machine again" in line for line in said)
    after = contents(tmp_path)
    authority = x509.load_pem_x509_certificate(after["ca/ca.crt"])
    for place in ("superlink", "site-a"):
        x509.load_pem_x509_certificate(after[f"{place}/server.crt"]).verify_directly_issued_by(authority)
        assert after[f"{place}/ca.crt"] == after["ca/ca.crt"] != before["ca/ca.crt"]
    assert after["site-a/auth.key"] == before["site-a/auth.key"]


def test_a_lost_authority_key_is_no_reason_for_a_silent_new_one(tmp_path):
    make(tmp_path)
    (tmp_path / "ca/ca.key").unlink()
    with pytest.raises(ConfigError, match="put the key back"):
        make(tmp_path)


@pytest.mark.parametrize("node", ["", "a b", "ca", "superlink", "../up", "site-executor", "-x", "ü"])
def test_names_that_no_node_can_have(tmp_path, node):
    with pytest.raises(ConfigError, match="name of a node"):
        make(tmp_path, node)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", ["fl.example.org:9092", "a b", "", "https://x", "-x.org"])
def test_addresses_that_no_certificate_can_have(tmp_path, address):
    with pytest.raises(ConfigError, match="host name or an IP address"):
        make(tmp_path, addresses=[address])


# --- TLS with it ----------------------------------------------------------------------------------------------


@contextmanager
def server(pair: Pair, folder: Path) -> Iterator[int]:
    """A TLS server that speaks HTTP/2, for any number of greetings."""
    (folder / "crt").write_bytes(pair.public)
    (folder / "key").write_bytes(pair.private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    context.set_alpn_protocols(["h2"])
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                context.wrap_socket(plain, server_side=True).close()
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_the_preflight_tells_trust_from_its_absence(tmp_path):
    ours, theirs = Authority.make(), Authority.make()
    (tmp_path / "ours").write_bytes(ours.pair.public)
    (tmp_path / "theirs").write_bytes(theirs.pair.public)
    with server(ours.issue(["127.0.0.1"]), tmp_path) as port:
        assert "speaks gRPC (HTTP/2)" in preflight.check(f"127.0.0.1:{port}", tmp_path / "ours")
        with pytest.raises(RunFailedError, match=r"wasn't issued by the authority in .*theirs"):
            preflight.check(f"127.0.0.1:{port}", tmp_path / "theirs", wait_seconds=60.0)
    with (
        server(ours.issue(["fl.example.org"]), tmp_path) as port,
        pytest.raises(RunFailedError, match=r"is not for '127.0.0.1' but for fl.example.org.*--address 127.0.0.1"),
    ):
        preflight.check(f"127.0.0.1:{port}", tmp_path / "ours")
    with (
        server(ours.issue(["127.0.0.1"], days=0), tmp_path) as port,
        pytest.raises(RunFailedError, match=r"expired.*--renew"),
    ):
        preflight.check(f"127.0.0.1:{port}", tmp_path / "ours")
    with pytest.raises(RunFailedError, match="is the SuperLink running"):
        preflight.check(f"127.0.0.1:{port}", tmp_path / "ours")


def test_what_the_preflight_cannot_use(tmp_path):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        preflight.check("superlink", tmp_path / "none")
    with pytest.raises(ConfigError, match="can't be read"):
        preflight.check("superlink:9092", tmp_path / "none")
    assert preflight.split_address("[::1]:9092") == ("::1", 9092)


# --- registration ----------------------------------------------------------------------------------------------


FAKE = """\
#!{python}
import json, sys
from pathlib import Path
book = Path(__file__).with_name("book.json")
known = json.loads(book.read_text()) if book.exists() else {{}}
command = sys.argv[2]
print("a line before the answer")
if command == "register":
    key = Path(sys.argv[3]).read_text().split()[1]
    if key in known:
        print(json.dumps({{"success": False, "error-message": "[code: 23] Public key already in use."}}))
        sys.exit(1)
    known[key] = str(100 + len(known))
    book.write_text(json.dumps(known))
    print(json.dumps({{"success": True, "node-id": known[key]}}, indent=2))
elif command == "unregister":
    print(json.dumps({{"success": sys.argv[3] in known.values(), "error-message": "no such node"}}))
else:
    print(json.dumps({{"success": True, "nodes": [{{"node-id": n, "status": "online"}} for n in known.values()]}}))
"""


@pytest.fixture
def operator(tmp_path, monkeypatch) -> Operator:
    """An operator whose ``flwr`` is a stand-in that, as Flower's, never forgets a key."""
    fake = tmp_path / "flwr"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(0o755)
    monkeypatch.setattr(registration, "executable", lambda _name: str(fake))
    make(tmp_path / "keys", "site-a", "site-b")
    return Operator(tmp_path / "keys/operator", "real")


def test_registering_is_idempotent_and_tells_names(operator):
    assert list(operator.register()) == ["site-a: registered as node 100", "site-b: registered as node 101"]
    assert list(operator.register()) == [
        "site-a: registered before as node 100",
        "site-b: registered before as node 101",
    ]
    assert list(operator.status()) == [("site-a", "100", "online"), ("site-b", "101", "online")]


def test_a_revoked_key_stays_out_and_a_new_one_gets_in(operator, tmp_path):
    list(operator.register())
    assert "node 101 is revoked" in operator.revoke("site-b")
    assert list(operator.register())[1] == "site-b: revoked; make a new key to let it in again"
    (tmp_path / "keys/site-b/auth.key").unlink()
    make(tmp_path / "keys", "site-b")
    assert list(operator.register())[1] == "site-b: registered as node 102"


def test_what_cannot_be_registered_or_revoked(operator, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="holds no node 'site-c'"):
        operator.revoke("site-c")
    with pytest.raises(ConfigError, match="fedstrat keys make"):
        list(Operator(tmp_path / "nothing", "real").register())
    refusal = json.dumps({"success": False, "error-message": "connection refused"})
    answer = subprocess.CompletedProcess([], 1, stdout=refusal, stderr="")
    monkeypatch.setattr(registration.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(RunFailedError, match="can't register site-a: connection refused"):
        list(operator.register())


# --- the command ------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(tmp_path):
    command = ["keys", "make", str(tmp_path / "ring"), "--nodes", "2", "--node", "site-x"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0
    assert "made the key of node-2" in first.output
    assert "made the key of site-x" in first.output
    again = CliRunner().invoke(app, command)
    assert again.output == f"nothing to do in {tmp_path / 'ring'}\n"
