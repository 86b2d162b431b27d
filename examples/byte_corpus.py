"""The text that train_byte_lm.py learns: files, training and held-out text, windows of it."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

VOCABULARY = 256
HELD_OUT_SHARE = 20  # one file in so many, or the last of so many parts of a single file
# Folders of the standard library that differ between installations.
NOT_EVERYWHERE = {"site-packages", "dist-packages", "test", "tests"}


class CorpusError(ValueError):
    """The corpus cannot be trained on."""


def corpus_files(corpus: Path | None) -> dict[str, Path]:
    """Name -> file, sorted.

    ``corpus`` is a file, or a folder of which all files count, those of its folders too. None: the
    standard library's sources.
    """
    if corpus is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = root.rglob("*.py")
        files = [x for x in paths if not NOT_EVERYWHERE & set(x.relative_to(root).parts)]
    elif corpus.is_dir():
        root, files = corpus, [path for path in corpus.rglob("*") if path.is_file()]
    else:
        root, files = corpus.parent, [corpus]
    names = {path.relative_to(root).as_posix(): path for path in files}
    return dict(sorted(names.items()))


def split_files(names: list[str]) -> tuple[list[str], list[str]]:
    """Names for training and held-out names, at least one of each.

    The held-out names are those of the lowest hashes, so that a new file moves few others.
    """

    def digest(name: str) -> bytes:
        return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()

    ranked = sorted(names, key=digest)
    count = max(1, len(names) // HELD_OUT_SHARE)
    return sorted(ranked[count:]), sorted(ranked[:count])


def read_corpus(corpus: Path | None, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text, each uint8 (bytes,) with more than seq_len bytes.

    No file is in both, unless there is only one.

    Raises:
      CorpusError: too little text.
      OSError: a file that cannot be read.
    """
    source = "the standard library" if corpus is None else f"corpus {corpus}"
    texts = {name: path.read_bytes() for name, path in corpus_files(corpus).items()}
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        raise CorpusError(f"{source} has no text")
    if len(texts) == 1:
        [text] = texts.values()
        cut = len(text) - len(text) // HELD_OUT_SHARE
        train, held_out = text[:cut], text[cut:]
    else:
        parts = split_files(list(texts))
        train, held_out = (b"\n".join(texts[name] for name in names) for names in parts)
    for part, text in (("training", train), ("held-out", held_out)):
        if len(text) <= seq_len:
            size = f"{len(text)} bytes of {part} text"
            raise CorpusError(f"{source} has {size}, fewer than the {seq_len + 1} of one sequence")
    return np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    """Sequences and the byte after each: uint8 (len(starts), seq_len + 1)."""
    return text[starts[:, None] + np.arange(seq_len + 1)]


def unigram_bits(train: np.ndarray, held_out: np.ndarray) -> float:
    """Held-out bits per byte of a model that knows only how frequent each byte is.

    The frequencies are those of the training text, add-one smoothed.
    """
    counts = np.bincount(train, minlength=VOCABULARY) + 1.0
    return float(-np.mean(np.log2(counts / counts.sum())[held_out]))
