"""Memory and speed of attention over split tokens, on 8 virtual devices.

    python benchmarks/context.py [--lengths 1024 ...] [--timed 1024 ...] [--rounds 5]

A step computes attention and its gradients: causal, one sequence, 8 heads of 64 values, f32. The
whole sequence on one device ("full") is compared with each `--context.method` over 8 devices. The
temporary memory of a device is that of the compiled program, also of lengths that are not run. The
methods run in turns, and the ratios of their speeds are within a round; a length has fewer rounds
if they take more than a minute. A method does not run if its temporary memory is more than half of
the machine's. All devices share the processors of one machine, so a ratio compares the work of all
devices, not the time of a cluster.
The figures are written to benchmarks/results/w9-context.json, in place of those of the run before,
and `report.py` makes a table of them.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = "w9-context"
TITLE = "W9: attention over split tokens"
EXPLANATION = (
    "A step computes causal attention of one sequence and its gradients, with 8 heads of 64 values "
    "in f32: the whole sequence on one device (full), or split over 8 virtual devices of the same "
    "processors by each `--context.method`. XLA compiles full attention for CPU without a fused "
    "kernel, so it writes all scores. *MB* is the temporary memory of a device in the compiled "
    "program. *speed* is relative to the ring in the same round: all devices share the processors, "
    "so it compares the work of all devices, not the time on as many chips. A method that needs "
    "more than half of the machine's memory does not fit."
)
DEVICES, HEADS, WIDTH = 8, 8, 64
METHODS = ("full", "ring", "gather", "ulysses")
COMPARED = tuple(method for method in METHODS if method != "ring")
SECONDS = 60.0
"""A length has no further round after this time."""


def compiled(method: str, length: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns the program of a step, and the shapes and shardings of its arrays."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec, SingleDeviceSharding

    from spmdtrain import MeshSpec, RunConfig, attention
    from spmdtrain.config.options import ContextOptions
    from spmdtrain.sharding.placement import make_placement, use_placement

    within: Any = contextlib.nullcontext()
    sharding: Any = SingleDeviceSharding(jax.devices()[0])
    if method != "full":
        options: Any = ContextOptions(method=method)  # type: ignore[arg-type]
        placement = make_placement(RunConfig(mesh=MeshSpec(context=DEVICES), context=options))
        within = use_placement(placement)
        sharding = placement.sharding(PartitionSpec(None, "context"))
    one = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32, sharding=sharding)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return jnp.square(attention(query, key, value, causal=True)).sum()

    with within:
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(one, one, one).compile()
    return program, (one, one, one)


def measure(lengths: list[int], timed: list[int], rounds: int) -> list[dict[str, Any]]:
    """Returns megabytes and seconds of each method for each length."""
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2e6
    found = []
    for length in lengths:
        programs = {method: compiled(method, length) for method in METHODS}
        memory = {
            method: program.memory_analysis().temp_size_in_bytes / 1e6
            for method, (program, _) in programs.items()
        }
        fitting = {
            method: program
            for method, program in programs.items()
            if memory[method] * (1 if method == "full" else DEVICES) <= half
        }
        seconds = times(fitting, rounds) if length in timed else {}
        found.append({"tokens": length, "temporary_mb": memory, "seconds": seconds})
        print(json.dumps(found[-1]), flush=True)
    return found


def times(programs: dict[str, tuple[Any, tuple[Any, ...]]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of a step of each method, by round."""
    import jax
    import numpy as np

    seconds: dict[str, list[float]] = {method: [] for method in programs}
    draws = np.random.default_rng(0)
    end = time.perf_counter() + SECONDS
    for number in range(rounds + 1):
        if number and time.perf_counter() > end:
            break
        for method, (program, shapes) in programs.items():
            arrays = [
                jax.device_put(draws.normal(size=x.shape).astype("f"), x.sharding) for x in shapes
            ]
            jax.block_until_ready(arrays)
            began = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            seconds[method].append(time.perf_counter() - began)
    # The first round warms up: it counts only if it is the only one.
    return {method: each[1:] or each for method, each in seconds.items()}


def table(result: dict[str, Any]) -> list[list[str]]:
    """Returns rows of the temporary memory, and of the speed relative to the ring."""
    speeds = [f"speed of {method}" for method in COMPARED]
    heading = ["tokens", *(f"MB, {method}" for method in METHODS), *speeds]
    rows = [[*heading, "steps/s of ring", "rounds"]]
    for each in result["lengths"]:
        row = [f"{each['tokens']:,}"]
        row += [f"{each['temporary_mb'][method]:,.1f}" for method in METHODS]
        if not (seconds := {name: found for name, found in each["seconds"].items() if found}):
            rows.append([*row, *["not run"] * len(COMPARED), "not run", "0"])
            continue
        ring = seconds["ring"]
        for method in COMPARED:
            pairs = zip(ring, seconds.get(method, ()), strict=method in seconds)
            ratios = [base / other for base, other in pairs]
            row.append(f"{statistics.median(ratios):.2f}" if ratios else "does not fit")
        rows.append([*row, f"{1 / statistics.median(ring):.3g}", str(len(ring))])
    return rows


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    lengths = [1024 * 2**power for power in range(7)]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--timed", type=int, nargs="*", default=lengths)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    if missing := sorted({*options.timed} - {*options.lengths}):
        parser.error(f"--timed {missing[0]} is not among --lengths, so it would not be measured")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = str(DEVICES)
    import bench

    file = options.results / f"{RESULT}.json"
    origin = bench.origin()
    found = measure(sorted(options.lengths), options.timed, options.rounds)
    result = {"origin": origin, "rounds": options.rounds, "lengths": found}
    file.write_text(json.dumps(result, indent=1) + "\n")
    for row in table(result):
        print("  ".join(f"{cell:>12}" for cell in row))


if __name__ == "__main__":
    main()
