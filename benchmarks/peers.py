"""Other implementations to measure beside mlstm_pallas, the inputs of all, the float64 oracles.

A package is imported only when it is asked for, and called, never copied from. Building an
implementation raises if the package or the device is missing, or if the package does not support
the shape.
"""

import functools
import importlib
from importlib import metadata
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import roofline
from jax import lax
from shapes import Shape

from mlstm_pallas.formulas.normaliser import DEFAULT_NORMALISER as NORMALISER


class Inputs(NamedTuple):
    """q, k (B, NH, S, DHQK), v (B, NH, S, DHV), i, f (B, NH, S) float32, and the cotangent dh."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    i: jax.Array
    f: jax.Array
    dh: jax.Array

    @property
    def shape(self):
        return Shape(*self.q.shape, self.v.shape[-1])


def normals(key, *dims):
    """Standard normal float32 arrays of these dimensions."""
    keys = jax.random.split(key, len(dims))
    return [jax.random.normal(key, dim, jnp.float32) for key, dim in zip(keys, dims, strict=True)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_inputs(key, shape, dtype, mean_f=4.0):
    """q and k have a positive mean: near q.n = 0, h would have no digits to compare."""
    rows = shape[:3]
    keys, values = (*rows, shape.DHQK), (*rows, shape.DHV)
    q, k, v, i, f, dh = normals(key, keys, keys, values, rows, rows, values)
    q, k, v, dh = (x.astype(dtype) for x in (q + 0.5, k + 0.5, v, dh))
    return Inputs(q, k, v, i, f + mean_f, dh)


ROWS = 128  # at once: the scores of all rows would not fit


def map_rows(function, *arrays):
    """function(t, row t of each array) for every row t of arrays (B, NH, S, ...).

    The backward pass computes the values again; only the inputs are kept.
    """
    rows = [jnp.moveaxis(x, 2, 0) for x in arrays]
    function = jax.checkpoint(function)
    values = lax.map(lambda x: function(*x), (jnp.arange(len(rows[0])), *rows), batch_size=ROWS)
    return jnp.moveaxis(values, 0, 2)


def exact(q, k, v, i, f, *, eps=NORMALISER.eps, norm_val=NORMALISER.norm_val):
    """The recurrence in its parallel form, every step against all before it.

    arXiv:2405.04517, appendix on the mLSTM. No step waits for another, so long sequences take a GPU
    seconds. It shares no code with the chunkwise form.
    """

    b = jnp.cumsum(jax.nn.log_sigmoid(f), -1)
    e = i - b

    def row(t, q, b):
        exponents = jnp.where(jnp.arange(k.shape[2]) <= t, e, -jnp.inf)
        u = jnp.maximum(exponents.max(-1), 0.0)  # m starts at 0
        scores = jnp.einsum("bhk,bhsk->bhs", q, k) * q.shape[-1] ** -0.5
        P = jnp.exp(exponents - u[..., None]) * scores
        den = jnp.maximum(jnp.abs(P.sum(-1)), norm_val * jnp.exp(-b - u)) + eps
        return jnp.einsum("bhs,bhsv->bhv", P, v) / den[..., None]

    return map_rows(row, q, b)


# Above any |z|. As the floor of the denominator it is the denominator: h is the numerator, scaled.
HUGE = 1e15


def constant_normaliser(q, k, v, i, f):
    """The same values; the gradient takes the denominator for a constant."""
    num = unnormalised(q, k, v, i, f)
    den = jnp.sum(num * num, -1) / jnp.sum(num * exact(q, k, v, i, f), -1)
    return num / lax.stop_gradient(den)[..., None]


def unnormalised(q, k, v, i, f):
    """exp(m_t) C_t^T q_t scale: the floor of the denominator, norm_val exp(-m_t), is all of it."""
    return exact(q, k, v, i, f, eps=0.0, norm_val=HUGE) * HUGE


def sigmoid_input_gate(q, k, v, i, f):
    """mLSTMsig without its normaliser (arXiv:2503.14376)."""
    return unnormalised(q, k, v, jax.nn.log_sigmoid(i), f)


def sigmoid_normalised(q, k, v, i, f):
    """mLSTMsig with its normaliser."""
    ones = jnp.ones_like(v[..., :1])
    both = sigmoid_input_gate(q, k, jnp.concatenate([v, ones], -1), i, f)
    num, z = both[..., :-1], both[..., -1:]
    return num / (jnp.maximum(jnp.abs(z), NORMALISER.norm_val) + NORMALISER.eps)


PACKED = 8  # sequences in a row


def packed(q, k, v, i, f):
    """Packed sequences, none of which sees another."""
    B, NH, S, _ = q.shape
    sequences = (x.reshape(B, NH * PACKED, S // PACKED, *x.shape[3:]) for x in (q, k, v, i, f))
    return exact(*sequences).reshape(v.shape)


def no_input_gate(q, k, v, i, f):
    """Simple gated linear attention."""
    return unnormalised(q, k, v, jnp.zeros_like(i), f)


def causal_attention(q, k, v):
    """Softmax attention of q, k, v (B, heads, S, D)."""

    def row(t, q):
        scores = jnp.einsum("bhd,bhsd->bhs", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[2]) <= t, scores, -jnp.inf))
        return jnp.einsum("bhs,bhsd->bhd", weights, v)

    return map_rows(row, q)


MLSTM = exact, constant_normaliser, packed  # the others are other functions


def take_heads(arrays, index, *, axes=2):
    """Heads of each JAX array (B, NH, ...) in a tree, or of (B * NH, ...) with axes=1, float64."""
    return jax.tree.map(
        lambda x: np.asarray(x.reshape(-1, *x.shape[axes:])[index]).astype(np.float64), arrays
    )


def swap_heads(*arrays):
    """(B, NH, S, ...) to (B, S, NH, ...), and back."""
    return [jnp.swapaxes(x, 1, 2) for x in arrays]


class Implementation:
    """Something that can be timed.

    Subclasses have these methods:
      build(inputs, direction): a function that runs once and leaves its outputs on the device.
      synchronise(outputs): waits for them.
      peak_memory_bytes(call): peak memory of one call beyond its inputs, outputs included.
      finite(outputs): whether all are.
      heads(outputs, index): some of the B * NH heads of each output, float64.

    Attributes:
      name: as in the flag --impl.
      oracle: the function that its outputs are checked against.
      outputs: names of the first outputs; the others are not checked.
      checked: the outputs that have to be within the tolerance; empty: all.
      config: for the record.
      head_axes: leading axes of the oracle's arguments and results that are heads: B, NH.
      stage: if it is a stage of mlstm_pallas by itself.
    """

    outputs = "h", "dq", "dk", "dv", "di", "df"
    checked = ()
    config = MappingProxyType({})
    head_axes = 2
    stage = None

    def versions(self):
        return {}

    def phases(self, shape, itemsize, direction):
        return roofline.mlstm(shape, itemsize, direction)

    def oracle_arguments(self, inputs):
        """The oracle's arguments and the cotangent of its result, (B, NH, ...) each."""
        return inputs[:5], inputs.dh

    def reference(self, *args):
        """The oracle on some of the heads, (heads, ...) in and out."""
        return self.oracle(*(x[None] for x in args))[0]

    def named(self, outputs):
        return dict(zip(self.outputs, outputs, strict=False))


