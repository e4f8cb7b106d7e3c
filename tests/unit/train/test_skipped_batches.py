"""`skip_steps`: the batches that a run leaves out, also after a resume."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest

from spmdtrain import FunctionModel, Loop, MeshSpec, Stream, Trainer, UserError
from spmdtrain.config.run_config import SkippedBatches
from spmdtrain.document.terminal import Terminal
from spmdtrain.record.run import Run

EXAMPLES = np.arange(40, dtype=np.float32)
BATCH = 8


def trainer(workdir: Path | None, **options: Any) -> Trainer:
    """A trainer whose loss is the sum of the indices of a batch's examples, times their number."""
    defaults: dict[str, Any] = {
        "global_batch_size": BATCH,
        "log_every": 1,
        "checkpoint_every_steps": 1,
        "keep_latest": 20,
        "trackers": (),
        "terminal": Terminal(quiet=True),
    }
    return Trainer(
        model=FunctionModel(lambda key: {"w": np.zeros((), np.float32)}),
        objective=lambda model, batch: {"loss": BATCH * batch["x"] + 0 * model["w"]},
        optimizer=optax.sgd(0.1),
        workdir=None if workdir is None else str(workdir),
        **defaults | options,
    )


def losses(workdir: Path) -> list[float]:
    return Run(str(workdir)).metrics("train")["loss"].tolist()


class CountingShard:
    """The examples of a shard, with the position as state."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.at = values, 0

    def __iter__(self) -> "CountingShard":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.at == len(self.values):
            raise StopIteration
        self.at += 1
        return {"x": self.values[self.at - 1]}

    def get_state(self) -> int:
        return self.at

    def set_state(self, at: int) -> None:
        self.at = at


def as_stream() -> Stream:
    def shard(index: int, count: int) -> Any:
        class Examples:
            def __iter__(self) -> Iterator[Any]:
                return CountingShard(np.array_split(EXAMPLES, count)[index])

        return Examples()

    return Stream(shard)


def test_the_batches_of_a_run_are_those_that_are_left_in_order() -> None:
    skipped = SkippedBatches.parse(["5:8", "2:3", "7:9"])
    left = [n for n in range(20) if n not in {2, 5, 6, 7, 8}]
    assert skipped.texts == ("2:3", "5:9")
    assert [skipped.batch_of(steps) for steps in range(len(left))] == left
    assert [skipped.position(steps) for steps in range(4)] == [0, 1, 2, 4]
    assert [n in skipped for n in (1, 2, 8, 9)] == [False, True, True, False]
    assert skipped.first_not_in(SkippedBatches.parse(["1:7"])) == 7
    assert SkippedBatches.parse(["2:3"]).first_not_in(skipped) is None
    numbers: list[Any] = [7, np.int64(2), "5", *range(6, 9)]
    assert SkippedBatches.parse(numbers) == skipped == SkippedBatches.parse(skipped.texts)
    for given in ("3:", "3:3", "4:3", "-1:2", "a:b", f"0:{2**63}", 2**63, -1, 2.0, True, (2, 3)):
        with pytest.raises(UserError, match=r"skip_steps is .*: write the number of a batch"):
            SkippedBatches.parse([given])  # type: ignore[list-item]


OPTIONS: dict[str, dict[str, Any]] = {
    "threads": {"data_threads": 2},
    "stream": {},
    "dispatch": {"steps_per_dispatch": 2, "checkpoint_every_steps": 4},
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [x if x == "threads" else pytest.param(x, marks=pytest.mark.slow) for x in OPTIONS]
)
def test_a_run_sees_exactly_the_other_batches_and_keeps_that_when_it_resumes(
    tmp_path: Path, data: str
) -> None:
    train = as_stream() if data == "stream" else {"x": EXAMPLES}
    options = OPTIONS[data]
    whole, run = tmp_path / "whole", tmp_path / "run"
    trainer(whole, **options).fit(train, steps=14)
    every = losses(whole)

    trainer(run, **options).fit(train, steps=4)
    given = {"skip_steps": ("6:8", 4), **options}
    trainer(run, **given).fit(train, steps=8)
    assert json.loads((run / "config.json").read_text())["config"]["skip_steps"] == ["4:5", "6:8"]
    elsewhere = {"mesh": MeshSpec(devices=(0, 1)), **options}
    trainer(run, **elsewhere).fit(train, steps=11)  # keeps the ranges without the option
    left = [*range(4), 5, *range(8, 14)]
    assert losses(run) == [every[n] for n in left]


@pytest.mark.slow
def test_batches_that_were_used_cannot_be_left_out_and_a_second_fit_keeps_the_range(
    tmp_path: Path,
) -> None:
    train = {"x": EXAMPLES}
    run = tmp_path / "run"
    first = trainer(run, skip_steps=("3:5",))
    first.fit(train, steps=4)  # batches 0, 1, 2 and 5
    with pytest.raises(UserError, match=r"leaves out batch 2, and .* has used batches up to 5: "):
        trainer(run, skip_steps=("2:3",)).fit(train, steps=6)
    with pytest.raises(UserError, match="leaves out batch 5"):
        trainer(run, skip_steps=("4:7",)).fit(train, steps=6)
    first.fit(train, steps=6)
    whole = tmp_path / "whole"
    trainer(whole).fit(train, steps=8)
    assert losses(run) == [losses(whole)[n] for n in (0, 1, 2, 5, 6, 7)]
    with pytest.raises(UserError, match=r"skip_steps is .*but under parameter_server"):
        trainer(None, strategy="parameter_server", skip_steps=("1:2",))


def test_a_loop_leaves_batches_out() -> None:
    with Loop(global_batch_size=BATCH, steps=4, skip_steps=("1:3",), shuffle=False) as loop:
        state = loop.start(lambda key: {"params": {"w": np.zeros(())}}, train={"x": EXAMPLES})
        step = loop.compile_step(lambda state, batch, key: (state, {"loss": batch["x"].min()}))
        seen = []
        for batch in loop.batches():
            state, output = step(state, batch)
            seen.append(float(output.metrics["loss"]))
            loop.end_step(state, output)
    assert seen == [0, 24, 32, 0]
