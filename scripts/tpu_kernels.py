"""Compile attention kernels ahead of time for a TPU that is not here and read their schedules.

    python scripts/tpu_kernels.py '{"who": "ours", "direction": "forward", "chip": "v5e", "head_dim": 128, "causal": true}'

One job a process, because the TPU compiler reads where to dump its programs when it is loaded. The last line printed is the
result as JSON. `who` is "ours" (with `direction`, and `tiling` if not the kernel's own), "fused" (both kernels of the fused ring
over all chips of the topology, with `heads` and `tokens` per chip), "splash" (JAX's, with `blocks` and `fused`: one backward
kernel instead of two) or "tokamax" (its splash attention, with `blocks`).
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import tpu_schedule

TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4"}
TOKENS = 4096  # compiled for; a schedule depends on the blocks, not on how many there are
CHUNK = 8192  # tokens of the chunk whose steps are counted

_OPERAND = re.compile(r"inlined_call_operand\.(\w+) \[shape: (\w+)\[([\d,]*)\], index: \d+, kind: (input|output)")
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}\]')


def our_kernel(job: dict[str, Any], mesh: Any, tokens: int) -> Any:
    """The chunk kernel for `tokens` queries and keys of one head on a chip of `mesh`."""
    import jax
    import jax.numpy as jnp

    from jax_ring_attention.kernels.contract import Problem
    from jax_ring_attention.kernels.mosaic_tpu import MosaicTpuKernel, common

    shape = (1, tokens, 1, job["head_dim"])
    reach = (None, 0 if job["causal"] else None)
    with jax.set_mesh(mesh):  # says what is compiled for
        kernel = MosaicTpuKernel(Problem(shape, shape, job["head_dim"], jnp.dtype(jnp.bfloat16), job["head_dim"] ** -0.5, reach))
    if job.get("tiling"):
        setattr(kernel, job["direction"], common.Tiling(*job["tiling"]))
    return kernel


def kinds_of(job: dict[str, Any], tiling: Any) -> list[int]:
    """The kinds of pairs that a program has a branch for, in its order."""
    from jax_ring_attention.kernels.mosaic_tpu import common

    diagonal = [common.DIAGONAL + j for j in range(common.diagonals(tiling))]
    return [common.UNMASKED, *([common.MASKED, *diagonal] if job["causal"] else [])]


def compile_ours(job: dict[str, Any], devices: list[Any]) -> dict[str, Any]:
    """Our kernel, and the steps that it makes over a whole chunk of CHUNK tokens on both sides, of one head."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jax_ring_attention.kernels.contract import Dense, Scope
    from jax_ring_attention.kernels.mosaic_tpu import common
    from jax_ring_attention.masks import Tokens

    mesh = Mesh(np.array(devices[:1]), ("x",))
    direction = job["direction"]

    def scope_of(tokens: int) -> Scope:
        integers = Tokens(jnp.arange(tokens, dtype=jnp.int32)[None] if job["causal"] else None)
        return Scope(integers, integers, Dense(), 0)

    def struct(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    kernel, scope = our_kernel(job, mesh, TOKENS), scope_of(TOKENS)
    shape = kernel.problem.query_shape
    chunk = jax.eval_shape(kernel.pack_chunk, struct(shape), struct(shape))
    if direction == "forward":
        query = jax.eval_shape(kernel.pack_query, struct(shape))
        arguments = query, chunk, jax.eval_shape(kernel.initial_stats, query)

        def run(query, chunk, carry):
            return kernel.fold(query, chunk, scope, carry)
    else:
        row = struct(shape[:3], jnp.float32)
        rows = jax.eval_shape(kernel.pack_rows, struct(shape), struct(shape), row, row)
        arguments = rows, chunk, jax.eval_shape(kernel.initial_d_query, rows)

        def run(rows, chunk, d_query):
            return kernel.fold_grads(rows, chunk, scope, d_query, None, rounded=False)

    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.set_mesh(mesh):
        program = jax.jit(run, donate_argnums=2).lower(*placed).compile().as_text()

    tiling, name = getattr(kernel, direction), f"ring_attention_{direction}"
    whole = our_kernel(job, mesh, CHUNK)
    steps = whole.list_steps(whole.padded_tokens(scope_of(CHUNK)), tiling, by_query=direction == "forward")
    codes = np.asarray(steps.code)[: int(steps.total)]
    kinds = kinds_of(job, tiling)
    return {
        "tiling": list(tiling),
        "names": {direction: name},
        "kinds": kinds,
        "tiles": [len(common.tiles_of(kind, tiling)) for kind in kinds],
        "steps": {str(kind): count for kind, count in collections.Counter(common.kind_of(codes).tolist()).items()},
        "scoped_vmem": scoped_vmem(program, name),
    }


def compile_fused(job: dict[str, Any], devices: list[Any]) -> dict[str, Any]:
    """The kernels of `schedule="fused"` on a ring of all chips, causal ones in the zigzag layout; `direction` may ask for one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_ring_attention import make_ring_mesh, ring_attention
    from jax_ring_attention.kernels.mosaic_tpu import common

    mesh = make_ring_mesh((len(devices),), ("seq",), devices=devices)
    spec = PartitionSpec(None, "seq")
    options = {"is_causal": True, "layout": "zigzag"} if job["causal"] else {}

    def forward(query, key, value):
        return ring_attention(query, key, value, mesh=mesh, spec=spec, schedule="fused", **options)

    def grad(query, key, value, d_out):
        out, pull = jax.vjp(forward, query, key, value)
        return out, pull(d_out)

    shape = (1, job["tokens"] * len(devices), job["heads"], job["head_dim"])
    struct = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    run, arguments = (forward, [struct] * 3) if job.get("direction") == "forward" else (grad, [struct] * 4)
    compiled = jax.jit(run).lower(*arguments).compile()
    program, memory = compiled.as_text(), compiled.memory_analysis()
    kernel = our_kernel(job, mesh, job["tokens"])
    wanted = (job["direction"],) if "direction" in job else ("forward", "backward")
    names = {direction: f"ring_attention_fused_{direction}" for direction in wanted}
    tilings = {direction: getattr(kernel, direction) for direction in wanted}
    kinds = {direction: kinds_of(job, tiling) for direction, tiling in tilings.items()}
    return {
        "ring_size": len(devices),
        "tilings": {direction: list(tiling) for direction, tiling in tilings.items()},
        "names": names,
        "kinds": kinds,
        "tiles": {d: [len(common.tiles_of(kind, tilings[d])) for kind in listed] for d, listed in kinds.items()},
        "scoped_vmem": {direction: scoped_vmem(program, name) for direction, name in names.items()},
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        },
    }


def scoped_vmem(program: str, name: str) -> int:
    """Bytes of VMEM that the compiler gave to the kernel, from the text of the compiled program."""
    calls = [line for line in program.splitlines() if f"{name}." in line.split(" = ")[0] and "tpu_custom_call" in line]
    found = [match for line in calls if (match := _SCOPED.search(line))]
    if not found:
        raise RuntimeError(f"no call of {name} says how much VMEM it uses")
    return max(int(match[1]) for match in found)


def operands_of(path: Path) -> list[dict[str, Any]]:
    """What a kernel is called with, results last, from the first bundle: kind, memory, shape and bytes."""
    found = []
    for memory, dtype, sizes, kind in _OPERAND.findall(path.read_text(errors="replace")):
        shape = [int(n) for n in sizes.split(",") if n]
        bits = int(re.sub(r"\D", "", dtype))
        found.append({"kind": kind, "memory": memory, "shape": shape, "bytes": math.prod(shape) * bits // 8})
    return found


def compile_splash(job: dict[str, Any], devices: list[Any]) -> dict[str, Any]:
    """JAX's or tokamax's splash attention, forward and backward, with the same blocks everywhere."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    heads = 2
    block_q, block_kv, compute = job["blocks"]
    sizes = {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": compute}
    sizes |= {f"{name}_dkv" if name != "block_kv_compute" else "block_kv_dkv_compute": size for name, size in sizes.items()}
    if job["who"] == "splash":
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        mask = (masks.CausalMask if job["causal"] else masks.FullMask)((TOKENS, TOKENS))
        # The kernel for d_query alone takes its block of keys at once: that must fit.
        backward = {"use_fused_bwd_kernel": True} if job["fused"] else {"block_q_dq": block_q, "block_kv_dq": min(block_kv, 1024)}
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=splash.BlockSizes(**sizes, **backward),
            head_shards=1,
            q_seq_shards=1,
        )
    else:
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

        mask = (masks.CausalMask if job["causal"] else masks.FullMask)((TOKENS, TOKENS))
        kernel = splash.make_splash_mha_single_device(mask, config=splash.SplashConfig(**sizes))
    mesh = Mesh(np.array(devices[:1]), ("x",))
    on_chip = NamedSharding(mesh, PartitionSpec())
    struct = jax.ShapeDtypeStruct((heads, TOKENS, job["head_dim"]), jnp.bfloat16, sharding=on_chip)

    def grad(query, key, value, d_output):
        output, pull = jax.vjp(lambda *inputs: kernel(*inputs), query, key, value)
        return output, pull(d_output)

    with jax.set_mesh(mesh):
        jax.jit(grad).lower(*[struct] * 4).compile()
    two = job["who"] == "splash" and not job["fused"]
    names = {"forward": "_fwd_", "dkv": "_dkv_", "dq": "_dq_"} if two else {"forward": "_fwd_", "backward": "_dkv_"}
    return {"names": names, "blocks": {name: [block_q, min(block_kv, 1024) if name == "dq" else block_kv] for name in names}}


def schedules_in(folder: Path, names: dict[str, str], chip: str) -> dict[str, Any]:
    """The schedule of the one kernel whose name contains each of `names`, as JSON."""
    files = tpu_schedule.kernel_files(folder)
    found = {}
    for label, part in names.items():
        matching = [path for name, path in files.items() if part in name]
        if len(matching) != 1:
            raise RuntimeError(f"{len(matching)} programs have {part!r} in their names, among {', '.join(files)}; wanted one")
        schedule = tpu_schedule.read(matching[0], tpu_schedule.CHIPS[chip])
        if not schedule.branches:
            raise RuntimeError(f"{matching[0].name} has no products: the names of the instructions may have changed")
        found[label] = {
            "branches": [_branch(piece) for piece in schedule.branches],
            "step_overhead": schedule.step_overhead,
            "first_step": schedule.first_step,
            "operands": operands_of(matching[0]),
            "passes": [
                {
                    "branches": [_branch(piece) for piece in branches],
                    "step_overhead": schedule.overhead(branches[0].loops),
                    "most_step_overhead": schedule.most_overhead(branches[0].loops),
                    "hop_overhead": schedule.overhead(branches[0].loops[:-1]),
                }
                for branches in schedule.passes
            ],
        }
    return found


def _branch(piece: tpu_schedule.Piece) -> dict[str, Any]:
    return {**piece._asdict(), "bundles": piece.bundles, "cycles": piece.cycles}


def check_branches(branches: list[dict[str, Any]], tiles: list[int]) -> None:
    """Branches stand in the order of their kinds; each must have products for as many tiles as its kind."""
    work = [branch["matmul_cycles"] for branch in branches]
    if len(work) != len(tiles) or any(w * tiles[0] != n * work[0] for w, n in zip(work, tiles, strict=True)):
        raise RuntimeError(f"branches with products of {work} cycles do not match kinds with {tiles} tiles")


def main(text: str) -> None:
    job = json.loads(text)
    with tempfile.TemporaryDirectory() as folder:
        # Before JAX is imported: the TPU compiler reads these when it is loaded.
        os.environ.update(
            LIBTPU_INIT_ARGS=tpu_schedule.compiler_flags(folder),
            TPU_SKIP_MDS_QUERY="1",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
            JAX_PLATFORMS="cpu",
        )
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[job["chip"]]).devices
        result = {"ours": compile_ours, "fused": compile_fused}.get(job["who"], compile_splash)(job, devices)
        result["schedules"] = schedules_in(Path(folder), result.pop("names"), job["chip"])
        if job["who"] == "ours":
            check_branches(result["schedules"][job["direction"]]["branches"], result["tiles"])
        if job["who"] == "fused":
            for direction, schedule in result["schedules"].items():
                for one in schedule["passes"]:
                    check_branches(one["branches"], result["tiles"][direction])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
