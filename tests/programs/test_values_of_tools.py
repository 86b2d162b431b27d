"""The compile report: values that a hand can check."""

import compile_report
from oracle import refused

WITHOUT_SPILLS = (
    "ptxas info    : 11 bytes gmem\n"
    "ptxas info    : Compiling entry function 'parallel_fw_H' for 'sm_90a'\n"
    "ptxas info    : Function properties for parallel_fw_H\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 1 barriers\n"
    "ptxas info    : Compile time = 116.005 ms"
)
WITH_SPILLS = (
    "ptxas-blackwell info    : 11 bytes gmem\n"
    "ptxas-blackwell info    : Compiling entry function 'parallel_fw_H' for 'sm_100a'\n"
    "ptxas-blackwell info    : Function properties for parallel_fw_H\n"
    "    744 bytes stack frame, 876 bytes spill stores, 732 bytes spill loads\n"
    "ptxas-blackwell info    : Used 255 registers, used 1 barriers, 744 bytes cumulative "
    "stack size\n"
    "ptxas-blackwell info    : Compile time = 471.360 ms"
)
SERIALIZED = (
    "ptxas info    : (C7519) warpgroup.arrive is injected in around line 3057 by compiler to "
    "allow use of registers in GMMA\n"
    "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources\n"
    "ptxas warning : Registers are spilled to local memory in function 'dQKV', 116 bytes "
    "spill stores, 164 bytes spill loads\n"
    "ptxas info    : Function properties for dQKV\n"
    "    160 bytes stack frame, 116 bytes spill stores, 164 bytes spill loads\n"
    "ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem"
)


def test_the_log_of_ptxas():
    """The log of ptxas: registers, bytes of spill stores and loads, messages. A warning has the
    spills a second time."""
    assert (
        compile_report.parse_ptxas(WITHOUT_SPILLS),
        compile_report.messages_of(WITHOUT_SPILLS),
    ) == ((168, 0, 0), ())
    assert (compile_report.parse_ptxas(WITH_SPILLS), compile_report.messages_of(WITH_SPILLS)) == (
        (255, 876, 732),
        (),
    )
    assert (compile_report.parse_ptxas(SERIALIZED), compile_report.messages_of(SERIALIZED)) == (
        (168, 116, 164),
        ("wgmma serialized", "C7512", "C7519"),
    )


def test_the_resources_of_a_mosaic_gpu_kernel():
    """The resources of a Mosaic GPU kernel: its buffers, and 8 bytes for each of 4 + 2 * 6
    barriers."""
    assert compile_report.parse_resources(
        "Resources(smem_scratch_bytes=231424, tmem_scratch_cols=0, "
        "barrier_counts=Counter({ClusterBarrier(collective_dims=(<Dimension.x: 0>,), "
        "arrival_count=2, num_barriers=4, leader_tracked=False): 1, Barrier(arrival_count=2, "
        "num_barriers=2, orders_tensor_core=False): 6}))"
    ) == 231424 + 8 * (4 + 2 * 6)


def test_an_output_without_numbers_is_refused():
    """An output without numbers is refused."""
    refused(
        ValueError,
        "no shared memory in the resources of a kernel: '11 bytes gmem'",
        lambda: compile_report.parse_resources("11 bytes gmem"),
    )
    refused(
        ValueError,
        "no registers or spills in the output of ptxas -v: '11 bytes gmem'",
        lambda: compile_report.parse_ptxas("11 bytes gmem"),
    )
