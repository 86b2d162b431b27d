"""Checkpoints of train_byte_lm.py, by orbax: whole or not there, checked when they are read."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax import nnx
from jax import lax

MAX_CHECKPOINTS = 2


class CheckpointError(Exception):
    """A checkpoint that cannot be read, or that does not belong to this run."""


@jax.jit
def checksum(state: nnx.State) -> jax.Array:
    """The sum of all 32-bit words modulo 2**32, the same on every mesh."""
    words = (lax.bitcast_convert_type(x, jnp.uint32) for x in jax.tree.leaves(state))
    return sum((jnp.sum(x, dtype=jnp.uint32) for x in words), jnp.uint32(0))


class Checkpoints:
    """The last checkpoints of a run, in a folder of their own that all its processes share.

    They are written in the background. A checkpoint has its name, the number of steps, only when it
    is complete. What a killed process leaves has another name, and the next run removes it.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        latest = ocp.checkpoint_managers.LatestN(MAX_CHECKPOINTS)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=latest, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def latest(self) -> int | None:
        """The step of the last one."""
        return self._manager.latest_step()

    def path(self, step: int) -> Path:
        return self._folder / str(step)

    def save(self, step: int, state: nnx.State, progress: dict[str, Any]) -> None:
        """Begins to write the state, arrays of 32 bits each, and the progress, which is JSON."""
        text = json.dumps(progress | dict(checksum=int(checksum(state))))
        record = dict(text=text, crc32=zlib.crc32(text.encode()))
        arrays, record = ocp.args.StandardSave(_named(state)), ocp.args.JsonSave(record)
        parts = ocp.args.Composite(state=arrays, progress=record)
        self._manager.save(step, args=parts, force=True)

    def progress(self, step: int) -> dict[str, Any]:
        """What was saved beside the state.

        Raises:
          CheckpointError: it cannot be read, or has changed since it was written.
        """
        checked = self._read(step, progress=ocp.args.JsonRestore())
        text = checked.get("text", "")
        if zlib.crc32(text.encode()) != checked.get("crc32"):
            raise self._damaged(step, "its record of the training has changed")
        return json.loads(text)

    def state(self, step: int, like: nnx.State) -> nnx.State:
        """The saved state, each array on the devices where ``like`` has it.

        Raises:
          CheckpointError: it cannot be read, has changed since it was written, or has other arrays
            than ``like``.
        """

        def placed(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        target = jax.tree.map(placed, _named(like))
        self._check(step, target)
        arrays = self._read(step, state=ocp.args.StandardRestore(target))
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in target])

    def _check(self, step: int, names: Iterable[str]) -> None:
        """Reads all arrays, one by one.

        orbax reads them at once, and when one fails the others fill the terminal.
        """
        words = 0
        for name in names:
            base = f"file://{self.path(step)}/state/"
            kvstore = dict(driver="ocdbt", base=base, path=f"{name}/")
            try:
                opened = tensorstore.open(dict(driver="auto", kvstore=kvstore), read=True)
                x = opened.result().read().result()
            except ValueError as error:
                raise self._damaged(step, str(error)) from error
            words += int(np.sum(x.view(np.uint32), dtype=np.uint32))
        if words % 2**32 != self.progress(step)["checksum"]:
            raise self._damaged(step, "its arrays have changed")

    def _read(self, step: int, **part: ocp.args.CheckpointArgs) -> Any:
        [name] = part
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**part))[name]
        # orbax, tensorstore and json have an exception for each kind of damage.
        except Exception as error:
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        reason = " ".join(reason.split())[:300]
        return CheckpointError(f"the checkpoint {self.path(step)} is damaged: {reason}")

    def clear(self) -> None:
        """Removes all."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()


def _named(state: nnx.State) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree.leaves_with_path(state)
    }
