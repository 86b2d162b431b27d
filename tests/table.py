"""The calls that are tested. Rows are chosen by pairs: each option meets each kind of steps, each
function, both layouts, the sizes and the heads where kernels change; ``missing`` lists the pairs
that no row has."""

import functools

from engine import Call, Documents, Drafts, Ids, Lengths, Slots

HALF, MIXED = ("bfloat16",) * 3, ("bfloat16", "float32", "float32")
ROUNDED_M = "float32", "float32", "bfloat16"
HEADS = dict(a=(16, 16), b=(37, 50), c=(64, 128), d=(24, 8), e=(320, 640))
HEADS |= dict(f=(128, 256), g=(256, 512), h=(384, 256), i=(250, 24))


def row(function, S, heads, *steps, dtype="float32", states=("float32",) * 3, B=2, NH=2, **options):
    """A call of heads by their letter or their sizes; its batch is that of its steps."""
    B = next((len(x.of) for x in steps if hasattr(x, "of")), B)
    if options.pop("last", function == "mlstm_chunkwise_sequence_parallel"):
        options["return_last_states"] = True
    return Call(function, (B, NH, S, *HEADS.get(heads, heads)), dtype, states, steps, options)


chunkwise, prefixes, sharded, step, ring = (
    functools.partial(row, f"mlstm_{name}")
    for name in (
        *("chunkwise", "chunkwise_states", "chunkwise_sequence_parallel"),
        *("recurrent_step", "ring_step"),
    )
)


def packed(*rows, **options):
    """Documents whose states return."""
    return Documents(rows, **options)


def drafts(B, T, calls, **options):
    """Drafts of which all numbers from 0 to T count in turn."""
    accepted = tuple(tuple((3 * b + 2 * c) % (T + 1) for c in range(calls)) for b in range(B))
    return Drafts(T, accepted, **options)


def config(**fields):
    return dict(config=fields)


BF, F16, NT = dict(dtype="bfloat16"), dict(dtype="float16"), dict(layout="BTNH")
SIGMOID, PLAIN = dict(input_gate="sigmoid"), dict(input_gate="sigmoid", normalize=False)
FLOOR, UNSTABLE = dict(eps=0.1, norm_val=0.5), dict(stabilize_correctly=False)
KEPT, STATE16 = dict(recompute_states_in_bw=False), dict(state_dtype="bfloat16")
CAST = dict(autocast_kernel_dtype="bfloat16")
FUSED, UNFUSED, SPLIT = config(fused=True), config(fused=False), config(num_splits=2)
ALONE = config(batch_invariant=True)
SMALL = dict(siz_b_DHQK=16, siz_b_DHHV=16)
# Tiles that divide neither rows nor columns, two launches of the scan, more splits than one.
TILES = config(
    triton_parallel_bw_dP=dict(siz_b_LQ=16, block_k=16),
    triton_parallel_bw_dQKV=dict(siz_b_LQ=32, block_k=16, **SMALL),
)
LAUNCHES = config(fused=True, triton_recurrent_fw_H=dict(siz_b_DHQK=16, state_rows=16))
SPLITS = config(
    fused=True,
    num_splits=4,
    triton_recurrent_fw_H=dict(siz_b_L=16, state_rows=32, **SMALL),
    triton_recurrent_fw_C=dict(siz_b_L=16, num_splits=4, **SMALL),
    triton_recurrent_bw_dC=dict(siz_b_L=16, num_splits=4, **SMALL),
)
OF_STATES = config(
    fused=False,
    triton_recurrent_fw_C=dict(siz_b_L=16, num_splits=4, **SMALL),
    triton_recurrent_bw_dC=dict(siz_b_L=16, num_splits=4, **SMALL),
)
COLUMNS = config(triton_recurrent_step=SMALL, triton_ring_step=SMALL)
SOME = Slots((3, -1, 0, 5), 5)  # 5 is no row, 1, 2 and 4 are rows of nobody
ENDS = Lengths((0, 63, 64, 1))

