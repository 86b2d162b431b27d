"""The byte-level xLSTM that train_byte_lm.py trains: the model, one training step, generation.

The model follows xLSTM (arXiv:2405.04517) in the form of xLSTM-7B (arXiv:2503.13427).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from byte_corpus import VOCABULARY
from byte_lm_mesh import HEADS, RESIDUAL_STREAM, state_shardings
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

State = tuple[jax.Array, jax.Array, jax.Array]  # c (B, NH, DHQK, DHV), n (B, NH, DHQK), m (B, NH)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, how its mLSTM runs, and on which devices.

    mesh None: the devices of the arrays.
    """

    layers: int
    embedding_dim: int
    heads: int
    qk_dim: int  # of all heads
    mlp_dim: int
    chunk_size: int | None = None
    dtype: str = "float32"
    backend: str | None = None
    mesh: Mesh | None = None


def residual_init(config: ModelConfig) -> nnx.Initializer:
    """For the 2 * layers matrices that add to the residual stream.

    Their sum has the variance of one matrix with the usual scale.
    """
    return nnx.initializers.variance_scaling(0.5 / config.layers, "fan_in", "truncated_normal")


def whole_mlstm(mesh: Mesh | None, options: dict[str, Any]) -> Callable[..., jax.Array]:
    """(q, k, v, i, f) -> h of whole sequences.

    Each device computes its shard of the batch, the heads and the steps.
    """
    if mesh is None:
        return functools.partial(mlstm_chunkwise, **options)
    if mesh.shape["sequence"] == 1:
        shard = functools.partial(mlstm_chunkwise, **options)
    else:
        parallel = mlstm_chunkwise_sequence_parallel
        shard = functools.partial(parallel, axis_name="sequence", **options)
    return jax.shard_map(shard, mesh=mesh, in_specs=HEADS, out_specs=HEADS)


class MLSTMLayer(nnx.Module):
    """Projections and gates, the mLSTM, a norm of each head, an output gate."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, NH = config.embedding_dim, config.heads
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.config = config
        self.query, self.key = linear(D, config.qk_dim), linear(D, config.qk_dim)
        self.value = linear(D, D)
        narrow = nnx.initializers.normal(0.02)
        gate = functools.partial(nnx.Linear, D, NH, kernel_init=narrow, rngs=rngs)

        def forget_bias(key, shape, dtype):
            return jnp.linspace(3.0, 6.0, *shape, dtype=dtype)

        # As xLSTM-7B starts: input gates almost closed, forget gates from short to long memory.
        self.input_gate = gate(bias_init=nnx.initializers.constant(-10.0))
        self.forget_gate = gate(bias_init=forget_bias)
        self.head_norm = nnx.RMSNorm(D // NH, use_scale=False, rngs=rngs)
        self.head_scale = nnx.Param(jnp.ones(D))
        self.output_gate = linear(D, D)
        self.output = linear(D, D, kernel_init=residual_init(config))

    def __call__(self, x: jax.Array, state: State | None) -> tuple[jax.Array, State | None]:
        """x (B, S, D) and the state before it (None: zeros) -> (B, S, D) and the state after it.

        The state after it is None where that before it is.
        """
        config = self.config

        def heads(y):  # (B, S, NH * DH) -> (B, S, NH, DH)
            return y.reshape(*y.shape[:2], config.heads, -1).astype(config.dtype)

        def gate(y):  # (B, S, NH), soft-capped
            return 15.0 * jnp.tanh(y / 15.0)

        qkv = (heads(project(x)) for project in (self.query, self.key, self.value))
        inputs = *qkv, gate(self.input_gate(x)), gate(self.forget_gate(x))
        options = dict(chunk_size=config.chunk_size, layout="BTNH", backend=config.backend)
        if state is None:
            h = whole_mlstm(config.mesh, options)(*inputs)
        elif x.shape[1] == 1:
            step = (y[:, 0] for y in inputs)
            h, state = mlstm_recurrent_step(*step, *state, backend=config.backend)
            h = h[:, None]
        else:
            h, state = mlstm_chunkwise(*inputs, *state, return_last_states=True, **options)
        h = self.head_norm(h.astype(x.dtype)).reshape(x.shape) * self.head_scale
        return self.output(jax.nn.sigmoid(self.output_gate(x)) * h), state


class GatedMLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        D, linear = config.embedding_dim, functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up = linear(D, config.mlp_dim), linear(D, config.mlp_dim)
        self.down = linear(config.mlp_dim, D, kernel_init=residual_init(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (B, S, D) -> (B, S, D)."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """An mLSTM layer and an MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        norms = (nnx.RMSNorm(config.embedding_dim, rngs=rngs) for _ in range(2))
        self.mlstm_norm, self.mlp_norm = norms
        self.mlstm, self.mlp = MLSTMLayer(config, rngs), GatedMLP(config, rngs)

    def __call__(self, x: jax.Array, state: State | None) -> tuple[jax.Array, State | None]:
        """Shapes and state as for MLSTMLayer."""
        h, state = self.mlstm(self.mlstm_norm(x), state)
        x = x + h
        return x + self.mlp(self.mlp_norm(x)), state


