"""What has to hold of a call under JAX's modes, on the axes of a mesh and in an export: relations
that raise AssertionError, and calls that have them."""

import contextlib
import functools
import re

import engine
import jax
import jax.numpy as jnp
import numpy as np
from engine import (
    INTEGERS,
    STATES,
    TOKENS,
    Call,
    Documents,
    Drafts,
    Ids,
    Lengths,
    Slots,
    arrays,
    exact,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import assert_close, collectives, mesh_for, mesh_of
from relations import below

from mlstm_pallas import (
    KernelConfig,
    mlstm_ring_flush,
    mlstm_ring_states,
    mlstm_ring_step,
    reference,
    use_backend,
)
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel
from mlstm_pallas.export import CUSTOM_CALL_TARGET, export
from mlstm_pallas.xlstm_jax import max_triton_fwbw_v5xlchunksize, triton_stablef

# ---------------- calls


def in_shards(call, tokens, states, config, **options):
    """A sequence over the axis x of a shard_map around the call."""
    run = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="x", layout="BNTH")
    h, last = run(*tokens, *states, config=config, **options)
    return h, *last


def ring_calls(call, tokens, states, accepted, **options):
    """Calls of drafts one after the other: in a scan inside of a shard_map the type of the ring
    would change, because it begins to vary."""
    T, rings = call.get(Drafts).T, mlstm_ring_states(*states, dtype=call.dtype, length=8)
    h, before = [], None
    for t in range(0, tokens[0].shape[2], T):
        x, of_step = (y[:, :, t : t + T] for y in tokens), dict(accepted=before, layout="BNTH")
        y, rings = mlstm_ring_step(*x, rings, **of_step, **options)
        h.append(y)
        before = accepted[:, t // T]
    return jnp.concatenate(h, 2), *mlstm_ring_flush(rings, accepted=before)


engine.FUNCTIONS |= dict(in_shards=in_shards, ring_calls=ring_calls)
SHAPE, FEW = (2, 4, 32, 16, 8), (2, 4, 4, 16, 8)
IDS = (7, 20, 5), (27, 5)
LAST, CHUNKS = dict(chunk_size=16, return_last_states=True), dict(chunk_size=16)
CALLS = {  # those before "reverse" are columns of the table of docs/devices.md
    "forward": Call("mlstm_chunkwise", SHAPE, states=None, options=CHUNKS),
    "gradient outside": Call("mlstm_chunkwise", SHAPE, options=LAST),
    "gradient inside": Call("mlstm_chunkwise", SHAPE, options=LAST),
    "`segment_ids`": Call("mlstm_chunkwise", SHAPE, steps=(Ids(IDS),), options=LAST),
    "`segment_lengths`": Call("mlstm_chunkwise", SHAPE, steps=(Documents(IDS),), options=LAST),
    "states of steps": Call("mlstm_chunkwise_states", SHAPE, options=dict(every=16)),
    "step": Call("mlstm_recurrent_step", FEW),
    "ring step": Call("ring_calls", FEW, steps=(Drafts(2, ((1, 2), (0, 1))),)),
    "sequence parallel": Call("in_shards", SHAPE, options=LAST),
    "reverse": Call(
        "mlstm_chunkwise",
        SHAPE,
        steps=(Ids(IDS), Lengths((30, 32))),
        options=LAST | dict(reverse=True),
    ),
    "slots": Call("mlstm_recurrent_step", FEW, steps=(Slots((2, -1), 3),)),
    "joined": Call("mlstm_recurrent_step", FEW, "bfloat16", options=dict(joined=True)),
    "bfloat16": Call("mlstm_chunkwise", SHAPE, "bfloat16", None, options=CHUNKS),
    "shards": Call("mlstm_chunkwise_sequence_parallel", SHAPE, options=LAST | dict(shards=2)),
}


def forward(call, backend):
    """The results of a call without gradients by name."""
    options = call.options | dict(config=KernelConfig(**call.options.get("config", {})))

    def outputs(x):
        tokens, states = ([x[y] for y in ys if y in x] for ys in (TOKENS, STATES))
        integers = {name: x[name] for name in INTEGERS if name in x}
        run = engine.FUNCTIONS[call.function]
        y = run(call, tokens, states, backend=backend, **options, **integers)
        return dict(zip(call.outputs, y, strict=True))

    return outputs


def fresh(call, backend):
    """A program that nobody has traced."""
    return engine.function_of(call, backend)


def both_passes(system):
    """The documented passes of a system, one after the other."""
    prefix = "" if system is max_triton_fwbw_v5xlchunksize else "_"
    first, second = (getattr(system, f"{prefix}mlstm_chunkwise_{x}") for x in ("fw", "bw"))

    def run(*x):
        h, n, m, *_ = first(*x)
        stabiliser = dict(vecM_out=m) if system is triton_stablef else {}
        return second(*x, vecN_out=n, matDeltaH=h, **stabiliser)

    return run


def with_gradients(run):
    """The results of run and its gradients at cotangents that are these results."""

    def both(*x):
        results, pull = jax.vjp(run, *x)
        return results, pull(results)

    return both


SYSTEMS = max_triton_fwbw_v5xlchunksize, triton_stablef
generated = triton_stablef._mlstm_chunkwise_fwbw_generator(None, True, chunk_size=16)
# Functions of q, k, v, i and f that are in no row of the table, and their number of steps.
OTHERS = {x.__name__.rpartition(".")[2]: (both_passes(x), 64) for x in SYSTEMS}
OTHERS |= {
    "generator": (with_gradients(generated), 32),
    "reference": (with_gradients(reference.chunkwise), 20),
    "recurrence": (with_gradients(reference.recurrence), 20),
}


def program(name, backend=None):
    """A function of arrays by name, which is traced anew, and its arrays. Functions of tokens have
    gradients on backend "xla" alone."""
    if name in CALLS:
        return fresh(CALLS[name], backend), arrays(CALLS[name], 1)
    run, S = OTHERS[name]
    x = arrays(Call("mlstm_chunkwise", (2, 4, S, 16, 16), states=None), 1)
    return lambda x: run(*(x[y] for y in TOKENS)), {y: x[y] for y in TOKENS}


def wide(x):
    """The arrays with integers of 64 bits, which are int32 unless they may be wide."""
    return {name: y.astype("int64") if name in INTEGERS else y for name, y in x.items()}


# ---------------- modes of jax

# Switches that change nothing: a call is traced to the same program, so that its results have the
# same bits.
SWITCHES = [
    lambda: jax.default_matmul_precision("float32"),
    lambda: jax.numpy_rank_promotion("raise"),
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.enable_custom_prng(True),
    lambda: jax.threefry_partitionable(not jax.config.jax_threefry_partitionable),
]
MODES = {
    "no jit": [lambda: jax.disable_jit(True)],
    "NaNs": [lambda: jax.debug_nans(True), lambda: jax.debug_infs(True)],
    "x64": [lambda: jax.enable_x64(True)],
    "x64, guarded": [lambda: jax.enable_x64(True), lambda: jax.transfer_guard("disallow")],
    "leaks": [lambda: jax.checking_leaks()],
}


@contextlib.contextmanager
def entered(contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


def same_program(name):
    """The jaxpr of both lowerings, of kernels and of plain jnp, is that without the switches."""

    def text():
        run, x = program(name)
        return re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(run)(x)))

    expected = text()
    with entered(SWITCHES):
        assert text() == expected


