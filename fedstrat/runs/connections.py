"""The SuperLink connections of Flower's config.toml."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrat.errors import ConfigError, FedstratError, nearest


def flwr_home() -> Path:
    """Flower's own folder, which holds its config.toml."""
    return Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser().absolute()


def settings(home: Path, name: str) -> dict[str, Any]:
    """What Flower's config.toml says of a SuperLink connection; nothing of the one that Flower itself makes.

    Raises:
        ConfigError: Flower's config.toml holds no such connection.
    """
    file = home / "config.toml"
    try:
        connections = tomllib.loads(file.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return {}  # Flower makes it, with its own default connections
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}") from None
    named = {key: value for key, value in connections.items() if isinstance(value, dict)}
    if name not in named:
        raise ConfigError(
            f"there is no SuperLink connection '{name}' in {file}{nearest(name, named)} "
            f"It holds: {', '.join(named) or 'none'}. Without a connection the clients are simulated here."
        )
    return dict(named[name])


def check_trust(connection: Mapping[str, Any]) -> None:
    """Refuse a SuperLink whose certificate is wrong: Flower would only say that it can't be reached.

    Args:
        connection: What Flower's config.toml says of it.

    Raises:
        UntrustedError: Says what is wrong with it, and what to do.
    """
    address, root_certificates = str(connection.get("address", "")), str(connection.get("root-certificates", ""))
    if not root_certificates:
        return
    from fedstrat.deploy import preflight  # noqa: PLC0415  (only here)

    try:
        preflight.check(address, Path(root_certificates))
    except preflight.UntrustedError as error:
        again = f"fedstrat keys check {address} --root-certificates {root_certificates}"
        raise preflight.UntrustedError(f"{error}. To check it again: {again}") from None
    except FedstratError:
        return  # Flower may see it otherwise, for example through a proxy
