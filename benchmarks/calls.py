"""Calls of mlstm_pallas as benchmarks and tools ask for them: variants, launches, configs."""

import dataclasses
import json

from mlstm_pallas import KernelConfig, stages
from mlstm_pallas.planning.call_spec import launch_of as planned_launch
from mlstm_pallas.problem.validation import check_chunk_size

# Arguments of mlstm_chunkwise; packed has segment_ids as well, and the arrays of BTNH are
# (B, S, NH, ...).
VARIANTS = {
    "exp": {},
    "packed": {},
    "sigmoid": {"input_gate": "sigmoid"},
    "unnormalised": {"input_gate": "sigmoid", "normalize": False},
    "BTNH": {"layout": "BTNH"},
    "states_kept": {"recompute_states_in_bw": False},
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of mlstm_chunkwise, with its inputs by position.

    Attributes:
      outputs: the name under which later stages have all of its outputs as one operand.
      fused: whether it runs in the chunks of the fused scan, not in the chunks of the call.
    """

    name: str
    outputs: str = ""
    fused: bool = False

    @property
    def operands(self):
        """The NamedTuple of its operands."""
        return (stages.STAGES | stages.HELPERS)[self.name].Operands

    @property
    def inputs(self):
        """The operands without a default: inputs of the call, or outputs of earlier stages."""
        optional = self.operands._field_defaults
        return tuple(x for x in self.operands._fields if x not in optional)

    @property
    def backward(self):
        return "_bw_" in self.name or self.name == "chunk_gradients"


# In order. step_benchmark.py times the stages of generation.
STAGES = {
    stage.name: stage
    for stage in (
        Stage("chunk_gates", "gates"),
        Stage("recurrent_fw_C"),
        Stage("parallel_fw_H"),
        Stage("parallel_fw_P", "scores_and_keys", fused=True),
        Stage("recurrent_fw_H", fused=True),
        Stage("parallel_bw_dP"),
        Stage("recurrent_bw_dC"),
        Stage("parallel_bw_dQKV"),
        Stage("chunk_gradients"),
    )
}


def launch_of(spec, stage):
    """How a stage runs, with sequences that are not split."""
    plan = spec.plan
    if stage in STAGES and STAGES[stage].fused:
        fused = planned_launch(spec, "recurrent_fw_H", spec.lowering)
        return planned_launch(spec, stage, fused.lowering, plan.fused_problem)
    return planned_launch(spec, stage, spec.lowering)


def config_row(spec, stages=()):
    """The keywords of a KernelConfig with which a call runs as it does now, whatever the rules are.

    stages: the stages whose tiles it has; empty: all stages of the call.
    """
    plan = spec.plan
    row = dict(chunk_size=spec.problem.L, fused=plan.uses_fused_scan)
    if plan.uses_fused_scan:
        row["num_splits"] = plan.num_splits
    for stage in stages or [x for x in plan.forward | plan.backward if x in STAGES]:
        launch = launch_of(spec, stage)
        if launch.tiles is not None:
            row[f"{launch.lowering.folder}_{stage}"] = dict(vars(launch.tiles))
    return row


def padded(spec, shape):
    """The sizes with which the kernels run a shape, if they are others."""
    p = spec.problem
    sizes = p.S, p.DHQK, p.DHV
    return "" if shape[2:] == sizes else "S, DHQK, DHV = {}, {}, {}".format(*sizes)


def parse_config(text):
    """The keywords of a KernelConfig, as JSON or as the path of a file with it."""
    try:
        if not text.lstrip().startswith("{"):
            with open(text, encoding="utf-8") as file:
                text = file.read()
        return KernelConfig(**json.loads(text))
    except (OSError, TypeError) as error:
        raise ValueError(str(error)) from None


def define_chunks(define):
    """The flags --chunk_size and --config."""
    row = "keywords of KernelConfig as JSON, '{\"fused\": true}', or a file with them"
    define.parsed(
        "chunk_size",
        lambda x: check_chunk_size("chunk_size", int(x)),
        "Steps; none: the plan's.",
    )
    define.parsed("config", parse_config, f"For mlstm_pallas: {row}.")