def check(call, x, results):
    """The results are those of the recurrence in float64."""
    compare(call, x, results, exact(call, x))


def compare(call, x, results, desired):
    """Of functions of tokens there may be no gradients."""
    desired = {name: desired[name] for name in results}
    below(engine.errors(call, x, jax.tree.map(np.asarray, results), desired))


def in_mode(name, backend, mode):
    """The results are right under the mode, in which the call is traced; without jit, where it may
    be, because that checks more values."""
    (run, x), x64 = program(name, backend), "x64" in mode
    expected = None if name in CALLS else jax.jit(run)(x)
    with jax.enable_x64(x64):
        placed = jax.device_put(wide(x) if x64 else x)
    jax.clear_caches()  # jax keeps what it has traced and compiled without the mode
    with entered(MODES[mode]):
        results = (run if mode == "NaNs" else jax.jit(run))(placed)
    if name in CALLS:
        check(CALLS[name], x, results)
    else:
        for y, z in zip(*map(jax.tree.leaves, (results, expected)), strict=True):
            assert_close(y, z, 1e-5)


# ---------------- meshes

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
# The kinds of x and y, and the axes of each shard_map around the call, from outside.
AXES = {
    "x and y automatic": ((AUTO, AUTO), ()),
    "x and y explicit": ((EXPLICIT, EXPLICIT), ()),
    "x explicit, y automatic": ((EXPLICIT, AUTO), ()),
    "`shard_map` over x and y": ((AUTO, AUTO), ("xy",)),
    "`shard_map` over x, y automatic": ((AUTO, AUTO), ("x",)),
    "`shard_map` over x, y explicit": ((EXPLICIT, EXPLICIT), ("x",)),
    "`shard_map` over x, which is explicit outside, y automatic": ((EXPLICIT, AUTO), ("x",)),
    "`shard_map` over y inside one over x": ((AUTO, AUTO), ("x", "y")),
    "the same, explicit outside": ((EXPLICIT, EXPLICIT), ("x", "y")),
}
# The dimensions of arrays, a letter each.
DIMS = dict(q="bhsk", k="bhsk", v="bhsv", i="bhs", f="bhs", c="bhkv", n="bhk", m="bh")
DIMS |= dict(segment_ids="bs", sequence_lengths="b", segment_lengths="b-", accepted="b-", slots="-")
BATCH_AND_HEADS, STEPS_AND_HEADS = dict(b="x", h="y"), dict(s="x", h="y")


