"""The byte-level xLSTM that train_byte_lm.py trains: its first weights, its loss, a training step.

It is the model of xlstm_model.py, on a mesh of devices.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from byte_lm_mesh import HEADS, RESIDUAL_STREAM, shardings
from jax import lax
from jax.sharding import Mesh, NamedSharding
from xlstm_model import Config, Params, block, next_logits, separate

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of the model, the devices that train it, and the dtype of products and activations."""

    config: Config
    mesh: Mesh
    dtype: str = "float32"


def matrices(params: Params) -> Params:
    """Whether each parameter is a matrix, and not a norm or a bias."""

    def is_matrix(path, _):
        return "norm" not in path[-1].key and path[-1].key != "gate_bias"

    return jax.tree.map_with_path(is_matrix, params)


def initial_params(config: Config, key: jax.Array) -> Params:
    """Input gates almost closed, forget gates from short to long memory, as xLSTM-7B starts.

    The matrices that add to the residual stream are small, so that their sum over the layers has
    the variance of one matrix with the usual scale.
    """
    D, NH, F, V = config.hidden_size, config.num_heads, config.ffn_dim, config.vocab_size
    DHQK, DHV = config.head_dims
    residual = 0.5 / config.num_blocks
    keys = iter(jax.random.split(key, 5 * config.num_blocks + 2))

    def matrix(*shape, scale=1.0):
        return (scale / shape[-1]) ** 0.5 * jax.random.normal(next(keys), shape)

    def weights():
        return dict(
            norm_mlstm=jnp.ones(D),
            qkvo=matrix(NH, 2 * (DHQK + DHV), D),
            gates=matrix(NH, 2, D, scale=4e-4 * D),
            gate_bias=jnp.stack([jnp.full(NH, -10.0), jnp.linspace(3.0, 6.0, NH)], axis=1),
            multihead_norm=jnp.ones((NH, DHV)),
            out_proj=matrix(D, NH * DHV, scale=residual),
            norm_ffn=jnp.ones(D),
            up=matrix(F, 2, D),
            down=matrix(D, F, scale=residual),
        )

    return dict(
        embeddings=matrix(V, D, scale=1e-2 * D),
        lm_head=matrix(V, D),
        out_norm=jnp.ones(D),
        blocks=[weights() for _ in range(config.num_blocks)],
    )


def cast(params: Params, dtype: str) -> Params:
    """Matrices in the dtype; norms and biases stay float32."""
    kinds = matrices(params)
    return jax.tree.map(lambda x, matrix: x.astype(dtype) if matrix else x, params, kinds)


def logits_of(model: Model, params: Params, tokens: jax.Array) -> jax.Array:
    """tokens (B, S) -> logits (B, S, 256); each device has its part of the batch, heads, steps."""
    function = mlstm_chunkwise
    if model.mesh.shape["sequence"] > 1:
        function = functools.partial(mlstm_chunkwise_sequence_parallel, axis_name="sequence")
    config, run = model.config, functools.partial(function, layout="BTNH")
    mlstm = jax.shard_map(run, mesh=model.mesh, in_specs=HEADS, out_specs=HEADS)
    place, where = lax.with_sharding_constraint, NamedSharding(model.mesh, RESIDUAL_STREAM)
    # Rows come before the cast, because their gradients are summed in the dtype of the table.
    x = place(params["embeddings"][tokens].astype(model.dtype), where)
    params = cast(params, model.dtype)
    for p in params["blocks"]:
        x, _ = block(config, p, x, lambda *joined: (mlstm(*separate(config, *joined)), None))
        x = place(x, where)
    return next_logits(config, params, x)


@functools.partial(jax.jit, static_argnums=0)
def cross_entropy(model: Model, params: Params, sequences: jax.Array) -> jax.Array:
    """Mean nats per byte of sequences (B, S + 1): each byte but the first from those before it."""
    tokens = sequences.astype(jnp.int32)
    logits = logits_of(model, params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_step(
    model: Model, optimizer: optax.GradientTransformation, state: Any, sequences: jax.Array
) -> tuple[Any, jax.Array]:
    """One update of (params, state of the optimizer) from sequences (B, S + 1).

    The loss is the one before it, in nats per byte.
    """
    params, moments = state
    loss, gradients = jax.value_and_grad(cross_entropy, 1)(model, params, sequences)
    updates, moments = optimizer.update(gradients, moments, params)
    state = optax.apply_updates(params, updates), moments
    # Without a constraint XLA may place the new state otherwise, and the next step compiles anew.
    return lax.with_sharding_constraint(state, shardings(state, model.mesh)), loss
