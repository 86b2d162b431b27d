#!/usr/bin/env bash
# ptxas 13.0.88 and nvJitLink 13.0.88: setmaxnreg has no effect in relocatable code.
#
# Kernels for Hopper give the registers of a warpgroup that only copies to those that compute, by
# setmaxnreg. ptxas compiles that as written. The same PTX compiled by ptxas -c or by nvJitLink, as
# jaxlib 0.12 does where it finds libnvJitLink, keeps the registers of the launch in every thread,
# so kernels that count on more spill. It is a remark of the verbose log, not a warning or an error.
# No GPU is needed to see it.
#
# Seen:
#     ptxas: no remark
#     ptxas -c, nvJitLink: (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain
#         compatibility across compilation units.
#
# Needs Python 3.11 or newer; PYTHON names it (default: python3). Ends with 0 while this is so.
set -euo pipefail
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("too old" if sys.version_info < (3, 11) else 0)'
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check \
    nvidia-cuda-nvcc==13.0.88 nvidia-nvjitlink==13.0.88
cd "$folder"
"$folder/venv/bin/python" -I - <<'EOF'
import ctypes
import subprocess
import sysconfig
from pathlib import Path

PTX = """
.version 8.3
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 out)
.reqntid 256, 1, 1
.maxnreg 128
{
  .reg .b64 %address;
  .reg .b32 %thread;
  .reg .pred %first;
  ld.param.u64 %address, [out];
  mov.u32 %thread, %tid.x;
  setp.lt.u32 %first, %thread, 128;
  @%first bra COMPUTE;
  setmaxnreg.dec.sync.aligned.u32 40;
  bra END;
COMPUTE:
  setmaxnreg.inc.sync.aligned.u32 208;
END:
  st.global.u32 [%address], %thread;
  ret;
}
"""
cuda = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
Path("kernel.ptx").write_text(PTX)


def ptxas(*flags):
    run = [cuda / "bin" / "ptxas", "-v", "-arch=sm_90a", *flags, "kernel.ptx", "-o", "kernel.cubin"]
    result = subprocess.run(run, check=True, capture_output=True, text=True)
    return result.stdout + result.stderr


def nvjitlink():
    library = ctypes.CDLL(str(cuda / "lib" / "libnvJitLink.so.13"))

    def call(name, *arguments):
        if getattr(library, f"__nvJitLink{name}_13_0")(*arguments):
            raise SystemExit(f"nvJitLink{name} failed")

    link, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 2)(b"-arch=sm_90a", b"-verbose")
    call("Create", ctypes.byref(link), 2, options)
    code = PTX.encode()
    call("AddData", link, 2, code, ctypes.c_size_t(len(code)), b"kernel")  # 2: PTX
    call("Complete", link)
    call("GetInfoLogSize", link, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    call("GetInfoLog", link, log)
    call("Destroy", ctypes.byref(link))
    return log.value.decode()


logs = dict(ptxas=ptxas(), relocatable=ptxas("-c"), nvjitlink=nvjitlink())
for name, log in logs.items():
    print(name, "->", [line for line in log.splitlines() if "setmaxnreg" in line])
if ["(C7504)" in log for log in logs.values()] != [False, True, True]:
    raise SystemExit("the behaviour has changed")
if "setmaxnreg" in logs["ptxas"]:
    raise SystemExit("ptxas ignores it, too")
EOF
