"""Guards one command: ends it and all that it started as soon as the process that wanted it is gone.

Run as a script, ``python -I warden.py FOLDER COMMAND...``, with a pipe as its standard input. When the pipe
closes (the owner closed it, ended, or was killed) or the command ends by itself, the warden ends the command,
waits for every process that descends from it, ends those that stay, and removes ``FOLDER``.

Flower's processes each open a session of their own and Ray's outlive their parents, so neither a process
group nor a process tree finds them all. On Linux the warden is the reaper of its orphans: whatever the
command started stays below it. It uses nothing but the standard library, so that it starts at once.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.1
TERMINATE_SECONDS = 8.0  # for the command itself
LINGER_SECONDS = 3.0  # for what it started, which notices by itself
KILL_SECONDS = 2.0  # from SIGTERM to SIGKILL for those that don't, and again for SIGKILL to work
_KILLS = 4


def main(arguments: list[str]) -> int:
    """Start the command, wait for it or for the owner's end, then leave nothing behind."""
    folder, *command = arguments
    adopt_orphans()
    # Only the pipe decides: a Ctrl-C in the terminal is the owner's to handle. (Ignored signals would stay ignored
    # in the command; handled ones don't.)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    told_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told_to_stop.append(number))

    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603  (our own launcher's)
    ended: dict[int, int] = {}
    while not told_to_stop and process.pid not in ended:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], _POLL_SECONDS)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            break
        reap(ended)

    # Having no child left is the one sign without a race: a list of processes, taken while parents end and their
    # children change hands, may miss some. (Where orphans don't come to us, the list is all there is.)
    if process.pid not in ended:
        send([process.pid], signal.SIGTERM)
        wait_until(lambda: process.pid in ended, TERMINATE_SECONDS, ended)
    if not wait_until(lambda: False, LINGER_SECONDS, ended):
        send(descendants(os.getpid()), signal.SIGTERM)
        wait_until(lambda: False, KILL_SECONDS, ended)
    for _ in range(_KILLS):
        send(descendants(os.getpid()), signal.SIGKILL)
        if wait_until(lambda: False, KILL_SECONDS / _KILLS, ended):
            break
    shutil.rmtree(folder, ignore_errors=True)
    process.returncode = ended.get(process.pid, -signal.SIGKILL)
    return process.returncode


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (Linux only; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(ended: dict[int, int]) -> bool:
    """Collect every child that has ended, process id -> exit code, and tell whether no child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        ended[pid] = os.waitstatus_to_exitcode(status)


def wait_until(reached: Callable[[], bool], seconds: float, ended: dict[int, int]) -> bool:
    """Reap children until ``reached()``, none is left, or the time is over; tell whether none is left."""
    deadline = time.monotonic() + seconds
    while True:
        alone = reap(ended)
        if alone or reached() or time.monotonic() >= deadline:
            return alone
        time.sleep(_POLL_SECONDS / 2)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes of ours; one that has just ended is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def descendants(root: int) -> list[int]:
    """Process ids of all living descendants of ``root``; zombies aren't living."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _parents() -> Iterable[tuple[int, int]]:
    """(process id, parent's process id) of every living process that we may see."""
    proc = Path("/proc/self/stat")
    if not proc.exists():  # not Linux
        listing = subprocess.run(["/bin/ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False)
        rows = [line.split() for line in listing.stdout.splitlines()]
        return [(int(pid), int(parent)) for pid, parent, state in rows if not state.startswith("Z")]
    pairs = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it has just ended
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]  # the name before may hold spaces and parentheses
        if state not in "ZX":
            pairs.append((int(entry.name), int(parent)))
    return pairs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
