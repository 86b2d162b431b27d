"""xLSTM-7B (arXiv:2503.13427): a forward pass of packed sequences, then steps of one token.

The model computes the same function as transformers' xLSTM. `xlstm_7b.py` generates text with it,
and `train_byte_lm.py` trains a small one. Dimensions, as in the shape comments:

    B, S   prompts, steps of all packed prompts     D      width of the residual stream
    NH     heads                                    DHQK   head dimension of q and k
    F, V   width of the feed-forward, vocabulary    DHV    head dimension of v and h

Weights are (outputs, inputs), as Hugging Face has them; weights of the same input are one array:

    embeddings, lm_head (V, D)    out_norm (D,)    blocks: a list of dicts
    norm_mlstm, norm_ffn (D,)     qkvo (NH, 2 DHQK + 2 DHV, D): q, k, v and output gate per head
    gates (NH, 2, D), gate_bias (NH, 2): input and forget gate    multihead_norm (NH, DHV)
    out_proj (D, NH DHV)          up (F, 2, D): gate and value    down (D, F)

A checkpoint with use_bias has NAME_bias beside each array of a block; out_norm may be missing.

States are a list with (c, n, m) per block: (B, NH, DHQK, DHV), (B, NH, DHQK), (B, NH). With one
array per block a step updates each in place; slices of one array for all blocks would be copied.
For many prompts on a GPU, and for drafts, they are RingStates. ``empty_states`` makes a pool of
states, into whose rows a prefill writes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from itertools import repeat
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mlstm_pallas import (
    RingStates,
    mlstm_chunkwise,
    mlstm_recurrent_step,
    mlstm_ring_states,
    mlstm_ring_step,
)

Params = dict[str, Any]
State = tuple[jax.Array, jax.Array, jax.Array] | RingStates
Rows = tuple[list[State], np.ndarray]  # a pool with the states of all blocks, and rows of it
# Of loops over tokens. XLA splits its Triton products of few rows along their sums, whose parts it
# adds afterwards; cuBLAS is faster. Kernels of a CUDA graph may run side by side.
LOOP_OPTIONS = dict(
    xla_gpu_enable_triton_gemm=False,
    xla_gpu_command_buffer_scheduling_mode="CONCURRENT",
)
NO_TOKEN = -1  # where logits are not finite
MOST_STEPS = 4096  # of a prefill; with these it uses all of a GPU
RING_BATCH = 16  # in float32; with fewer bytes the two launches of a step with a ring take longer


@dataclasses.dataclass(frozen=True)
class Config:
    """The values of config.json that decide on the function; the defaults are xLSTM-7B's."""

    vocab_size: int = 50304
    hidden_size: int = 4096
    num_blocks: int = 32
    num_heads: int = 8
    qk_dim_factor: float = 0.5
    v_dim_factor: float = 1.0
    ffn_proj_factor: float = 2.667
    ffn_round_up_to_multiple_of: int = 64
    gate_soft_cap: float | None = 15.0
    output_logit_soft_cap: float | None = 30.0
    norm_eps: float = 1e-6
    eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_bias: bool = False
    add_out_norm: bool = True
    input_gate: Literal["exp", "sigmoid"] = "exp"
    inference_state_dtype: str = "float32"

    @property
    def qk_dim(self) -> int:
        return int(self.hidden_size * self.qk_dim_factor)

    @property
    def v_dim(self) -> int:
        return int(self.hidden_size * self.v_dim_factor)

    @property
    def ffn_dim(self) -> int:
        multiple = self.ffn_round_up_to_multiple_of
        return int((self.hidden_size * self.ffn_proj_factor + multiple - 1) // multiple) * multiple

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.qk_dim // self.num_heads, self.v_dim // self.num_heads


def rings_are_faster(config: Config, B: int) -> bool:
    """Whether a step of B prompts is; on a CPU it takes two to nine times as long."""
    in_float32 = B * jnp.dtype(config.inference_state_dtype).itemsize / 4
    return jax.default_backend() == "gpu" and in_float32 >= RING_BATCH


class Sampling(NamedTuple):
    """temperature 0 takes the likeliest token.

    top_p: the fewest tokens whose mass reaches it may be drawn, one at least; of equal ones, those
    with the lowest ids.
    """

    temperature: float = 0.0
    top_p: float = 1.0


def project(p: Params, name: str, x: jax.Array, dtype: Any = None) -> jax.Array:
    """x (..., inputs) with p[name] (*outputs, inputs): (..., *outputs), summed in float32.

    It adds the bias p[name_bias] (*outputs) if there is one.
    """
    weight, bias, dtype = p[name], p.get(f"{name}_bias"), dtype or x.dtype
    if math.prod(x.shape[:-1]) == 1:  # XLA reads a weight faster in a sum than in a product
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], *[1] * (weight.ndim - 1), -1)
        y = jnp.sum(y * weight.astype(jnp.float32), axis=-1).astype(dtype)
    else:
        precision = "highest" if weight.dtype == jnp.float32 else None  # a GPU's default is TF32
        options = dict(precision=precision, preferred_element_type=dtype)
        y = jnp.tensordot(x, weight, axes=(-1, -1), **options)
    return y if bias is None else (y + bias).astype(dtype)


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    return cap * jnp.tanh(x / cap) if cap else x


