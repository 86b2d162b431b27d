r"""Times a training step of an xLSTM language model, with mlstm_pallas and with mlstm_kernels.

    python benchmarks/xlstm_lm_benchmark.py                               # 1.3b on a GPU, else tiny
    python benchmarks/xlstm_lm_benchmark.py --impl=triton,mosaic_gpu --jsonl=lm.jsonl
    python benchmarks/xlstm_lm_benchmark.py --batch=4 --sequence=16384
    python benchmarks/xlstm_lm_benchmark.py --mesh=one,data,fsdp --jsonl=lm_gpus.jsonl

The model has the blocks of xLSTM-7B (arXiv:2503.13427): RMS norm, mLSTM layer, RMS norm, gated MLP,
each of the two beside a residual connection. The mLSTM layer projects to q, k, v, an output gate
and the pre-activations of the input and forget gates, 15 tanh(x / 15). One RMS norm per head, the
output gate and a projection follow. Logits are 30 tanh(x / 30). The embedding is not tied.

    1.3b    24 blocks of width 2048, 4 heads of 256/512 as in xLSTM-7B, MLP of width 5504 (8/3 of
            the width, rounded up to 64), 32,000 tokens: 1,345,865,920 parameters

Parameters, gradients and AdamW's moments are float32, products and activations bfloat16. The batch
of random tokens is the same in each step, so that the loss falls. The state is donated.

Memory is traded for time by a recipe. "parts" means that the logits of an eighth of the tokens are
in memory at a time, and that matrices are cast to bfloat16 once per step:

    inputs               the backward pass finds the input of each block, and computes what is in it
                         again; the blocks are one scan
    inputs_in_parts      the same with parts
    products             results of products and of the mLSTM are kept; parts; one scan
    products_unrolled    the same, with one block after the other in the program
    products_by_block    the same, but the host calls two programs for one block after the other,
                         with half of the batch at a time; it sums the gradients in float32

--programs=FILE keeps the programs of products_by_block, with which the next process starts.

A mesh spreads the step over devices, each of which has --batch sequences or, where sequences are
split, --sequence steps of them (lm_mesh.py):

    one                  no mesh: one device
    data                 each device has all parameters
    fsdp                 parameters, gradients and moments are sharded over all devices
    sequence             a sequence is split over devices; each has all parameters
    fsdp_sequence        the same, with sharded parameters

FLOPs of the model are 6 for each token and parameter of a matrix product, and three times the
forward products of the mLSTM in chunks of 128. Neither the embedding nor what is computed again
counts. MFU is the share of the data sheet's dense bfloat16 rate, "of measured" that of the rate in
roofline.py. Memory is what the compiled step needs: its arguments, which it updates in place, and
temporary arrays; of several programs, the most that is in use during a step. On a GPU one more step
is profiled: the milliseconds of matrix products, of the mLSTM, of elementwise kernels with
reductions among them, of copies and of collectives, how long nothing but collectives runs
("exposed"), and how long nothing does ("idle"). All of these, the MFU and the memory are per
device. Efficiency is the rate of tokens per device, relative to the row of one device with as many
tokens per device.

Every row starts from the same parameters. Its first three losses and its first gradient norm are
compared with those of the first row of the same shape, which has the same tokens. Exit code 1 when
they differ or mlstm_pallas fails, 2 when the request makes no sense, 130 after Ctrl-C.
"""

import dataclasses
import functools
import itertools
import math
import operator
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import command
import flax.linen as nn
import jax
import jax.numpy as jnp
import lm_mesh
import optax
import peers
import profiles
import reporting
import roofline
import runner
import step_programs
from command import RequestError
from jax.ad_checkpoint import checkpoint_name
from lm_mesh import OneDevice
from shapes import Shape

import mlstm_pallas
from mlstm_pallas.problem.validation import BACKENDS

