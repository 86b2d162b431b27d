#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0: LoRA of dt_proj in Mamba and Jamba has no effect until it is
# merged.
#
# dt_proj computes the step size, from which the decays follow. peft refuses to adapt two modules of
# Mamba, out_proj and conv1d, because its kernels do not call them, so a user takes the others to be
# safe. transformers does not call dt_proj either, on CPUs too, but multiplies by its weight. So its
# adapter gets no gradient, also in Jamba, where "all-linear" includes it. An adapter that was
# trained without kernels in transformers 5.0, which called the module, changes nothing now, until
# merge_and_unload makes another model of it than the one that was evaluated. Leave dt_proj out, or
# train it by modules_to_save=["dt_proj"].
#
# Seen (torch 2.13.0, CPU), adapters without a gradient, all of dt_proj; relative change of the
# logits by a random adapter of dt_proj, before and after merge_and_unload:
#     Mamba, in_proj, x_proj and dt_proj: 2 of 6; 0, 0.00013
#     FalconMamba, in_proj, x_proj and dt_proj: 2 of 6; 0, 0.044
#     Jamba, all-linear: 1 of 14; 0, 0.65
#     Mamba, x_proj and modules_to_save=["dt_proj"]: 0 of 4
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    peft==0.21.2 transformers==5.24.0 torch==2.13.0 accelerate==1.15.0 numpy==2.4.6
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -I - <<'EOF' 2>log || { cat log; exit 1; }
import copy

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

torch.manual_seed(0)
size = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2)
attention = dict(num_attention_heads=2, num_key_value_heads=2, attn_layer_offset=1)
feed_forward = dict(intermediate_size=32, num_experts=1)
jamba = JambaConfig(**size, **attention, **feed_forward, attn_layer_period=2, initializer_range=0.3)
ids = torch.randint(0, 64, (2, 16))


def without_gradient(model, **options):
    adapted = get_peft_model(copy.deepcopy(model).train(), LoraConfig(r=4, **options))
    adapted(ids, labels=ids).loss.backward()
    trained = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
    missing = {n for n, gradient in trained.items() if gradient is None}
    assert all("dt_proj.lora" in n for n in missing)
    return len(missing) // 2, len(trained) // 2


@torch.no_grad()
def changes(model):
    config = LoraConfig(r=4, target_modules=["dt_proj"], init_lora_weights=False)
    base = model.eval()(ids).logits
    adapted = get_peft_model(copy.deepcopy(model), config).eval()
    before = adapted(ids).logits
    after = adapted.merge_and_unload()(ids).logits
    return [float((logits - base).norm() / base.norm()) for logits in (before, after)]


three = ["in_proj", "x_proj", "dt_proj"]
mamba = MambaForCausalLM(MambaConfig(**size))
falcon_mamba = FalconMambaForCausalLM(FalconMambaConfig(**size))
jamba = JambaForCausalLM(jamba)
for model, modules in ((mamba, three), (falcon_mamba, three), (jamba, "all-linear")):
    missing, total = without_gradient(model, target_modules=modules)
    before, after = changes(model)
    print(f"{type(model).__name__}: {missing} of {total}; {before:.2g}, {after:.2g}")
    if not missing or before != 0 or after < 1e-5:
        raise SystemExit("the behaviour has changed")
saved = without_gradient(mamba, target_modules=["x_proj"], modules_to_save=["dt_proj"])
print("modules_to_save:", saved)
if saved[0] != 0:
    raise SystemExit("modules_to_save does not train dt_proj, either")
EOF
