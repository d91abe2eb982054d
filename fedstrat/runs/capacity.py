"""How many simulated clients run at once on this machine, and what limits that."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstrat.errors import ConfigError

GPU_BYTES_PER_CLIENT = 1_500_000_000  # a CUDA context (about 0.5 GB), a small model, its batches and gradients
_PROBE_SECONDS = 10.0
_PROBE = """
import json, torch
devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
print(json.dumps([torch.cuda.get_device_properties(i).total_memory for i in devices]))
"""


@dataclass(frozen=True)
class Capacity:
    """The share of the machine that the simulated clients get.

    Attributes:
        at_once: Clients that run at the same time.
        limit: What keeps this number from being larger, in words.
        gpus: GPUs in use.
        gpu_share: The part of one GPU that each client gets; 0 without GPUs.
        ours: Whether the simulation starts Ray; one that exists already has its size.
    """

    at_once: int
    limit: str
    gpus: int = 0
    gpu_share: float = 0.0
    ours: bool = True

    def federation(self, num_clients: int) -> str:
        """The federation config that tells Flower's simulation engine so."""
        clients = f"num-supernodes={num_clients} client-resources-num-cpus=1 client-resources-num-gpus={self.gpu_share}"
        return clients + (f" init-args-num-cpus={self.at_once} init-args-num-gpus={self.gpus}" if self.ours else "")


def plan(num_clients: int, cores: int, gpu_bytes: Sequence[int] = ()) -> Capacity:
    """Share out the machine: one CPU core a client, and where GPUs are used an equal part of one.

    Args:
        num_clients: Simulated clients.
        cores: CPU cores that this process may use.
        gpu_bytes: Memory of each GPU to use.
    """
    bounds = {
        num_clients: "there are no more clients",
        cores: f"1 CPU core each, {cores} core{'s' * (cores != 1)} here",
    }
    if gpu_bytes:
        per_gpu = max(min(gpu_bytes) // GPU_BYTES_PER_CLIENT, 1)
        gigabytes = GPU_BYTES_PER_CLIENT / 1e9
        bounds.setdefault(
            per_gpu * len(gpu_bytes),
            f"{gigabytes} GB of GPU memory each, {len(gpu_bytes)} GPU{'s' * (len(gpu_bytes) != 1)} here",
        )
    at_once = min(bounds)
    if not gpu_bytes:
        return Capacity(at_once, bounds[at_once])
    gpus = min(len(gpu_bytes), at_once)
    share = int(1e4 / -(-at_once // gpus)) / 1e4  # Ray counts in ten-thousandths
    return Capacity(at_once, bounds[at_once], gpus, share)


def usable_cores() -> int:
    """CPU cores that this process may use: its affinity and its container's quota count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cores, *_quota(Path("/sys/fs/cgroup"))]), 1)


def _quota(root: Path) -> list[int]:
    """The CPU quota of this control group (version 2, then 1) in whole cores, if there is one."""
    try:
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii").strip()
        except OSError:
            return []
    return [int(quota) // int(period)] if quota.isdigit() and period.isdigit() else []


def gpu_memory() -> list[int]:
    """Bytes of memory of each CUDA device that PyTorch sees; empty without one."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's, the one under WSL, AMD's
    if sys.platform == "linux" and not any(Path(driver).exists() for driver in drivers):
        return []
    # In another process, since asking for the memory opens a context on the GPU, which would stay.
    try:
        answer = subprocess.run(  # noqa: S603  (our own text)
            [sys.executable, "-c", _PROBE], capture_output=True, timeout=_PROBE_SECONDS, check=True
        )
        return [int(size) for size in json.loads(answer.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def choose_gpus(device: str, gpu_bytes: Sequence[int], key: str = "train.device") -> tuple[list[int], str]:
    """Which of the visible GPUs the value of a key asks for.

    Args:
        device: ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N``.
        gpu_bytes: Memory of each GPU, as ``gpu_memory`` gives it.
        key: The key.

    Returns:
        Indices of the GPUs to use, and a warning; either may be empty.

    Raises:
        ConfigError: The device that was asked for isn't here.
    """
    if device == "auto":
        warning = "found no CUDA device: training on the CPU (train.device=cpu silences this)"
        return list(range(len(gpu_bytes))), "" if gpu_bytes else warning
    if not device.startswith("cuda"):
        return [], ""
    here = (
        f"PyTorch finds {len(gpu_bytes)} CUDA device{'s' * (len(gpu_bytes) != 1)} here"
        if gpu_bytes
        else ("PyTorch finds no CUDA device here")
    )
    index = int(device.partition(":")[2] or 0)
    if index >= len(gpu_bytes):
        raise ConfigError(
            f"{key}={device}: expected a CUDA device, but {here}; "
            f"set {key} to cpu, or to auto to take CUDA only where it is"
        )
    return [index] if ":" in device else list(range(len(gpu_bytes))), ""


def visible_devices(chosen: Sequence[int], environment: Mapping[str, str]) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves only the chosen ones of those visible now."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else []
    return ",".join(names[index] if index < len(names) else str(index) for index in chosen)
