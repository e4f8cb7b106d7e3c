"""Devices of the trials that run at the same time."""

from collections.abc import Mapping
from pathlib import Path

from spmdtrain.errors import UserError
from spmdtrain.launch.task_env import gpus_of


def trial_environments(
    jobs: int, devices_per_trial: int | None, inherited: Mapping[str, str]
) -> list[dict[str, str]]:
    """Returns the environments of the trials that run at the same time.

    No two of them share a GPU, because each process reserves most of the GPU's memory.

    Args:
      jobs: Number of trials that run at the same time.
      devices_per_trial: Number of GPUs of each, or of virtual CPU devices without a GPU; None for
        an equal share of the GPUs, or the devices that the experiment asks for on the CPU.
      inherited: The environment of this process.

    Raises:
      UserError: If there are too few GPUs, or if this machine has TPUs and jobs is not 1.
    """
    gpus = gpus_of(inherited)
    if not gpus:
        if jobs > 1 and inherited.get("JAX_PLATFORMS") != "cpu" and _has_tpu():
            raise UserError(
                f"--jobs is {jobs}: only one process can use the TPUs of a machine; use --jobs 1, "
                "or set JAX_PLATFORMS=cpu"
            )
        own = {} if devices_per_trial is None else {"JAX_NUM_CPU_DEVICES": str(devices_per_trial)}
        return [{**inherited, **own} for _ in range(jobs)]
    each = devices_per_trial or len(gpus) // jobs
    if not 0 < each * jobs <= len(gpus):
        raise UserError(
            f"--jobs is {jobs} x {each or 1} GPUs, but there are {len(gpus)} ({','.join(gpus)}): "
            "trials cannot share a GPU; change --jobs or --devices-per-trial, or set "
            "JAX_PLATFORMS=cpu"
        )
    return [
        {**inherited, "CUDA_VISIBLE_DEVICES": ",".join(gpus[job * each : (job + 1) * each])}
        for job in range(jobs)
    ]


def _has_tpu() -> bool:
    return any(Path("/dev").glob("accel[0-9]*"))
