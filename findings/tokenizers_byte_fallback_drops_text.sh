#!/usr/bin/env bash
# tokenizers 0.23.3: a tokenizer trained with byte_fallback=True has no byte tokens, and leaves out
# every character that its corpus lacks.
#
# BPE(byte_fallback=True) should encode an unknown character by the tokens <0x00> to <0xFF> of its
# bytes. BpeTrainer adds none of them, and without an unk_token encode drops the character in
# silence. A model then trains and answers on damaged text. The documentation says of byte_fallback
# only that it is the trick of SentencePiece, whose trainer adds all 256. With special_tokens they
# are in the vocabulary, but decode skips them. Train so, and then delete them from "added_tokens"
# of tokenizer.json: they stay in the vocabulary and are no longer special.
#
# Seen, "the cat naïve 7" after training on "the cat sat on the mat":
#     byte_fallback=True: decoded as "the cat nae ", vocabulary 22
#     special_tokens of all bytes: decoded as "the cat nae "
#     deleted from added_tokens: decoded as "the cat naïve 7"
# Upstream: huggingface/tokenizers#1407 (open).
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    tokenizers==0.23.3
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

text = "the cat naïve 7"
byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(special_tokens):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.BpeTrainer(special_tokens=special_tokens, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 10, trainer)
    return tokenizer


special = trained(byte_tokens)
settings = json.loads(special.to_str())
settings["added_tokens"] = []
tokenizers = {
    "byte_fallback": trained([]),
    "special tokens": special,
    "plain tokens": Tokenizer.from_str(json.dumps(settings)),
}
seen = []
for name, tokenizer in tokenizers.items():
    encoding = tokenizer.encode(text)
    seen.append(tokenizer.decode(encoding.ids))
    print(name, tokenizer.get_vocab_size(), encoding.tokens, repr(seen[-1]))
if seen != ["the cat nae ", "the cat nae ", text]:
    raise SystemExit("the behaviour has changed")
EOF