DTYPE = "bfloat16"
GATE_CAP, LOGIT_CAP = 15.0, 30.0
# Dense bfloat16 FLOP/s of the data sheet, by a part of the device's name.
PEAK_FLOPS = {"H200": 989e12}
# Differences of losses are shares of the first loss, since later ones come close to 0. The first
# loss differs by rounding alone. Adam's first updates have the size of the learning rate whatever
# the gradient's size is, so the losses of later steps also differ by updates of noise: among 15
# rows of 1.3b (commits 810c485 to c40828d) the losses 0 to 4 by up to 1.4e-4, 8.2e-4, 2.8e-3,
# 8.4e-3 and 2.1e-2, which no longer tells right from wrong.
FIRST_TOLERANCE, LATER_TOLERANCE, GRADIENT_NORM_TOLERANCE = 1e-3, 1e-2, 2e-2
COMPARED_LOSSES = 3  # later ones have to be finite


class Recipe(NamedTuple):
    """How a step is written: each field changes a few lines of Network, which a model can have.

    keep: names of results that the backward pass takes from the forward pass; it computes the
      others again from the input of their block.
    loss_parts: parts of the tokens whose logits are in memory one after the other, which give their
      gradients in the forward pass; 1 for all at once.
    scan: the blocks are one scan, whose results are stacked, and not one after the other in the
      program.
    cast_once: the matrices become bfloat16 before the blocks and not in each of them.
    by_block: the step is ``ByBlock``, with as many parts of a batch.
    """

    keep: tuple[str, ...] = ()
    loss_parts: int = 1
    scan: bool = True
    cast_once: bool = False
    by_block: int = 0


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
        of_products = sum(x for name, x in sizes if name in ("kernel", "unembedding"))
        return sum(x for _, x in sizes), of_products

    def flops(self, batch, sequence):
        """FLOPs of a training step."""
        _, of_products = self.parameters()
        mlstm = roofline.forward(self.mlstm_shape(batch, sequence), jnp.dtype(DTYPE).itemsize).flops
        return 6 * of_products * batch * sequence + 3 * self.layers * mlstm


MODELS = {
    "1.3b": Model(layers=24, width=2048, heads=4, mlp_width=5504, vocabulary=32000),
    "tiny": Model(layers=2, width=64, heads=2, mlp_width=192, vocabulary=128),
}


OF_MLSTM = "mlstm_h", "mlstm_n", "mlstm_m", "mlstm_z"
# Of these the backward pass needs nothing but the elementwise parts of a block.
PRODUCTS = (*OF_MLSTM, "query", "key", "value", "gates", "output_gate")
PRODUCTS += "residual", "gate", "up"

RECIPES = {
    "inputs": Recipe(),
    "inputs_in_parts": Recipe(loss_parts=8, cast_once=True),
    "products": Recipe(PRODUCTS, 8, cast_once=True),
    "products_unrolled": Recipe(PRODUCTS, 8, scan=False, cast_once=True),
    "products_by_block": Recipe(PRODUCTS, 8, scan=False, cast_once=True, by_block=2),
}


# ---------------------------------------------------------------- the model

dense = functools.partial(nn.Dense, use_bias=False, dtype=DTYPE)
norm = functools.partial(nn.RMSNorm, dtype=DTYPE)


def product(width, name, **options):
    """A projection whose result has the name of its parameters, for a policy of jax.checkpoint."""
    layer = dense(width, name=name, **options)
    return lambda x: checkpoint_name(layer(x), name)


def residual_dense(model):
    """A projection onto the residual stream, smaller the more layers add to it."""
    init = nn.initializers.variance_scaling(0.5 / model.layers, "fan_in", "normal")
    return dense(model.width, kernel_init=init)


