"""Making nodes known to a SuperLink: idempotent, by name."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedstrat.errors import ConfigError, RunFailedError, nearest
from fedstrat.runs.flowercli import NO_TALKING, executable, scripts_first

RECORD = "registered.json"
_SECONDS = 120.0  # as for the other commands of flwr; a busy machine needs some of it
_IN_USE = "already in use"


@dataclass(frozen=True)
class Registered:
    """A node that was registered.

    Attributes:
        number: Its node id.
        key: The body of its public key.
        revoked: Whether it was unregistered again.
    """

    number: str
    key: str
    revoked: bool = False


@dataclass(frozen=True)
class Operator:
    """Whoever registers nodes: the keyring's folder ``operator`` and a connection of Flower's config.toml.

    Attributes:
        folder: Holds ``nodes/NAME.pub``; what was registered is kept beside it in ``registered.json``, since
            the SuperLink tells node ids but no names.
        connection: Name of the connection to the SuperLink.
    """

    folder: Path
    connection: str

    def register(self) -> Iterator[str]:
        """Register every node that the SuperLink doesn't know yet; gives one line per node.

        Raises:
            ConfigError: There are no public keys.
            RunFailedError: The SuperLink refused one, or doesn't answer.
        """
        files = sorted((self.folder / "nodes").glob("*.pub"))
        if not files:
            raise ConfigError(
                f"expected public keys in {self.folder / 'nodes'}, but there are none; run fedstrat keys make"
            )
        known = self.known()
        for file in files:
            name, key = file.stem, _body(file)
            before = known.get(name)
            if before is not None and before.key == key and before.revoked:
                yield f"{name}: revoked; make a new key to let it in again"
                continue
            answer = self._flwr("register", str(file), name=name)
            if "node-id" in answer:
                known[name] = Registered(str(answer["node-id"]), key)
                self._remember(known)
                yield f"{name}: registered as node {known[name].number}"
            elif _IN_USE in str(answer.get("error-message", "")).lower():
                yield f"{name}: registered before" + (f" as node {before.number}" if before else "")
            else:
                raise RunFailedError(f"can't register {name}: {_said(answer)}")

    def revoke(self, name: str) -> str:
        """Unregister a node: the SuperLink refuses its key from now on, for good.

        Raises:
            ConfigError: No node of that name was registered from here.
            RunFailedError: The SuperLink refused, or doesn't answer.
        """
        known = self.known()
        if name not in known:
            raise ConfigError(
                f"{self.folder / RECORD} holds no node '{name}'{nearest(name, known)} If it was registered elsewhere,"
                " find its number with 'flwr supernode list' and use 'flwr supernode unregister'"
            )
        number = known[name].number
        answer = self._flwr("unregister", number)
        if not answer.get("success"):
            raise RunFailedError(f"can't revoke {name}: {_said(answer)}")
        known[name] = replace(known[name], revoked=True)
        self._remember(known)
        return f"{name}: node {number} is revoked; its key can't be registered again"

    def status(self) -> Iterator[tuple[str, str, str]]:
        """Give (name, node id, status) of every node that the SuperLink knows; the name is "" if not ours.

        Raises:
            RunFailedError: The SuperLink doesn't answer.
        """
        answer = self._flwr("list")
        if "nodes" not in answer:
            raise RunFailedError(f"can't list the nodes: {_said(answer)}")
        names = {entry.number: name for name, entry in self.known().items()}
        for node in answer["nodes"]:
            number = str(node["node-id"])
            yield names.get(number, ""), number, str(node["status"])

    def known(self) -> dict[str, Registered]:
        """What was registered from here, by name.

        Raises:
            ConfigError: The record is damaged.
        """
        file = self.folder / RECORD
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            return {name: Registered(**entry) for name, entry in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} can't be read ({error}); restore it, or move it away to begin anew") from None

    def _remember(self, known: dict[str, Registered]) -> None:
        file = self.folder / RECORD
        temporary = file.with_name(f".{file.name}")
        text = json.dumps({name: asdict(entry) for name, entry in known.items()}, indent=2, sort_keys=True)
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(file)

    def _flwr(self, command: str, *arguments: str, name: str = "") -> dict[str, Any]:
        options = ["--name", name] if name else []
        line = [executable("flwr"), "supernode", command, *arguments, self.connection, *options, "--format", "json"]
        try:
            ended = subprocess.run(  # noqa: S603  (Flower's command)
                line,
                env={**scripts_first(os.environ), **NO_TALKING, "PYTHONIOENCODING": "utf-8"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RunFailedError(
                f"the SuperLink of the connection '{self.connection}' gave no answer in {_SECONDS:g} s"
            ) from None
        start = ended.stdout.find("{")  # Flower may print a line before it
        with contextlib.suppress(ValueError):
            found = json.loads(ended.stdout[start:]) if start >= 0 else None
            if isinstance(found, dict):
                return found
        return {"success": False, "error-message": ended.stderr or ended.stdout}


def _body(public_key: Path) -> str:
    fields = public_key.read_text(encoding="utf-8").split()
    return fields[1] if len(fields) > 1 else ""


def _said(answer: dict[str, Any]) -> str:
    said = " ".join(str(answer.get("error-message") or "Flower gives no reason").split())
    if "unavailable" in said:  # what Flower also says of a certificate that it doesn't trust
        said += " To see what is wrong: fedstrat keys check HOST:PORT --root-certificates ca.crt"
    return said
