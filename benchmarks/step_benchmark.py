r"""Times a step of the recurrent mLSTM, as a generation loop sees it, beside other implementations.

    python benchmarks/step_benchmark.py         # batches of 1 to 128 on a GPU, a tiny one without
    python benchmarks/step_benchmark.py --shape=1x8x1x256x512,64x8x1x256x512 \
        --impl=triton,xla,mlstm_kernels_triton_step --jsonl=step.jsonl
    python benchmarks/step_benchmark.py --from_jsonl=step.jsonl --plot=step.png  # measures nothing

Shapes are those of the other benchmarks; the sequence length does not count. mlstm_pallas runs in
one jitted loop of --steps steps that updates its states in place, a peer in torch as a CUDA graph
of as many launches. The outputs after a few steps are checked against the float64 recurrence, on
the first, a middle and the last head. A wrong output is not timed.

With --ring=8,16 a backend also runs mlstm_ring_step with rings of these lengths, and with
--tokens=1,4 it does so for calls of so many tokens, all of which are accepted. ms/step is the time
of a call.

With --layers=1,32 there are rows in which a step updates the states of so many layers in turns, as
those of a model do: states of one layer may stay in the L2, those of many do not. ms/step is the
time per layer.

With --slots=192 a backend has two more rows, whose states are at random slots of pools of 192: the
step with slots ("slots"), and a gather of the states, the step and a scatter ("gathered").

Bytes are those of the states, read once and written once, 2 B NH (DHQK DHV + DHQK + 1) itemsize,
whatever an implementation moves. "copy" is the rate at which a loop updates 512 MiB of the device's
memory in place, bytes read and written, measured in the same run; at that rate the states allow the
tokens per second of the "memory limit". A token is a step of one sequence in one layer. States that
fit in the L2 can exceed the limit. Exit code 1 when an output is wrong or mlstm_pallas fails, 2
when the request makes no sense, 130 after Ctrl-C.
"""

import functools
import itertools
import os
import statistics
from typing import NamedTuple

import command
import jax
import jax.numpy as jnp
import numpy as np
import peers
import reporting
import runner
import shapes
from calls import VARIANTS
from command import RequestError
from jax import lax
from peers import take_heads, torch_tensor
from runner import UnsupportedError

from mlstm_pallas import mlstm_recurrent_step, mlstm_ring_states, mlstm_ring_step, reference

BACKENDS = ("triton", "interpret", "xla")  # a step has no Mosaic GPU kernel
LOOPS = ("scan", "while")
POOLED = ("slots", "gathered")

CHECKED_STEPS = 4
# Relative norms of the error of h, by the coarser of the dtypes: sums of a few hundred float32
# products, or values rounded to 16 bits in each of a few steps.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2 / 8, "bfloat16": 1e-2}
COPIED_BYTES, COPIES = {"gpu": 2**29, "cpu": 2**24}, 8


class Token(NamedTuple):
    q: jax.Array  # (B, NH, DHQK)
    k: jax.Array
    v: jax.Array  # (B, NH, DHV)
    i: jax.Array  # (B, NH)
    f: jax.Array


def state_bytes(shape, dtype):
    per_head = shape.DHQK * shape.DHV + shape.DHQK + 1
    return shape.B * shape.NH * per_head * jnp.dtype(dtype).itemsize


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def random_inputs(shape, dtype, state_dtype):
    """n has a positive mean, as q and k have; m is 0, as any gate has it."""
    B, NH, _, K, V = shape
    *token, _ = peers.random_inputs(jax.random.key(0), shape._replace(S=1), dtype)
    c, n = peers.normals(jax.random.key(1), (B, NH, K, V), (B, NH, K))
    states = c.astype(state_dtype), (n + 0.5).astype(state_dtype), jnp.zeros((B, NH))
    return Token(*(x[:, :, 0] for x in token)), states