def scale(p: Params, name: str, x: jax.Array) -> jax.Array:
    """x with the weight p[name] of a norm, and its bias if there is one."""
    bias = p.get(f"{name}_bias")
    return x * p[name] if bias is None else x * p[name] + bias


def rms_norm(p: Params, name: str, x: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return scale(p, name, y).astype(x.dtype)


def separate(config: Config, qkvo: jax.Array, gates: jax.Array) -> tuple[jax.Array, ...]:
    """q, k, v, i, f of qkvo (..., NH, 2 DHQK + 2 DHV) and gates (..., NH, 2)."""
    DHQK, DHV = config.head_dims
    q, k, v, _ = jnp.split(qkvo, (DHQK, 2 * DHQK, 2 * DHQK + DHV), axis=-1)
    return q, k, v, gates[..., 0], gates[..., 1]


def block(
    config: Config, p: Params, x: jax.Array, mlstm: Callable[..., tuple[jax.Array, State]]
) -> tuple[jax.Array, State]:
    """x (..., D) after an mLSTM layer and a feed-forward layer, and the states of ``mlstm``.

    mlstm: (qkvo, gates) -> h (..., NH, DHV) and states; ``separate`` has their shapes.
    """
    y = rms_norm(p, "norm_mlstm", x, config.norm_eps)
    qkvo = project(p, "qkvo", y)
    gates = project(p, "gates", y, jnp.float32)
    # Without the barrier the bias becomes an operand of the product, of which it is a copy per row.
    gates = lax.optimization_barrier(gates) + p["gate_bias"]
    gates = soft_cap(gates, config.gate_soft_cap)
    h, states = mlstm(qkvo, gates)
    h, o = h.astype(jnp.float32), qkvo[..., -h.shape[-1] :].astype(jnp.float32)
    variance = jnp.var(h, axis=-1, keepdims=True)
    h = jax.nn.standardize(h, variance=variance, epsilon=config.norm_eps)
    h = (scale(p, "multihead_norm", h) * jax.nn.sigmoid(o)).astype(x.dtype)
    x = x + project(p, "out_proj", h.reshape(*x.shape[:-1], config.v_dim))
    y = project(p, "up", rms_norm(p, "norm_ffn", x, config.norm_eps))  # (..., F, 2)
    y = y.astype(jnp.float32)
    y = (jax.nn.silu(y[..., 0]) * y[..., 1]).astype(x.dtype)
    return x + project(p, "down", y), states


@functools.partial(jax.jit, static_argnums=0)
def next_logits(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """x (..., D) -> float32 logits (..., V) of the token that follows."""
    if "out_norm" in params:
        x = rms_norm(params, "out_norm", x, config.norm_eps)
    weight = "embeddings" if config.tie_word_embeddings else "lm_head"
    return soft_cap(project(params, weight, x, jnp.float32), config.output_logit_soft_cap)


@functools.partial(jax.jit, donate_argnums=0)
def put_rows(pool: Any, rows: jax.Array, values: Any) -> Any:
    """Values go to rows (N,) of the pool; those of rows beyond it, nowhere."""
    return jax.tree.map(lambda x, y: x.at[rows].set(y.astype(x.dtype), mode="drop"), pool, values)


@jax.jit
def take_rows(pool: Any, rows: Any) -> Any:
    return jax.tree.map(lambda x: x[rows], pool)


def empty_states(
    config: Config, params: Params, B: int, dtype: Any = None, rings: bool = False
) -> list[State]:
    """States (B, ...) before a prompt, which are zeros.

    They are placed as a prefill and the steps return them, so that their shapes compile once.

    Args:
      dtype: of c. None: that of the config.
      rings: whether the states have a ring buffer each.
    """
    embeddings, blocks = params["embeddings"], len(params["blocks"])
    mesh = embeddings.sharding.mesh
    placed = NamedSharding(mesh, P(None, "heads") if mesh.size > 1 else P())
    return placed_zeros(config, blocks, B, dtype, embeddings.dtype if rings else None, placed)


@functools.partial(jax.jit, static_argnums=range(6))
def placed_zeros(
    config: Config, blocks: int, B: int, dtype: Any, ring_dtype: Any, placed: NamedSharding
) -> list[State]:
    """One program for ``empty_states``, because it makes hundreds of arrays."""
    (DHQK, DHV), heads = config.head_dims, (B, config.num_heads)
    shapes = (*heads, DHQK, DHV), (*heads, DHQK), heads
    kinds = dtype or config.inference_state_dtype, config.inference_state_dtype, "float32"
    states: list[State] = [tuple(map(jnp.zeros, shapes, kinds)) for _ in range(blocks)]
    if ring_dtype is not None:
        options: dict[str, Any] = dict(dtype=ring_dtype, input_gate=config.input_gate)
        states = [mlstm_ring_states(*state[:3], **options) for state in states]
    return lax.with_sharding_constraint(states, placed)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 6))
