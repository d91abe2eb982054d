"""``-c KEY=VALUE``: read as Flower reads it, but forgiving, and written as a TOML file for Flower.

Flower wants TOML values, so text needs quotes within the shell's quotes. Here ``algorithm=scaffold`` is
enough: a key whose default is text takes any value as text.
"""

import contextlib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedstrat.errors import ConfigError, UnknownSettingError, nearest
from fedstrat.naming import kebab

Scalar = bool | int | float | str

_MEANT = {"learning-rate": "lr"}
"""Words that people use for ours."""
_OTHER_WORDS = re.compile("|".join(_MEANT))
_PAIR = re.compile(r"\s*([^\s=]+)=('[^']*'|\"[^\"]*\"|\S*)")


def read_app(folder: Path) -> dict[str, Scalar]:
    """Read the run config, flat, that the pyproject.toml of the app in ``folder`` declares.

    Raises:
        ConfigError: There is no such file, it isn't TOML, or it declares no Flower app of fedstrat's kind.
    """
    file = folder / "pyproject.toml"
    try:
        config = tomllib.loads(file.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except FileNotFoundError:
        raise ConfigError(
            f"--app {folder}: expected a folder with a pyproject.toml, but {file} doesn't exist"
        ) from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {error}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"--app {folder}: {file} holds no [tool.flwr.app.config], so it isn't a Flower app") from None
    flat = _flatten(config)
    if "algorithm" not in flat:
        raise ConfigError(f"--app {folder}: [tool.flwr.app.config] has no key 'algorithm', so it isn't a fedstrat app")
    return flat


def read_pairs(arguments: Sequence[str], defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Read the arguments of ``-c``: each holds ``KEY=VALUE`` pairs separated by spaces, or names a TOML file.

    Args:
        arguments: For example ``["algorithm=craft craft.server-lr=0.3", "train.lr=0.1"]``; later ones win.
        defaults: The app's run config; its types decide how a value without quotes is read.

    Raises:
        UnknownSettingError: A key that the app doesn't have.
        ConfigError: An argument that isn't made of pairs, or a value that is no number, truth value or text.
    """
    found: dict[str, Scalar] = {}
    for argument in arguments:
        if argument.endswith(".toml") and "=" not in argument:
            pairs = _read_file(Path(argument).expanduser())
        else:
            pairs = {key: _value(key, raw, defaults.get(key)) for key, raw in _split(argument)}
        for key, value in pairs.items():
            if key not in defaults:
                raise UnknownSettingError(unknown_key(key, defaults))
            wants_float = isinstance(defaults[key], float) and type(value) is int
            found[key] = float(value) if wants_float else value
    return found


def write_toml(flat: Mapping[str, Scalar]) -> str:
    """Write a flat run config as TOML that reads back to the same values."""
    # JSON's text and truth values are TOML's too, but for DEL; repr writes floats, inf and nan as TOML does.
    lines = [
        f"{key} = {repr(value) if type(value) in (int, float) else json.dumps(value, ensure_ascii=False)}\n"
        for key, value in flat.items()
    ]
    return "".join(lines).replace("\x7f", "\\u007f")


def unknown_key(name: str, table: Iterable[str]) -> str:
    """One sentence about a key that doesn't exist, with the one that was probably meant."""
    table = list(table)
    spelled = _OTHER_WORDS.sub(lambda match: _MEANT[match[0]], kebab(name))
    inner, _, leaf = spelled.rpartition(".")
    siblings = [known for known in table if inner and known.startswith(f"{inner}.")]
    cousins = [known for known in table if known.rpartition(".")[2] == leaf]
    if spelled in table or not (siblings or cousins):
        return f"run config: there is no key '{name}'{nearest(spelled, table)}"
    if siblings:
        return (
            f"run config: there is no key '{name}'{nearest(spelled, siblings)}"
            f" The table '{inner}' holds: {', '.join(known.rpartition('.')[2] for known in siblings)}."
        )
    return f"run config: there is no key '{name}'{nearest(spelled, cousins) if inner else _which(cousins)}"


def _which(names: list[str]) -> str:
    return f"; did you mean {' or '.join(repr(name) for name in names)}?"


def _split(argument: str) -> list[tuple[str, str]]:
    pairs = []
    place = 0
    while argument[place:].strip():
        match = _PAIR.match(argument, place)
        if match is None:
            raise ConfigError(
                f"-c {argument!r}: expected KEY=VALUE pairs separated by spaces, "
                f"but got {argument[place:].strip()!r}; put quotes around a value that holds spaces, "
                "as in -c 'dataset.dir=\"/my data\"'"
            )
        pairs.append((match[1], match[2]))
        place = match.end()
    return pairs


def _value(key: str, raw: str, default: Scalar | None) -> Scalar:
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
        if isinstance(default, float):
            with contextlib.suppress(ValueError):
                value = float(raw)  # .5, which TOML wants as 0.5
        if raw.startswith(("'", '"')):  # backslashes that are no escapes, as in a path of Windows
            value = raw[1:-1]
    if isinstance(default, str) and not isinstance(value, str):
        return raw  # 100, true or 2026-01-02 where text is wanted
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"-c {key}={raw}: expected a number, true, false or text, but got a {type(value).__name__}")
    return value


def _read_file(file: Path) -> dict[str, Scalar]:
    try:
        return _flatten(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"-c {file}: can't read it as TOML: {error}") from None


def _flatten(table: Mapping[str, object], prefix: str = "") -> dict[str, Scalar]:
    flat: dict[str, Scalar] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, bool | int | float | str):
            flat[f"{prefix}{key}"] = value
        else:
            raise ConfigError(
                f"run config: expected '{prefix}{key}' to be a number, true, false or text, got {value!r}"
            )
    return flat
