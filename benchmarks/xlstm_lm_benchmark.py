r"""Times a training step of an xLSTM language model, with mlstm_pallas and with mlstm_kernels.

    python benchmarks/xlstm_lm_benchmark.py                               # 1.3b on a GPU, else tiny
    python benchmarks/xlstm_lm_benchmark.py --impl=triton,mosaic_gpu --jsonl=lm.jsonl
    python benchmarks/xlstm_lm_benchmark.py --batch=4 --sequence=16384

The model has the blocks of xLSTM-7B (arXiv:2503.13427): RMS norm, mLSTM layer, RMS norm, gated MLP,
each of the two beside a residual connection. The mLSTM layer projects to q, k, v, an output gate
and the pre-activations of the input and forget gates, 15 tanh(x / 15). One RMS norm per head, the
output gate and a projection follow. Logits are 30 tanh(x / 30). The embedding is not tied.

    1.3b    24 blocks of width 2048, 4 heads of 256/512 as in xLSTM-7B, MLP of width 5504 (8/3 of
            the width, rounded up to 64), 32,000 tokens: 1,345,865,920 parameters

Parameters, gradients and AdamW's moments are float32, products and activations bfloat16. The blocks
are one scan and rematerialised. The batch of random tokens is the same in each step, so that the
loss falls. The state is donated.

FLOPs of the model are 6 for each token and parameter of a matrix product, and three times the
forward products of the mLSTM in chunks of 128. Neither the embedding nor what is computed again
counts. MFU is the share of the data sheet's dense bfloat16 rate, "of measured" that of the rate in
roofline.py. Memory is what the compiled step needs: its arguments, which it updates in place, and
temporary arrays.

Every implementation starts from the same parameters and tokens. Its losses and its first gradient
norm are compared with the first implementation's. Exit code 1 when they differ or mlstm_pallas
fails, 2 when the request makes no sense, 130 after Ctrl-C.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import command
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import peers
import reporting
import roofline
import runner
from shapes import Shape

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.problem.validation import BACKENDS

DTYPE = "bfloat16"
GATE_CAP, LOGIT_CAP = 15.0, 30.0
# Dense bfloat16 FLOP/s of the data sheet, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12}
# Differences of losses are shares of the first loss, since later ones come close to 0. The first
# loss differs by rounding alone. Adam's first updates have the size of the learning rate whatever
# the gradient's size is, so the losses of later steps also differ by updates of noise.
FIRST_TOLERANCE, LATER_TOLERANCE, GRADIENT_NORM_TOLERANCE = 1e-3, 1e-2, 2e-2

MLSTM = Callable[..., jax.Array]  # q, k, v, i, f as (B, S, NH, ...) -> h (B, S, NH, DHV)


@dataclasses.dataclass(frozen=True)
class Model:
    """Dimensions; q and k have heads half as wide as v."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    vocabulary: int

    @property
    def qk_width(self):
        return self.width // 2

    def mlstm_shape(self, batch, sequence):
        """The shape of the mLSTM in one layer."""
        heads = self.qk_width // self.heads, self.width // self.heads
        return Shape(batch, self.heads, sequence, *heads)

    def parameters(self):
        """The number of parameters, and of those in matrix products."""
        params = jax.eval_shape(lambda: initial_state(self)).params
        sizes = [(path[-1].key, x.size) for path, x in jax.tree.leaves_with_path(params)]
        return sum(x for _, x in sizes), sum(x for name, x in sizes if name == "kernel")

    def flops(self, batch, sequence):
        """FLOPs of a training step."""
        _, of_products = self.parameters()
        mlstm = roofline.forward(self.mlstm_shape(batch, sequence), jnp.dtype(DTYPE).itemsize).flops
        return 6 * of_products * batch * sequence + 3 * self.layers * mlstm


MODELS = {
    "1.3b": Model(layers=24, width=2048, heads=4, mlp_width=5504, vocabulary=32000),
    "tiny": Model(layers=2, width=64, heads=2, mlp_width=192, vocabulary=128),
}


# ---------------------------------------------------------------- the model

dense = functools.partial(nn.Dense, use_bias=False, dtype=DTYPE)
norm = functools.partial(nn.RMSNorm, dtype=DTYPE)


def residual_dense(model):
    """A projection onto the residual stream, smaller the more layers add to it."""
    init = nn.initializers.variance_scaling(0.5 / model.layers, "fan_in", "normal")
    return dense(model.width, kernel_init=init)


