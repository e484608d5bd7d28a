"""The one place that knows how JAX versions differ, or that leans on a detail of JAX.

Every function says which versions need it. Supported: 0.10.2 (the last for Python 3.11) and newer.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

#: What JAX prints when a `jax.custom_vjp` function meets forward mode; the text is the same in 0.10 to 0.12.
FORWARD_MODE_MESSAGE = "can't apply forward-mode"


#: For example (0, 10, 2).
JAX_VERSION = jax.version.__version_info__


def has_hopper_gpu() -> bool:
    """Whether the default backend is an NVIDIA GPU of compute capability 9.0."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return False
    return str(getattr(jax.local_devices()[0], "compute_capability", "")) == "9.0"


def tpu_chip() -> str | None:
    """Generation of the TPU that is traced for, such as "v5e": of the mesh in context, or of the default device, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    if device is None and jax.default_backend() == "tpu":
        device = jax.devices()[0]
    kind = "" if device is None else str(device.device_kind).lower()
    names = {"v6": "v6e", "7x": "tpu7x", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v4": "v4"}
    return next((name for part, name in names.items() if "tpu" in kind and part in kind), None)


def multiprocessors() -> int:
    """Of the default GPU; 132, an H100's and H200's, where a kernel is lowered without one."""
    return getattr(jax.local_devices()[0], "core_count", 132)


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which `x` varies: empty outside `shard_map` and under `check_vma=False`."""
    # 0.9 and before spelled it `aval.vma`; 0.10 and newer have `aval.manual_axis_type.varying`.
    return jax.typeof(x).manual_axis_type.varying


def vary_over(tree: Any, axes: Iterable[str]) -> Any:
    """Mark every array of `tree` as varying over `axes` too; its transpose is the `psum` that gradients need.

    A scan or a custom VJP under `check_vma=True` wants equal types in and out, so inputs are brought to one type first.
    """
    wanted = frozenset(axes)

    def mark(x):
        missing = tuple(sorted(wanted - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def vary_together(tree: Any) -> Any:
    """Inside `shard_map`, every array of `tree` marked as varying wherever any of them does."""
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(tree)))
    return vary_over(tree, axes) if axes else tree