def directed(forward, inputs, direction):
    """A function of inputs with the cotangent of its result at their end, and its arguments.

    Forward it is (*inputs) -> (result,), forward and backward (*inputs, cotangent) -> (result,
    *gradients).
    """

    def forward_backward(*args):
        *args, cotangent = args
        result, vjp = jax.vjp(forward, *args)
        return result, *vjp(cotangent)

    if direction == "fwd":
        return lambda *args: (forward(*args),), inputs[:-1]
    return forward_backward, inputs


class JaxImplementation(Implementation):
    """computation(inputs, direction) is a function to compile and its arguments.

    steps_first: whether outputs are (B, S, NH, ...).
    """

    steps_first = False

    def build(self, inputs, direction):
        function, self.arguments = self.computation(inputs, direction)
        self.compiled = jax.jit(function).lower(*self.arguments).compile()
        return lambda: self.compiled(*self.arguments)

    def synchronise(self, outputs):
        jax.block_until_ready(outputs)

    def peak_memory_bytes(self, call):
        memory = self.compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def finite(self, outputs):
        return all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(outputs))

    def heads(self, outputs, index):
        outputs = swap_heads(*outputs) if self.steps_first else outputs
        return take_heads(outputs, index, axes=self.head_axes)


def torch_tensor(torch, x, dtype):
    """An array of JAX or NumPy as a tensor on the GPU."""
    tensor = torch.tensor(np.asarray(x).astype(np.float32), device="cuda")
    return tensor.to(getattr(torch, str(dtype))).contiguous()