class MlstmPallas(peers.JaxImplementation):
    """A backend of mlstm_recurrent_step or, with a ring, of mlstm_ring_step, as a row asks."""

    def __init__(self, row, rows):
        """rows: of the pools, if there are pools."""
        options = dict(backend=row["impl"], **VARIANTS[row["variant"]])
        self.plain_step = functools.partial(mlstm_recurrent_step, **options)
        self.ring_step = functools.partial(mlstm_ring_step, **options)
        self.settings, self.ring, self.rows = row, row["ring"], rows

    def step(self, *token_and_states, slots=None):
        if not self.ring:
            return self.plain_step(*token_and_states, slots=slots)
        *token, states = token_and_states
        token = [jnp.repeat(x[:, :, None], self.settings["tokens"], axis=2) for x in token]
        h, states = self.ring_step(*token, states, slots=slots)
        return h[:, :, -1], (states,)

    def build(self, token, states, steps):
        """A call runs the steps from the states of the call before and returns the last h.

        All layers have the same token and begin with the same states.
        """
        rows = np.random.default_rng(0).permutation(np.arange(self.rows, dtype="int32"))
        slots, pooled = rows[: len(token.q)], self.settings["pooled"]

        def run(token, states, steps):
            def of_layer(states):
                if pooled != "gathered":
                    return self.step(*token, *states, slots=slots if pooled else None)
                h, after = self.step(*token, *(pool[slots] for pool in states))
                pools = zip(states, after, strict=True)
                return h, tuple(pool.at[slots].set(x, unique_indices=True) for pool, x in pools)

            def body(_, carry):
                outputs, after = zip(*map(of_layer, carry[1]), strict=True)
                return outputs[-1], list(after)

            return lax.fori_loop(0, steps, body, (jnp.zeros_like(token.v), states))

        # A fori_loop is a scan, but with a traced number of steps a while_loop.
        run = jax.jit(
            run, donate_argnums=1, static_argnums=2 if self.settings["loop"] == "scan" else ()
        )
        current = jax.tree.map(jnp.copy, states)
        if self.ring:
            current = (mlstm_ring_states(*current, dtype=token.k.dtype, length=self.ring),)
        if pooled:
            pools = jax.tree.map(lambda x: jnp.zeros((self.rows, *x.shape[1:]), x.dtype), current)
            current = jax.tree.map(lambda x, y: x.at[slots].set(y), pools, current)
        current = [jax.tree.map(jnp.copy, current) for _ in range(self.settings["layers"])]

        def call():
            nonlocal current
            h, current = run(token, current, steps)
            return [h]

        return call


class MlstmKernelsStep(peers.TorchPeer):
    """mlstm_kernels (NX-AI), its Triton step kernel.

    The steps of a layer go to and fro between two sets of states; in place they share C, but not n
    and m, which every CTA of a head reads and one of them writes.
    """

    module_name = "mlstm_kernels.torch.recurrent"
    in_place = False

    def __init__(self, layers=1):
        super().__init__()
        self.layers = layers

    def build(self, token, states, steps):
        torch = self.torch

        def tensor(x):
            return torch_tensor(torch, x if x.ndim > 2 else x[..., None], x.dtype)

        token, first = tuple(map(tensor, token)), tuple(map(tensor, states))

        def two_sets():
            old, new = (tuple(map(torch.empty_like, first)) for _ in range(2))
            return old, (old[0], *new[1:]) if self.in_place else new

        layers = [two_sets() for _ in range(self.layers)]

        def run(count):
            for old, _ in layers:
                for x, y in zip(old, first, strict=True):
                    x.copy_(y)
            for t, sets in itertools.product(range(count), layers):
                old, into = sets[t % 2], sets[(t + 1) % 2]
                new = dict(zip(("matC_new", "vecN_new", "scaM_new"), into, strict=True))
                options = dict(eps=1e-6, dtype_state=first[0].dtype, **new)
                h, _ = self.module.mlstm_recurrent_step__triton(*token, *old, **options)
            return h

        run(1)  # compiles: a graph can only record
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            h = run(steps)

        def call():
            graph.replay()
            return [h]

        return call


class MlstmKernelsStepInPlace(MlstmKernelsStep):
    in_place = True


PEERS = {
    "mlstm_kernels_triton_step": MlstmKernelsStep,
    "mlstm_kernels_triton_step_in_place": MlstmKernelsStepInPlace,
}


def expected_h(token, states, index, variant, steps):
    """h of the heads in index after so many steps with the same token, float64."""
    token, states = take_heads((token, states), index)

    @jax.jit
    def last_h(token, states):
        x = (jnp.repeat(x[None, :, None], steps, axis=2) for x in token)
        states = (x[None] for x in states)
        h, _ = reference.recurrence(*x, *states, **VARIANTS[variant])
        return h[0, :, -1]

    with jax.enable_x64(True):
        return np.asarray(last_h(token, states))


