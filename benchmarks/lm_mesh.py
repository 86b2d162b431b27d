"""How a training step of a language model is spread over the devices of a mesh.

The mesh has two axes: "batch", over which sequences are split, and "sequence", over which their
steps are. Inputs, targets and activations are split over both. What is computed per token stays on
its device; the mLSTM exchanges states, and gradients are summed over all devices. With ``sharded``
parameters each device keeps a part of each, of its gradient and of its moments (FSDP, ZeRO-3). A
block gathers its weights when it runs, and again in the backward pass, which sums their gradients
onto the parts. docs/training.md has the same in nnx.

    data            sequences over all devices; each has all parameters
    fsdp            sequences over all devices; sharded
    sequence        steps, by mlstm_chunkwise_sequence_parallel; each device has all parameters
    fsdp_sequence   steps; sharded over all devices
"""

import contextlib
import dataclasses
import functools

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mlstm_pallas import mlstm_chunkwise
from mlstm_pallas.distributed import mlstm_chunkwise_sequence_parallel

AXES = "batch", "sequence"
TOKENS = P(*AXES)  # of arrays (B, S, ...)
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Parameters of fewer elements, those of all layers together, stay on every device.
FEWEST_SHARDED = 1024


class OneDevice:
    """A step without a mesh; ``Spread`` has the same functions."""

    batch = sequence = size = 1

    def context(self):
        """In which a step is traced and called."""
        return contextlib.nullcontext()

    def shardings(self, tree):
        """Where the arrays of a state are, None for any device."""
        return None

    def place_state(self, state):
        return state

    def place_tokens(self, tokens):
        """Of arrays (B, S)."""
        return tokens

    def mlstm(self, **options):
        """The mLSTM of arrays (B, S, NH, ...)."""
        return functools.partial(mlstm_chunkwise, layout="BTNH", **options)

    def gather(self, params):
        """All of the parameters, on each device."""
        return params

    def embed(self, table, tokens):
        """table (vocabulary, width), tokens (B, S) -> (B, S, width)."""
        return table[tokens]

    def sum_over_tokens(self, function):
        """``function`` with the sum of its results, where each device has some of the tokens.

        function: of a tree of parameters and of arrays (B, S, ...), returns a scalar.
        """
        return function


@dataclasses.dataclass(frozen=True)
class Spread(OneDevice):
    """mesh: with the axes ``AXES``; sharded: whether each device has a part of the parameters."""

    mesh: Mesh
    sharded: bool

    batch = property(lambda self: self.mesh.shape["batch"])
    sequence = property(lambda self: self.mesh.shape["sequence"])
    size = property(lambda self: self.mesh.size)

    def context(self):
        return jax.set_mesh(self.mesh)

    def spec(self, x):
        """Of a parameter or its moments: the longest axis is split, never that of the layers."""
        axes = [n for n in range(x.ndim) if x.shape[n] % self.size == 0]
        if not (self.sharded and axes and x.size >= FEWEST_SHARDED):
            return P()
        longest = max(axes, key=lambda n: x.shape[n])
        return P(*[None] * longest, AXES)

    def shardings(self, tree):
        return jax.tree.map(lambda x: NamedSharding(self.mesh, self.spec(x)), tree)

    def place_state(self, state):
        return jax.device_put(state, self.shardings(state))

    def place_tokens(self, tokens):
        return jax.device_put(tokens, NamedSharding(self.mesh, TOKENS))

    def mlstm(self, **options):
        if self.sequence == 1:
            return super().mlstm(**options)
        options |= dict(layout="BTNH", axis_name="sequence")
        call = functools.partial(mlstm_chunkwise_sequence_parallel, **options)
        return jax.shard_map(call, mesh=self.mesh, in_specs=(TOKENS,) * 5, out_specs=TOKENS)

    def gather(self, params):
        """reshard is for explicit axes, the constraint for automatic ones."""
        if not self.sharded:
            return params
        everywhere = NamedSharding(self.mesh, P())

        def gathered(x):
            x = jax.sharding.reshard(x, everywhere)
            return jax.lax.with_sharding_constraint(x, everywhere)

        return jax.tree.map(gathered, params)

    def embed(self, table, tokens):
        return self._on_tokens(lambda table, tokens: table[tokens], TOKENS)(table, tokens)

    def sum_over_tokens(self, function):
        return self._on_tokens(lambda *x: jax.lax.psum(function(*x), AXES), P())

    def _on_tokens(self, function, out_specs):
        """``function`` on the tokens of each device, with all of the parameters.

        They are gathered inside, so that the gradient of each is summed once.
        """

        def on_all(params, *arrays):
            specs = jax.tree.map(self.spec, params)
            tokens = [TOKENS] * len(arrays)

            @functools.partial(
                jax.shard_map, mesh=self.mesh, in_specs=(specs, *tokens), out_specs=out_specs
            )
            def on_one(params, *arrays):
                return function(jax.tree.map(_gathered, params, specs), *arrays)

            return on_one(params, *arrays)

        return on_all


def _gathered(x, spec):
    """All of a parameter inside of shard_map, whose gradient is the sum over the devices."""
    if spec == P():
        return jax.lax.pcast(x, AXES, to="varying")
    return jax.lax.all_gather(x, AXES, axis=len(spec) - 1, tiled=True)


KINDS = {  # whether steps are split, whether parameters are
    "data": (False, False),
    "fsdp": (False, True),
    "sequence": (True, False),
    "fsdp_sequence": (True, True),
}


def spread(name, axis_type, devices, per_sequence):
    """The spread of this name, or ``OneDevice``.

    devices: of the mesh.
    per_sequence: how many share a sequence, if steps are split.
    """
    if name == "one":
        return OneDevice()
    steps, sharded = KINDS[name]
    split = per_sequence if steps else 1
    shape = len(devices) // split, split
    types = (AXIS_TYPES[axis_type],) * 2
    return Spread(jax.make_mesh(shape, AXES, axis_types=types, devices=devices), sharded)