def dims_of(x, names):
    """Those of arrays and of results, which may be of several documents or steps."""
    several = {y: f"b-{DIMS[y][1:]}" if np.ndim(x.get("dc", 0)) > 4 else DIMS[y] for y in STATES}
    outputs = dict(h="bhsv") | several
    arrays = DIMS | {f"d{y}": z for y, z in outputs.items()}
    results = outputs | {f"d{y}": DIMS[y] for y in TOKENS + STATES}
    if "slots" in x:  # rows of pools, which all shards of a batch would share
        arrays, results = (
            {y: z.replace("b", "-") for y, z in d.items()} for d in (arrays, results)
        )
    return {y: arrays[y] for y in x}, {y: results[y] for y in names}


def specs(dims, shards, axes="xy"):
    """How arrays are sharded over these axes of the mesh."""
    names = {y: [shards.get(d) for d in z] for y, z in dims.items()}
    return {y: P(*(a if a and a in axes else None for a in z)) for y, z in names.items()}


def outside(call, run):
    """The results and gradients of a function of arrays by name that returns outputs."""

    def results(x):
        sources = {y: x[y] for y in call.sources}
        outputs, pull = jax.vjp(lambda y: run(x | y), sources)
        [gradients] = pull({y: x[f"d{y}"] for y in outputs})
        return outputs | {f"d{y}": z for y, z in gradients.items()}

    return results


def shardings(spec):
    """Those on the mesh that is set, whose devices may not be here."""
    mesh = jax.sharding.get_mesh()
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    return {y: NamedSharding(mesh, z) for y, z in spec.items()}


def abstract(x, places):
    """As jax.device_put, for a mesh of devices that are not here."""
    return {y: jax.ShapeDtypeStruct(z.shape, z.dtype, sharding=places[y]) for y, z in x.items()}


OUTSIDE, SEQUENCE = "gradient outside", "sequence parallel"


def arrays_of(name):
    """One f for all entries, which does not vary over x, where the gradient is taken outside."""
    x = program(name)[1]
    return x | dict(f=x["f"][:1]) if name == OUTSIDE else x


def on_axes(name, axes, backend=None, place=jax.device_put):
    """A call on the mesh that is set: a jitted function of arrays by name, the arrays, and the
    shardings of its results."""
    call, x, (_, levels) = CALLS.get(name), arrays_of(name), AXES[axes]
    run, shards = program(name, backend)[0], BATCH_AND_HEADS
    shards = STEPS_AND_HEADS if name == SEQUENCE else shards
    names = [*call.outputs] if call else []
    if name in ("forward", OUTSIDE):
        run = forward(call, backend)
    elif call and call.differentiable and not call.one_by_one:
        names += [f"d{y}" for y in call.sources]
    dims, results = dims_of(x, names)
    if name == OUTSIDE:
        of_all, dims["f"] = run, "-hs"

        def run(x):
            return of_all(x | dict(f=jnp.broadcast_to(x["f"], x["i"].shape)))

    for level in reversed(levels):
        of_others = P(*(a if a in level else None for a in "xy"))
        run = jax.shard_map(
            run,
            in_specs=(specs(dims, shards, level),),
            out_specs=specs(results, shards, level) if call else of_others,
            axis_names={*level},
            check_vma=backend != "interpret",
        )
    if name == OUTSIDE:
        run, results = outside(call, run), results | {f"d{y}": dims[y] for y in call.sources}
    x = place(x, shardings(specs(dims, shards)))
    return jax.jit(run), x, shardings(specs(results, shards))


