"""One ring over two real processes: it computes what one process computes, and a death ends it instead of hanging it."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cases import FLOAT32_TOLERANCE, ring_mesh
from worker_ring import NAMES, attention_and_grads, attention_arguments

from jax_ring_attention.testing import assert_close

pytestmark = pytest.mark.multiprocess

TESTS = Path(__file__).parent
PATIENCE = 60
"""Seconds for anything to happen; compiling takes a few, the heartbeat of a dead process is missed after ten."""


@dataclasses.dataclass
class Worker:
    """A running child, the file that it writes after its first step, and the file with all that it says."""

    process: subprocess.Popen
    result: Path
    log: Path

    def wait_for_first_step(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.result.exists():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], list[Worker]]]:
    """Starts the two processes of a ring; whatever happens, none survives the test."""
    workers: list[Worker] = []

    def start_two(mode: str) -> list[Worker]:
        path = os.pathsep.join(filter(None, [str(TESTS.parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "PYTHONPATH": path}
        port = free_port()
        for rank in range(2):
            result, log = tmp_path / f"result{rank}.npz", tmp_path / f"log{rank}.txt"
            command = [sys.executable, str(TESTS / "worker_ring.py"), mode, str(port), str(rank), str(result)]
            with log.open("wb") as both:
                process = subprocess.Popen(command, env=environment, stdout=both, stderr=both)
            workers.append(Worker(process, result, log))
        return workers

    yield start_two
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_compute_what_one_does(start):
    workers = start("once")
    for worker in workers:
        assert worker.process.wait(2 * PATIENCE) == 0, worker.said()
    parts = []
    for worker in workers:
        with np.load(worker.result) as saved:
            parts.append({name: saved[name] for name in NAMES})
    mesh = ring_mesh(8)
    want = attention_and_grads(mesh)(*attention_arguments(mesh))
    have = [np.concatenate([part[name] for part in parts], axis=1) for name in NAMES]
    assert_close(have, [np.asarray(x) for x in want], FLOAT32_TOLERANCE, NAMES)


@pytest.mark.parametrize("victim", [0, 1], ids=["the_coordinator_dies", "the_other_dies"])
def test_death_of_one_process_ends_the_other_with_an_error(start, victim):
    workers = start("forever")
    for worker in workers:
        worker.wait_for_first_step()
    time.sleep(0.5)  # into a later step
    victim, survivor = workers[victim], workers[1 - victim]
    assert survivor.process.poll() is None, survivor.said()
    victim.process.send_signal(signal.SIGKILL)
    assert victim.process.wait(PATIENCE) == -signal.SIGKILL
    assert survivor.process.wait(PATIENCE) != 0
    assert "rror" in survivor.said()
