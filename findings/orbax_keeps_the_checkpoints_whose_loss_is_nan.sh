#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: with best_fn, a run that ends in NaN keeps the NaN checkpoints as the
# best ones, and deletes those before.
#
# The documentation says that max_to_keep retains checkpoints by their quality, as best_fn measures
# it. The manager sorts them by that number and keeps the end of the list. A NaN is neither less
# nor greater than another number, so the sort leaves it where it was saved, at the end. As soon as
# there are max_to_keep of them, no finite checkpoint is left and best_step() is a NaN. There is no
# warning. A best_fn that returns inf for NaN, or -inf for best_mode="max", is right.
#
# Seen (jax 0.10.2, CPU), max_to_keep=2, losses 3, 2, 1, NaN, NaN of steps 0 to 4:
#     best_mode="min": steps 3 and 4 are kept, best_step() is 4
#     best_mode="max" of minus the loss: the same
#     NaN as inf: steps 1 and 2 are kept, best_step() is 2
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6 ml_dtypes==0.6.0 orbax-checkpoint==0.12.8
cd "$folder"
env -u XLA_FLAGS JAX_PLATFORMS=cpu "$folder/venv/bin/python" -I - <<'EOF'
import math
import tempfile

import jax.numpy as jnp
import orbax.checkpoint as ocp


def kept(best_mode, best_fn):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_mode=best_mode, best_fn=best_fn)
    with tempfile.TemporaryDirectory() as folder:
        with ocp.CheckpointManager(folder, options=options) as manager:
            for step, loss in enumerate((3.0, 2.0, 1.0, math.nan, math.nan)):
                tree = ocp.args.StandardSave(dict(w=jnp.full(2, loss)))
                manager.save(step, args=tree, metrics=dict(loss=loss))
                manager.wait_until_finished()
            return sorted(manager.all_steps()), manager.best_step()


seen = [
    kept("min", lambda metrics: metrics["loss"]),
    kept("max", lambda metrics: -metrics["loss"]),
    kept("min", lambda metrics: math.inf if math.isnan(metrics["loss"]) else metrics["loss"]),
]
print(*seen, sep="\n")
if seen != [([3, 4], 4), ([3, 4], 4), ([1, 2], 2)]:
    raise SystemExit("the behaviour has changed")
EOF
