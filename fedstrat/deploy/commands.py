"""``fedstrat keys``: keys and certificates of real nodes."""

from pathlib import Path
from typing import Annotated

import typer

from fedstrat.errors import ConfigError
from fedstrat.plainhelp import PlainCommand

keys = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys and certificates of real nodes.")

_Connection = Annotated[str, typer.Argument(help="A SuperLink connection of Flower's config.toml.")]
_Operator = Annotated[Path, typer.Option("--operator", metavar="DIR", help="The keyring's folder 'operator'.")]


@keys.command(cls=PlainCommand)
def make(
    folder: Annotated[Path, typer.Argument(help="The keyring; made if it isn't there.")] = Path("keys"),
    nodes: Annotated[int, typer.Option(min=0, help="See to nodes node-1 to node-N.")] = 0,
    node: Annotated[list[str] | None, typer.Option(help="See to a node of this name; may be repeated.")] = None,
    address: Annotated[
        list[str] | None,
        typer.Option(help="A host name or IP address under which the SuperLink is reached; may be repeated."),
    ] = None,
    renew: Annotated[bool, typer.Option("--renew", help="Issue all server certificates anew.")] = False,
    days: Annotated[int, typer.Option(min=1, help="How long new server certificates are valid.")] = 730,
    owner: Annotated[str, typer.Option(metavar="UID:GID", help="Give all files to this user and group.")] = "",
) -> None:
    """Make authority, certificates and keys; what is there and good is kept.

    Every folder of the keyring goes to one machine: superlink, one per node, and operator to whoever submits runs.
    """
    from fedstrat.deploy.keyring import Keyring  # noqa: PLC0415  (needn't be read for --help)

    user, _, group = owner.partition(":")
    if owner and not (user.isdecimal() and group.isdecimal()):
        raise ConfigError(f"expected --owner to be two numbers, such as 10001:10001, but got '{owner}'")
    ring = Keyring(folder.expanduser(), (int(user), int(group)) if owner else None)
    ring.make([*(f"node-{i + 1}" for i in range(nodes)), *(node or ())], address or (), renew=renew, days=days)
    for line in ring.said:
        typer.echo(line)
    typer.echo(f"{len(ring.said)} changes in {folder}" if ring.said else f"nothing to do in {folder}")


@keys.command(cls=PlainCommand)
def register(connection: _Connection, operator: _Operator = Path("keys/operator")) -> None:
    """Register every node of the keyring with the SuperLink; those that it knows are left alone."""
    from fedstrat.deploy.registration import Operator  # noqa: PLC0415

    for line in Operator(operator.expanduser(), connection).register():
        typer.echo(line)


@keys.command(cls=PlainCommand)
def revoke(
    connection: _Connection,
    node: Annotated[str, typer.Argument(help="Name of the node.")],
    operator: _Operator = Path("keys/operator"),
) -> None:
    """Unregister a node: the SuperLink refuses its key from now on."""
    from fedstrat.deploy.registration import Operator  # noqa: PLC0415

    typer.echo(Operator(operator.expanduser(), connection).revoke(node))


@keys.command(name="list", cls=PlainCommand)
def list_nodes(connection: _Connection, operator: _Operator = Path("keys/operator")) -> None:
    """Show which nodes the SuperLink knows, and which are online."""
    from fedstrat.deploy.registration import Operator  # noqa: PLC0415

    for name, number, status in Operator(operator.expanduser(), connection).status():
        typer.echo(f"{name or '(registered elsewhere)':24} {status:12} {number}")


@keys.command(cls=PlainCommand)
def check(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink as a node reaches it.")],
    root_certificates: Annotated[Path, typer.Option(metavar="FILE", help="The authority's ca.crt.")],
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a SuperLink that isn't there yet.")] = 0.0,
) -> None:
    """Tell whether this machine trusts that SuperLink, and if not, why."""
    from fedstrat.deploy.preflight import check as preflight  # noqa: PLC0415

    typer.echo(preflight(address, root_certificates.expanduser(), wait_seconds=wait))
