"""The oracle against the derivative of the reference in float64; wrong results, which each rule of
the comparison refuses."""

import numpy as np
import pytest
from engine import KINDS, Call, Documents, Drafts, Lengths, Slots, arrays, errors, exact
from oracle import in_float64, outputs_and_gradients
from relations import below

from mlstm_pallas import reference

NAMES = dict(
    zip("qkvifcnm", ("q", "k", "v", "i", "f", "c_initial", "n_initial", "m_initial"), strict=True)
)
LAST = dict(return_last_states=True)
CALL = Call("mlstm_chunkwise", (2, 2, 20, 16, 8), options=LAST)
OPTIONS = [
    {},
    dict(eps=0.3, norm_val=2.0, stabilize_correctly=False),
    dict(input_gate="sigmoid"),
    dict(normalize=False, input_gate="sigmoid"),
]


@pytest.mark.quick("{}-model", "{}-cancels")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_oracle_is_the_reference_and_its_derivative(options, kind):
    call = Call("mlstm_chunkwise", (2, 2, 20, 7, 5), options=LAST | options)
    x = arrays(call, 1, kind)
    run = outputs_and_gradients(lambda **x: reference.recurrence(**x, **options))
    inputs = {NAMES[name]: x[name] for name in call.sources}
    cotangents = [x[f"d{name}"] for name in "hcnm"]
    outputs, gradients = in_float64(run, inputs, cotangents)
    expected = exact(call, x)
    actual = dict(zip("hcnm", outputs, strict=True))
    actual |= {f"d{name}": gradients[NAMES[name]] for name in call.sources}
    bound = 1e-7 if kind == "cancels" else 1e-8
    below({name: (y, bound) for name, (y, _) in errors(call, x, actual, expected).items()})


LENGTHS = Call("mlstm_chunkwise", (2, 2, 20, 16, 8), steps=(Lengths((12, 0)),), options=LAST)
PACKED = Call(
    "mlstm_chunkwise",
    (2, 2, 20, 16, 8),
    steps=(Documents(((10, 0, 10), (5, 5, 5)), own=True),),
    options=LAST,
)
DRAFTS = Call("mlstm_ring_step", (1, 2, 8, 16, 8), steps=(Drafts(4, ((2, 3),)),))
POOLS = Call("mlstm_recurrent_step", (2, 2, 3, 16, 8), steps=(Slots((2, -1), 4),))
HALF = Call("mlstm_chunkwise", (2, 2, 20, 16, 8), "bfloat16", options=LAST)
LARGER, ONE = np.float32(1.001), np.s_[0, 0]
# A call, the kind of its arrays, a result, where it is wrong, and the wrong value or a factor.
WRONG = {
    "a head of h": (CALL, "model", "h", ONE, LARGER),
    "a step of h": (CALL, "model", "h", np.s_[:, :, 7], LARGER),
    "a head of c": (CALL, "model", "c", ONE, LARGER),
    "the last step is lost in c": (CALL, "model", "c", np.s_[1], LARGER),
    "n": (CALL, "model", "n", np.s_[:], LARGER),
    "m": (CALL, "model", "m", ONE, LARGER),
    "a gradient of v": (CALL, "model", "dv", ONE, LARGER),
    "a gradient of f": (CALL, "model", "df", np.s_[:], LARGER),
    "a gradient of m": (CALL, "model", "dm", np.s_[:], LARGER),
    "NaN in h": (CALL, "any size", "h", np.s_[1, 1, 3], np.nan),
    "NaN where much cancels": (CALL, "cancels", "dq", np.s_[1, 1, 3, 2], np.nan),
    "inf in a state": (CALL, "any size", "c", np.s_[0, 1, 0, 0], np.inf),
    "h of 16 bits is off by 2 %": (HALF, "model", "h", np.s_[:], 1.02),
    "h beyond a length is not 0": (LENGTHS, "model", "h", np.s_[0, 0, 12, 0], 1e-30),
    "dq beyond a length is not 0": (LENGTHS, "model", "dq", np.s_[0, 0, 19, 0], 1e-30),
    "di beyond a length is not 0": (LENGTHS, "model", "di", np.s_[0, 0, 12], 1e-30),
    "df beyond a length is not 0": (LENGTHS, "any size", "df", np.s_[1, 0, 0], 1e-30),
    "NaN beyond a length": (LENGTHS, "any size", "df", np.s_[1, 0, 0], np.nan),
    "states of a row of length 0": (LENGTHS, "model", "c", np.s_[1], LARGER),
    "states of a document of no steps": (PACKED, "model", "c", np.s_[0, 1], LARGER),
    "a document's last state": (PACKED, "model", "n", np.s_[0, 2], LARGER),
    "gradients of a document's states": (PACKED, "model", "dc", np.s_[1, 2], LARGER),
    "h of a rejected draft": (DRAFTS, "model", "h", np.s_[0, 0, 2], LARGER),
    "states behind drafts": (DRAFTS, "model", "c", np.s_[0], LARGER),
    "h of an entry without a row": (POOLS, "model", "h", np.s_[1, 0, 0, 0], 1e-30),
    "a row of a pool": (POOLS, "model", "c", np.s_[2], LARGER),
    "a row of nobody": (POOLS, "model", "c", np.s_[0], LARGER),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_result_is_refused(wrong):
    call, kind, name, place, value = WRONG[wrong]
    x = arrays(call, 1, kind)
    desired = exact(call, x)
    actual = {y: np.array(z, "float32") for y, z in desired.items()}
    below(errors(call, x, actual, desired, kind))
    times = value if 0.5 < abs(value) < 2 else 0
    actual[name][place] = times * actual[name][place] if times else value
    with pytest.raises(AssertionError, match=f"'{name}'"):
        below(errors(call, x, actual, desired, kind))
