"""Eight emulated CPU devices for every test, before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # the TPU compiler must not look for a TPU

import jax

if os.environ["JAX_PLATFORMS"] == "cpu":
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` need one: they are left out where JAX runs on CPU."""
    if os.environ["JAX_PLATFORMS"] != "cpu":
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needs_gpu)
    items[:] = [item for item in items if item not in needs_gpu]
