"""The benchmarks, tools and examples as programs: wrong requests, exit codes."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import benchmark_runs
import command
import extras
import jax
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIXTURE = Path(__file__).with_name("xlstm_7b")
CHECKPOINT = f"--checkpoint={FIXTURE}"
PROGRAM = """
import command
define_flags = lambda define: define.shared(repeats=3)
command.main(define_flags, lambda options: options.repeats)
"""


@pytest.mark.parametrize(
    ("argument", "code", "message"),
    [
        ("--repeats=0", 2, "stand_in: flag --repeats=0: 0 is not a positive integer\n"),
        ("--repeats=7", 7, ""),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(argument, code, message, tmp_path):
    program = tmp_path / "stand_in.py"
    program.write_text(PROGRAM)
    process = subprocess.run(
        [sys.executable, program, argument],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stderr, process.stdout) == (code, message, "")


STDOUT = """
import command
command.main(lambda define: None, lambda options: print("\\u2192", flush=FLUSH))
"""


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize(
    ("file", "code", "message"),
    [
        ("full", 1, "stand_in: .*No space left on device\n"),
        ("pipe", 1, "stand_in: cannot write to stdout: .*Broken pipe\n"),
        ("none", 2, "stand_in: stdout is closed, expected a file or a pipe\n"),
        ("ascii", 0, ""),
    ],
)
def test_what_stdout_cannot_take_is_one_line(file, code, message, flush, tmp_path):
    program = tmp_path / "stand_in.py"
    program.write_text(STDOUT.replace("FLUSH", str(flush)))
    settings = {"PYTHONPATH": str(BENCHMARKS)}
    settings["PYTHONIOENCODING"] = "ascii" if file == "ascii" else "utf-8"
    reader, writer = os.pipe()
    os.close(reader)
    files = dict(full=os.open("/dev/full", os.O_WRONLY), pipe=writer)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh"] if file == "none" else []
    process = subprocess.run(
        [*closed, sys.executable, program],
        env=os.environ | settings,
        stdout=files.get(file, subprocess.DEVNULL),
        stderr=subprocess.PIPE,
        text=True,
    )
    for number in files.values():
        os.close(number)
    assert process.returncode == code
    assert re.fullmatch(message, process.stderr)


LOCK = """
import sys, command
file = command.open_alone("output", sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_file_is_written_by_one_run_at_a_time(tmp_path):
    """A run that is killed leaves no lock; what cannot be locked may be shared."""
    path = tmp_path / "rows"
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, path],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(command.RequestError, match=f"^--output: another run is writing {path}"):
            command.open_alone("output", path)
        process.kill()
    for _ in range(2):
        with command.open_alone("output", path) as file:
            file.write("kept")
    assert path.read_text() == "keptkept"
    with command.open_alone("output", os.devnull), command.open_alone("output", os.devnull):
        pass


@pytest.mark.parametrize("name", ["EIO", "ENOSYS", "EOPNOTSUPP", "ENOLCK", "no fcntl"])
def test_where_nothing_can_be_locked_a_line_says_so(name, tmp_path, monkeypatch, capsys):
    number = getattr(errno, name, errno.ENOSYS)
    if name == "no fcntl":
        monkeypatch.setattr(command, "fcntl", None)
    else:
        flock = mock.Mock(side_effect=OSError(number, os.strerror(number)))
        monkeypatch.setattr(command.fcntl, "flock", flock)
    path = tmp_path / "rows"
    if name == "EIO":  # which is no sign of this
        with pytest.raises(command.RequestError, match=r"^--output: \[Errno 5\]"):
            command.open_alone("output", path)
        return
    with command.open_alone("output", path) as file:
        file.write("kept")
    expected = f"{path} cannot be locked ({os.strerror(number)}): nothing protects it from a second"
    assert capsys.readouterr().err == f"{expected} run\n"
    assert path.read_text() == "kept"


# Python runs it first: what Windows lacks.
SITE = """
import signal, sys
del signal.SIGHUP
sys.modules["fcntl"] = None
"""


