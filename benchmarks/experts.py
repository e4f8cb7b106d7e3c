"""Speed of a mixture of experts and of a dense model of the same FLOPs per token, on one device.

    python benchmarks/experts.py [--steps 20] [--rounds 7]

The models are the presets `moe-dense` and `moe` of experiments/llama.py, as they are and four times
as wide. Both steps run in one process, in turns, and the ratio is that of a round. The figures are
written to benchmarks/results/w10-experts.json, and `report.py` makes a table of them. The losses
that both presets reach are in docs/python.md.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = "w10-experts"
TITLE = "W10: a mixture of experts against a dense model"
EXPLANATION = (
    "The presets `moe-dense` and `moe` of experiments/llama.py, as they are and four times as "
    "wide, on one device without `--mesh.expert`. A token of `moe` is computed by 2 of 8 experts "
    "of about half the width of the dense MLP, so both models have the same FLOPs per token. "
    "*speed* is that of `moe` relative to `moe-dense`, within a round."
)
SCALES = (1, 4)
"""Factors of the width of the presets."""
ROWS = 16


def program(preset: str, scale: int) -> Any:
    """Returns the compiled step of a preset on one device.

    Args:
      preset: moe or moe-dense.
      scale: Factor of its widths.
    """
    from functools import partial

    import llama
    import numpy as np
    import shakespeare_gpt
    from compiled_steps import CompiledSteps

    from spmdtrain import Trainer
    from spmdtrain.document.terminal import Terminal
    from spmdtrain.models import LLAMA_AXIS_RULES, Llama

    config = llama.PRESETS[preset]
    config = replace(config, width=config.width * scale, mlp_width=config.mlp_width * scale)
    dense = config.experts is None
    trainer = Trainer(
        model=partial(Llama, llama.shape(config)),
        objective=shakespeare_gpt.objective if dense else partial(llama.routed_objective, config),
        optimizer=llama.make_optimizer(config, 1000),
        global_batch_size=ROWS,
        axis_rules=LLAMA_AXIS_RULES,
        terminal=Terminal(quiet=True),
    )
    tokens = np.random.default_rng(0).integers(0, 256, (ROWS, config.length + 1)).astype(np.int32)
    weights = np.ones((ROWS, config.length), np.float32)
    return CompiledSteps(trainer, {"tokens": tokens, "weights": weights})


def table(result: dict[str, Any]) -> list[list[str]]:
    """Returns a row for each scale."""
    rows = [["width", "parameters, dense", "moe", "ms a step, dense", "moe", "speed of moe"]]
    for each in result["models"]:
        parameters = [f"{count:,}" for count in each["parameters"]]
        times = [f"{1000 * seconds:.1f}" for seconds in each["seconds"]]
        rows.append([str(each["width"]), *parameters, *times, f"{1 / each['ratio']:.2f}"])
    return rows


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(HERE.parent / "experiments"))
    import bench
    import llama
    from compiled_steps import compare

    result: dict[str, Any] = {"origin": bench.origin(), "rounds": options.rounds, "models": []}
    for scale in SCALES:
        dense, mixture = program("moe-dense", scale), program("moe", scale)
        found = compare(dense, mixture, options.steps, options.rounds)
        result["models"].append(
            {
                "width": llama.PRESETS["moe"].width * scale,
                "parameters": [dense.parameters, mixture.parameters],
                "seconds": [found.first, found.other],
                "ratio": found.ratio,
            }
        )
    (options.results / f"{RESULT}.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in table(result):
        print("  ".join(f"{cell:>18}" for cell in row))


if __name__ == "__main__":
    main()
