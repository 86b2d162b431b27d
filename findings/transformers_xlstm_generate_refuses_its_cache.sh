#!/usr/bin/env bash
# transformers 5.24.0: generate returns the cache of an xLSTM, and every generate call refuses it.
#
# With return_dict_in_generate=True the output has the cache after the answer. For models with
# attention, the documentation continues a chat by passing that cache to the next generate; for
# xLSTM, it says that forward takes it with the next input_ids. Here generate fails with an
# AttributeError that names a property of other cache classes, whether it gets all ids or only
# those that the cache has not read. What remains is a loop over calls of the model.
#
# Seen (torch 2.13.0, CPU):
#     model(new ids): runs
#     generate(all ids): AttributeError: 'xLSTMCache' object has no attribute 'is_compileable'
#     generate(new ids): AttributeError: 'xLSTMCache' object has no attribute 'is_compileable'
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

torch.manual_seed(0)
config = xLSTMConfig(
    vocab_size=64, hidden_size=128, num_hidden_layers=1, num_heads=2, eos_token_id=None
)
model = xLSTMForCausalLM(config).eval()
options = dict(max_new_tokens=4, do_sample=False)


def outcome(name, call, **arguments):
    first = model.generate(torch.arange(3, 11)[None], return_dict_in_generate=True, **options)
    last = first.sequences[:, -1:]  # the only token that the cache has not read
    ids = dict(new=last, all=first.sequences)[arguments.pop("ids")]
    try:
        with torch.no_grad():
            call(ids, cache=first.cache, **arguments)
        result = "runs"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    print(f"{name}: {result}")
    return result


if outcome("model(new ids)", model, ids="new") != "runs":
    raise SystemExit("the model does not take the cache, either")
for ids in ("all", "new"):
    if "is_compileable" not in outcome(f"generate({ids} ids)", model.generate, ids=ids, **options):
        raise SystemExit("the behaviour has changed")
EOF