def capped(x, cap):
    """x in float32, smoothly within +-cap."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap)


def gate_biases(key, shape, dtype):
    """Of the input gates and then the forget gates of all heads.

    Input gates are almost closed, as trainings of xLSTM start. With open ones n . q may cancel, and
    a few such steps make up most of a gradient norm. Forget gates go from short to long memory.
    """
    heads = shape[0] // 2
    return jnp.concatenate(
        [jnp.full(heads, -10.0, dtype), jnp.linspace(3.0, 6.0, heads, dtype=dtype)]
    )


class MLSTMLayer(nn.Module):
    model: Model
    mlstm: MLSTM

    @nn.compact
    def __call__(self, x):
        """x (B, S, width) -> the same."""
        model = self.model

        def heads(width, name):
            return product(width, name)(x).reshape(*x.shape[:2], model.heads, -1)

        q, k = heads(model.qk_width, "query"), heads(model.qk_width, "key")
        v = heads(model.width, "value")
        options = dict(bias_init=gate_biases, kernel_init=nn.initializers.normal(0.02))
        gates = product(2 * model.heads, "gates", use_bias=True, **options)(x)
        h = self.mlstm(q, k, v, *jnp.split(capped(gates, GATE_CAP), 2, axis=-1))
        # One mean per head, one scale per channel.
        h = norm(reduction_axes=-1, feature_axes=(-2, -1), name="head_norm")(h).reshape(x.shape)
        return residual_dense(model)(h * nn.sigmoid(product(model.width, "output_gate")(x)))


class GatedMLP(nn.Module):
    model: Model

    @nn.compact
    def __call__(self, x):
        """x (B, S, width) -> the same."""
        gate, up = (product(self.model.mlp_width, name) for name in ("gate", "up"))
        return residual_dense(self.model)(nn.silu(gate(x)) * up(x))


class Block(nn.Module):
    model: Model
    mlstm: MLSTM

    @nn.compact
    def __call__(self, x):
        """x (B, S, width) -> the same."""
        x = x + MLSTMLayer(self.model, self.mlstm)(norm()(x))
        x = checkpoint_name(x, "residual")
        return x + GatedMLP(self.model)(norm()(x))


class Network(NamedTuple):
    """A language model of a recipe; the parameters of its blocks are one tree, or one each."""

    model: Model
    mlstm: MLSTM
    recipe: Recipe
    spread: OneDevice = OneDevice()

    def cast(self, params):
        """The parameters of one block or of all."""

        def cast(path, x):
            matrix = self.recipe.cast_once and path[-1].key == "kernel"
            return x.astype(DTYPE) if matrix else x

        return jax.tree.map_with_path(cast, params)

    def embed(self, table, tokens):
        """table (vocabulary, width), tokens (B, S) -> (B, S, width)."""
        # Rows come before the cast, because their gradients are summed in the dtype of the table.
        return self.spread.embed(table, tokens).astype(DTYPE)

    def block(self, params, x):
        """x (B, S, width) -> the same."""
        policy = jax.checkpoint_policies.save_only_these_names(*self.recipe.keep)
        block = Block(self.model, self.mlstm)
        # What is computed again can only merge with what was computed before in one program, and
        # not across a scan.
        one_program = not (self.recipe.scan or self.recipe.by_block)

        @functools.partial(jax.checkpoint, policy=policy, prevent_cse=one_program)
        def of_block(params, x):
            return block.apply({"params": self.spread.gather(params)}, x)

        return of_block(params, x)

    def blocks(self, params, x):
        """x (B, S, width) -> the same, through all blocks."""
        if self.recipe.scan:
            return jax.lax.scan(lambda x, y: (self.block(y, x), None), x, params)[0]
        for of_one in params:
            x = self.block(of_one, x)
        return x

    def mean_nats(self, head, x, targets):
        """Of targets (B, S); x (B, S, width)."""
        return self.spread.sum_over_tokens(self.nats)(head, x, targets) / targets.size

    def loss(self, params, inputs, targets):
        """Mean nats of the targets (B, S), the tokens that follow the inputs (B, S)."""
        x = self.embed(params["embedding"], inputs)
        x = self.blocks(self.cast(params["blocks"]), x)
        return self.mean_nats((params["norm"], params["unembedding"]), x, targets)

    def nats(self, head, x, targets):
        """The sum over targets (B, S); x (B, S, width)."""
        if self.recipe.loss_parts == 1:
            logits = capped(raw_logits(head, x), LOGIT_CAP)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum()
        shape = self.recipe.loss_parts, -1
        return nats_in_parts(head, x.reshape(*shape, x.shape[-1]), targets.reshape(shape))


def raw_logits(head, x):
    """x (..., width) -> bfloat16 logits (..., vocabulary) that are not capped."""
    scale, unembedding = head
    return norm().apply({"params": {"scale": scale}}, x) @ unembedding.astype(DTYPE)


@jax.checkpoint
def nats_of(logits, targets):
    """The sum over targets (T,) of raw logits (T, vocabulary): one pass over them.

    The gradient is one more, because it needs the raw logits alone and has no scatter. The sum of
    exponentials needs no maximum, because logits are capped.
    """
    logits = capped(logits, LOGIT_CAP)
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    of_targets = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.sum(jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - of_targets)


@jax.custom_vjp
def nats_in_parts(head, x, targets):
    """The sum over parts (parts, ...): the logits of one part at a time are in memory, and the
    forward pass computes the gradients, so that no part's logits are computed again."""
    return sum_of_parts(head, x, targets)[0]