def capped(x, cap):
    """x in float32, smoothly within +-cap."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap)


def forget_bias(key, shape, dtype):
    """From short to long memory."""
    return jnp.linspace(3.0, 6.0, *shape, dtype=dtype)


class MLSTMLayer(nn.Module):
    model: Model
    mlstm: MLSTM

    @nn.compact
    def __call__(self, x):
        """x (B, S, width) -> the same."""
        model = self.model

        def heads(width, name):
            return dense(width, name=name)(x).reshape(*x.shape[:2], model.heads, -1)

        def gate(bias, name):
            options = dict(use_bias=True, bias_init=bias, kernel_init=nn.initializers.normal(0.02))
            return capped(dense(model.heads, name=name, **options)(x), GATE_CAP)

        q, k = heads(model.qk_width, "query"), heads(model.qk_width, "key")
        v = heads(model.width, "value")
        # Almost closed, as trainings of xLSTM start. With open input gates n . q may cancel, and a
        # few such steps make up most of a gradient norm.
        i = gate(nn.initializers.constant(-10.0), "input_gate")
        h = self.mlstm(q, k, v, i, gate(forget_bias, "forget_gate"))
        # One mean per head, one scale per channel.
        h = norm(reduction_axes=-1, feature_axes=(-2, -1), name="head_norm")(h).reshape(x.shape)
        return residual_dense(model)(h * nn.sigmoid(dense(model.width, name="output_gate")(x)))


class GatedMLP(nn.Module):
    model: Model

    @nn.compact
    def __call__(self, x):
        """x (B, S, width) -> the same."""
        gate, up = dense(self.model.mlp_width), dense(self.model.mlp_width)
        return residual_dense(self.model)(nn.silu(gate(x)) * up(x))


class Block(nn.Module):
    model: Model
    mlstm: MLSTM

    @nn.compact
    def __call__(self, x):
        """x (B, S, width) -> the same, as a carry of the scan."""
        x = x + MLSTMLayer(self.model, self.mlstm)(norm()(x))
        return x + GatedMLP(self.model)(norm()(x)), None


class LanguageModel(nn.Module):
    model: Model
    mlstm: MLSTM

    @nn.compact
    def __call__(self, tokens):
        """tokens (B, S) -> float32 logits (B, S, vocabulary)."""
        options = dict(embedding_init=nn.initializers.normal(0.02), dtype=DTYPE)
        x = nn.Embed(self.model.vocabulary, self.model.width, **options)(tokens)
        # In a scan the compiler cannot merge what is computed again with what was computed before.
        block = nn.remat(Block, prevent_cse=False)
        axes = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        blocks = nn.scan(block, length=self.model.layers, **axes)
        x, _ = blocks(self.model, self.mlstm, name="blocks")(x)
        return capped(dense(self.model.vocabulary, name="unembedding")(norm()(x)), LOGIT_CAP)


# ---------------------------------------------------------------- implementations of the mLSTM


def ours(backend):
    """The states of one block at a time are kept for the backward pass."""
    options = dict(backend=backend, recompute_states_in_bw=False)
    return functools.partial(mlstm_chunkwise, layout="BTNH", **options)


PEERS = {"mlstm_kernels_limit_chunk": peers.limit_chunk, "jla": peers.jla}


# ---------------------------------------------------------------- the training step


class State(NamedTuple):
    params: Any
    optimizer: Any


class Metrics(NamedTuple):
    loss: jax.Array
    gradient_norm: jax.Array


ADAMW = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


@functools.partial(jax.jit, static_argnums=0)
def initial_state(model):
    """The same for all implementations; a short sequence on backend "xla" tells the shapes."""
    network = LanguageModel(model, ours("xla"))
    params = network.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return State(params, OPTIMIZER.init(params))


def loss_of(network, params, tokens):
    """Mean nats of every token (B, S + 1) but the first, given those before it."""
    logits = network.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(network, state, tokens):
    """One update; the metrics are those before it."""
    loss, gradients = jax.value_and_grad(loss_of, 1)(network, state.params, tokens)
    updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.params)
    metrics = Metrics(loss, optax.tree.norm(gradients))
    return State(optax.apply_updates(state.params, updates), optimizer), metrics


# ---------------------------------------------------------------- measuring


def measure(row, mlstm, model, first, options):
    """Fills the row and compares it with the first one, {} if there is none."""
    B, _, S, *_ = row["shape"]
    tokens = jax.random.randint(jax.random.key(1), (B, S + 1), 0, model.vocabulary)
    network = LanguageModel(model, mlstm)
    state = jax.block_until_ready(initial_state(model))
    start = time.perf_counter()
    step = jax.jit(functools.partial(train_step, network), donate_argnums=0)
    compiled = step.lower(state, tokens).compile()
    times, losses, norms = [], [], []
    for _ in range(options.warmup + options.steps):
        state, metrics = jax.block_until_ready(compiled(state, tokens))
        times.append(time.perf_counter() - start)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.gradient_norm))
        start = time.perf_counter()
    seconds = runner.store_times(row, times[options.warmup :])
    memory = compiled.memory_analysis()
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    peak = roofline.of_device(PEAK_FLOPS, row["device"])
    measured, _ = roofline.device_rates(row["device"], DTYPE)
    row |= dict(
        first_call_s=times[0],
        losses=losses,
        gradient_norms=norms,
        tokens_per_s=B * S / seconds,
        peak_mib=(arrays - memory.alias_size_in_bytes) / 2**20,
        mfu_pct=peak and 100 * row["flops"] / seconds / peak,
        measured_pct=measured and 100 * row["flops"] / seconds / measured,
    )
    if row["impl"] in PEERS:
        row["versions"] |= peers.jax_versions(row["impl"])
    compare(row, first or row)


def compare(row, first):
    """Raises WrongOutputError where two rows differ; the row keeps its time."""
    pairs, scale = zip(row["losses"], first["losses"], strict=True), first["losses"][0]
    errors = {f"loss {n}": abs(x - y) / scale for n, (x, y) in enumerate(pairs)}
    limits = dict.fromkeys(errors, LATER_TOLERANCE) | {"loss 0": FIRST_TOLERANCE}
    norm, first_norm = row["gradient_norms"][0], first["gradient_norms"][0]
    errors["gradient norm"] = abs(norm / first_norm - 1)
    runner.check(row, errors, limits | {"gradient norm": GRADIENT_NORM_TOLERANCE})


def measured_rows(options):
    """A row for each implementation, and before them a line about the model."""
    gpu = runner.on_gpu()
    impls = options.impl or (["triton", "mosaic_gpu", *PEERS] if gpu else ["xla"])
    runner.check_gpu(impls)
    name = options.model or ("1.3b" if gpu else "tiny")
    model = MODELS[name]
    batch, sequence = options.batch or (8 if gpu else 2), options.sequence or (8192 if gpu else 64)
    shape, flops = model.mlstm_shape(batch, sequence), model.flops(batch, sequence)
    parameters, _ = model.parameters()
    keys = dict(parameters=parameters, flops=flops, model=dataclasses.asdict(model))
    keys |= dict(direction="train", dtype=DTYPE)
    step = f"{batch * sequence:,} tokens and {flops:.3e} FLOP per step"
    print(f"{name}: {parameters:,} parameters, {step}", flush=True)
    first = {}
    for impl in impls:
        row = runner.new_row(options, name, shape, impl, **keys)
        mlstm = PEERS.get(impl) or ours(impl)
        yield runner.attempt(row, impl in BACKENDS, measure, mlstm, model, first, options)
        first = first or (row if row["status"] == "ok" else {})


# ---------------------------------------------------------------- the command


COLUMNS = reporting.columns(
    """
