"""The model of xlstm_nnx.py in flax linen."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap)


class Block(nn.Module):
    """An mLSTM layer and a gated MLP, each behind a norm and added to the residual stream."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, states=None, segment_ids=None, resets=None):
        """x (B, S, width), or one token, (B, width), and the states (c, n, m) before it.

        states: None before the first token.

        segment_ids: (B, S), the documents of a packed row, each from zero states.
        resets: (B, S), or (B,) for one token; where it is True the states before count no more.

        Returns the same shape as x and the states after the last token.
        """
        width = x.shape[-1]
        linear = functools.partial(nn.Dense, use_bias=False)
        y = nn.RMSNorm(name="norm_mlstm")(x)
        # DHQK is half of DHV, as in xLSTM-7B.
        q, k, v = (
            linear(size, name=name)(y).reshape(*y.shape[:-1], self.heads, -1)
            for name, size in (("query", width // 2), ("key", width // 2), ("value", width))
        )
        # Forget gates from short to long memory, input gates that are rather closed.
        biases = dict(
            input_gate=nn.initializers.constant(-3.0),
            forget_gate=lambda key, shape, dtype: jnp.linspace(3.0, 6.0, *shape),
        )
        i, f = (
            soft_cap(nn.Dense(self.heads, bias_init=bias, name=name)(y), 15.0)
            for name, bias in biases.items()
        )
        if resets is not None:
            f = jnp.where(resets[..., None], -jnp.inf, f)
        if x.ndim == 2:
            h, states = mlstm_recurrent_step(q, k, v, i, f, *(states or ()))
        else:
            options = dict(segment_ids=segment_ids, return_last_states=True, layout="BTNH")
            h, states = mlstm_chunkwise(q, k, v, i, f, *(states or ()), **options)
        # The output projection can do what a scale of this norm would do.
        h = nn.RMSNorm(use_scale=False, name="head_norm")(h).reshape(x.shape)
        x = x + linear(width, name="output")(nn.sigmoid(linear(width, name="output_gate")(y)) * h)
        y = nn.RMSNorm(name="norm_mlp")(x)
        y = nn.silu(linear(2 * width, name="up_gate")(y)) * linear(2 * width, name="up")(y)
        return x + linear(width, name="down")(y), states


class LanguageModel(nn.Module):
    """Blocks whose parameters are stacked: one scan runs them, so that one is compiled."""

    vocabulary: int
    width: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array, states=None, *, segment_ids=None, resets=None):
        """tokens (B, S), or (B,) for a step -> float32 logits (..., vocabulary), states.

        The states of all blocks are stacked on their first axis. segment_ids and resets are those
        of a block.
        """
        run = nn.scan(
            nn.remat(Block, prevent_cse=False),  # a scan needs no barriers
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),  # states of each block, and of all
            length=self.layers,
        )
        # Embed reads float32 rows, also from a bfloat16 table, and so sums their gradients.
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.float32, name="embed")
        x = embed(tokens)
        x = x.astype(embed.embedding.dtype)
        x, states = run(self.heads, name="blocks")(x, states, segment_ids, resets)
        x = nn.RMSNorm(name="norm")(x)
        # Logits are float32, also those of bfloat16 weights.
        product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
        options = dict(use_bias=False, dot_general=product)
        logits = nn.Dense(self.vocabulary, **options, name="unembed")(x)
        return soft_cap(logits, 30.0), states


def empty_states(model: LanguageModel, params, B: int):
    """The states of all blocks before the first token, which are zeros."""
    _, states = jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct((B,), jnp.int32))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), states)