def prefill_block(
    config: Config,
    p: Params,
    x: jax.Array,
    lengths: jax.Array,
    initial: State | None,
    initial_rows: jax.Array | None,
    pool: State | None,
    rows: jax.Array | None,
) -> tuple[jax.Array, State]:
    """x (1, S, D) after a block, and its states as ``prefill`` has them."""
    B = len(lengths)
    of_prompts = dict(segment_lengths=lengths[None]) if B > 1 else dict(sequence_lengths=lengths)
    before = [y[None] if B > 1 else y for y in take_rows(initial, initial_rows) or ()]

    def mlstm(qkvo: jax.Array, gates: jax.Array) -> tuple[jax.Array, State]:
        options = dict(layout="BTNH", eps=config.eps, input_gate=config.input_gate)
        return mlstm_chunkwise(
            *separate(config, qkvo, gates),
            *before,
            return_last_states=True,
            **options,
            **of_prompts,
        )

    x, states = block(config, p, x, mlstm)
    c, n, m = (y[0] for y in states) if B > 1 else states
    dtype = config.inference_state_dtype
    states = c.astype(dtype), n.astype(dtype), m
    if isinstance(pool, RingStates):
        options = dict(dtype=pool.k.dtype, input_gate=config.input_gate)
        states = mlstm_ring_states(*states, **options)
    return x, put_rows(pool, rows, states) if pool else states


def prefill(
    config: Config,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    initial: Rows | None = None,
    into: Rows | None = None,
) -> tuple[jax.Array, list[State]]:
    """Reads prompts, one after the other in one row.

    All blocks have the same shapes, so the loop over them compiles one, which also takes initial
    states from rows of a pool and puts states into rows of another one.

    Args:
      tokens: (1, S).
      lengths: (B,), the tokens of each prompt.
      initial: the states before each prompt, rows (B,) of a pool. None: zeros.
      into: where the states after each prompt go, rows (B,) of another pool, which is updated in
        place; the states of rows beyond it go nowhere. None: into an array for the B prompts.

    Returns:
      x (1, S, D), of which ``next_logits`` makes logits, and the states after each prompt, in the
      pool if there is one.
    """
    initial, initial_rows = initial or (repeat(None), None)
    pool, rows = into or (repeat(None), None)
    # Once, not for each block.
    tokens, lengths, initial_rows, rows = jax.device_put((tokens, lengths, initial_rows, rows))
    x, states = take_rows(params["embeddings"], tokens), []
    for p, before, state in zip(params["blocks"], initial, pool, strict=False):
        x, state = prefill_block(config, p, x, lengths, before, initial_rows, state, rows)
        states.append(state)
    return x, states


