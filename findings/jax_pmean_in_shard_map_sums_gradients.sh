#!/usr/bin/env bash
# jax 0.10.2: in a shard_map, the pmean of the gradients of replicated parameters is their sum.
#
# A data-parallel step of pmap takes jax.grad of the loss on each device and then lax.pmean of the
# gradients. The documentation names shard_map as its successor, and the step runs there unchanged.
# But inside a shard_map, jax.grad itself adds the gradient of a replicated parameter over the
# devices, and the pmean of equal values changes nothing: the gradient is as many times too large as
# there are devices, and with psum that number again. The guide says that marking a value as varying
# transposes to a psum, not what this does to such a step. Adam hides the factor; SGD, clipping by
# norm and the logged norm do not. Take the pmean of the loss inside jax.grad, or pass
# check_vma=False, with which jax.grad adds nothing.
#
# Seen (CPU, 8 devices; also jax 0.12.0.1), the gradient of w in the mean of w * arange(8):
#     without devices 3.5, pmap 3.5
#     shard_map with pmean 28.0, with psum 224.0
#     shard_map with pmean of the loss 3.5, with check_vma=False 3.5
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0
cd "$folder"
env XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
    "$folder/venv/bin/python" -I - <<'EOF'
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

w, x = jnp.float32(1), jnp.arange(8.0)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def loss(w, x):
    return (w * x).mean()


def of_gradient(collective):
    return lambda w, x: collective(jax.grad(loss)(w, x), "data")


def of_loss(w, x):
    return jax.grad(lambda w: lax.pmean(loss(w, x), "data"))(w)


def sharded(step, **options):
    specs = dict(in_specs=(P(), P("data")), out_specs=P())
    step = jax.jit(jax.shard_map(step, mesh=mesh, **specs, **options))
    return float(step(w, x).block_until_ready())


pmapped = jax.pmap(of_gradient(lax.pmean), axis_name="data", in_axes=(None, 0))
expected = [float(jax.grad(loss)(w, x)), float(pmapped(w, x).block_until_ready()[0])]
seen = [sharded(of_gradient(lax.pmean)), sharded(of_gradient(lax.psum))]
repaired = [sharded(of_loss), sharded(of_gradient(lax.pmean), check_vma=False)]
print("without devices {}, pmap {}".format(*expected))
print("shard_map with pmean {}, with psum {}".format(*seen))
print("shard_map with pmean of the loss {}, with check_vma=False {}".format(*repaired))
if expected + repaired != [3.5] * 4:
    raise SystemExit("the gradient of one device, of pmap or of a repair is another one")
if seen != [28, 224]:
    raise SystemExit("the behaviour has changed")
EOF
