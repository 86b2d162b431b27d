"""The byte-level xLSTM that train_byte_lm.py trains: the model, one training step, generation.

The model follows xLSTM (arXiv:2405.04517) in the form of xLSTM-7B (arXiv:2503.13427). Parameters
are a dictionary, in which the layers' parameters are stacked.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from byte_corpus import VOCABULARY
from byte_lm_mesh import HEADS, RESIDUAL_STREAM, constrained, specs
from jax.nn.initializers import normal, variance_scaling
from jax.sharding import Mesh

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

Params = dict[str, Any]
States = tuple[jax.Array, ...]  # c (layers, B, NH, DHQK, DHV), n (.., DHQK), m (layers, B, NH)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, how its mLSTM runs, and on which devices."""

    layers: int
    embedding_dim: int
    heads: int  # q and k are half as wide as v
    mesh: Mesh
    dtype: str = "float32"


def initial_params(config: ModelConfig, key: jax.Array) -> Params:
    """Input gates almost closed, forget gates from short to long memory, as xLSTM-7B starts.

    The matrices that add to the residual stream are small, so that their sum over the layers has
    the variance of one matrix with the usual scale.
    """
    L, D, NH = config.layers, config.embedding_dim, config.heads
    keys = iter(jax.random.split(key, 12))

    def matrix(*shape, scale=1.0):
        init = variance_scaling(
            scale, "fan_in", "truncated_normal", batch_axis=range(len(shape) - 2)
        )
        return init(next(keys), shape)

    norm, residual, gate = jnp.ones((L, D)), dict(scale=0.5 / L), dict(scale=4e-4 * D)
    blocks = dict(mlstm_norm=norm, head_norm=norm, mlp_norm=norm)
    blocks |= dict(query=matrix(L, D, D // 2), key=matrix(L, D, D // 2), value=matrix(L, D, D))
    blocks |= dict(input_gate=matrix(L, D, NH, **gate), forget_gate=matrix(L, D, NH, **gate))
    blocks["input_bias"] = jnp.full((L, NH), -10.0)
    blocks["forget_bias"] = jnp.tile(jnp.linspace(3.0, 6.0, NH), (L, 1))
    blocks |= dict(output_gate=matrix(L, D, D), output=matrix(L, D, D, **residual))
    blocks |= dict(gate=matrix(L, D, 2 * D), up=matrix(L, D, 2 * D))
    blocks["down"] = matrix(L, 2 * D, D, **residual)
    embedding, unembedding = normal(0.1)(next(keys), (VOCABULARY, D)), matrix(D, VOCABULARY)
    return dict(blocks=blocks, embedding=embedding, norm=jnp.ones(D), unembedding=unembedding)


def rms_norm(x: jax.Array, scale: jax.Array | float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def mlstm_layer(
    config: ModelConfig, p: Params, x: jax.Array, state: States | None
) -> tuple[jax.Array, States | None]:
    """x (B, S, D) and the state before it (None: zeros) -> (B, S, D) and the state after it.

    The state after it is None where that before it is.
    """

    def heads(name):  # (B, S, NH, DH)
        return (x @ p[name]).reshape(*x.shape[:2], config.heads, -1).astype(config.dtype)

    def gate(name):  # (B, S, NH), soft-capped
        return 15.0 * jnp.tanh((x @ p[f"{name}_gate"] + p[f"{name}_bias"]) / 15.0)

    inputs = heads("query"), heads("key"), heads("value"), gate("input"), gate("forget")
    if state is None:  # each device computes its shard of the batch, the heads and the steps
        function = mlstm_chunkwise
        if config.mesh.shape["sequence"] > 1:
            function = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="sequence")
        shard = functools.partial(function, layout="BTNH")
        specs = dict(mesh=config.mesh, in_specs=HEADS, out_specs=HEADS)
        h = jax.shard_map(shard, **specs)(*inputs)
    elif x.shape[1] == 1:
        h, state = mlstm_recurrent_step(*(y[:, 0] for y in inputs), *state)
    else:
        h, state = mlstm_chunkwise(*inputs, *state, return_last_states=True, layout="BTNH")
    h = h.reshape(*x.shape[:2], config.heads, -1).astype(x.dtype)
    h = rms_norm(h, 1.0).reshape(x.shape) * p["head_norm"]
    return (jax.nn.sigmoid(x @ p["output_gate"]) * h) @ p["output"], state


def logits_of(
    config: ModelConfig, params: Params, tokens: jax.Array, states: States | None = None
) -> tuple[jax.Array, States | None]:
    """tokens (B, S) and the states before them -> logits (B, S, 256) and the states after them.

    Without states before them there are none after them.
    """

    def block(x, layer):
        p, state = layer
        h, state = mlstm_layer(config, p, rms_norm(x, p["mlstm_norm"]), state)
        x = x + h
        y = rms_norm(x, p["mlp_norm"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
        return place(x), state

    place = functools.partial(constrained, mesh=config.mesh, spec=RESIDUAL_STREAM)
    x = place(params["embedding"][tokens])
    # Unrolled, because XLA's loops on CPUs are slower.
    x, states = jax.lax.scan(block, x, (params["blocks"], states), unroll=True)
    return rms_norm(x, params["norm"]) @ params["unembedding"], states


@functools.partial(jax.jit, static_argnums=0)
def cross_entropy(config: ModelConfig, params: Params, sequences: jax.Array) -> jax.Array:
    """Mean nats per byte of sequences (B, S + 1): each byte but the first from those before it."""
    tokens = sequences.astype(jnp.int32)
    logits, _ = logits_of(config, params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_step(
    config: ModelConfig, optimizer: optax.GradientTransformation, state: Any, sequences: jax.Array
) -> tuple[Any, jax.Array]:
    """One update of (params, state of the optimizer) from sequences (B, S + 1).

    The loss is the one before it, in nats per byte.
    """
    params, moments = state
    loss, gradients = jax.value_and_grad(cross_entropy, 1)(config, params, sequences)
    updates, moments = optimizer.update(gradients, moments, params)
    state = optax.apply_updates(params, updates), moments
    # Without a constraint XLA may place the new state otherwise, and the next step compiles anew.
    return constrained(state, config.mesh, specs(state)), loss


@functools.partial(jax.jit, static_argnames=("config", "length", "temperature"))
def generate(config, params, prompt, key, *, length: int, temperature: float) -> jax.Array:
    """prompt (B, S) -> the next bytes (B, length).

    The prompt is read by mlstm_chunkwise, each byte after it by mlstm_recurrent_step. The states
    have one size, however long the text gets.
    """

    def pick(logits, key):
        if temperature == 0:
            return jnp.argmax(logits[:, -1], -1)
        return jax.random.categorical(key, logits[:, -1] / temperature)

    def step(carry, key):
        token, states = carry
        logits, states = logits_of(config, params, token[:, None], states)
        return (pick(logits, key), states), token

    DHV = config.embedding_dim // config.heads
    rows = config.layers, prompt.shape[0], config.heads
    states = tuple(jnp.zeros((*rows, *dims)) for dims in ((DHV // 2, DHV), (DHV // 2,), ()))
    keys = jax.random.split(key, length + 1)
    logits, states = logits_of(config, params, prompt, states)
    _, tokens = jax.lax.scan(step, (pick(logits, keys[0]), states), keys[1:])
    return tokens.swapaxes(0, 1)
