"""Train a Llama-style model on text of any length with ring attention: on emulated CPU devices, a GPU, a slice of a pod.

Tokens are bytes. Every file is a document; documents are packed into rows of --seq-len tokens and see only themselves. The
devices form a mesh data x ring x tensor, of which --ring takes what the other two leave. By arguments alone:

    python scripts/train_long_context.py --cpu-devices 8 --seq-len 4096
    python scripts/train_long_context.py --cpu-devices 8 --data-parallel 2 --tensor 2 --batch 2
    python scripts/train_long_context.py --dtype bfloat16 --seq-len 65536 --data 'books/**/*.txt'
    python scripts/train_long_context.py --coordinator auto ...                  on every host of a TPU slice or Slurm job
    python scripts/train_long_context.py --coordinator HOST:PORT --num-processes 2 --process-id 0 ...    on any machines

With --checkpoint-dir a run continues from the newest checkpoint in it, bit for bit as if it had not stopped; several processes
need a directory that all of them see. --attention dense trains the same model without the ring, to compare.

Progress goes to stderr; the last line of stdout is one JSON object. The model is in llama.py, the packing in packing.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import glob
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import llama
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from packing import Batch, pack_documents
from tqdm import tqdm

from jax_ring_attention import to_layout

ROOT = Path(__file__).resolve().parents[1]
OWN_TEXT = [str(ROOT / pattern) for pattern in ("*.md", "docs/*.md", "jax_ring_attention/**/*.py", "tests/*.py", "scripts/*.py")]


# Devices.


def start_jax(options: argparse.Namespace) -> None:
    """Before anything touches a device: the platform, and the other processes."""
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        if jax.config.jax_num_cpu_devices != options.cpu_devices:
            jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    if options.coordinator == "auto":
        jax.distributed.initialize()
    elif options.coordinator:
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)


def make_mesh(options: argparse.Namespace) -> Mesh:
    """All devices of all processes, data x ring x tensor."""
    count, others = len(jax.devices()), options.data_parallel * options.tensor
    ring = options.ring or count // others
    if others * ring != count:
        raise ValueError(
            f"--data-parallel {options.data_parallel} x --ring {ring} x --tensor {options.tensor} is {others * ring} devices, "
            f"but there are {count}; the product must be all of them."
        )
    return jax.make_mesh((options.data_parallel, ring, options.tensor), llama.AXES, axis_types=(AxisType.Auto,) * 3)


# Data. A step number determines its batch, so that a run that continues needs no other state.


def read_documents(patterns: list[str], seed: int) -> list[bytes]:
    """The files that match, shuffled; the same in every process."""
    paths = sorted({path for pattern in patterns for path in glob.glob(pattern, recursive=True) if Path(path).is_file()})
    if not paths:
        raise ValueError(f"--data {' '.join(patterns)} matches no file; quote a pattern so that ** reaches this program.")
    return [Path(paths[i]).read_bytes() for i in np.random.default_rng(seed).permutation(len(paths))]


@functools.lru_cache(maxsize=2)
def row_order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def batch_at(rows: Batch, step: int, size: int, seed: int) -> Batch:
    """Batch number `step` of `size` rows: every row once an epoch, in a new order each time."""
    count = len(rows.tokens)
    numbers = range(step * size, (step + 1) * size)
    return Batch(*(x[[row_order(count, seed, n // count)[n % count] for n in numbers]] for x in rows))


def put_on_mesh(batch: Batch, mesh: Mesh, layout: str) -> Batch:
    """The batch in the order in which the layout stores it; every process places what its own devices hold."""
    sharding = NamedSharding(mesh, llama.TOKENS)
    stored = (np.asarray(to_layout(x, layout, mesh.shape["ring"])) for x in batch)
    return Batch(*(jax.make_array_from_callback(x.shape, sharding, lambda at, x=x: x[at]) for x in stored))


# Training.


class State(NamedTuple):
    params: Any
    optimizer: Any


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW after a linear warm-up. The rate does not depend on --steps, so that a longer run begins like a shorter one."""
    rate = optax.linear_schedule(options.learning_rate / options.warmup, options.learning_rate, options.warmup - 1)

    def is_matrix(params):
        return jax.tree.map(lambda spec: spec != P(), llama.param_specs())

    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def shardings(specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


@functools.partial(jax.jit, static_argnames=("config", "mesh"))
def make_params(config: llama.Config, mesh: Mesh, seed: int) -> Any:
    """Initial parameters, made where they live: no device ever holds all of them."""
    return jax.lax.with_sharding_constraint(llama.init_params(config, seed), shardings(llama.param_specs(), mesh))


def init_state(config: llama.Config, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int) -> State:
    """Initial parameters, and the optimizer's state in the same places."""
    params = make_params(config, mesh, seed)
    shapes = jax.eval_shape(optimizer.init, params)
    specs = optax.tree_map_params(
        optimizer, lambda _, spec: spec, shapes, llama.param_specs(), transform_non_params=lambda _: P()
    )
    return State(params, jax.jit(optimizer.init, out_shardings=shardings(specs, mesh))(params))


def make_step(config: llama.Config, options: argparse.Namespace, optimizer: Any, mesh: Mesh) -> Callable[..., Any]:
    """`(state, batch) -> (state, loss)`, the loss before the update; not compiled yet."""
    if options.attention == "dense":
        attend = llama.dense_attend
    else:
        ring = {"layout": options.layout, "schedule": options.schedule, "implementation": options.implementation}
        attend = llama.ring_attend(mesh, **ring)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss_and_grads = jax.value_and_grad(llama.sequence_loss)
        loss, grads = loss_and_grads(state.params, batch, config=config, mesh=mesh, attend=attend, keep=options.keep)
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), optimizer_state), loss

    return step


