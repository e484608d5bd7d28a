"""Eight emulated CPU devices for every test, before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # the TPU compiler must not look for a TPU

os.environ.setdefault("NPROC", "32")  # threads for emulated TPUs: with as many devices as cores their callbacks can deadlock

import jax
import pytest

from jax_ring_attention import compat

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` need one: they are left out where JAX runs on CPU."""
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if item not in needs_gpu]


@pytest.fixture(autouse=True)
def emulated_tpu(request):
    """Tests with a parameter `implementation="mosaic_tpu"` run in the emulator, where what was never written is NaN."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("implementation") != "mosaic_tpu":
        yield
        return
    with compat.tpu_interpret_mode(uninitialized_memory="nan"):
        yield