def sum_of_parts(head, x, targets):
    def nats_of_part(head, x, targets):
        return nats_of(raw_logits(head, x), targets)

    def add(total, part):
        of_part, (of_head, of_x) = jax.value_and_grad(nats_of_part, (0, 1))(head, *part)
        return jax.tree.map(jnp.add, total, (of_part, of_head)), of_x

    # Both vary over the axes of a mesh as the head does.
    zeros = jnp.zeros_like(head[0], jnp.float32, ()), jax.tree.map(jnp.zeros_like, head)
    (total, of_head), of_x = jax.lax.scan(add, zeros, (x, targets))
    return total, (of_head, of_x)


def scaled_gradients(gradients, cotangent):
    return *jax.tree.map(lambda x: x * cotangent.astype(x.dtype), gradients), None


nats_in_parts.defvjp(sum_of_parts, scaled_gradients)


# ---------------------------------------------------------------- implementations of the mLSTM


def ours(backend, recipe, spread):
    """The states of one block at a time are kept for the backward pass, unless h of all is."""
    return spread.mlstm(backend=backend, recompute_states_in_bw="mlstm_h" in recipe.keep)


PEERS = {"mlstm_kernels_limit_chunk": peers.limit_chunk, "jla": peers.jla}


# ---------------------------------------------------------------- the training step


class State(NamedTuple):
    params: Any
    optimizer: Any


class Metrics(NamedTuple):
    loss: jax.Array
    gradient_norm: jax.Array


ADAMW = optax.adamw(3e-4, b1=0.9, b2=0.95, weight_decay=0.1)
LARGEST_NORM = 1.0
OPTIMIZER = optax.chain(optax.clip_by_global_norm(LARGEST_NORM), ADAMW)


def initial_state(model, recipe=RECIPES["inputs"]):
    """The same for all implementations."""
    params = initial_params(model)
    if not recipe.scan:  # not in the program that draws them, which would take minutes to compile
        blocks = params["blocks"]
        each = (jax.tree.map(operator.itemgetter(n), blocks) for n in range(model.layers))
        params["blocks"] = tuple(each)
    if recipe.by_block:
        return State(params, [*map(ADAMW.init, parts_of(params))])
    return State(params, OPTIMIZER.init(params))


@functools.partial(jax.jit, static_argnums=0)
def initial_params(model):
    """Blocks are stacked; a short sequence on backend "xla" tells the shapes."""
    key, *keys = jax.random.split(jax.random.key(0), 3)
    block = Block(model, ours("xla", Recipe(), OneDevice()))

    def of_block(key):
        return block.init(key, jnp.zeros((1, 8, model.width), DTYPE))["params"]

    blocks = jax.vmap(of_block)(jax.random.split(key, model.layers))
    table = nn.initializers.normal(0.02)(keys[0], (model.vocabulary, model.width))
    head = nn.initializers.lecun_normal()(keys[1], table.shape[::-1])
    return dict(embedding=table, blocks=blocks, norm=jnp.ones(model.width), unembedding=head)