class TorchPeer(Implementation):
    """forward(*arguments) is what it times; the module module_name has the function."""

    def __init__(self):
        self.torch, self.module = map(importlib.import_module, ("torch", self.module_name))
        if not self.torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU")

    def versions(self):
        packages = "torch", "triton", self.module_name.partition(".")[0]
        known = metadata.packages_distributions()
        return {name: metadata.version(known[name][0]) for name in packages if name in known}

    def arguments(self, inputs):
        """The arguments of forward, and the cotangent of its result."""
        return inputs[:5], inputs.dh

    def build(self, inputs, direction):
        torch = self.torch
        torch.cuda.empty_cache()
        args, cotangent = self.arguments(inputs)
        args = [torch_tensor(torch, x, x.dtype) for x in args]
        cotangent = torch_tensor(torch, cotangent, inputs.v.dtype)
        if direction == "fwd":

            def call():
                with torch.no_grad():
                    return (self.forward(*args),)
        else:
            for x in args:
                x.requires_grad_()

            def call():
                h = self.forward(*args)
                return (h.detach(), *torch.autograd.grad(h, args, cotangent))

        return call

    def synchronise(self, outputs):
        self.torch.cuda.synchronize()

    def peak_memory_bytes(self, call):
        cuda = self.torch.cuda
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        self.synchronise(call())
        return cuda.max_memory_allocated() - before

    def finite(self, outputs):
        return all(bool(self.torch.isfinite(x).all()) for x in outputs)

    def heads(self, outputs, index):
        heads = (x.reshape(-1, *x.shape[2:])[index.tolist()] for x in outputs)
        return tuple(x.double().cpu().numpy() for x in heads)


def check_state_size(shape, chunk_size):
    """Raises ValueError if the states of mlstm_kernels exceed its 32-bit offsets.

    It writes to other addresses then, and no CUDA call of the process works any more.
    """
    states = shape.B * shape.NH * (shape.S // chunk_size + 1) * shape.DHQK * shape.DHV
    if states > 2**31:
        raise ValueError(f"its states would have {states} elements, beyond its offsets of 32 bits")


class MlstmKernels(TorchPeer):
    """mlstm_kernels (NX-AI): the stabilised mLSTM; no gradient flows through its normaliser."""

    oracle = staticmethod(constant_normaliser)
    # Its gate gradients are sums over the whole sequence of products that were rounded before. They
    # are reported and not checked.
    checked = ("h", "dq", "dk", "dv")
    module_name = "mlstm_kernels.torch.chunkwise"

    def build(self, inputs, direction):
        check_state_size(inputs.shape, self.config["chunk_size"])
        return super().build(inputs, direction)

    def forward(self, q, k, v, i, f):
        options = dict(eps=1e-6, autocast_kernel_dtype=q.dtype, **self.config)
        return getattr(self.module, self.function)(q, k, v, i, f, **options)


class LimitChunk(MlstmKernels):
    name, function = "mlstm_kernels_limit_chunk", "mlstm_chunkwise__limit_chunk"
    config = MappingProxyType(dict(chunk_size=64))


def limit_chunk(q, k, v, i, f):
    """mlstm_kernels (NX-AI) in JAX, through jax-triton; arrays are (B, S, NH, ...).

    Its xl_chunk in JAX takes no number of warps, and with the default the LLVM inside triton 3.6.0
    stops on an assertion, and the process with it.
    """
    B, S, NH, K = q.shape
    check_state_size(Shape(B, NH, S, K, v.shape[-1]), LimitChunk.config["chunk_size"])
    module = importlib.import_module("mlstm_kernels.jax.chunkwise")
    arrays = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, i, f))
    options = dict(eps=1e-6, autocast_kernel_dtype=q.dtype, **LimitChunk.config)
    return jnp.swapaxes(module.mlstm_chunkwise__limit_chunk(*arrays, **options), 1, 2)


def jla(q, k, v, i, f, impl="mosaic_gpu"):
    """jax-linear-attention's mLSTM; arrays are (B, S, NH, ...)."""
    attention = importlib.import_module("jla.ops").linear_attention
    return attention("mlstm", q, k, v, g=jax.nn.log_sigmoid(f), i=i, impl=impl)[0]


