"""Every public function under a mesh of eight CPU devices, in a process of its own: test_mesh.py;
and how other tests run a call on a mesh, ``on_mesh``.

usage: mesh_calls.py KIND BACKEND PLATFORM [lowered]

KIND is that of the mesh axis, "Auto" or "Explicit"; PLATFORM is "cpu" or "export", for CPUs and for
CUDA. On CPUs calls are traced; with "lowered" those without manual axes are lowered too. Of those
with manual axes, alike inside both kinds, one kind exports every other and the other kind the
rest. Each call has a shape that is new to the process, and calls with manual axes come first: jax
keeps the operations that it has once run eagerly, which would hide that a trace runs some. The
transfer guard refuses them anywhere.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import collectives, mesh_for, mesh_of, results_of, sharded

from mlstm_pallas import (
    mlstm_chunkwise,
    mlstm_recurrent_sequence,
    mlstm_recurrent_step,
    use_backend,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.export import export
from mlstm_pallas.problem.validation import BACKENDS
from mlstm_pallas.xlstm_jax import (
    max_triton_fwbw_v3noslice,
    max_triton_fwbw_v5xlchunksize,
    triton_stablef,
)

B, NH, D, L = 8, 2, 16, 16
BATCH = P("x")
LAYOUTS, KINDS = ("BTNH", "BNTH"), ("manual", "")
chunkwise = functools.partial(mlstm_chunkwise, chunk_size=L)
halves = itertools.count(10)


def compiled_for(run, x, exchanged=()):
    """A jitted function compiled for these arrays; exchanged: how many collectives of each kind its
    devices run, exactly."""
    compiled = run.lower(*x).compile()
    assert collectives(compiled) == dict(exchanged)
    return compiled


def on_mesh(run, x, specs, mesh, results=(), exchanged=()):
    """What a jitted function returns of arrays that are sharded by the one spec, or by one each.

    Args:
      results: the specs of the first results.
      exchanged: as for compiled_for.
    """
    x = sharded(x, mesh, *specs)
    result = compiled_for(run, x, exchanged)(*x)
    for y, spec in zip(jax.tree.leaves(result), results, strict=False):
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), y.ndim)
    return result


def odd():
    """A number of steps that is new and no multiple of anything."""
    return 2 * next(halves) + 1


def even():
    """One that is new and fills the last chunk."""
    return L * next(halves)


def lead(layout, S, B=B):
    return (B, NH, S) if layout == "BNTH" else (B, S, NH)


def in_segments(*x):
    options = dict(segment_ids=jnp.zeros(x[3].shape[:2], "int32"), num_segments=3)
    return chunkwise(*x, **options, return_last_states=True, layout="BTNH")


def both_passes(system):
    """The documented passes of a system, one after the other."""
    prefix = "" if system is max_triton_fwbw_v5xlchunksize else "_"
    forward, backward = (getattr(system, f"{prefix}mlstm_chunkwise_{x}") for x in ("fw", "bw"))

    def run(*x):
        h, n, m, *_ = forward(*x)
        stabiliser = dict(vecM_out=m) if system is triton_stablef else {}
        return backward(*x, vecN_out=n, matDeltaH=h, **stabiliser)

    return run


def calls():
    """(name, function, lead axes of its arguments, sharding of these).

    The names of calls with manual axes begin with "manual".
    """
    sequence = functools.partial(
        mlstm_chunkwise_sequence_parallel, axis_name="x", chunk_size=L, return_last_states=True
    )
    transforms = results_of, lambda run: run
    chosen = itertools.product(KINDS, LAYOUTS, (odd, even), transforms)
    # Every third of them has each pair of values.
    for manual, layout, steps, transform in itertools.islice(chosen, 0, None, 3):
        run = transform(of_kind(manual, functools.partial(chunkwise, layout=layout)))
        yield f"{manual} chunkwise {layout}", run, lead(layout, steps()), BATCH
    for layout, steps in zip(LAYOUTS, (odd, even), strict=True):
        spec = P(None, "x") if layout == "BTNH" else P(None, None, "x")
        run = over_shards(functools.partial(sequence, layout=layout), spec, (spec, P()))
        for transform in transforms:
            yield f"manual sequence {layout}", transform(run), lead(layout, 8 * steps(), 1), spec
    generated = triton_stablef._mlstm_chunkwise_fwbw_generator(None, chunk_size=L)
    systems = max_triton_fwbw_v3noslice, max_triton_fwbw_v5xlchunksize, triton_stablef
    for manual in KINDS:
        for name, run, axes in (
            ("segments", in_segments, lead("BTNH", odd())),
            ("step", mlstm_recurrent_step, (B, NH)),
            ("steps", mlstm_recurrent_sequence, lead("BNTH", odd())),
        ):
            yield f"{manual} {name}", of_kind(manual, run), axes, BATCH
        run = results_of(of_kind(manual, lambda *x: generated(*x)[0]))
        yield f"{manual} generator", run, (B, NH, even()), BATCH
        for system in systems:
            S, run = 64 * next(halves), of_kind(manual, both_passes(system))  # whole chunks
            yield f"{manual} {system.__name__}", run, (B, NH, S), BATCH


def over_shards(run, spec=BATCH, out_specs=BATCH):
    return jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=out_specs, check_vma=checks)


def of_kind(manual, run):
    return over_shards(run) if manual else run


def is_made(position, manual):
    """Whether this process makes a call."""
    if on_cpu:
        return not (manual and is_lowered)
    if manual:
        return position % 2 == (kind == "Auto")
    return kind == "Explicit"  # automatic axes need devices


def lower(run, x):
    if platform == "export":
        export(run, *x, platform=("cpu", "cuda"))
        return
    traced = jax.jit(run).trace(*x)
    if is_lowered:
        lowered = traced.lower()
        # XLA traces the shards of automatic axes when it compiles.
        if "CustomSPMDPartitioning" in lowered.as_text():
            lowered.compile()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("kind", choices=["Auto", "Explicit"])
    parser.add_argument("backend", choices=["None", *BACKENDS])
    parser.add_argument("platform", choices=["cpu", "export"])
    parser.add_argument("is_lowered", choices=["lowered", ""], default="", nargs="?")
    kind, backend, platform, is_lowered = vars(parser.parse_args()).values()
    checks = backend != "interpret"
    jax.config.update("jax_num_cpu_devices", 8)
    axis = getattr(AxisType, kind)
    on_cpu = platform == "cpu"
    mesh = mesh_of((8,), axis) if on_cpu else mesh_for("NVIDIA H200", (8,), "x", axis)
    count = 0
    with (
        jax.set_mesh(mesh) if on_cpu else jax.sharding.use_abstract_mesh(mesh),
        use_backend(None if backend == "None" else backend),
        jax.transfer_guard("disallow"),
    ):
        for position, (name, run, axes, spec) in enumerate(calls()):
            if not is_made(position, name.startswith("manual")):
                continue
            sharding = NamedSharding(mesh, spec)
            shapes = [(*axes, D)] * 3 + [axes] * 2
            x = [jax.ShapeDtypeStruct(shape, "float32", sharding=sharding) for shape in shapes]
            print(name, axes, flush=True)
            lower(run, x)
            count += 1
    print(f"{count} calls")