def train_step(network, state, tokens):
    """One update; the metrics are those before it. tokens: the inputs and the targets."""
    loss, gradients = jax.value_and_grad(network.loss)(state.params, *tokens)
    updates, optimizer = OPTIMIZER.update(gradients, state.optimizer, state.params)
    metrics = Metrics(loss, optax.tree.norm(gradients))
    return State(optax.apply_updates(state.params, updates), optimizer), metrics


def parts_of(params):
    """The parameters outside of the blocks, and those of each block; of gradients, the same."""
    outside = {name: x for name, x in params.items() if name != "blocks"}
    return [outside, *params["blocks"]]


class ByBlock:
    """``train_step`` as programs that the host calls, of which two serve all blocks.

    What a block saves for its backward pass are arrays, which nothing stacks, and of which only
    those of one part of the batch are in memory. The update of each block sums the gradients of
    all parts in float32.
    """

    def __init__(self, network, state, tokens, path=None, setting=""):
        """state, tokens: arrays, or their shapes with shardings.

        path: of a file for ``step_programs.compiled``.
        setting: what decides on the programs beside their code and the shapes of tokens.
        """
        self.network, self.parts = network, network.recipe.by_block
        calls = functools.partial(self.calls, state, tokens)
        if network.spread.size > 1:  # only the arrays say how what a block saves is sharded
            self.programs = {name: function for name, (function, _) in calls().items()}
            return
        key = dict(setting=setting, tokens=str([x.shape for x in tokens]))
        code = mlstm_pallas.__file__, step_programs.__file__, __file__
        key |= step_programs.facts(Path(x).parent for x in code)
        self.programs = step_programs.compiled(calls, path, key)

    def calls(self, state, tokens):
        """By name: a program, and its arguments or their shapes."""
        network, shardings = self.network, self.network.spread.shardings
        outside, block, *others = parts_of(state.params)
        table, head = outside["embedding"], (outside["norm"], outside["unembedding"])
        ids, targets = jax.eval_shape(functools.partial(self.part, n=0), tokens)
        forward, backward = step_programs.halves(network.block)
        cast, x = jax.eval_shape(network.cast, block), jax.eval_shape(network.embed, table, ids)
        _, saved = jax.eval_shape(forward, cast, x)
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        metrics = [scalar] * self.parts, [scalar] * (2 + len(others))

        def update(params, gradients, optimizer):
            options = dict(donate_argnums=(0, 1), out_shardings=shardings((params, optimizer)))
            arguments = params, optimizer, [gradients] * self.parts, Metrics(scalar, scalar)
            return jax.jit(self.updated, **options), arguments

        of_inputs = shardings(cast), None
        return {  # those that take longest to compile come first
            "backward": (
                jax.jit(backward, donate_argnums=2, out_shardings=of_inputs),
                ((cast, x), saved, x),
            ),
            "forward": (jax.jit(forward), (cast, x)),
            "nats": (
                jax.jit(jax.value_and_grad(network.mean_nats, (0, 1))),
                (head, x, targets),
            ),
            "update of outside": update(outside, outside, state.optimizer[0]),
            "update of block": update(block, cast, state.optimizer[1]),
            "embed": (jax.jit(network.embed), (table, ids)),
            "embedding_gradient": (jax.jit(self.embedding_gradient), (table, ids, x)),
            "cast": (jax.jit(network.cast), (block,)),
            "squares of outside": (jax.jit(self.squares), ([outside] * self.parts,)),
            "squares of block": (jax.jit(self.squares), ([cast] * self.parts,)),
            "metrics": (jax.jit(self.metrics), metrics),
        }

    def embedding_gradient(self, table, tokens, gradient):
        return jax.vjp(lambda x: self.network.embed(x, tokens), table)[1](gradient)[0]

    @staticmethod
    def mean(gradients):
        """In float32, over the parts of a batch."""
        return jax.tree.map(
            lambda *x: sum(y.astype(jnp.float32) for y in x) / len(gradients), *gradients
        )

    def squares(self, gradients):
        return optax.tree.norm(self.mean(gradients), squared=True)

    @staticmethod
    def metrics(losses, squares):
        return Metrics(sum(losses) / len(losses), jnp.sqrt(sum(squares)))

    def updated(self, params, optimizer, gradients, metrics):
        """As ``OPTIMIZER`` updates them, with the norm of all gradients."""
        factor = LARGEST_NORM / jnp.maximum(metrics.gradient_norm, LARGEST_NORM)
        gradients = jax.tree.map(lambda x: factor * x, self.mean(gradients))
        updates, optimizer = ADAMW.update(gradients, optimizer, params)
        return optax.apply_updates(params, updates), optimizer

    def gradients(self, params, blocks, inputs, targets):
        """The loss of a part of a batch, and its gradients as ``parts_of`` has them.

        blocks: their parameters, cast.
        """
        call = self.programs
        x, kept = call["embed"](params["embedding"], inputs), []
        for block in blocks:
            y, saved = call["forward"](block, x)
            kept.append(((block, x), saved))
            x = y
        head = params["norm"], params["unembedding"]
        loss, ((norm, unembedding), gradient) = call["nats"](head, x, targets)
        gradients = []
        while kept:  # whose arrays are free after the call
            of_block, gradient = call["backward"](*kept.pop(), gradient)
            gradients.append(of_block)
        embedding = call["embedding_gradient"](params["embedding"], inputs, gradient)
        outside = dict(embedding=embedding, norm=norm, unembedding=unembedding)
        return loss, [outside, *reversed(gradients)]

    def part(self, tokens, n):
        """Every so many sequences from n on, with which they stay on their devices."""
        parts = (x.reshape(-1, self.parts, x.shape[-1])[:, n] for x in tokens)
        return self.network.spread.place_tokens(tuple(parts))

    def __call__(self, state, tokens):
        call, parts = self.programs, parts_of(state.params)
        blocks = [*map(call["cast"], parts[1:])]
        results = [
            self.gradients(state.params, blocks, *self.part(tokens, n)) for n in range(self.parts)
        ]
        losses, gradients = zip(*results, strict=True)
        gradients = [*map(list, zip(*gradients, strict=True))]
        names = ["outside", *["block"] * len(blocks)]
        squares = [call[f"squares of {x}"](y) for x, y in zip(names, gradients, strict=True)]
        metrics = call["metrics"]([*losses], squares)
        updated = [
            call[f"update of {name}"](*arrays, metrics)
            for name, *arrays in zip(names, parts, state.optimizer, gradients, strict=True)
        ]
        (outside, *blocks), optimizer = zip(*updated, strict=True)
        return State(outside | dict(blocks=tuple(blocks)), [*optimizer]), metrics