# The packages of functions above that models in JAX call, by the name of the implementation.
JAX_PACKAGES = {
    "mlstm_kernels_limit_chunk": ("mlstm_kernels", "jax-triton", "triton"),
    "jla": ("jax-linear-attention",),
}


def jax_versions(name):
    return {package: metadata.version(package) for package in JAX_PACKAGES[name]}


class Jla(JaxImplementation):
    """jax-linear-attention: the stabilised mLSTM, with all gradients."""

    name, steps_first, oracle = "jla", True, staticmethod(exact)
    config = MappingProxyType(dict(impl="mosaic_gpu"))

    def versions(self):
        return jax_versions(self.name)

    def computation(self, inputs, direction):
        forward = functools.partial(jla, **self.config)
        return directed(forward, Inputs(*swap_heads(*inputs)), direction)


class XLChunk(MlstmKernels):
    name, function = "mlstm_kernels_xl_chunk", "mlstm_chunkwise__xl_chunk"
    # With 4 warps the LLVM inside triton 3.6.0 stops on an assertion, and the process with it.
    config = MappingProxyType(dict(chunk_size=128, num_warps_intra=8))


class XLChunkSiging(MlstmKernels):
    """The mLSTM with a sigmoid input gate, here without its normaliser."""

    name, oracle = "mlstm_kernels_xl_chunk_siging", staticmethod(sigmoid_input_gate)
    function = "mlstm_siging_chunkwise__xl_chunk"
    config = MappingProxyType(dict(chunk_size=128, normalize=False))


class SimpleGLA(TorchPeer):
    """flash-linear-attention: scalar forget gate, no input gate, no normaliser."""

    name, module_name = "fla_simple_gla", "fla.ops.simple_gla"
    oracle = staticmethod(no_input_gate)
    outputs = ("h", "dq", "dk", "dv")  # its last gradient is with respect to log sigmoid(f)
    config = MappingProxyType(dict(chunk_size=64))

    def arguments(self, inputs):
        q, k, v, dh = (jnp.swapaxes(x, 1, 2) for x in (inputs.q, inputs.k, inputs.v, inputs.dh))
        return (q, k, v, jnp.swapaxes(jax.nn.log_sigmoid(inputs.f), 1, 2)), dh

    def forward(self, q, k, v, g):
        return self.module.chunk_simple_gla(q, k, v, g, **self.config)[0]

    def heads(self, outputs, index):
        return super().heads([x.transpose(1, 2) for x in outputs], index)


ATTENTION_HEAD = 128


def attention_heads(shape):
    """The number of heads of 128 that have the width of h together."""
    width = shape.NH * shape.DHV
    if width % ATTENTION_HEAD:
        raise ValueError(f"the width NH * DHV = {width} has no heads of {ATTENTION_HEAD}")
    return width // ATTENTION_HEAD


class TorchAttentionCudnn(TorchPeer):
    """Causal softmax attention of the same width, by cuDNN."""

    name, module_name = "torch_sdpa_cudnn", "torch.nn.attention"
    oracle = staticmethod(causal_attention)
    outputs = ("o", "dq", "dk", "dv")

    def phases(self, shape, itemsize, direction):
        sizes = shape.B, attention_heads(shape), shape.S, ATTENTION_HEAD
        return roofline.attention(*sizes, itemsize, direction)

    def arguments(self, inputs):
        """q, k, v and the cotangent, (B, heads, S, 128)."""
        B, _, S, _, _ = inputs.shape
        heads = attention_heads(inputs.shape)
        widths = (jnp.flip(inputs.v, 2), jnp.flip(inputs.v, 3), inputs.v, inputs.dh)
        widths = (jnp.swapaxes(x, 1, 2).reshape(B, S, heads, ATTENTION_HEAD) for x in widths)
        *args, cotangent = (jnp.swapaxes(x, 1, 2) for x in widths)
        return args, cotangent

    oracle_arguments = arguments

    def forward(self, q, k, v):
        with self.module.sdpa_kernel(self.module.SDPBackend.CUDNN_ATTENTION):
            return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


_PEERS = LimitChunk, XLChunk, Jla, XLChunkSiging, SimpleGLA, TorchAttentionCudnn
PEERS = {peer.name: peer for peer in _PEERS}