@functools.partial(jax.jit, static_argnums=0)
def forward(
    config: Config, params: Params, tokens: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """tokens (B, S) -> float32 logits (B, S, V), with derivatives: for training.

    Each block runs once more in the backward pass.

    Args:
      segment_ids: (B, S), documents of packed rows. None: each row is one.
    """

    def mlstm(qkvo: jax.Array, gates: jax.Array) -> tuple[jax.Array, Any]:
        options: dict[str, Any] = dict(layout="BTNH", eps=config.eps, input_gate=config.input_gate)
        arrays = separate(config, qkvo, gates)
        return mlstm_chunkwise(*arrays, segment_ids=segment_ids, **options), None

    run = jax.checkpoint(lambda p, x: block(config, p, x, mlstm)[0])
    table = params["embeddings"]
    # The gradients of rows are summed in the dtype of the rows.
    x = table.astype(jnp.float32)[tokens].astype(table.dtype)
    for p in params["blocks"]:
        x = run(p, x)
    return next_logits(config, params, x)


@jax.jit
def finite(tree: Any) -> Any:
    """Whether all values of each array are."""
    return jax.tree.map(lambda x: jnp.all(jnp.isfinite(x)), tree)


def not_finite(tree: Any) -> list[str]:
    """The names of the arrays of a tree that have values that are not finite."""
    leaves = jax.tree.leaves_with_path(jax.device_get(finite(tree)))
    return [jax.tree_util.keystr(x, simple=True, separator=".") for x, right in leaves if not right]


def first_not_finite(config: Config, params: Params, tokens: list[int]) -> str:
    """What is not finite first when the model reads tokens: a weight, a block or the logits."""
    if names := not_finite(params):
        return names[0]
    states: Any = empty_states(config, params, 1)
    for n in range(0, len(tokens), MOST_STEPS):
        some = np.array([tokens[n : n + MOST_STEPS]])
        x, after = take_rows(params["embeddings"], some), []
        for number, (p, before) in enumerate(zip(params["blocks"], states, strict=True)):
            rows = np.array([some.size]), before, np.array([0]), None, None
            x, state = prefill_block(config, p, x, *rows)
            if not_finite((x, state)):
                return f"block {number} of {len(states)}"
            after.append(state)
        states = after
    return "the logits"


@functools.partial(jax.jit, static_argnums=0)
def step_block(
    config: Config, p: Params, x: jax.Array, state: State, accepted: jax.Array | None = None
) -> tuple[jax.Array, State]:
    def mlstm(qkvo: jax.Array, gates: jax.Array) -> tuple[jax.Array, State]:
        token = qkvo, None, None, gates, None  # joined
        if not isinstance(state, RingStates):
            return mlstm_recurrent_step(
                *token, *state, eps=config.eps, input_gate=config.input_gate
            )
        options: dict[str, Any] = dict(accepted=accepted, layout="BTNH", eps=config.eps)
        return mlstm_ring_step(*token, state, **options)

    return block(config, p, x, mlstm)


def step(
    config: Config,
    params: Params,
    states: list[State],
    token: jax.Array,
    accepted: jax.Array | None = None,
) -> tuple[jax.Array, list[State]]:
    """token (B,) -> logits (B, V) and the states after it.

    With rings also tokens (B, T) -> logits (B, T, V); accepted: (B,), how many of the call before
    count.
    """
    x, after = params["embeddings"][token], []  # (B, D)
    for p, state in zip(params["blocks"], states, strict=True):
        x, state = step_block(config, p, x, state, accepted)
        after.append(state)
    return next_logits(config, params, x), after


def look_up(text: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """What followed the last two tokens of text[:length] where they last stood before, (count,)."""
    at = jnp.arange(len(text))
    same = (text == text[length - 1]) & (jnp.roll(text, 1) == text[length - 2])
    begin = jnp.max(jnp.where(same & (at > 0) & (at < length - 1), at + 1, 0))
    return lax.dynamic_slice(text, (begin,), (count,))


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5), compiler_options=LOOP_OPTIONS
)
def speculate(
    config: Config,
    calls: int,
    T: int,
    params: Params,
    states: list[State],
    text: jax.Array,
    length: jax.Array,
    accepted: jax.Array,
) -> tuple[list[State], jax.Array, jax.Array, jax.Array]:
    """The likeliest tokens, of which a call checks T - 1 drafts and adds 1 to T.

    Args:
      states: with rings, of all tokens but the last one.
      text: (B, size), the tokens and space for calls * T new ones.
      length: (B,), how many tokens there are.
      accepted: (B,), how many tokens of the call before count.

    Returns:
      The last four arguments after the calls.
    """

    def one(carry: Any, _: None) -> Any:
        states, text, length, accepted = carry
        drafts = jax.vmap(functools.partial(look_up, count=T - 1))(text, length)
        last = jnp.take_along_axis(text, length[:, None] - 1, axis=1)
        tokens = jnp.concatenate([last, drafts], axis=1)
        logits, states = step(config, params, states, tokens, accepted)
        likeliest = sample(Sampling(), logits, None, 0).astype(text.dtype)
        right = jnp.cumprod(drafts == likeliest[:, :-1], axis=1, dtype=length.dtype)
        accepted = 1 + jnp.sum(right, axis=1, dtype=length.dtype)
        text = jax.vmap(lax.dynamic_update_slice)(text, likeliest, length[:, None])
        return (states, text, length + accepted, accepted), None

    carry, _ = lax.scan(one, (states, text, length, accepted), None, length=calls)
    return carry


