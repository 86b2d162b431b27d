#!/usr/bin/env bash
# xlstm 2.0.6: get_weight_decay_optim_groups returns the parameters in another order in each
# process, so a restored optimizer has the moments of other parameters.
#
# The state_dict of a torch optimizer numbers the parameters in the order of its groups, and
# load_state_dict goes by these numbers. xLSTMLMModel collects each group in a set of tensors, whose
# order depends on their addresses in memory. After a restart the parameters have the moments of
# others, and load_state_dict says nothing. The first step raises a RuntimeError about sizes if any
# of them differ. If all are equal, as those of the norms of the residual stream, the training goes
# on with the wrong moments. Sort each group by the order of named_parameters().
#
# Seen (torch 2.13.0, CPU; the counts vary), a model of 8 blocks, saved after a step of AdamW and
# restored in a new process:
#     all parameters: 113 of 115 have other moments, step: RuntimeError
#     the norms of the residual stream: 7 of 9 have other moments, step: runs
#     both, if the groups are sorted: 0 have other moments, step: runs
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    torch==2.13.0 xlstm==2.0.6 mlstm_kernels==2.0.6 numpy==2.4.6
cd "$folder"
cat >train.py <<'EOF'
import sys

import torch
from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMLMModel, xLSTMLMModelConfig

task = sys.argv[1]
wrong, failures = {}, {}
for trained in ("all", "norms"):
    for is_sorted in (False, True):
        torch.manual_seed(0)
        block = mLSTMBlockConfig(mlstm=mLSTMLayerConfig())
        model = xLSTMLMModel(
            xLSTMLMModelConfig(
                vocab_size=64, mlstm_block=block, context_length=16, num_blocks=8, embedding_dim=64
            )
        )
        model.reset_parameters()
        for name, p in model.named_parameters():
            p.requires_grad = trained == "all" or "xlstm_norm" in name or "post_blocks" in name
        names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        groups = model.get_weight_decay_optim_groups()
        if trained == "norms":  # the second group also has the embedding, which is not trained
            groups = [[p for p in group if p in names] for group in groups]
        if is_sorted:
            order = {p: n for n, p in enumerate(names)}
            groups = [sorted(group, key=order.get) for group in groups]
        optimizer = torch.optim.AdamW([dict(params=group) for group in groups if group], lr=1e-3)

        def step():
            tokens = torch.arange(32).reshape(2, 16)
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        path = f"{trained}_{is_sorted}.pt"
        if task == "save":
            step()
            moments = {names[p]: state["exp_avg"] for p, state in optimizer.state.items()}
            weights = model.state_dict()
            torch.save(dict(model=weights, optimizer=optimizer.state_dict(), moments=moments), path)
            continue
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        case = trained, is_sorted
        wrong[case] = sum(
            not torch.equal(optimizer.state[p]["exp_avg"], saved["moments"][name])
            for p, name in names.items()
        )
        try:
            step()
            failures[case] = None
        except RuntimeError as error:
            failures[case] = str(error)
        print(*case, f"{wrong[case]} of {len(names)} have other moments;", failures[case] or "runs")

if task == "restore":
    if wrong["all", True] or wrong["norms", True]:
        raise SystemExit("sorted groups have other moments, too")
    if not wrong["all", False] or not wrong["norms", False] or failures["norms", False]:
        raise SystemExit("the behaviour has changed")
EOF
"$folder/venv/bin/python" -I train.py save
"$folder/venv/bin/python" -I train.py restore
