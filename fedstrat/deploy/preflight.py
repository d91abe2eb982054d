"""Can this machine talk to that SuperLink, and if not, what is to be done? Asked before a node starts."""

import contextlib
import hashlib
import socket
import ssl
import time
from pathlib import Path

from fedstrat.deploy.authority import names_in
from fedstrat.errors import ConfigError, RunFailedError

_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.5


class UntrustedError(RunFailedError):
    """The server's certificate isn't one that this machine should trust."""


def split_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 host stands in brackets.

    Raises:
        ConfigError: It is something else.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"expected HOST:PORT, such as superlink:9092, but got '{address}'")
    return host, int(port)


def check(address: str, root_certificates: Path, *, wait_seconds: float = 0.0) -> str:
    """Open a TLS connection as a node would, and say in one line what was found.

    A server that can't be reached is waited for; a certificate that is wrong is not.

    Args:
        address: ``HOST:PORT`` of the SuperLink.
        root_certificates: The authority that is trusted.
        wait_seconds: How long to wait for a server that isn't there yet.

    Raises:
        ConfigError: ``address`` or the authority's file is wrong.
        UntrustedError: The server must not be trusted; says what to do.
        RunFailedError: No server answers.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=str(root_certificates))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{root_certificates} can't be read as certificates of an authority: {error}") from None
    context.set_alpn_protocols(["h2"])
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            return _greet(host, port, context)
        except ssl.SSLCertVerificationError as error:
            raise UntrustedError(_explain(error, host, port, root_certificates)) from None
        except (OSError, EOFError) as error:
            if time.monotonic() >= deadline:
                raise RunFailedError(
                    f"{address} doesn't answer with TLS ({error}); is the SuperLink running, the address right, and"
                    " the port open in between?"
                ) from None
            time.sleep(_POLL_SECONDS)


def _greet(host: str, port: int, context: ssl.SSLContext) -> str:
    with (
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as secure,
    ):
        protocol = "gRPC (HTTP/2)" if secure.selected_alpn_protocol() == "h2" else "HTTP/1.1"
        return f"{host}:{port} is trusted: {secure.version()}, speaks {protocol}"


def _explain(error: ssl.SSLCertVerificationError, host: str, port: int, root_certificates: Path) -> str:
    certificate = b""
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE  # only to read what is shown
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS) as plain,
        blind.wrap_socket(plain, server_hostname=host) as secure,
    ):
        certificate = secure.getpeercert(binary_form=True) or b""
    said = error.verify_message or str(error)
    if "ostname mismatch" in said or "IP address mismatch" in said:
        return (
            f"the certificate of {host}:{port} is not for '{host}' but for {', '.join(names_in(certificate))}; make one"
            f" that is: fedstrat keys make KEYS --address {host}, copy KEYS/superlink to the SuperLink, and restart it"
        )
    if "expired" in said or "not yet valid" in said:
        return (
            f"the certificate of {host}:{port}: {said}; check the clocks of both machines, or renew it with"
            " fedstrat keys make KEYS --renew and restart the SuperLink"
        )
    print_of = hashlib.sha256(certificate).hexdigest()[:16] if certificate else "unknown"
    return (
        f"the certificate of {host}:{port} (SHA-256 {print_of}…) wasn't issued by the authority in {root_certificates}:"
        f" {said}. Copy ca.crt from the keyring that the SuperLink's certificate was made in; if that is what this is,"
        " somebody else answers there"
    )