CHUNKWISE = (
    chunkwise(1, "a", last=True),
    chunkwise(16, "b", last=True, **NT),
    chunkwise(63, "c", last=True, reverse=True, **KEPT),
    chunkwise(64, "a", **FLOOR, **FUSED),
    chunkwise(65, "b", last=True, **UNSTABLE, **SPLIT, **CAST, chunk_size=16),
    chunkwise(64, "a", last=True, **BF, **STATE16, **NT),
    chunkwise(64, "c", last=True, **F16, states=None, **UNFUSED, chunk_size=32),
    chunkwise(65, "a", last=True, **SIGMOID, reverse=True, **NT),
    chunkwise(64, "b", **PLAIN, **KEPT, chunk_size=32, states=("float32",) * 2),
    chunkwise(64, "a", last=True, **ALONE, **BF),
    chunkwise(64, "a", ENDS, last=True, **NT, **FUSED, **FLOOR),
    chunkwise(64, "b", ENDS, last=True, reverse=True, **UNSTABLE, **UNFUSED),
    chunkwise(65, "a", Lengths((65, 64, 0)), last=True, **BF, **STATE16, **KEPT,
        autocast_kernel_dtype="float32"),
    chunkwise(64, "a", Lengths((64, 9)), last=True, **SIGMOID, **SPLIT, chunk_size=16),
    chunkwise(63, "a", Lengths((30, 63)), **PLAIN, **F16, **CAST, **KEPT, states=None),
    chunkwise(64, "a", Ids(((20, 44), (64,), (1, 1, 62))), last=True, **NT, **FUSED, **CAST,
        chunk_size=16),
    chunkwise(65, "b", Ids(((64, 1), (20, 30))), last=True, **UNSTABLE, reverse=True),
    chunkwise(64, "a", Ids(((32, 32), (20, 30))), last=True, **BF, **STATE16, **KEPT, **FLOOR,
        chunk_size=32),
    chunkwise(64, "a", Ids(((32, 32), (63,))), Lengths((50, 63)), last=True, **SIGMOID,
        **SPLIT, chunk_size=16),
    chunkwise(63, "a", Ids(((10, 53), (5, 5, 5))), **PLAIN, **UNFUSED, states=None),
    chunkwise(64, "b", Ids(((5, 6, 7), (60,))), Lengths((0, 50)), last=True, reverse=True, **NT,
        **FLOOR, **UNSTABLE, **KEPT, **STATE16),
    chunkwise(63, "a", Ids(((5, 30, 28), (60,))), Lengths((50, 50)), **PLAIN, **CAST, **FUSED,
        chunk_size=16),
    chunkwise(64, "a", packed((20, 44), (0, 64)), last=True, **NT),
    chunkwise(64, "a", packed((32, 0, 32), (1, 30), own=True), last=True, **FUSED, **BF,
        **STATE16, chunk_size=16),
    chunkwise(65, "b", packed((65,), (0,), (16, 16)), last=True, **UNSTABLE, **FLOOR, **CAST),
    chunkwise(64, "a", packed((3, 40), (20,)), last=True, **KEPT, **PLAIN,
        **UNFUSED, chunk_size=16),
    chunkwise(64, "c", packed((50, 14), (0, 0, 64), own=True), last=True, **UNFUSED),
    chunkwise(64, "a", packed((20, 30), (0, 40)), last=True, **FLOOR,
        **UNSTABLE, **KEPT, **ALONE, **CAST),
    chunkwise(64, "a", packed((20, 25), (0,), own=True), last=True,
        **PLAIN, **NT, **STATE16, **FUSED, chunk_size=16),
    chunkwise(64, "a", packed((32, 16, 16), (10, 10, 10, 34)), last=True, **F16, **SPLIT,
        chunk_size=16),
    chunkwise(1, "a", last=True, reverse=True, **FLOOR, **UNSTABLE, **FUSED, **STATE16, **CAST,
        **KEPT, **NT, chunk_size=16),
    chunkwise(15, "a", packed((5, 0, 10), (0, 0, 15)), last=True, **PLAIN, **STATE16, **CAST,
        chunk_size=16),
    chunkwise(17, "e", last=True, **FLOOR, **UNSTABLE, **STATE16, **KEPT, **FUSED, **NT,
        chunk_size=16),
    chunkwise(17, "e", last=True, reverse=True, **PLAIN, **UNFUSED, **CAST),
    chunkwise(50, "a", last=True, reverse=True, **BF, **TILES, chunk_size=32),
    chunkwise(50, "d", Ids(((20, 30), (40,))), last=True, **F16, **LAUNCHES, **CAST, reverse=True,
        chunk_size=32),
    chunkwise(64, "a", Lengths((64, 50)), last=True, **SPLITS, **KEPT, chunk_size=16),
    chunkwise(96, "a", Ids(((20, 76), (40, 24))), last=True, **OF_STATES, chunk_size=16),
    # All 8 entries of a list of chunks are used.
    chunkwise(64, "a", packed((17, 33), (18, 17)), last=True, chunk_size=16),
    chunkwise(16, "a", packed((1,) * 16, (2,) * 8, own=True), last=True, chunk_size=16),
    chunkwise(64, "a", packed((2, 3, 1, 7, 5, 4, 6, 3, 2, 1, 1, 1, 28), (4,) * 13), last=True,
        chunk_size=16),
)  # fmt: skip
EVERY = (
    prefixes(65, "a", every=16, **NT, **FLOOR, **CAST),
    prefixes(64, "b", every=32, **BF, **FUSED, **STATE16),
    prefixes(64, "c", every=64, **UNSTABLE, **UNFUSED, states=None),
    prefixes(64, "a", every=16, **PLAIN),
    prefixes(63, "a", Lengths((0, 16, 63)), every=16, **FLOOR, **NT),
    prefixes(64, "a", Lengths((32, 50)), every=16, **PLAIN, **SPLIT, **STATE16),
    prefixes(64, "a", Lengths((64, 10)), every=32, **UNSTABLE, **CAST),
    prefixes(64, "a", Ids(((32, 32), (20, 40))), every=32, **PLAIN, **FUSED, **CAST),
    prefixes(
        64, "b", Ids(((16, 48), (20, 30))), every=16, **F16, **UNSTABLE, **FLOOR, **NT, **STATE16
    ),
    prefixes(
        128,
        "a",
        Ids(((64, 64), (20, 80))),
        Lengths((90, 128)),
        every=32,
        **ALONE,
        **NT,
        **FLOOR,
        **UNSTABLE,
        **STATE16,
    ),
    prefixes(64, "a", Ids(((16, 48), (20, 40))), Lengths((40, 64)), every=16, **PLAIN, **CAST),
)
PARALLEL = (
    sharded(64, "a", shards=4, **NT, **CAST),
    sharded(64, "b", shards=2, **BF, **STATE16, **FLOOR),
    sharded(64, "a", Lengths((0, 40)), shards=4, **PLAIN, **KEPT, **NT, **UNFUSED),
    sharded(64, "a", Lengths((64, 17)), shards=2, **UNSTABLE, **FLOOR, **STATE16, **CAST),
    sharded(64, "a", Ids(((16, 48), (20, 30))), shards=4, **UNSTABLE, **NT, **FLOOR, **UNFUSED),
    sharded(64, "a", Ids(((16, 48), (20, 30))), shards=2, **PLAIN, **KEPT, **STATE16, **CAST),
    sharded(
        128,
        "a",
        Ids(((33, 95), (128,))),
        Lengths((100, 70)),
        shards=2,
        **PLAIN,
        **NT,
        **STATE16,
        **CAST,
    ),
    sharded(
        64,
        "a",
        Ids(((33, 31), (60,))),
        Lengths((50, 64)),
        shards=4,
        **UNSTABLE,
        **FLOOR,
        **KEPT,
        **UNFUSED,
    ),
    sharded(64, "a", Ids(((20, 44), (50, 14))), shards=2, config=dict(chunk_size=16)),
    sharded(64, "a", shards=1, states=None, **UNFUSED, **PLAIN, **KEPT),
    sharded(64, "a", shards=2, **UNSTABLE),
)
BY_TOKEN = (
    step(1, "a", **PLAIN, joined=True),
    step(1, "b", **F16, states=("float16",) * 3, joined=True, **COLUMNS),
    step(3, "e", joined=True, **FLOOR),
    step(6, "a", states=ROUNDED_M),
    step(5, "b", **BF, states=MIXED, joined=True),
    step(4, "c", **UNSTABLE, **FLOOR, states=HALF, **BF),
    step(5, "a", **SIGMOID, joined=True, **ALONE),
    step(4, "a", SOME, joined=True, **FLOOR),
    step(4, "b", SOME, **PLAIN, **BF, states=HALF),
    step(3, "a", SOME, **UNSTABLE, **F16, states=MIXED, **ALONE),
)
RINGS = (
    ring(24, "a", Drafts(1), states=ROUNDED_M, **COLUMNS),
    ring(24, "b", Drafts(1, length=8, phase=0), joined=True, **BF, states=HALF),
    ring(24, "a", drafts(2, 3, 8, length=8), **NT, **FLOOR),
    ring(24, "c", drafts(2, 8, 3), joined=True, **BF, states=MIXED, **UNSTABLE),
    ring(32, "a", drafts(2, 4, 8, length=8, phase=3), **SIGMOID, **NT, joined=True),
    ring(24, "a", drafts(2, 2, 12, length=8, phase=0), **ALONE, **F16, states=MIXED),
    # Two entries of four heads: XLA would flush the rings of one entry in another order.
    ring(24, "b", drafts(2, 1, 24, length=8, phase=0), **PLAIN, **ALONE, NH=4),
    ring(24, "a", SOME, drafts(4, 3, 8, length=8, phase=0), joined=True, **NT, **ALONE),
    ring(24, "b", SOME, drafts(4, 4, 6, length=8), **SIGMOID, **BF, states=HALF),
    ring(24, "a", SOME, Drafts(1, length=8), **UNSTABLE, **FLOOR),
    ring(24, "a", SOME, Drafts(2), **PLAIN, **NT),
    # Alone a head is one CTA, whose indices are constants; its rows are at no multiple of 16 bytes.
    ring(48, "i", Drafts(1, phase=0), **F16, states=MIXED, **ALONE, NH=1),
)
CALLS = CHUNKWISE + EVERY + PARALLEL + BY_TOKEN + RINGS