def copy_rate(repeats):
    """Bytes/s that a loop reads and writes which updates an array on the device in place."""
    size = COPIED_BYTES.get(jax.default_backend(), COPIED_BYTES["gpu"])

    # Copies into new arrays would measure CUDA graphs, where XLA_FLAGS ask for them.
    @functools.partial(jax.jit, donate_argnums=0)
    def update(x):
        return lax.fori_loop(0, COPIES, lambda _, x: x + 1, x)

    current = update(jnp.ones(size // 4, jnp.int32))

    def call():
        nonlocal current
        current = update(current)
        return current

    times = runner.time_calls(call, jax.block_until_ready, repeats)
    return COPIES * 2 * size / statistics.median(times)


def measure(row, options):
    """Fills the row; does not time a wrong output."""
    shape, variant = row["shape"], options.variant
    dtypes = row["dtype"], row["state_dtype"]
    if row["impl"] in BACKENDS:
        impl = MlstmPallas(row, options.slots or 0)
    elif variant != "exp":
        raise UnsupportedError(f"it has no variant {variant}")
    else:
        impl = PEERS[row["impl"]](row["layers"])
    token, states = random_inputs(shape, *dtypes)
    index = np.unique([0, shape.B * shape.NH // 2, shape.B * shape.NH - 1])
    expected = expected_h(token, states, index, variant, CHECKED_STEPS * row["tokens"])
    _, outputs = runner.first_call(row, impl, token, states, CHECKED_STEPS)
    [h] = impl.heads(outputs, index)
    limits = dict(h=max(TOLERANCES[dtype] for dtype in dtypes))
    runner.check(row, dict(h=runner.relative_error(h, expected)), limits)
    call = impl.build(token, states, row["steps"])
    times = runner.time_calls(call, impl.synchronise, options.repeats)
    steps = row["steps"] * row["layers"]
    seconds = runner.store_times(row, [x / steps for x in times])
    row["gbps"] = 2 * row["state_mib"] * 2**20 / seconds / 1e9
    row["copy_pct"] = 100 * row["gbps"] / row["copy_gbps"]
    row["tokens/s"] = shape.B * row["tokens"] / seconds


def measured_rows(options):
    """A row for each shape, dtype, dtype of the states, implementation and loop."""
    gpu = runner.on_gpu()
    impls = options.impl or (["triton", *PEERS] if gpu else ["xla"])
    runner.check_gpu(impls)
    named = shapes.named(options.shape, "decode" if gpu else "tiny")
    if options.slots and (most := max(shape.B for shape in named.values())) > options.slots:
        raise RequestError(f"--slots={options.slots}, expected at least {most} rows")
    copy_gbps = copy_rate(options.repeats) / 1e9
    print(f"\ncopy: {copy_gbps:.4g} GB/s")
    steps = options.steps or (1000 if gpu else 10)
    common = dict(direction="step", steps=steps, variant=options.variant, copy_gbps=copy_gbps)
    cases = itertools.product(named.items(), options.dtype, options.state_dtype, impls)
    for (name, whole), dtype, state_dtype, impl in cases:
        shape, keys = whole._replace(S=1), common | dict(dtype=dtype, state_dtype=state_dtype)
        keys["state_mib"] = state_bytes(shape, state_dtype) / 2**20
        loops = options.loop if impl in BACKENDS else ("graph",)
        pooled, rings = ("",), [(0, 1)]
        if impl in BACKENDS:
            pooled = ("", *POOLED) if options.slots else pooled
            rings += itertools.product(options.ring, options.tokens)
        settings = itertools.product(options.layers, loops, pooled, rings)
        for keys["layers"], loop, keys["pooled"], (ring, tokens) in settings:
            if ring and keys["pooled"] == "gathered":
                continue
            keys |= dict(ring=ring, tokens=tokens)
            row = runner.new_row(options, name, shape, impl, loop=loop, **keys)
            yield runner.attempt(row, impl in BACKENDS, measure, options)


def plot(rows, path):
    """Tokens per second against the batch, beside what the bandwidth of a copy allows."""
    rows = [row for row in rows if row.get("tokens/s")]

    def limit(row):
        return row | {"loop": "limit", "tokens/s": 100 * row["tokens/s"] / row["copy_pct"]}

    def line(row):
        ring = row.get("ring") and f"ring of {row['ring']}, {row['tokens']} per call"
        layers = row.get("layers", 1) > 1 and f"{row['layers']} layers"
        names = row["impl"], row["loop"], row.get("pooled"), ring, layers
        return "memory limit" if row["loop"] == "limit" else ", ".join(filter(None, names))

    def panel(row):
        heads = "{1} heads of {3}/{4}".format(*row["shape"])
        return f"{heads}, {row['state_dtype']} states"

    both = [*rows, *map(limit, rows)]
    reporting.plot(
        both, path, line, lambda row: row["shape"].B, panel, keys=("tokens/s",), xlabel="batch"
    )


COLUMNS = reporting.columns(
    """
shape      name
impl       impl
layers     layers
loop       loop
pooled     pooled
ring       ring
T          tokens
dtype      dtype
states     state_dtype
state MiB  state_mib  .4g
ms/step    ms         .5f
spread %   spread     .1%
GB/s       gbps       .4g
copy %     copy_pct   .0f
tokens/s   tokens/s   .4g
error      error      .1e
note       note
""",
)


def define_flags(define):
    define.names("impl", [], (*BACKENDS, *PEERS), "none: triton and peers, without a GPU xla.")
    define.names("state_dtype", ["float32"], TOLERANCES, "the dtype of C and n; m is float32.")
    define.items("layers", "1", int, "Whose states are updated in turns.")
    define.integer("slots", None, "Rows of pools; none: no pools.", lower_bound=1)
    define.items("ring", [], int, "Lengths of rings, beside steps without.")
    define.items("tokens", "1", int, "Tokens per call with a ring.")
    define.integer("steps", None, "Steps per loop; none: 1000, without a GPU 10.", lower_bound=1)
    define.names(
        "loop", ["scan"], LOOPS, "the loop around mlstm_pallas, lax.scan or lax.while_loop."
    )
    define.enum("variant", "exp", ["exp", "sigmoid", "unnormalised"], "What mlstm_pallas computes.")
    define.shared("shape", "dtype", "repeats", "commit", "from_jsonl", "jsonl", "plot")


run = functools.partial(runner.run, measured_rows, COLUMNS, plot=plot)


if __name__ == "__main__":
    # A peer in torch needs memory on the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command.main(define_flags, run)