class ByteLM(nnx.Module):
    """Bytes to logits of the byte that follows each."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        embedding = dict(embedding_init=nnx.initializers.normal(0.1), rngs=rngs)
        self.embedding = nnx.Embed(VOCABULARY, config.embedding_dim, **embedding)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.embedding_dim, rngs=rngs)
        self.unembedding = nnx.Linear(config.embedding_dim, VOCABULARY, use_bias=False, rngs=rngs)

    def initial_states(self, batch: int) -> list[State]:
        """The states before the first byte, one for each layer."""
        config, NH = self.config, self.config.heads
        DHQK, DHV = config.qk_dim // NH, config.embedding_dim // NH
        dims = (NH, DHQK, DHV), (NH, DHQK), (NH,)
        state: State = tuple(jnp.zeros((batch, *dim)) for dim in dims)
        return [state] * config.layers

    def place(self, x: jax.Array) -> jax.Array:
        """x (B, S, D), sharded over the mesh."""
        mesh = self.config.mesh
        if mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, RESIDUAL_STREAM))

    def __call__(
        self, tokens: jax.Array, states: list[State] | None = None
    ) -> tuple[jax.Array, list[State | None]]:
        """tokens (B, S) and the states before them -> logits (B, S, 256) and the states after them.

        The states after them are None where there are none before them.
        """
        x = self.place(self.embedding(tokens))
        after = []
        for block, state in zip(self.blocks, states or [None] * self.config.layers, strict=True):
            x, state = block(x, state)
            x = self.place(x)
            after.append(state)
        return self.unembedding(self.norm(x)), after


def cross_entropy(model: ByteLM, sequences: jax.Array) -> jax.Array:
    """Mean nats per byte of sequences (B, S + 1): each byte but the first from those before it."""
    tokens = sequences.astype(jnp.int32)
    logits, _ = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


evaluation_step = nnx.jit(cross_entropy)


@nnx.jit
def train_step(model: ByteLM, optimizer: nnx.Optimizer, sequences: jax.Array) -> jax.Array:
    """One update from sequences (B, S + 1); returns the loss before it, in nats per byte."""
    loss, gradients = nnx.value_and_grad(cross_entropy)(model, sequences)
    optimizer.update(model, gradients)
    mesh = model.config.mesh
    # Without a constraint XLA may place the new state otherwise, and the next step compiles anew.
    if mesh is not None:
        state = nnx.state((model, optimizer))
        placed = jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))
        nnx.update((model, optimizer), placed)
    return loss


@functools.partial(nnx.jit, static_argnames=("length", "temperature"))
def generate(
    model: ByteLM, prompt: jax.Array, key: jax.Array, *, length: int, temperature: float
) -> jax.Array:
    """prompt (B, S) -> the next bytes (B, length).

    The prompt is read by mlstm_chunkwise, each byte after it by mlstm_recurrent_step. The states
    have one size, however long the text gets.
    """

    def pick(logits, key):
        if temperature == 0:
            return jnp.argmax(logits, -1)
        return jax.random.categorical(key, logits / temperature)

    def step(carry, key):
        token, states = carry
        logits, states = model(token[:, None], states)
        return (pick(logits[:, -1], key), states), token

    keys = jax.random.split(key, length + 1)
    logits, states = model(prompt, model.initial_states(prompt.shape[0]))
    _, tokens = jax.lax.scan(step, (pick(logits[:, -1], keys[0]), states), keys[1:])
    return tokens.swapaxes(0, 1)