# ---------------- what has no row

EVERYWHERE = {"eps", "stabilize_correctly", "input_gate", "normalize", "config"}
CHUNKED = EVERYWHERE | {"state_dtype", "autocast_kernel_dtype"}
OPTIONS = {
    "mlstm_chunkwise": CHUNKED | {"reverse", "recompute_states_in_bw", "chunk_size"},
    "mlstm_chunkwise_states": CHUNKED,
    "mlstm_chunkwise_sequence_parallel": CHUNKED | {"recompute_states_in_bw"},
    "mlstm_recurrent_step": EVERYWHERE | {"joined"},
    "mlstm_ring_step": EVERYWHERE | {"joined"},
}
ENDINGS = "ends at S", "of no steps"
STEPS = {
    "mlstm_chunkwise": ("-", "Lengths", "Ids", "Ids+Lengths", "Documents"),
    "mlstm_chunkwise_states": ("-", "Lengths", "Ids", "Ids+Lengths"),
    "mlstm_chunkwise_sequence_parallel": ("-", "Lengths", "Ids", "Ids+Lengths"),
    "mlstm_recurrent_step": ("-", "Slots"),
    "mlstm_ring_step": ("Drafts", "Slots+Drafts"),
}
REFUSED = {
    *(("joined", f"a document {end}") for end in ENDINGS),
    ("reverse", "a document of no steps"),
    ("reverse", "Documents"),
}


