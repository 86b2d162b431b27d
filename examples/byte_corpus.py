"""The text that train_byte_lm.py learns: files, training and held-out text."""

import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

VOCABULARY = 256
HELD_OUT_SHARE = 20  # every so many-th file, or the last of so many parts of a single file
# Folders of the standard library that differ between installations.
NOT_EVERYWHERE = {"site-packages", "dist-packages", "test", "tests"}


class UserError(ValueError):
    """What the user can mend; the message is one line."""


def corpus_files(corpus: Path | None) -> list[Path]:
    """``corpus`` is a file or a folder; None: the standard library's sources.

    A file that has several names, by symbolic or hard links, is there once. Folders that are links
    are left out.
    """
    if corpus and not corpus.is_dir():
        return [corpus]
    root = corpus or Path(sysconfig.get_path("stdlib"))
    names: dict[tuple[int, int], Path] = {}  # by device and inode
    paths = sorted(path for path in root.rglob("*" if corpus else "*.py") if path.is_file())
    for path in sorted(paths, key=Path.is_symlink):  # a link does not replace its file
        if corpus or not NOT_EVERYWHERE & {*path.relative_to(root).parts}:
            names.setdefault(((status := path.stat()).st_dev, status.st_ino), path)
    return sorted(names.values())


def real(path: Path) -> Path:
    """Without links; Path.resolve raises RuntimeError for a link to itself, before Python 3.13."""
    return Path(os.path.realpath(path))


def read_corpus(
    corpus: Path | None, seq_len: int, written: Iterable[Path] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text, each uint8 (bytes,) with more than seq_len bytes.

    No file is in both, unless there is only one.

    written: files and folders that the program writes, which are no part of the text.

    Raises:
      UserError: too little text.
      OSError: a file that cannot be read.
    """
    source = "the standard library" if corpus is None else f"corpus {corpus}"
    outputs = {*map(real, written)}
    files = [x for x in corpus_files(corpus) if outputs.isdisjoint([y := real(x), *y.parents])]
    texts = [text for path in files if (text := path.read_bytes())]
    if not texts:
        raise UserError(f"{source} has no text")
    if len(texts) == 1:
        cut = len(texts[0]) - len(texts[0]) // HELD_OUT_SHARE
        train, held_out = texts[0][:cut], texts[0][cut:]
    else:
        held_out = b"\n".join(texts[::HELD_OUT_SHARE])
        del texts[::HELD_OUT_SHARE]
        train = b"\n".join(texts)
    for part, text in (("training", train), ("held-out", held_out)):
        if len(text) <= seq_len:
            size = f"{len(text)} bytes of {part} text"
            raise UserError(f"{source} has {size}, fewer than the {seq_len + 1} of one sequence")
    return np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)


def unigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Held-out bits per byte of a model that knows only how frequent each byte is.

    The frequencies are counted in the training text, add-one smoothed.
    """
    counts = np.bincount(train, minlength=VOCABULARY) + 1.0
    return float(-np.mean(np.log2(counts / counts.sum())[held_out]))