def gathers(axes):
    """Whether jax gathers: where x and y are of different kinds."""
    kinds, levels = AXES[axes]
    return len({*kinds}) > 1 and not levels


def sine(axes):
    """A sine on the mesh that is set, with the same shard_maps, and an array that is not there."""
    run = jnp.sin
    for level in reversed(AXES[axes][1]):
        spec = P(*(y if y in level else None for y in "xy"))
        run = jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names={*level})
    [place] = shardings(dict(x=P("x", "y"))).values()
    return run, jax.ShapeDtypeStruct((2, 4), "float32", sharding=place)


def exchanges(name, axes):
    """Whether devices exchange something on the mesh that is set: of a sequence, gradients that
    have no own part on each device, and what jax gathers, of a sine as well on jax 0.10."""
    if name in (OUTSIDE, SEQUENCE) or gathers(axes):
        return True
    run, x = sine(axes)
    return bool(collectives(jax.jit(run).lower(x).compile()))


def on_mesh(name, axes):
    """The results are right and, unless jax gathers, sharded as the arrays are; nothing is
    exchanged."""
    with jax.set_mesh(mesh_of((2, 2), *AXES[axes][0])):
        run, placed, places = on_axes(name, axes)
        compiled = run.trace(placed).lower().compile()
        results = compiled(placed)
        assert not collectives(compiled) or exchanges(name, axes)
    for y, place in places.items():
        same = results[y].sharding.is_equivalent_to(place, results[y].ndim)
        assert same or gathers(axes), y
    call, x = CALLS[name], arrays_of(name)
    x |= dict(f=np.broadcast_to(x["f"], x["i"].shape))
    desired = exact(call, x)
    if name == OUTSIDE:
        desired["df"] = desired["df"].sum(0, keepdims=True)
    compare(call, x, results, desired)


def lowered_on_mesh(name, axes, platform):
    """The kernels of a call are lowered, interpreted for CPUs, or in an export for H200s, which
    needs axes that are explicit or of a shard_map; nothing is transferred meanwhile."""
    jax.clear_caches()  # of operations that have once run eagerly
    kinds, _ = AXES[axes]
    interpret = platform == "cpu"
    mesh = mesh_of((2, 2), *kinds) if interpret else mesh_for("NVIDIA H200", (2, 2), "xy", kinds[0])
    with (
        jax.set_mesh(mesh) if interpret else jax.sharding.use_abstract_mesh(mesh),
        use_backend("interpret" if interpret else None),
        jax.transfer_guard("disallow"),
    ):
        run, x, _ = on_axes(name, axes, "interpret" if interpret else None, abstract)
        if not interpret:
            assert CUSTOM_CALL_TARGET in export(run, x, platform="cuda").mlir_module()
            return
        lowered = run.trace(x).lower()
        if "CustomSPMDPartitioning" in lowered.as_text():
            lowered.compile()  # XLA traces the shards


# ---------------- exports


def exported(name, x64):
    """An export for H200s has the kernels. One for CPUs that is read again has the right dtypes,
    shapes and values of results and gradients; under x64 with integers of 64 bits."""
    call, (run, x) = CALLS[name], program(name)
    with jax.enable_x64(x64):
        passed = wide(x) if x64 else x
        of_gpu = export(run, passed, platform="cuda", device_kind="NVIDIA H200")
        loaded = jax.export.deserialize(export(run, passed, platform="cpu").serialize())
        results = loaded.call(passed)
    assert CUSTOM_CALL_TARGET in of_gpu.mlir_module()
    assert "custom_call @" not in loaded.mlir_module()
    expected = jax.eval_shape(program(name)[0], x)
    for y, z in expected.items():
        assert (results[y].shape, results[y].dtype) == (z.shape, z.dtype), y
    check(call, x, results)