def manual_axes() -> tuple[str, ...]:
    """Names of the mesh axes that are manual here, that is, inside which `shard_map` bodies we are."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_in_context() -> jax.sharding.AbstractMesh | None:
    """The mesh set by `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def default_matmul_precision() -> str | None:
    """What `jax.default_matmul_precision` is set to here."""
    return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]


#: What the race detector of the emulator found, kernel by kernel.
_emulated_races: list[Any] = []


_emulating: list[bool] = []


def emulates_tpu() -> bool:
    """Whether we are inside `tpu_interpret_mode`."""
    return bool(_emulating)


@contextlib.contextmanager
def tpu_interpret_mode(**parameters: Any) -> Iterator[None]:
    """Inside, Pallas TPU kernels are emulated on the CPU; `parameters` are those of `pltpu.InterpretParams`.

    The emulator of 0.10 to 0.12 evaluates index maps and kernel bodies op by op, and under `check_vma=True` refuses to mix grid
    indices with varying numbers, so it runs unchecked here. What it returns has the types that the call declared.
    """
    from jax._src import callback, config, effects  # private: the public switch is an argument of the caller's own shard_map
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as emulator
    from jax.experimental.pallas import tpu as pltpu

    checked = emulator.interpret_pallas_call
    new_races = emulator.RaceDetectionState
    _emulated_races.clear()
    _emulating.append(True)

    def recorded(*args, **kwargs):
        _emulated_races.append(new_races(*args, **kwargs))
        return _emulated_races[-1]

    def unchecked(*args, **kwargs):
        with config._check_vma(False):
            return checked(*args, **kwargs)

    # `emit_pipeline` asks how the chip tiles memory, and there is no entry for the CPU. 0.12 moved the module; the old name
    # forwards.
    from jax._src.pallas.mosaic import tpu_info

    emulator.interpret_pallas_call = unchecked
    emulator.RaceDetectionState = recorded  # type: ignore[assignment, misc]
    effects.remat_allowed_effects.add_type(callback.OrderedIOEffect)  # of its callbacks, which may well run twice
    effects.remat_allowed_effects.add_type(callback.IOEffect)
    known = dict(tpu_info.registry)
    if "on_race" in inspect.signature(pltpu.InterpretParams).parameters:  # 0.12 raises by itself, 0.10 leaves it to the reader
        parameters = {"on_race": "warn"} | parameters
    tpu_info.registry.setdefault("cpu", lambda: tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1))
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**parameters)):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()  # or the next kernel goes on with the memory of one that failed
        raise
    finally:
        emulator.interpret_pallas_call = checked
        emulator.RaceDetectionState = new_races  # type: ignore[misc]
        tpu_info.registry.clear()
        tpu_info.registry.update(known)
        _emulating.pop()


def tpu_interpret_found_races() -> bool:
    """Whether any kernel emulated with `detect_races=True` had one, since `tpu_interpret_mode` was last entered."""
    # Private: there is no public reader, and the emulator itself remembers the last kernel only.
    assert _emulated_races, "no kernel was emulated"
    return any(state.races_found for state in _emulated_races)


def load_whole(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    """Load all of a Mosaic GPU reference into registers of `layout`; global memory wants `optimized=False`."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # 0.10 wants an index, 0.11 warns about one, 0.12 does not take it.
    parameter = inspect.signature(plgpu.load).parameters.get("idx")
    index = ((),) if parameter is not None and parameter.default is parameter.empty else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def store_whole(ref: Any, value: jax.Array) -> None:
    """Store registers to all of a reference to global memory in Mosaic GPU, also in pieces smaller than a sector."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    store = getattr(plgpu, "store", None)  # 0.12 refuses such pieces unless told; 0.11 has no store and refuses nothing
    if store is None:
        ref[...] = value
    else:
        store(ref, value, optimized=False)


_untransposable_p = Primitive("untransposable")
_untransposable_p.def_impl(lambda x, *, message: x)
_untransposable_p.def_abstract_eval(lambda x, *, message: x)
mlir.register_lowering(_untransposable_p, lambda ctx, x, *, message: [x])
batching.defvectorized(_untransposable_p)


def _refuse_transpose(cotangent, x, *, message):
    raise NotImplementedError(message)


ad.deflinear2(_untransposable_p, _refuse_transpose)


def untransposable(tree: Any, message: str) -> Any:
    """The identity, except that reverse-mode differentiation through it raises NotImplementedError(message); forward mode works.

    A `jax.custom_vjp` around it would refuse forward mode as well.
    """
    return jax.tree.map(lambda x: _untransposable_p.bind(x, message=message), tree)


_unbatchable_p = Primitive("unbatchable")
_unbatchable_p.def_impl(lambda x, *, message: x)
_unbatchable_p.def_abstract_eval(lambda x, *, message: x)
mlir.register_lowering(_unbatchable_p, lambda ctx, x, *, message: [x])


def _refuse_batch(operands, axes, *, message):
    raise NotImplementedError(message)


batching.primitive_batchers[_unbatchable_p] = _refuse_batch


def unbatchable(tree: Any, message: str) -> Any:
    """The identity, except that `jax.vmap` over it raises NotImplementedError(message)."""
    return jax.tree.map(lambda x: _unbatchable_p.bind(x, message=message), tree)


def call_without_varying(function: Callable[..., Any], *operands: Any, axes: frozenset[str] | None = None) -> Any:
    """`function(*operands)` for a function that calls a Mosaic GPU kernel, or a TPU kernel with loops; also under `check_vma`.

    Kernel bodies of 0.11 and 0.12 mix values that keep the operands' varying axes with values that drop them, and references
    with varying axes are refused; on TPUs the conversion between the two cannot be compiled. So
    the call is traced unchecked, on operands that carry no axes (a slice traced unchecked
    drops them, and XLA drops the slice), and what comes out is marked as varying again: over `axes`, or where any operand does.
    """
    found = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(operands)))
    if not found:
        return function(*operands)
    from jax._src import config  # private: the public switch is an argument of the caller's own shard_map

    with config._check_vma(False):
        plain = jax.tree.map(lambda x: lax.slice(x, (0,) * x.ndim, x.shape), operands)
        result = function(*plain)
    return vary_over(result, found if axes is None else axes)