# ---------------------------------------------------------------- measuring


def first_state(network, batch, sequence):
    """The state before the first step, and the inputs and targets, on their devices."""
    shape = batch, sequence + 1
    tokens = jax.random.randint(jax.random.key(1), shape, 0, network.model.vocabulary)
    # Shifted before they are split, so that no device needs a token of another one.
    tokens = network.spread.place_tokens((tokens[:, :-1], tokens[:, 1:]))
    return network.spread.place_state(initial_state(network.model, network.recipe)), tokens


def compiled_step(network, state, tokens, *programs):
    """For these arrays or their shapes with shardings, under ``Spread.context``.

    programs: the last arguments of ``ByBlock``.
    """
    if network.recipe.by_block:
        return ByBlock(network, state, tokens, *programs)
    options = dict(donate_argnums=0, out_shardings=(network.spread.shardings(state), None))
    step = jax.jit(functools.partial(train_step, network), **options)
    return step.lower(state, tokens).compile()


def measure(row, network, others, options):
    """Fills the row and compares it with others, the rows before it that are right."""
    B, _, S, *_ = row["shape"]
    state, tokens = jax.block_until_ready(first_state(network, B, S))
    start = time.perf_counter()
    setting = f"{row['name']} {row['recipe']} {row['impl']}"
    compiled = compiled_step(network, state, tokens, options.programs, setting)
    row["compile_s"] = time.perf_counter() - start
    times, losses, norms = [], [], []
    for _ in range(options.warmup + options.steps):
        state, metrics = jax.block_until_ready(compiled(state, tokens))
        times.append(time.perf_counter() - start)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.gradient_norm))
        start = time.perf_counter()
    seconds = runner.store_times(row, times[options.warmup :])
    if network.recipe.by_block:
        with profiles.peak_memory() as in_use:
            state, _ = jax.block_until_ready(compiled(state, tokens))
    else:
        in_use = [bytes_of(compiled.memory_analysis())]
    peak = roofline.of_device(PEAK_FLOPS, row["device"])
    measured, _ = roofline.device_rates(row["device"], DTYPE)
    flops = row["flops"] / row["devices"]
    row |= dict(
        first_call_s=times[0],
        losses=losses,
        gradient_norms=norms,
        tokens_per_s=B * S / seconds,
        tokens_per_s_per_device=B * S / seconds / row["devices"],
        peak_mib=in_use[0] / 2**20 if in_use else None,
        mfu_pct=peak and 100 * flops / seconds / peak,
        measured_pct=measured and 100 * flops / seconds / measured,
    )
    if runner.on_gpu():
        times = profiles.milliseconds(lambda: compiled(state, tokens))
        row |= {f"{kind}_ms": x for kind, x in times.items()}
    if row["impl"] in PEERS:
        row["versions"] |= peers.jax_versions(row["impl"])
    row["efficiency_pct"] = efficiency(row, others)
    compare(row, next((x for x in others if x["shape"] == row["shape"]), row))


