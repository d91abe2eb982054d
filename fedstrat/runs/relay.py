"""Which lines of a run's log are for the user.

A run's log mixes what our ServerApp says with Flower's, Ray's and Python's own lines. What a ServerApp prints
is shown; so are our warnings, which go through Flower's logger and begin with a round, a node or a checkpoint.
"""

import re
from collections.abc import Callable

RESULTS = "results: "

_CONTROL_CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_FLOWER_RECORD = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:(?:\s+(.*)|$)")
_OURS = re.compile(r"(?:round|node) \d+[: ]|the checkpoint ")
_CLIENT = re.compile(r"client \S+")
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?$")
_NOISE = re.compile(
    r"\((?:\w+ )?pid=\d+|\(\w+\) |"  # Ray's copy of what a worker printed
    r"\[?\d{4}-\d\d-\d\d[ T,]|"  # records of Ray and uvicorn
    r"Using SuperLink: |Successfully installed |"
    r"\S+[/\\]site-packages[/\\]\S+:\d+: \w*Warning: "
)


def clean(line: str) -> str:
    """A line without its end, colours and other control codes."""
    return _CONTROL_CODES.sub("", line).rstrip()


class Relay:
    """Takes a run's log line by line and shows what is for the user.

    Args:
        show: Prints one line to the user.
        verbose: Whether to show every line.

    Attributes:
        results: The folder that the ServerApp named with a line ``results: FOLDER``; empty without one.
        last_exception: The last line of the last traceback that passed, such as ``ValueError: no data``.
    """

    def __init__(self, show: Callable[[str], None], *, verbose: bool = False) -> None:
        self._show = show
        self._verbose = verbose
        self._in_record = False
        self._warnings: set[str] = set()
        self.results = ""
        self.last_exception = ""

    def feed(self, line: str) -> None:
        """Take the next line, with or without its line end."""
        line = clean(line)
        if line.startswith(RESULTS):
            self.results = line.removeprefix(RESULTS)  # shown at the very end
            return
        shown = self._for_user(line)
        if self._verbose:
            self._show(line)
        elif shown:
            self._show(shown)

    def _for_user(self, line: str) -> str:
        """What to show of a line; empty for nothing."""
        record = _FLOWER_RECORD.match(line)
        if record:
            level, text = record[1], record[2] or ""
            # A warning or an error may go on over several lines; Flower's other records are single lines.
            self._in_record = level not in ("DEBUG", "INFO")
            return self._warning(text) if level == "WARNING" and _OURS.match(text) else ""
        if line.startswith("Traceback "):
            self._in_record = True
        if _EXCEPTION.match(line):
            self.last_exception = line
        if self._in_record or _NOISE.match(line) or line[:1].isspace():
            return ""
        return line

    def _warning(self, text: str) -> str:
        # Where every client fails for one reason, one of them is enough to know.
        key = _CLIENT.sub("client", text)
        if key in self._warnings:
            return ""
        self._warnings.add(key)
        return f"warning: {text}"