@pytest.mark.quick("docs/chunkwise")
@pytest.mark.parametrize(
    ("program", "link"),
    [
        ("docs/chunkwise", "folder"),
        ("docs/schedules", "program"),
        ("examples/train_byte_lm", "folder"),
        ("examples/xlstm_7b", "program"),
        ("benchmarks/server_benchmark", "folder"),
        ("benchmarks/draft_tokens", "program"),
        ("tools/compare_versions", "folder"),
        ("tools/compile_report", "program"),
    ],
)
def test_a_program_starts_from_a_link_without_a_display_or_a_lock(program, link, tmp_path):
    """The link is to the program or to its folder. MPLBACKEND is a notebook's."""
    folder, name = program.split("/")
    path = BENCHMARKS.parent / folder
    if link == "program":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / f"{name}.py").symlink_to(path / f"{name}.py")
    else:
        (tmp_path / "bin").symlink_to(path)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    settings = {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, BENCHMARKS.parent)))}
    process = subprocess.run(
        [sys.executable, tmp_path / "bin" / f"{name}.py", "--help"],
        env=os.environ | settings | {"MPLBACKEND": "module://matplotlib_inline.no_backend"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "\n  --" in process.stdout  # its flags


# program, arguments: what the message has.
REQUESTS = f"""
compare_versions --before=/no/such: flag --before=/no/such: there is no /no/such/mlstm_pallas
compare_versions --shape=tiny: --before is missing, expected a folder with mlstm_pallas
prefill_benchmark --backend=triton: --backend=triton needs a GPU
prefill_benchmark --segments=0: flag --segments=0
server_benchmark --cache=0,16: --cache
server_benchmark --draft=8: --draft
server_benchmark --states=step --draft=3: --draft
server_benchmark --text=repeated --draft=0: --text
scaling_benchmark --mode=both: flag --mode=both: unknown both, known are
scaling_benchmark --backend=triton: --backend=triton needs a GPU
compile_report --device=K80: flag --device=K80: unknown K80, known are A100,
compile_report --chunk_size=48: chunk_size is 48, expected a power of two
compile_report --heads=64: flag --heads=64: cannot read the head sizes '64', expected DHQK/DHV
compile_report --stage=nonsense: --stage: no stage nonsense in fwd, there are chunk_summaries,
compile_report --direction=step --variant=packed: --variant: a step has no variant packed
kernel_benchmark --shape=8k: flag --shape=8k: unknown shape '8k', known are 7b-8k
kernel_benchmark --impl=cuda: flag --impl=cuda: unknown cuda, known are
kernel_benchmark --config={{: flag --config={{: Expecting property name
kernel_benchmark --config={{"no":1}}: config.no is no field, expected one like batch
kernel_benchmark --from_jsonl={__file__}: --from_jsonl: {__file__}, line 1 is no row
kernel_benchmark --from_jsonl=/no/such: --from_jsonl: [Errno 2] No such file
kernel_benchmark --from_jsonl=/dev/null --jsonl=/dev/null: --from_jsonl: /dev/null is --jsonl too
kernel_benchmark --impl=mosaic_gpu: --impl=mosaic_gpu needs a GPU
kernel_benchmark --stage=chunk_gates --direction=fwbw: --stage has one direction
kernel_benchmark --plot=x.foo: --plot: x.foo does not end with .png, .pdf or .svg
kernel_benchmark --plot=/no/such/p.png: --plot: no folder for /no/such/p.png
kernel_benchmark --jsonl=/no/such/rows: --jsonl: [Errno 2] No such file
layer_benchmark --impl=triton: --impl=triton needs a GPU
scaling_benchmark --backend=xla --devices=1,4096: --devices: there are
scaling_benchmark --devices=2 --mode=strong-sequence --shape=1x1x33x16x16: a multiple of 2 devices
chunkwise --output=x.foo: --output: x.foo does not end with
chunkwise --output=/no/such/x.png: --output: no folder for
schedules --output=x.foo: --output: x.foo does not end with
schedules --output=/no/such/x.png: --output: no folder for
step_benchmark --slots=1 --impl=xla --shape=2x1x1x16x16: --slots=1, expected at least 2 rows
step_benchmark --impl=mosaic_gpu: unknown mosaic_gpu, known are
xlstm_lm_benchmark --model=7b: flag --model=7b: value should be one of <1.3b|tiny>
xlstm_lm_benchmark --impl=triton: --impl=triton needs a GPU
xlstm_lm_benchmark --mesh=data --devices=4096: --devices=4096: there are
xlstm_lm_benchmark --mesh=sequence --devices=2 --split=3: --split=3 does not divide 2 devices
xlstm_lm_benchmark --mesh=data --impl=jla: --impl=jla runs on one device, expected --mesh=one
xlstm_lm_benchmark --mesh=both: flag --mesh=both: unknown both, known are one, data,
xlstm_7b: either --checkpoint
xlstm_7b --random {CHECKPOINT}: either --checkpoint
xlstm_7b {CHECKPOINT}: no prompt
xlstm_7b {CHECKPOINT} --prompt=: prompt 0 has no token
xlstm_7b {CHECKPOINT} hello: unexpected argument hello
xlstm_7b {CHECKPOINT} --prompt=a --stop_tokens=end: --stop_tokens: invalid literal for int()
xlstm_7b {CHECKPOINT} --prompt=a --stop_tokens=128: --stop_tokens: 128 is no token, an integer from
xlstm_7b --random --draft=3 --temperature=1: --draft is for temperature 0
xlstm_7b --random --draft=3 --batch=2 --benchmark: --draft is for temperature 0, and with
xlstm_7b --random --prefix_cache=17: --prefix_cache is for several prompts
xlstm_7b --random --benchmark --new_tokens=1: --benchmark times the tokens after the first
xlstm_7b --random --prefix_cache=16 --batch=2: --prefix_cache=16: Blocks of 1024 tokens
xlstm_7b --random --batch=65536 --prompt_length=4097: make 268500992 tokens, expected at most 268
xlstm_7b --random --seed=4294967296: --seed=4294967296: 4294967296 is not an integer in the range
xlstm_7b {CHECKPOINT} --prompt=a --devices=3: --devices=3 do not divide num_heads
xlstm_7b {CHECKPOINT} --prompt=a --devices=8: --devices=8 do not divide num_heads
xlstm_7b {CHECKPOINT} --prompt=a --devices=99: --devices=99, and there are
xlstm_7b {CHECKPOINT} --prompts=/no/such/file: --prompts: cannot read
xlstm_7b {CHECKPOINT} --prompts={FIXTURE}/expected.npz: cannot read
xlstm_7b {CHECKPOINT} --prompts=/dev/null: no prompt: give --prompt, or --prompts=FILE
xlstm_7b {CHECKPOINT} --prompt=a --prompt=: prompt 1 has no token
xlstm_7b {CHECKPOINT} --prompt=a --output=/no/such/folder/file: --output: [Errno 2]
xlstm_7b {CHECKPOINT} --prompt=a --output={FIXTURE}/new.json: --output: {FIXTURE}/new.json is for
xlstm_7b {CHECKPOINT} --prompts={__file__} --output={__file__}: --output: {__file__} is for
xlstm_7b {CHECKPOINT} --prompt=\udcff: --prompt: 'utf-8' codec can't encode character
xlstm_7b {CHECKPOINT} --prompt=a --slots=0: --slots=0
xlstm_7b {CHECKPOINT} --prompt=a --slots=two: slots
xlstm_7b {CHECKPOINT} --prompt=a --batching=some: batching
xlstm_7b {CHECKPOINT} --prompt=a --temperature=-1: --temperature=-1
xlstm_7b {CHECKPOINT} --prompt=a --size=3b: --size=3b
xlstm_7b --checkpoint=/no/such/folder --prompt=a: --checkpoint: cannot read /no/such/folder/
train_byte_lm --heads=3: --embedding_dim must be an even multiple of --heads
train_byte_lm --steps=-1: steps
train_byte_lm --dtype=float16: dtype
train_byte_lm --mesh=data:0: --mesh: data:0 is no axis (data, tensor, sequence) with its size
train_byte_lm --mesh=foo: --mesh: foo is no axis
train_byte_lm --mesh=data:x: --mesh: data:x is no axis
train_byte_lm --mesh=pipe:2: --mesh: pipe:2 is no axis
train_byte_lm --temperature=-1: --temperature=-1
train_byte_lm --mesh=data:3: --batch_size must be a multiple of data in --mesh
train_byte_lm --mesh=data:4096 --batch_size=4096: --mesh=data:4096 has 4096 devices, there are
train_byte_lm --num_processes=2: --coordinator_address, --num_processes and --process_id belong
train_byte_lm --coordinator_address=host --num_processes=1 --process_id=0: expected HOST:PORT
train_byte_lm --temperature=nan: --temperature=nan
train_byte_lm --temperature=1e-40: --temperature=1e-40: expected 0, or a number from 1e-30 to 1e30
train_byte_lm --seed=4294967296: --seed=4294967296: 4294967296 is not an integer in the range
train_byte_lm --steps=100000000000000000000: --steps=100000000000000000000
numerics --gates=1: flag --gates=1: unknown gates '1', expected I:F or I:F:C
numerics --gates=1:two: flag --gates=1:two: unknown gates '1:two'
numerics --cotangents=positive: flag --cotangents=positive: unknown positive, known are random
numerics --impl=triton: --impl=triton needs a GPU
draft_tokens --seeds=0: flag --seeds=0
draft_tokens --draft=8: flag --draft=8
draft_tokens --dtype=float16: flag --dtype=float16: unknown float16, known are bfloat16, float32
train_byte_lm --no_such_flag: no_such_flag
train_byte_lm --corpus=/no/such/text: --corpus: [Errno 2] No such file
train_byte_lm --corpus=/dev/null: has no text
train_byte_lm --corpus={__file__} --seq_len=999: bytes of held-out text, fewer than the 1000
"""


@pytest.mark.parametrize("request_line", REQUESTS.strip().splitlines())
def test_a_wrong_request_is_one_line_and_exit_code_2(request_line, capsys, monkeypatch, tmp_path):
    if "--devices=2" in request_line and jax.local_device_count() < 2:
        pytest.skip("needs two devices")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "docs")
    request, message = request_line.split(": ", 1)
    name, *arguments = request.split()
    program = pytest.importorskip(name)
    assert benchmark_runs.run(program, *arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: ")
    assert message in line
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("module", "program", "packages"),
    [
        ("flax", "xlstm_lm_benchmark", "'mlstm_pallas[benchmark]'"),
        ("absl", "xlstm_7b", "'mlstm_pallas[examples]'"),
    ],
)
def test_a_missing_package_is_one_line(module, program, packages, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{program}.py"])
    error = ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.part")
    with pytest.raises(SystemExit, match="2"):
        extras.end(ModuleNotFoundError, error, None)
    expected = f"{program}: {module}.part is missing: pip install {packages}\n"
    assert capsys.readouterr().err == expected
