"""Writes this folder's checkpoint and what transformers' xLSTM computes from it.

    pip install absl-py torch transformers safetensors
    python tests/programs/xlstm_7b/make_fixture.py

config.json, the sharded *.safetensors in bfloat16 and tokenizer.json (one token per ASCII
character, which this leaves as it is) are a checkpoint as Hugging Face has them. expected.npz holds
float32 logits at some positions of a few prompts and the tokens of a greedy generate. transformers
runs its own PyTorch code where the package xlstm is missing; the script refuses to run with it. No
test imports this file.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import command
import numpy as np
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

FOLDER = Path(__file__).parent
PROMPT_LENGTHS = (1, 7, 64, 130)  # chunks of transformers have 64 steps
NEW_TOKENS = 24
CONFIG = dict(
    vocab_size=128,
    hidden_size=64,
    num_hidden_layers=2,
    num_heads=4,
    qk_dim_factor=1.0,
    v_dim_factor=2.0,
    ffn_proj_factor=1.25,  # 80, rounded up to 96
    ffn_round_up_to_multiple_of=32,
    bos_token_id=0,
    eos_token_id=0,
)


def randomise(model):
    """Gates, norms and logits at work: transformers' own start has input gates that are shut."""
    generator = torch.Generator().manual_seed(0)

    def normal(x, mean, std):
        x.copy_(mean + std * torch.randn(x.shape, generator=generator))

    for name, x in model.named_parameters():
        if "norm" in name:
            normal(x, 1.0, 0.2)
        elif name.endswith("igate_preact.bias"):
            normal(x, -1.0, 2.0)
        elif name.endswith("fgate_preact.bias"):
            x.copy_(torch.linspace(1.0, 6.0, len(x)))
        elif "gate_preact" in name:
            normal(x, 0.0, 2.0 * x.shape[-1] ** -0.5)
        elif "embeddings" in name:
            normal(x, 0.0, 1.0)
        else:
            normal(x, 0.0, (8.0 if "lm_head" in name else 1.0) * x.shape[-1] ** -0.5)


@torch.no_grad()
def write(_):
    if find_spec("xlstm"):
        raise command.RequestError("uninstall xlstm: transformers would run its kernels")
    model = xLSTMForCausalLM(xLSTMConfig(**CONFIG))
    randomise(model)
    for old in FOLDER.glob("*.safetensors"):
        old.unlink()
    model.to(torch.bfloat16).save_pretrained(FOLDER, max_shard_size="150KB")
    model = xLSTMForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    rng, expected = np.random.default_rng(2), {}
    for n, length in enumerate(PROMPT_LENGTHS):
        prompt = torch.from_numpy(rng.integers(1, CONFIG["vocab_size"], (1, length)))
        positions = np.unique(np.linspace(0, length - 1, 12).astype(int))
        options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
        greedy = model.generate(prompt, **options)[0]
        logits = model(greedy[None]).logits[0]
        if (logits[length - 1 : -1].argmax(-1) != greedy[length:]).any():
            raise SystemExit("error: generate differs from the logits of the whole sequence")
        expected |= {
            f"prompt_{n}": prompt[0].numpy().astype(np.uint8),
            f"positions_{n}": positions.astype(np.uint8),
            f"logits_{n}": model(prompt).logits[0, positions].numpy(),
            f"greedy_{n}": greedy[length:].numpy().astype(np.uint8),
        }
    np.savez(FOLDER / "expected.npz", **expected)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    command.main(lambda define: None, write)