def compile_step(step: Callable[..., Any], state: State, batch: Batch, mesh: Mesh) -> jax.stages.Compiled:
    places = (jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, batch).compile()


def run_settings(options: argparse.Namespace, config: llama.Config, documents: list[bytes]) -> dict[str, Any]:
    """What determines a run; the mesh and the kind of attention do not, up to rounding."""
    chosen = {name: getattr(options, name) for name in ("seq_len", "batch", "seed", "learning_rate", "warmup")}
    data = hashlib.sha256(b"".join(hashlib.sha256(document).digest() for document in documents)).hexdigest()
    return {**dataclasses.asdict(config), **chosen, "data": data}


class Checkpoints:
    """The state after some steps, and the settings without which a continuation would be another run."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any]):
        """ValueError if the directory holds a checkpoint of a run with other settings."""
        import orbax.checkpoint

        self.ocp, self.settings = orbax.checkpoint, settings
        manager = self.ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=options.checkpoint_every)
        self.manager = self.ocp.CheckpointManager(options.checkpoint_dir.resolve(), options=manager)
        self.steps = self.manager.latest_step() or 0
        if not self.steps:
            return
        saved = self.manager.restore(self.steps, args=self.ocp.args.Composite(settings=self.ocp.args.JsonRestore())).settings
        different = [f"{name}={saved.get(name)!r}, this run {x!r}" for name, x in settings.items() if saved.get(name) != x]
        if different:
            raise ValueError(
                f"the checkpoint in {self.manager.directory} has {'; '.join(different)}. "
                "Use the same, or another --checkpoint-dir."
            )
        if self.steps >= options.steps:
            raise ValueError(f"the checkpoint is at step {self.steps} already; ask for more than --steps {options.steps}.")

    def restore(self, state: State) -> State:
        """The newest saved state, on the mesh of `state`; `state` itself where none is saved."""
        if not self.steps:
            return state
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        return self.manager.restore(self.steps, args=self.ocp.args.Composite(state=self.ocp.args.StandardRestore(like))).state

    def save(self, step: int, state: State, last: bool) -> None:
        """Saves where --checkpoint-every says so, and the last; returns once the state is on the host."""
        if self.manager.latest_step() != step:
            args = self.ocp.args
            composite = args.Composite(state=args.StandardSave(state), settings=args.JsonSave(self.settings))
            self.manager.save(step, args=composite, force=last)


class Trained(NamedTuple):
    """Losses of the steps from `first_step` on, each before its update, and what else was measured."""

    losses: list[float]
    first_step: int
    tokens_per_second: float
    temp_bytes: int
    parameters: int
    state: State


def train(options: argparse.Namespace, mesh: Mesh) -> Trained:
    config = model_config(options)
    check_sizes(options, config, mesh)
    documents = read_documents(options.data, options.seed)
    rows = pack_documents(documents, options.seq_len)
    checkpoints = None
    if options.checkpoint_dir:
        checkpoints = Checkpoints(options, run_settings(options, config, documents))
    start = checkpoints.steps if checkpoints else 0
    optimizer = make_optimizer(options)
    state = init_state(config, optimizer, mesh, options.seed)
    if checkpoints:
        state = checkpoints.restore(state)

    def batch(step):
        return put_on_mesh(batch_at(rows, step, options.batch, options.seed), mesh, options.layout)

    compiled = compile_step(make_step(config, options, optimizer, mesh), state, batch(start), mesh)
    losses: list[float] = []
    begin = time.perf_counter()
    is_first = jax.process_index() == 0
    # disable=None: no bar where stderr is no terminal
    progress = tqdm(range(start, options.steps), desc="training", unit="step", disable=None if is_first else True)

    def record(loss: jax.Array) -> float:
        """Waits for a step to end, says so, and returns tokens per second so far."""
        losses.append(float(loss))
        done = start + len(losses)
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss of step {done} is {losses[-1]}; try a smaller --learning-rate or more --warmup.")
        speed = options.batch * options.seq_len * len(losses) / (time.perf_counter() - begin)
        said = f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s"
        progress.set_postfix_str(said)
        if is_first and progress.disable and done % options.log_every == 0:
            print(f"step {done}: {said}", flush=True)
        return speed

    running = None  # the step before this one: read while this one runs, so that the devices never wait for the host
    for step in progress:
        state, loss = compiled(state, batch(step))
        if running is not None:
            record(running)
        running = loss
        if checkpoints:
            checkpoints.save(step + 1, state, last=step + 1 == options.steps)
    speed = record(running)
    if checkpoints:
        checkpoints.manager.close()
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    return Trained(losses, start, speed, compiled.memory_analysis().temp_size_in_bytes, parameters, state)


# Arguments.


def model_config(options: argparse.Namespace) -> llama.Config:
    return llama.Config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(llama.Config)})


def check_sizes(options: argparse.Namespace, config: llama.Config, mesh: Mesh) -> None:
    config.check(mesh)
    if options.batch % mesh.shape["data"]:
        raise ValueError(f"--batch {options.batch} must be a multiple of --data-parallel {mesh.shape['data']}.")
    if options.seq_len % (2 * mesh.shape["ring"]):
        raise ValueError(f"--seq-len {options.seq_len} must be a multiple of twice the ring, 2 x {mesh.shape['ring']}.")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = functools.partial(_at_least, 1)

    devices = parser.add_argument_group("devices")
    devices.add_argument("--cpu-devices", type=count, metavar="N", help="emulate N CPU devices in this process")
    devices.add_argument("--data-parallel", type=count, default=1, help="devices that share out the rows of a batch (default 1)")
    devices.add_argument("--ring", type=count, help="devices that share out the tokens of a row (default all that are left)")
    devices.add_argument("--tensor", type=count, default=1, help="devices that share out heads and hidden units (default 1)")
    devices.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; 'auto' where the cluster tells JAX")
    devices.add_argument("--num-processes", type=count)
    devices.add_argument("--process-id", type=int)

    attention = parser.add_argument_group("attention")
    attention.add_argument("--attention", choices=("ring", "dense"), default="ring", help="dense: jax.nn.dot_product_attention")
    attention.add_argument("--layout", choices=("zigzag", "striped", "contiguous"), default="zigzag")
    attention.add_argument("--schedule", choices=("ring", "bidirectional", "all_gather"), default="ring")
    attention.add_argument("--implementation", help="kernel of the ring (default: the first that suits the devices)")
    attention.add_argument("--keep", choices=tuple(llama.KEEP), default="attention", help="of a layer, for its backward pass")

    model = parser.add_argument_group("model")
    for field in dataclasses.fields(llama.Config):
        name = f"--{field.name.replace('_', '-')}"
        model.add_argument(name, type=type(field.default), default=field.default, help=f"default {field.default}")

    training = parser.add_argument_group("training")
    training.add_argument("--data", nargs="+", default=OWN_TEXT, metavar="GLOB", help="files (default this repository's text)")
    training.add_argument("--seq-len", type=count, default=4096, help="tokens per row, over all devices (default 4096)")
    training.add_argument("--batch", type=count, default=1, help="rows per step, over all devices (default 1)")
    training.add_argument("--steps", type=count, default=100, help="in all, with those before a checkpoint (default 100)")
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--warmup", type=count, default=10, help="steps until the learning rate is reached (default 10)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--checkpoint-dir", type=Path, help="save here, and continue from what is here")
    training.add_argument("--checkpoint-every", type=count, default=100, help="steps; the last is always saved (default 100)")
    training.add_argument("--log-every", type=count, default=10, help="steps per line without a terminal (default 10)")

    options = parser.parse_args(arguments)
    named = options.num_processes is not None and options.process_id is not None
    if (options.coordinator not in (None, "auto")) != named or (options.num_processes is None) != (options.process_id is None):
        parser.error("--coordinator HOST:PORT, --num-processes and --process-id go together; --coordinator auto goes alone")
    return options


def _at_least(least: int, text: str) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return int(text)


def main(arguments: list[str] | None = None) -> Trained:
    options = parse(arguments)
    start_jax(options)
    mesh = make_mesh(options)
    trained = train(options, mesh)
    if jax.process_index() == 0:
        settings = {name: str(x) if isinstance(x, Path) else x for name, x in vars(options).items()}
        figures = trained._asdict() | {"first_loss": trained.losses[0], "final_loss": trained.losses[-1]}
        device = {"device": jax.devices()[0].device_kind, "mesh": dict(mesh.shape), "processes": jax.process_count()}
        shown = {name: x for name, x in figures.items() if name not in ("losses", "state")}
        print(json.dumps({"script": "train_long_context", "jax": jax.__version__, **settings, **device, **shown}))
    return trained


if __name__ == "__main__":
    main()
