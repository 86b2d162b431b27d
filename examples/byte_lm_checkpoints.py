"""Checkpoints of train_byte_lm.py: one file each, whole or not there, checked when it is read."""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from byte_corpus import UserError

MAX_CHECKPOINTS = 2


class Checkpoints:
    """The last checkpoints of a run, in a folder that all its processes share.

    A checkpoint is a NumPy archive, STEP.npz, with a CRC-32 of each array. It gets its name when it
    is complete.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.npz"))

    def path(self, step: int) -> Path:
        return self.folder / f"{step}.npz"

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Writes the state, whole arrays, and the progress, which is JSON."""
        part = self.folder / "part"
        with part.open("wb") as file:
            np.savez(file, *jax.tree.leaves(state), progress=json.dumps(progress))
            os.fsync(file.fileno())
        part.replace(self.path(step))
        for old in self.steps()[:-MAX_CHECKPOINTS]:
            self.path(old).unlink()

    def read(self, step: int) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The arrays of the state, and the progress.

        Raises UserError if the file cannot be read or has changed since it was written.
        """
        try:
            with self.path(step).open("rb") as file, np.load(file) as archive:
                progress, *leaves = (archive[name] for name in archive.files)
                return leaves, json.loads(progress.item())
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"the checkpoint {self.path(step)} is damaged: {reason}") from None

    def clear(self) -> None:
        for step in self.steps():
            self.path(step).unlink()
