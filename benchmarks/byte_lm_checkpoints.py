"""Checkpoints of train_byte_lm.py, by orbax: complete or not there, and checked when they are read."""

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

KEPT = 2


class CheckpointError(Exception):
    """A checkpoint that cannot be read, or that does not belong to this run."""


@jax.jit
def checksum(state: nnx.State) -> jax.Array:
    """The sum of all 32-bit words modulo 2**32, the same on every mesh."""
    words = (lax.bitcast_convert_type(x, jnp.uint32) for x in jax.tree.leaves(state))
    return sum((jnp.sum(x, dtype=jnp.uint32) for x in words), jnp.uint32(0))


class Checkpoints:
    """The last checkpoints of a run, in a folder of their own that all its processes share.

    They are written in the background. A checkpoint has its name, the number of steps, only when it is complete; what a killed process
    leaves has another name, and the next run removes it.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        latest = ocp.checkpoint_managers.LatestN(KEPT)
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
        """Begins to write the arrays of state, of 32 bits each, and progress, which JSON must be able to hold."""
        text = json.dumps(progress | dict(checksum=int(checksum(state))))
        checked = dict(text=text, crc32=zlib.crc32(text.encode()))
        parts = dict(
            state=ocp.args.StandardSave(_named(state)), progress=ocp.args.JsonSave(checked)
        )
        self._manager.save(step, args=ocp.args.Composite(**parts), force=True)

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
          CheckpointError: it cannot be read, has changed since it was written, or has other arrays than ``like``.
        """
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _named(like)
        )
        self._check(step, target)
        arrays = self._read(step, state=ocp.args.StandardRestore(target))
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in target])

    def _check(self, step: int, names: Iterable[str]) -> None:
        """Reads all arrays, one by one: orbax reads them at once, and when one fails the others fill the terminal."""
        words = 0
        for name in names:
            kvstore = dict(driver="ocdbt", base=f"file://{self.path(step)}/state/", path=f"{name}/")
            try:
                x = (
                    tensorstore.open(dict(driver="auto", kvstore=kvstore), read=True)
                    .result()
                    .read()
                    .result()
                )
            except ValueError as error:
                raise self._damaged(step, str(error)) from error
            words += int(np.sum(x.view(np.uint32), dtype=np.uint32))
        if words % 2**32 != self.progress(step)["checksum"]:
            raise self._damaged(step, "its arrays have changed")

    def _read(self, step: int, **part: ocp.args.CheckpointArgs) -> Any:
        [name] = part
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**part))[name]
        except (
            Exception
        ) as error:  # orbax, tensorstore and json have one of their own for each kind of damage
            raise self._damaged(step, f"{type(error).__name__}: {error}") from error

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"the checkpoint {self.path(step)} is damaged: {' '.join(reason.split())[:300]}"
        )

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
