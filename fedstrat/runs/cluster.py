"""A Ray cluster that somebody else runs: what it has room for. We connect to it, and never start or end it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from fedstrat.errors import ConfigError
from fedstrat.runs.capacity import Capacity

_PROBE_SECONDS = 60.0
_PROBE = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
rooms = [(int(n["Resources"].get("CPU", 0)), int(n["Resources"].get("GPU", 0))) for n in ray.nodes() if n["Alive"]]
print(json.dumps(rooms))
"""


def nodes(address: str) -> list[tuple[int, int]]:
    """(CPUs, GPUs) of every living node of a cluster.

    Args:
        address: ``HOST:PORT`` of its head, as ``ray start`` shows it. This machine must be one of its nodes.

    Raises:
        ConfigError: There is no such cluster, or no connection to it from here.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ConfigError(
            f"expected the HOST:PORT of a Ray cluster's head, such as 192.0.2.1:6379, but got '{address}'"
        )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        # In another process, since a process has one connection to Ray.
        answer = subprocess.run(  # noqa: S603  (our own text)
            [sys.executable, "-c", _PROBE, address],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
        said = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        answer, said = None, f"no answer in {_PROBE_SECONDS:g} s"
    if answer is None or answer.returncode:
        raise ConfigError(
            f"can't connect to the Ray cluster at {address}: {said} (is its head running there, and this machine one of"
            f" its nodes? if not: ray start --address={address})"
        )
    return [(cpus, gpus) for cpus, gpus in json.loads(answer.stdout.splitlines()[-1])]


def plan(nodes: Sequence[tuple[int, int]], device: str) -> Capacity:
    """Share out a cluster: one CPU core a client, and one GPU where GPUs are used.

    Args:
        nodes: (CPUs, GPUs) of its nodes.
        device: The value of ``train.device``; ``auto`` takes GPUs if any node has one.

    Raises:
        ConfigError: No node has room for a client.
    """
    if device.startswith("cuda:"):
        raise ConfigError(f"train.device={device}: on a cluster Ray chooses the GPU; set train.device to cuda")
    gpus = device == "cuda" or (device == "auto" and any(gpus for _, gpus in nodes))
    at_once = sum(min(c, g) if gpus else c for c, g in nodes)
    each = "1 CPU core and 1 GPU each" if gpus else "1 CPU core each"
    if at_once < 1:
        raise ConfigError(
            f"the Ray cluster has no room for a client ({each}): its nodes' (CPUs, GPUs) are {list(nodes)}"
        )
    limit = f"{each}, {len(nodes)} Ray node{'s' * (len(nodes) != 1)}"
    return Capacity(at_once, limit, gpu_share=float(gpus), ours=False)