def bytes_of(memory):
    """What a program needs, by its memory analysis."""
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return arrays - memory.alias_size_in_bytes


def efficiency(row, others):
    """In percent of the tokens per second of one device, None without its row."""

    def setting(row):
        B, _, S, *_ = row["shape"]
        return row["impl"], row["recipe"], B * S // row["devices"]

    alone = [x for x in others if x["mesh"] == "one" and setting(x) == setting(row)]
    key = "tokens_per_s_per_device"
    return 100 * row[key] / alone[0][key] if alone else None


def compare(row, first):
    """Raises WrongOutputError where two rows differ; the row keeps its time."""
    pairs, scale = zip(row["losses"], first["losses"], strict=True), first["losses"][0]
    errors = {
        f"loss {n}": abs(x - y) / scale
        for n, (x, y) in enumerate(pairs)
        if n < COMPARED_LOSSES or not math.isfinite(x)
    }
    limits = dict.fromkeys(errors, LATER_TOLERANCE) | {"loss 0": FIRST_TOLERANCE}
    norm, first_norm = row["gradient_norms"][0], first["gradient_norms"][0]
    errors["gradient norm"] = abs(norm / first_norm - 1)
    runner.check(row, errors, limits | {"gradient norm": GRADIENT_NORM_TOLERANCE})


def meshes(options, impls):
    """The name of each mesh, the kind of its axes and the spread; raises RequestError."""
    present, count = jax.local_devices(), options.devices or len(jax.local_devices())
    split = options.split or count
    if count > len(present):
        raise RequestError(f"--devices={count}: there are {len(present)}")
    if count % split:
        raise RequestError(f"--split={split} does not divide {count} devices")
    if options.mesh != ["one"] and (others := [x for x in impls if x in PEERS]):
        raise RequestError(f"--impl={others[0]} runs on one device, expected --mesh=one")
    for name, axes in itertools.product(options.mesh, options.axes):
        if name != "one":
            yield name, axes, lm_mesh.spread(name, axes, present[:count], split)
        elif axes == options.axes[0]:
            yield name, None, OneDevice()


