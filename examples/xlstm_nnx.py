"""A language model of xLSTM blocks in flax nnx, for the tutorial: docs/tutorial.md."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from mlstm_pallas import mlstm_chunkwise, mlstm_recurrent_step


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    return cap * jnp.tanh(x / cap)


class Block(nnx.Module):
    """An mLSTM layer and a gated MLP, each behind a norm and added to the residual stream.

    mlstm: the function for whole sequences; docs/training.md passes that of split sequences.
    """

    def __init__(self, width: int, heads: int, *, mlstm=mlstm_chunkwise, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        gate = functools.partial(nnx.Linear, width, heads, rngs=rngs)
        self.heads, self.mlstm = heads, mlstm
        self.norm_mlstm = nnx.RMSNorm(width, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(width, rngs=rngs)
        self.query = linear(width, width // 2)  # DHQK is half of DHV, as in xLSTM-7B
        self.key = linear(width, width // 2)
        self.value = linear(width, width)
        # Forget gates from short to long memory, input gates that are rather closed.
        self.input_gate = gate(bias_init=nnx.initializers.constant(-3.0))
        self.forget_gate = gate(bias_init=lambda key, shape, dtype: jnp.linspace(3.0, 6.0, *shape))
        # The output projection can do what a scale of this norm would do.
        self.head_norm = nnx.RMSNorm(width // heads, use_scale=False, rngs=rngs)
        self.output_gate = linear(width, width)
        self.output = linear(width, width)
        self.up, self.up_gate = linear(width, 2 * width), linear(width, 2 * width)
        self.down = linear(2 * width, width)

    def __call__(self, x: jax.Array, states=None, *, segment_ids=None, resets=None):
        """x (B, S, width), or one token, (B, width), and the states (c, n, m) before it.

        states: None before the first token.

        segment_ids: (B, S), the documents of a packed row, each from zero states.
        resets: (B, S), or (B,) for one token; where it is True the states before count no more.

        Returns the same shape as x and the states after the last token.
        """
        y = self.norm_mlstm(x)
        q, k, v = (
            project(y).reshape(*y.shape[:-1], self.heads, -1)
            for project in (self.query, self.key, self.value)
        )
        i, f = (soft_cap(gate(y), 15.0) for gate in (self.input_gate, self.forget_gate))
        if resets is not None:
            f = jnp.where(resets[..., None], -jnp.inf, f)
        if x.ndim == 2:
            h, states = mlstm_recurrent_step(q, k, v, i, f, *(states or ()))
        else:
            options = dict(segment_ids=segment_ids, return_last_states=True, layout="BTNH")
            h, states = self.mlstm(q, k, v, i, f, *(states or ()), **options)
        h = self.head_norm(h).reshape(x.shape)
        x = x + self.output(nnx.sigmoid(self.output_gate(y)) * h)
        y = self.norm_mlp(x)
        return x + self.down(nnx.silu(self.up_gate(y)) * self.up(y)), states


class LanguageModel(nnx.Module):
    """Blocks whose parameters are stacked: one scan runs them, so that one is compiled.

    embed_sharding: of x (B, S, width), which a gather needs on explicit mesh axes.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        *,
        mlstm=mlstm_chunkwise,
        embed_sharding=None,
        rngs: nnx.Rngs,
    ):
        self.embed_sharding = embed_sharding
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        make = nnx.vmap(lambda rngs: Block(width, heads, mlstm=mlstm, rngs=rngs))
        self.blocks = make(rngs.split(layers))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        # Logits are float32, also those of bfloat16 weights.
        options = dict(use_bias=False, preferred_element_type=jnp.float32)
        self.unembed = nnx.Linear(width, vocabulary, **options, rngs=rngs)

    def __call__(self, tokens: jax.Array, states=None, *, segment_ids=None, resets=None):
        """tokens (B, S), or (B,) for a step -> float32 logits (..., vocabulary), states.

        The states of all blocks are stacked on their first axis. segment_ids and resets are those
        of a block.
        """

        @nnx.scan(in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        @nnx.remat
        def run(block: Block, x: jax.Array, states):
            return block(x, states, segment_ids=segment_ids, resets=resets)

        # Embed reads float32 rows, also from a bfloat16 table, and so sums their gradients.
        x = self.embed(tokens, out_sharding=self.embed_sharding)
        x = x.astype(self.embed.embedding.dtype)
        x, states = run(self.blocks, x, states)
        return soft_cap(self.unembed(self.norm(x)), 30.0), states


def empty_states(model: LanguageModel, B: int):
    """The states of all blocks before the first token, which are zeros."""
    tokens = jax.ShapeDtypeStruct((B,), jnp.int32)
    _, states = nnx.eval_shape(lambda model, tokens: model(tokens), model, tokens)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), states)
