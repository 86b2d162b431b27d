#!/usr/bin/env bash
# orbax-checkpoint 0.12.8: CheckpointManager.save of an earlier step saves nothing, in silence.
#
# A run that goes back, after a spike of the loss or with a new data set, and counts its steps from
# there again calls save(5) in a folder that has step 10. The manager returns False, as it also does
# for a step that save_interval_steps skips; nobody reads that value, and hours later there is no
# checkpoint. force=True saves it.
#
# Seen (jax 0.10.2, CPU): save(10) True, save(5) False, steps [10]; save(5, force=True) True
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
import tempfile

import jax.numpy as jnp
import orbax.checkpoint as ocp

seen = []
with tempfile.TemporaryDirectory() as folder, ocp.CheckpointManager(folder) as manager:
    for step, options in ((10, {}), (5, {}), (5, dict(force=True))):
        tree = ocp.args.StandardSave(dict(w=jnp.full(2, step)))
        saved = manager.save(step, args=tree, **options)
        manager.wait_until_finished()
        seen.append((step, saved, sorted(manager.all_steps())))
        print(*seen[-1])
if seen != [(10, True, [10]), (5, False, [10]), (5, True, [5, 10])]:
    raise SystemExit("the behaviour has changed")
EOF
