r"""Times the prefill of packed prompts: the forward pass of mlstm_pallas.

    python benchmarks/prefill_benchmark.py        # p64 and r8 on a GPU, a tiny shape without
    python benchmarks/prefill_benchmark.py --backend=mosaic_gpu,triton --jsonl=prefill.jsonl
    python benchmarks/prefill_benchmark.py --shape=r8 --segments=64 --odd
    python benchmarks/prefill_benchmark.py --from_jsonl=prefill.jsonl --plot=prefill.png

A row of S steps has N prompts. The variants are

    plain     segment_ids alone, without states
    states    with the last states of each prompt (segment_lengths, return_last_states=True)
    initial   the same, where each prompt starts from initial states of its own
    lengths   as many prompts in a padded batch, each in a row of S // N steps of which it fills
              45 % on average (sequence_lengths), with their last states

Outputs are checked against plain jnp in float32. A wrong output is not timed. Tokens are the steps
of prompts in one layer. TFLOP/s and TB/s count the FLOPs and bytes that these need (roofline.py),
and the states read and written, which are "state MiB". Exit code 1 when an output is wrong or
mlstm_pallas fails, 2 when the request makes no sense, 130 after Ctrl-C.
"""

import functools
import itertools

import command
import jax
import kernel_benchmark
import numpy as np
import peers
import roofline
import runner
import shapes
import step_benchmark

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.problem.validation import BACKENDS

VARIANTS = {"plain": 0, "states": 1, "initial": 2, "lengths": 1}  # how often states are moved


class Prefill(peers.JaxImplementation):
    def computation(self, arrays, options):
        # Ids are arguments, because XLA may evaluate in advance what depends on constants.
        return lambda x: mlstm_chunkwise(**x, **options), [arrays]


def measure(row, odd, repeats):
    """Fills the row; does not time a wrong output."""
    shape, N, dtype, moved = row["shape"], row["segments"], row["dtype"], VARIANTS[row["variant"]]
    (B, _, S, *_), random = shape, np.random.default_rng(0)
    prompts, options = shape._replace(B=B * N, S=S // N), dict(return_last_states=moved > 0)
    row["tokens"] = B * S
    if row["variant"] == "lengths":
        shape = prompts
        x = dict(
            sequence_lengths=random.permutation(np.linspace(1, 0.9 * S / N, B * N).astype(int))
        )
        row["tokens"] = int(x["sequence_lengths"].sum())
    else:
        starts = random.choice(S - 1, N - 1, replace=False) + 1 if odd else np.arange(1, N) * S // N
        lengths = np.diff(np.sort(starts), prepend=0, append=S)
        ids = np.repeat(np.arange(N), lengths)
        named = dict(segment_lengths=lengths) if moved else dict(segment_ids=ids)
        x = {name: np.tile(y, (B, 1)) for name, y in named.items()}
    if moved > 1:
        _, states = step_benchmark.random_inputs(prompts, dtype, "float32")
        named = zip(("c_initial", "n_initial", "m_initial"), states, strict=True)
        x |= {name: y.reshape(B, N, *y.shape[1:]) for name, y in named}
    impl, tensors = Prefill(), peers.random_inputs(jax.random.key(0), shape, dtype)._asdict()
    del tensors["dh"]
    plain = {name: y.astype("float32") for name, y in tensors.items()}
    expected = impl.build(plain | x, options | dict(backend="xla"))()
    arrays = jax.device_put(tensors | x)
    call, outputs = runner.first_call(row, impl, arrays, options | dict(backend=row["impl"]))
    compared = map(runner.relative_error, *map(jax.tree.leaves, (outputs, expected)))
    errors = dict(zip("hcnm", compared, strict=False))
    runner.check(row, errors, dict.fromkeys(errors, kernel_benchmark.TOLERANCES[dtype][0]))
    del outputs, expected, plain
    seconds = runner.measure(row, impl, call, repeats)
    state_bytes = moved * step_benchmark.state_bytes(prompts, "float32")
    cost = roofline.forward(shape._replace(B=1, S=row["tokens"]), tensors["q"].itemsize)
    row |= {"state_mib": state_bytes / 2**20, "tokens/s": row["tokens"] / seconds}
    row["tflops"] = cost.flops / seconds / 1e12
    row["tbps"] = (cost.bytes + state_bytes) / seconds / 1e12


def measured_rows(options):
    """A row for each shape, dtype, variant and backend."""
    gpu = runner.on_gpu()
    backends = options.backend or ["triton" if gpu else "xla"]
    runner.check_gpu(backends, "backend")
    named = shapes.named(options.shape, *(("p64", "r8") if gpu else ("tiny",)))
    cases = itertools.product(named.items(), options.dtype, options.variant, backends)
    for (name, shape), dtype, variant, impl in cases:
        keys = dict(dtype=dtype, variant=variant, odd=options.odd, direction="fwd", stage="")
        keys["segments"] = options.segments or max(shape.S // 1024, 4)
        row = runner.new_row(options, name, shape, impl, **keys)
        yield runner.attempt(row, True, measure, options.odd, options.repeats)


KEYS = ("segments", "odd", "state_mib", "tokens/s")
COLUMNS = {key: (key, ".4g") for key in KEYS} | kernel_benchmark.COLUMNS


def define_flags(define):
    define.names("backend", [], BACKENDS, "none: triton, without a GPU xla.")
    define.names("variant", VARIANTS, VARIANTS, "see above.")
    define.integer("segments", None, "Per row; none: of 1,024 steps, at least 4.", lower_bound=1)
    define.boolean("odd", False, "Segments of random lengths instead of equal ones.")
    define.shared("shape", "dtype", "repeats", "commit", "from_jsonl", "jsonl", "plot")


run = functools.partial(runner.run, measured_rows, COLUMNS, plot=kernel_benchmark.plot)


if __name__ == "__main__":
    command.main(define_flags, run)
