"""What is read from the messages of XLA about memory that is exhausted."""

import pytest

from spmdtrain.plan.shortage import Shortage, cause, share_of_gpu

G, M = 2**30, 2**20
# As users of GPUs, TPUs and CPUs have reported them, and as libtpu and XLA:CPU print them here.
RECORDED: dict[str, tuple[str, Shortage | None]] = {
    "a TPU's compiler": (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (18.14G) exceeds available HBM (15.75G).",
        Shortage("the compiler", int(18.14 * G), limit=int(15.75 * G)),
    ),
    "a TPU's compiler, with the table of its allocations": (
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.51G of 15.48G hbm. "
        "Exceeded hbm capacity by 2.03G.\n\nTotal hbm usage >= 18.03G:\n    reserved 530.00M",
        Shortage("the compiler", int(17.51 * G), limit=int(15.48 * G)),
    ),
    "a program on a TPU": (
        "RESOURCE_EXHAUSTED: Attempting to reserve 10.51G at the bottom of memory. That was not "
        "possible. There are 8.97G free, 0B reserved, and 8.97G reservable.",
        Shortage(needed=int(10.51 * G), free=int(8.97 * G)),
    ),
    "an array on a TPU": (
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 15.65G. That "
        "was not possible. There are 11.08G free.; (0x0x0_HBM0)",
        Shortage(needed=int(15.65 * G), free=int(11.08 * G)),
    ),
    "fragmented memory of a TPU": (
        "RESOURCE_EXHAUSTED: Attempting to allocate 31.06M. That was not possible. There are "
        "58.64M free. Due to fragmentation, the largest contiguous region of free memory is "
        "30.56M.; (0x0x0_HBM0)",
        Shortage(needed=int(31.06 * M), free=int(58.64 * M), contiguous=int(30.56 * M)),
    ),
    "an older TPU": (
        "RESOURCE_EXHAUSTED: Could not allocate 10485760 bytes in memory 0x0x0_HBM0; 4374528 bytes "
        "allocatable, 14942208 bytes available",
        Shortage("an array", 10485760, free=4374528),
    ),
    "a step on a GPU": (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.\n"
        "BufferAssignment OOM Debugging.\nBufferAssignment stats:\n"
        "             parameter allocation:  372.76MiB",
        Shortage(needed=4770354232),
    ),
    "a newer step on a GPU": (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2.00GiB.",
        Shortage(needed=2 * G),
    ),
    "an array on a GPU": (
        "RESOURCE_EXHAUSTED: Failed to allocate request for 176.00MiB (184549376B) on device "
        "ordinal 0",
        Shortage(needed=184549376),
    ),
    "a CPU": (
        "RESOURCE_EXHAUSTED: Out of memory allocating 281474976710656 bytes.",
        Shortage(needed=2**48),
    ),
    "one without figures": ("RESOURCE_EXHAUSTED: Out of memory", Shortage()),
    # Not about the memory of a device.
    "a kernel on a TPU": (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "vmem. Used 32.42M of 16.00M vmem. Exceeded vmem capacity by 16.42M",
        None,
    ),
    "a kernel on a GPU": (
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 4194304, available: "
        "101376",
        None,
    ),
    "a message between processes": (
        "RESOURCE_EXHAUSTED: Received message larger than max (5308389 vs. 4194304)",
        None,
    ),
    "files": ("RESOURCE_EXHAUSTED: Error opening: Too many open files", None),
}


@pytest.mark.parametrize("name", RECORDED)
def test_messages_say_what_was_asked_for_and_what_was_free(name: str) -> None:
    message, expected = RECORDED[name]
    assert Shortage.parse(message) == expected


@pytest.mark.parametrize(
    ("shortage", "peak", "others", "limit", "said"),
    [
        (RECORDED["fragmented memory of a TPU"][0], 9 * G, 0, 16 * G, "pieces of at most 32.0 MB"),
        (RECORDED["a CPU"][0], 60 * M, 0, 80 * M, "less than the 281475 GB that were asked for"),
        (RECORDED["a newer step on a GPU"][0], 9 * G, 8 * G, 16 * G, "beside the 8.59 GB"),
        (RECORDED["a newer step on a GPU"][0], 9 * G, 1 * G, 16 * G, "other programs and proc"),
        (RECORDED["a newer step on a GPU"][0], 17 * G, 1 * G, 16 * G, ""),  # the advice says what
        (RECORDED["a newer step on a GPU"][0], 9 * G, 1 * G, None, ""),
    ],
)
def test_why_a_step_that_fits_has_no_memory(
    shortage: str, peak: int, others: int, limit: int | None, said: str
) -> None:
    found = Shortage.parse(shortage)
    assert found is not None
    text = cause(found, peak, others, limit)
    assert said in text and bool(said) == bool(text)


def test_a_gpu_whose_memory_jax_does_not_have_names_the_part() -> None:
    part = share_of_gpu(60 * G, "gpu", "NVIDIA H100 80GB HBM3")
    assert "of its memory: XLA_PYTHON_CLIENT_MEM_FRACTION" in part and 74 < int(part[:2]) < 82
    assert share_of_gpu(78 * G, "gpu", "NVIDIA H100 80GB HBM3") == ""
    assert share_of_gpu(10 * G, "tpu", "TPU v5 lite") == ""
    assert share_of_gpu(10 * G, "gpu", "NVIDIA Unknown") == ""