def name_of(steps):
    """The kind of steps, as STEPS has it."""
    return "+".join(type(x).__name__ for x in steps) or "-"


def places(call):
    """Where kernels change: sizes, heads, layouts, dtypes, ends of documents."""
    S, *heads = call.shape[2:]
    power = next((d for d in (0, -1, 1) if (S - d) & (S - d - 1) == 0), None)
    sizes = {0: "2^k", -1: "2^k - 1", 1: "2^k + 1"}
    yield f"S = {1 if S == 1 else sizes.get(power)}"
    yield f"heads of {heads[0]}/{heads[1]}"
    yield call.options.get("layout", "BNTH")
    yield call.dtype
    if ids := call.get(Ids):
        yield from {"a document ends at S" for row in ids.of if sum(row) == S}
        yield from {"a document of no steps" for row in ids.of if 0 in row}


PLACES = {
    *("S = 1", "S = 2^k", "S = 2^k - 1", "S = 2^k + 1", "BNTH", "BTNH"),
    *("heads of 16/16", "heads of 37/50", "heads of 320/640", "bfloat16", "float16"),
    *("a document ends at S", "a document of no steps"),
}


def missing():
    """Pairs of an option with a kind of steps of a function, or with a place, that no row has."""
    there = {(o, name_of(x.steps), x.function) for x in CALLS for o in x.options}
    every = {(o, s, f) for f, names in OPTIONS.items() for o in names for s in STEPS[f]}
    at = {(o, place) for x in CALLS for o in x.options for place in places(x)}
    wanted = {(o, place) for names in OPTIONS.values() for o in names for place in PLACES}
    return sorted(x for x in (every - there) | (wanted - at) if x[:2] not in REFUSED)