@functools.partial(jax.jit, static_argnums=0)
def sample(sampling: Sampling, logits: jax.Array, key: jax.Array, number: Any) -> jax.Array:
    """Token (..., B) from logits (..., B, V), or NO_TOKEN where one is NaN or inf, or all -inf.

    number: of the draw, (B,) or for all; folded into the key. Draws are from logits (B, V).
    """
    known = jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)
    if not sampling.temperature:
        return jnp.where(known, jnp.argmax(logits, axis=-1), NO_TOKEN)
    # Of the largest logit the quotient is 0 at any temperature, and others are at least -inf.
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    limits = jnp.finfo(logits.dtype)
    logits = logits / float(np.clip(sampling.temperature, limits.tiny, limits.max))
    if sampling.top_p < 1.0:
        ordered, tokens = lax.top_k(logits, logits.shape[-1])  # equal ones in the order of ids
        mass = jax.nn.softmax(ordered)
        before = jnp.cumsum(mass, axis=-1) - mass  # the mass of the tokens before each
        # Sums that reach top_p may fall short of it by their rounding errors.
        drawn = jnp.where(before < max(sampling.top_p - 1e-6, 1e-9), ordered, -jnp.inf)
        logits = jnp.put_along_axis(logits, tokens, drawn, axis=-1, inplace=False)
    number = jnp.broadcast_to(number, len(logits))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, number)
    return jnp.where(known, jax.vmap(jax.random.categorical)(keys, logits), NO_TOKEN)


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), donate_argnums=4, compiler_options=LOOP_OPTIONS
)
def decode(
    config: Config,
    sampling: Sampling,
    steps: int,
    params: Params,
    states: list[State],
    token: jax.Array,
    key: jax.Array,
    number: jax.Array,
) -> tuple[list[State], jax.Array, jax.Array]:
    """Generates ``steps`` tokens after ``token`` (B,) in one loop on the device.

    number: of the first new token, as for ``sample``. Returns the states, which are updated in
    place, the last token (B,) and all new tokens (steps, B). The last one is not in the states yet.
    """

    def one(carry: Any, number: jax.Array) -> Any:
        states, token = carry
        logits, states = step(config, params, states, token)
        token = sample(sampling, logits, key, number)
        return (states, token), token

    numbers = jnp.add.outer(jnp.arange(steps), number)  # (steps,) or (steps, B)
    (states, token), tokens = lax.scan(one, (states, token), numbers)
    return states, token, tokens
