"""The folder that ``fedstrat keys make`` fills: each subfolder is what one machine or container gets, no more.

    ca/          ca.crt ca.key                   the authority; its key is only needed to issue certificates
    superlink/   ca.crt server.crt server.key executor.secret
    NODE/        ca.crt server.crt server.key executor.secret auth.key auth.pub
    superlink-executor/, NODE-executor/          ca.crt executor.secret
    operator/    ca.crt nodes/NODE.pub           for whoever submits runs and registers nodes; nothing secret

``server.crt`` is the certificate of the SuperLink, or of a SuperNode's own Runtime API, which its executor calls.
``executor.secret`` is what an executor proves itself with to the SuperLink or SuperNode that it works for; an executor
runs the apps' code, so it gets no other key. ``auth.key`` is how a SuperNode proves to the SuperLink who it is.
"""

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedstrat.deploy.authority import SERVER_DAYS, Authority, Pair, names_in, node_keys, public_key_of
from fedstrat.errors import ConfigError

SUPERLINK = "superlink"
EXECUTOR = "-executor"
RESERVED = ("ca", "operator", SUPERLINK)
HERE = ("localhost", "127.0.0.1", "::1")
RENEW_DAYS = 60
"""A certificate that ends within so many days is issued anew."""

_PRIVATE, _PUBLIC, _FOLDER = 0o600, 0o644, 0o700
_SECRET_BYTES = 32


@dataclass
class Keyring:
    """Makes what is missing in a keyring, and keeps the rest.

    Args:
        folder: The keyring.
        owner: (user id, group id) that everything made or kept is given to; None leaves it as it is.

    Attributes:
        said: One line for everything that was made anew, in order.
    """

    folder: Path
    owner: tuple[int, int] | None = None
    said: list[str] = field(default_factory=list)

    def make(
        self,
        nodes: Iterable[str],
        addresses: Sequence[str] = (),
        *,
        renew: bool = False,
        days: int = SERVER_DAYS,
    ) -> None:
        """Make authority, certificates, keys and secrets as far as they are missing or no longer good.

        Args:
            nodes: Names of the nodes, beside those that are there.
            addresses: Host names and IP addresses under which nodes and users reach the SuperLink, beside the
                service name ``superlink`` and this machine's own.
            renew: Whether server certificates are issued anew even if they are good.
            days: How long new server certificates are valid.

        Raises:
            ConfigError: A name can't be used, or a file can't be read or written.
        """
        nodes = list(dict.fromkeys([*self.nodes(), *map(check_name, nodes)]))
        try:
            self._make(nodes, addresses, 0 if not renew else days + 1, days)
        except OSError as error:
            raise ConfigError(f"the keys can't be written: {error.filename or self.folder}: {error.strerror}") from None

    def nodes(self) -> list[str]:
        """Names of the nodes that are there."""
        return sorted(path.parent.name for path in self.folder.glob("*/auth.key"))

    def _make(self, nodes: list[str], addresses: Sequence[str], spare_days: int, days: int) -> None:
        authority = self._authority()
        self._serve(authority, SUPERLINK, [SUPERLINK, *HERE, *addresses], spare_days, days)
        for node in nodes:
            self._serve(authority, node, [node, *HERE], spare_days, days)
            self._prove(node)
        self._keep("operator/ca.crt", authority.pair.public, _PUBLIC)
        if self.owner is not None:
            for path in [self.folder, *self.folder.rglob("*")]:
                if (path.stat().st_uid, path.stat().st_gid) != self.owner:
                    os.chown(path, *self.owner)

    def _authority(self) -> Authority:
        certificate, key = self._path("ca/ca.crt"), self._path("ca/ca.key")
        if certificate.exists() and key.exists():
            return Authority(Pair(certificate.read_bytes(), key.read_bytes()))
        if certificate.exists() or any(self.folder.glob("*/server.crt")):
            # A new authority would silently cut off every machine that trusts the old one.
            if not key.exists() and certificate.exists():
                raise ConfigError(
                    f"{certificate} is there, but {key.name} isn't: put the key back, or move the folder 'ca' away to"
                    " begin anew with a new authority, whose ca.crt then has to go to every machine"
                )
            self.said.append("the authority is new: copy every folder to its machine again")
        authority = Authority.make()
        self._write("ca/ca.key", authority.pair.private, _PRIVATE)
        self._write("ca/ca.crt", authority.pair.public, _PUBLIC)
        self.said.append("made the authority")
        return authority

    def _serve(self, authority: Authority, place: str, names: list[str], spare_days: int, days: int) -> None:
        """See to the certificate and executor secret of a SuperLink or SuperNode."""
        certificate, key = self._path(f"{place}/server.crt"), self._path(f"{place}/server.key")
        fault = "made"
        if certificate.exists() and key.exists():
            pair = Pair(certificate.read_bytes(), key.read_bytes())
            why = authority.fault_of(pair, names, max(spare_days, RENEW_DAYS if days > RENEW_DAYS else 0))
            fault = f"renewed ({why})" if why else ""
            if why != "it can't be read":
                names = [*names, *names_in(pair.public)]
        if fault:
            pair = authority.issue(names, days)
            self._write(f"{place}/server.key", pair.private, _PRIVATE)
            self._write(f"{place}/server.crt", pair.public, _PUBLIC)
            self.said.append(f"{fault} the certificate of {place} for {', '.join(dict.fromkeys(names))}")
        self._keep(f"{place}/ca.crt", authority.pair.public, _PUBLIC)
        executor, secret = f"{place}{EXECUTOR}", self._path(f"{place}/executor.secret")
        if not secret.exists():
            self._write(f"{place}/executor.secret", secrets.token_hex(_SECRET_BYTES).encode(), _PRIVATE)
        self._keep(f"{executor}/executor.secret", secret.read_bytes(), _PRIVATE)
        self._keep(f"{executor}/ca.crt", authority.pair.public, _PUBLIC)

    def _prove(self, node: str) -> None:
        """See to the key with which a node proves who it is."""
        private = self._path(f"{node}/auth.key")
        if not private.exists():
            keys = node_keys(node)
            self._write(f"{node}/auth.key", keys.private, _PRIVATE)
            self.said.append(f"made the key of {node}")
        public = public_key_of(private.read_bytes()) + f" {node}\n".encode()
        self._keep(f"{node}/auth.pub", public, _PUBLIC)
        self._keep(f"operator/nodes/{node}.pub", public, _PUBLIC)

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _keep(self, name: str, data: bytes, mode: int) -> None:
        path = self._path(name)
        if not path.exists() or path.read_bytes() != data:
            self._write(name, data, mode)

    def _write(self, name: str, data: bytes, mode: int) -> None:
        """Write a file that is never readable by others, whole or not at all."""
        path = self._path(name)
        for folder in (self.folder, *reversed(path.parents)):
            if folder == self.folder or self.folder in folder.parents:
                folder.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.chmod(mode)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_name(node: str) -> str:
    """Return a node's name if it can be one: it names a folder, a host and a client.

    Raises:
        ConfigError: It can't.
    """
    good = node.isascii() and node.replace("-", "").replace("_", "").isalnum() and node[0].isalnum() and len(node) < 64
    if not good or node in RESERVED or node.endswith(EXECUTOR):
        raise ConfigError(
            f"expected the name of a node to be letters, digits, '-' and '_', none of {', '.join(RESERVED)}, and not to"
            f" end in '{EXECUTOR}', but got '{node}'"
        )
    return node
