"""XLA options that keep the kernels of a step independent of the number of devices."""

from collections.abc import Mapping

Value = str | int | bool | float

_BY_PLATFORM: Mapping[str, Mapping[str, Value]] = {
    # Without partitioning, on one device, the simplifier sees other programs, and for example
    # replaces a division by a product with the reciprocal, which has other bits.
    "cpu": {"xla_disable_hlo_passes": "algsimp"},
    # Not measured. Without autotuning, the algorithms of matrix products and convolutions do not
    # depend on timings.
    "gpu": {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_deterministic_ops": True,
        "xla_gpu_exclude_nondeterministic_ops": True,
    },
}


def exact_options(platform: str) -> dict[str, Value]:
    """Returns the compiler options of a step with `exact` on a platform, such as "gpu"."""
    return dict(_BY_PLATFORM.get("gpu" if platform in ("cuda", "rocm") else platform, {}))
