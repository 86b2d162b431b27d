r"""Times xLSTM-7B of transformers with mlstm_kernels, as `xlstm_7b.py --benchmark` times ours.

    pip install torch transformers xlstm==2.0.6 mlstm_kernels==2.0.6 absl-py
    python benchmarks/transformers_xlstm_7b.py --prompt_length=8192
    python benchmarks/transformers_xlstm_7b.py --batch=64 --prompt_length=1024

Random weights in bfloat16, float32 states, greedy tokens. Prints a row of JSON per way to decode:
"generate" is `model.generate`; "cuda_graph" replays one captured step of the model with an argmax,
which transformers does not offer but its users can write. Medians of three runs after a warm-up.
"""

import json
import statistics
import time

import command
from command import RequestError


def define_flags(define):
    kernels = ["limit_chunk", "xl_chunk"]
    define.integer("batch", 1, "Random prompts.", lower_bound=1)
    define.integer("prompt_length", 128, "Tokens per prompt.", lower_bound=1)
    define.integer("new_tokens", 65, "Per prompt.", lower_bound=2)
    define.enum("chunkwise", "limit_chunk", kernels, "Kernel of mlstm_kernels for prompts.")
    define.enum("size", "7b", ["7b", "tiny"], "tiny: heads of 32/64, to try this program.")


def seconds(call):
    import torch

    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def run(options):
    """Raises RequestError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise RequestError("torch has no GPU here")
    with torch.inference_mode():
        measure(options)


def measure(options):
    import torch
    import transformers

    size = {} if options.size == "7b" else dict(hidden_size=256, num_hidden_layers=2, num_heads=4)
    config = transformers.xLSTMConfig(
        chunkwise_kernel=f"chunkwise--triton_{options.chunkwise}",
        sequence_kernel="native_sequence__triton",
        step_kernel="triton",
        mode="inference",
        **size,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.xLSTMForCausalLM(config).eval()
        prompts = torch.randint(config.vocab_size, (options.batch, options.prompt_length))
    model.generation_config.eos_token_id = None

    def generate(tokens):
        greedy = dict(do_sample=False, use_cache=True, pad_token_id=0)
        return model.generate(prompts, max_new_tokens=tokens, **greedy)

    first, steps = seconds(lambda: generate(1)), options.new_tokens - 1
    row = dict(
        impl="transformers",
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        chunkwise=options.chunkwise,
        batch=options.batch,
        prompt_tokens=prompts.numel(),
        new_tokens=options.new_tokens,
        first_token_ms=1e3 * first,
    )

    def show(decoding, per_token):
        figures = dict(ms_per_token=1e3 * per_token, tokens_per_s=options.batch / per_token)
        print(json.dumps(row | dict(decoding=decoding) | figures), flush=True)

    show("generate", (seconds(lambda: generate(options.new_tokens)) - first) / steps)

    out = model(prompts, use_cache=True)
    token, cache = out.logits[:, -1:].argmax(-1), out.cache_params

    def step():
        logits = model(token, cache_params=cache, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    show("cuda_graph", seconds(lambda: [graph.replay() for _ in range(steps)]) / steps)


if __name__ == "__main__":
    command.main(define_flags, run)