model          name
tokens         tokens
impl           impl
ms             ms            .1f
spread %       spread        .1%
tokens/s       tokens_per_s  .0f
MFU %          mfu_pct       .1f
of measured %  measured_pct  .1f
peak MiB       peak_mib      .0f
first call s   first_call_s  .1f
error          error         .1e
note           note
""",
    tokens=lambda row: f"{row['shape'].B} x {row['shape'].S}",
)


def define_flags(define):
    warmup = "Steps that are not timed, the first call among them."
    default = "none: triton, mosaic_gpu and peers, without a GPU xla."
    define.names("impl", [], (*BACKENDS, *PEERS), f"implementation of the mLSTM; {default}")
    define.enum("model", None, list(MODELS), "None: 1.3b, without a GPU tiny.")
    define.integer("batch", None, "Sequences; none: 8, without a GPU 2.", lower_bound=1)
    define.integer("sequence", None, "Steps; none: 8192, without a GPU 64.", lower_bound=1)
    define.integer("warmup", 2, warmup, lower_bound=1)
    define.integer("steps", 5, "Steps that are timed; the median counts.", lower_bound=1)
    define.shared("commit", "from_jsonl", "jsonl")


run = functools.partial(runner.run, measured_rows, COLUMNS)


if __name__ == "__main__":
    command.main(define_flags, run)