def measured_rows(options):
    """A row for each implementation, and before them a line about the model."""
    gpu = runner.on_gpu()
    impls = options.impl or (["triton", "mosaic_gpu", *PEERS] if gpu else ["xla"])
    runner.check_gpu(impls)
    name = options.model or ("1.3b" if gpu else "tiny")
    model = MODELS[name]
    batch, sequence = options.batch or (8 if gpu else 2), options.sequence or (8192 if gpu else 64)
    parameters, _ = model.parameters()
    keys = dict(parameters=parameters, model=dataclasses.asdict(model))
    keys |= dict(direction="train", dtype=DTYPE)
    print(f"{name}: {parameters:,} parameters", flush=True)
    right = []
    product = itertools.product(options.recipe, meshes(options, impls), impls)
    for recipe_name, (mesh, axes, spread), impl in product:
        recipe = RECIPES[recipe_name]
        parts = recipe.by_block or 1
        if batch % parts or (batch // parts * sequence) % recipe.loss_parts:
            wanted = f"--recipe={recipe_name} has {parts} x {recipe.loss_parts} parts"
            raise RequestError(f"{wanted}, not {batch} x {sequence} tokens")
        size = batch * spread.batch, sequence * spread.sequence
        keys |= dict(recipe=recipe_name, mesh=mesh, axes=axes, devices=spread.size)
        keys |= dict(flops=model.flops(*size))
        row = runner.new_row(options, name, model.mlstm_shape(*size), impl, **keys)
        mlstm = PEERS.get(impl) or ours(impl, recipe, spread)
        network = Network(model, mlstm, recipe, spread)
        with spread.context():
            row = runner.attempt(row, impl in BACKENDS, measure, network, right, options)
        yield row
        right += [row] * (row["status"] == "ok")


# ---------------------------------------------------------------- the command


COLUMNS = reporting.columns(
    """
model           name
tokens          tokens
recipe          recipe
impl            impl
mesh            mesh
axes            axes
devices         devices         d
ms              ms              .1f
spread %        spread          .1%
tokens/s        tokens_per_s    .0f
efficiency %    efficiency_pct  .1f
MFU %           mfu_pct         .1f
of measured %   measured_pct    .1f
peak MiB        peak_mib        .0f
products ms     products_ms     .0f
mLSTM ms        mlstm_ms        .0f
elementwise ms  elementwise_ms  .0f
copies ms       copies_ms       .0f
collectives ms  collectives_ms  .0f
exposed ms      exposed_ms      .0f
idle ms         idle_ms         .0f
first call s    first_call_s    .1f
error           error           .1e
note            note
""",
    tokens=lambda row: f"{row['shape'].B} x {row['shape'].S}",
)


def define_flags(define):
    warmup = "Steps that are not timed, the first call among them."
    default = "none: triton, mosaic_gpu and peers, without a GPU xla."
    define.names("impl", [], (*BACKENDS, *PEERS), f"implementation of the mLSTM; {default}")
    define.names("recipe", ["inputs_in_parts"], RECIPES, "how the step is written; see above.")
    define.enum("model", None, list(MODELS), "None: 1.3b, without a GPU tiny.")
    define.names("mesh", ["one"], ("one", *lm_mesh.KINDS), "how it is spread; see above.")
    define.names("axes", ["auto"], lm_mesh.AXIS_TYPES, "the kind of a mesh's axes.")
    define.integer("devices", None, "Of a mesh; none: all of this process.", lower_bound=1)
    define.integer("split", None, "Devices per sequence; none: --devices.", lower_bound=1)
    batch = "Sequences, times the devices that they are spread over; none: 8, without a GPU 2."
    define.integer("batch", None, batch, lower_bound=1)
    sequence = "Steps, times the devices per sequence; none: 8192, without a GPU 64."
    define.integer("sequence", None, sequence, lower_bound=1)
    define.parsed("programs", Path, "File for those of products_by_block; none: they are not kept.")
    define.integer("warmup", 2, warmup, lower_bound=1)
    define.integer("steps", 5, "Steps that are timed; the median counts.", lower_bound=1)
    define.shared("commit", "from_jsonl", "jsonl")


run = functools.partial(runner.run, measured_rows, COLUMNS)


if __name__ == "__main__":
    command.main(define_flags, run)
