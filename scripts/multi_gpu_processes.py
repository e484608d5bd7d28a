"""Processes for bench_ring_multi_gpu.py: one stage in one process or in one for each GPU, bounded in time, multicast off."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

#: A program that uses NVLink multicast can take the GPUs of a shared host out of service.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


def refuse_multicast(environment: Mapping[str, str]) -> None:
    """SystemExit for settings that turn NVLink multicast on, or XLA's symmetric memory, which may use it."""
    for name, off in MULTICAST_OFF.items():
        if environment.get(name, off) != off:
            raise SystemExit(f"{name}={environment[name]} turns NVLink multicast on: unset it, or set it to {off}")
    if found := re.search(r"\S*(symmetric|multicast|multimem|nvls|nvshmem)\S*", environment.get("XLA_FLAGS", "").lower()):
        raise SystemExit(f"XLA_FLAGS has {found[0]}, which may use NVLink multicast: leave it out")


# What a process does first and last.


def start(cpu_devices: int | None, processes: int, process: int, port: int) -> None:
    """Before anything touches a device: emulation, and the other processes, each of which holds as many devices as the others."""
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices // processes)
        if processes > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes > 1:
        mine = [process] if cpu_devices is None else None  # one GPU for each process
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, local_device_ids=mine)


def stop(processes: int) -> None:
    """Wait for the other processes, which may still need this one."""
    if processes > 1:
        jax.distributed.shutdown()


# What starts them.


class Failure(NamedTuple):
    """Why a process gave no result, and whether that is only because its time was over."""

    failed: str
    out_of_time: bool = False


def why(code: int, text: str) -> str:
    """From the exit code of a process and what it wrote to stderr: what the watchdog found, or the last line."""
    if "Timeout (" in text:
        main_thread = text[text.rindex("(most recent call first)") :]  # the last one listed
        frame = re.search(r'^  File "(.*)", line (\d+) in (\S+)', main_thread, re.MULTILINE)
        place = f" in {frame[3]}, {Path(frame[1]).name}:{frame[2]}" if frame else ""
        return f"no progress within the limit, stopped by the watchdog{place}"
    lines = [line for line in text.splitlines() if line.strip()]
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{lines[-1].strip()[:300] if lines else 'no message'} ({ended})"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_own_processes(
    script: str, work: dict[str, Any], patience: float, environment: Mapping[str, str] | None = None, processes: int = 1
) -> dict[str, Any] | Failure:
    """What `script --one WORK` prints last in the first of `processes`; all end when one fails, or after `patience` seconds.

    WORK is `work` with `processes`, `process` and the `port` at which they meet.
    """
    whole = {**os.environ, **(environment or {})}
    refuse_multicast(whole)
    work = work | {"processes": processes, "port": free_port()}
    with tempfile.TemporaryDirectory() as directory:
        children: list[subprocess.Popen] = []
        logs = [Path(directory) / f"{process}.err" for process in range(processes)]
        try:
            for process, log in enumerate(logs):
                command = [sys.executable, script, "--one", json.dumps(work | {"process": process})]
                with log.open("wb") as err, log.with_suffix(".out").open("wb") as out:
                    children.append(subprocess.Popen(command, env=whole | MULTICAST_OFF, stdout=out, stderr=err))
            deadline = time.monotonic() + patience
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                if time.monotonic() > deadline:
                    return Failure(f"not finished within {patience:g} s", out_of_time=True)
                time.sleep(0.05)
            reasons = [
                why(child.returncode, log.read_text(errors="replace"))
                for child, log in zip(children, logs, strict=True)
                if child.poll()
            ]
            if reasons:  # where one stopped, others may only have lost their partner
                return Failure(next((reason for reason in reasons if "watchdog" in reason), reasons[0]))
            return json.loads(logs[0].with_suffix(".out").read_text().splitlines()[-1])
        finally:
            for child in children:
                child.kill()
                child.wait()


def flags_known(flags: str) -> bool:
    """Whether the installed jaxlib starts with these XLA flags. Asked in a process of its own: an unknown flag ends it."""
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(command, env=environment, capture_output=True, timeout=120).returncode == 0
