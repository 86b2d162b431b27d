#!/usr/bin/env bash
# transformers 5.24.0: save_pretrained writes the truncation and padding of a tokenizer's last call
# into tokenizer.json.
#
# truncation, max_length and padding are arguments of one call, and the docstring of
# set_truncation_and_padding says that both settings are reset after it. They stay in the backend,
# and save_pretrained saves them. The tokenizers library reads them from the file: it cuts every
# text to the length of that call and pads shorter ones, so a corpus loses the rest of its
# documents, and a prompt loses its end. transformers replaces the settings at each call, so it
# reads the same file without a loss. Call no_truncation() and no_padding() after
# Tokenizer.from_file.
#
# Seen (tokenizers 0.23.3), tokens of a text of 50 words and of one of 2:
#     saved before any call: tokenizers 50 and 2, transformers 50 and 2
#     saved after a call with max_length 8 and padding: tokenizers 8 and 8, transformers 50 and 2
# Upstream: huggingface/transformers#24441 (closed).
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    transformers==5.24.0 tokenizers==0.23.3 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

words = [f"w{n}" for n in range(50)]
vocab = {word: n for n, word in enumerate(["<pad>", "<unk>", *words])}
backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>"
)
texts = [" ".join(words), "w1 w2"]


def saved(name):
    tokenizer.save_pretrained(name)
    read = Tokenizer.from_file(f"{name}/tokenizer.json")
    again = AutoTokenizer.from_pretrained(name)
    lengths = [len(read.encode(text).ids) for text in texts]
    lengths += [len(again(text).input_ids) for text in texts]
    print(name, lengths)
    return lengths


before = saved("before")
tokenizer(texts, truncation=True, max_length=8, padding="max_length")
after = saved("after")
if before != [50, 2, 50, 2]:
    raise SystemExit("a tokenizer that was not called has other lengths, too")
if after != [8, 8, 50, 2]:
    raise SystemExit("the behaviour has changed")
EOF
