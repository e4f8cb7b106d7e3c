"""Runs that train on a stream: their positions in checkpoints, and after interruptions."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import linear_model
import numpy as np
import optax
import pytest
from helpers import metrics, saved_steps

from spmdtrain import FunctionModel, Loop, MeshSpec, Stream, Trainer, UserError
from spmdtrain.checkpoints.command import main as checkpoints
from spmdtrain.checkpoints.manifest import POSITIONS_FILE
from spmdtrain.document.terminal import Terminal

HALVES = {"microbatches": 2, "mesh": MeshSpec(devices=(0, 1, 2, 3))}


def stream() -> grain.IterDataset:
    source = grain.MapDataset.range(50).shuffle(seed=3).map(lambda x: {"x": np.int32(x)})
    return source.to_iter_dataset().filter(lambda example: example["x"] % 3 != 0)


def objective(model: Any, batch: Any) -> dict[str, Any]:
    """Hashes of a batch, as sums below 2**24: exact in float32."""
    x = batch["x"]
    loss = (x * x % 4093).astype(jnp.float32) + 0 * model["w"]
    return {"loss": loss, "other": (x * 31 % 2039).astype(jnp.float32)}


def trainer(workdir: Path | None, **options: Any) -> Trainer:
    defaults = {
        "model": FunctionModel(lambda key: {"w": jnp.zeros(())}),
        "objective": objective,
        "optimizer": optax.sgd(0.1),
        "global_batch_size": 8,
        "log_every": 1,
        "terminal": Terminal(quiet=True),
        "workdir": workdir and str(workdir),
    }
    return Trainer(**defaults | options)


def checksums(workdir: Path) -> dict[int, tuple[float, float]]:
    return {x["step"]: (x["loss"], x["other"]) for x in metrics(workdir, "train")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float]]:
    """The checksums of 12 batches of a run without interruption."""
    workdir = tmp_path_factory.mktemp("whole")
    trainer(workdir).fit(stream(), steps=12)
    found = checksums(workdir)
    assert len(set(found.values())) == 12
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"steps_per_dispatch": 2}, HALVES])
def test_a_resumed_run_sees_the_same_examples(
    tmp_path: Path, whole: dict[int, tuple[float, float]], options: dict[str, Any]
) -> None:
    trainer(tmp_path, **options).fit(stream(), steps=5)
    trainer(tmp_path, **options).fit(stream(), steps=12)
    assert checksums(tmp_path) == whole


@pytest.mark.slow
def test_a_second_fit_continues_and_a_restart_begins_again(
    tmp_path: Path, whole: dict[int, tuple[float, float]]
) -> None:
    fitted = trainer(tmp_path)
    fitted.fit(stream(), steps=5)
    fitted.fit(stream(), steps=12)
    assert checksums(tmp_path) == whole
    again = trainer(None)
    again.fit(stream(), steps=5)
    result = again.fit(stream(), steps=2, restart=True)
    assert (result.train["loss"], result.train["other"]) == whole[2]


@pytest.mark.slow
def test_the_file_of_positions_is_covered_by_the_checkpoint_s_checksums(
    tmp_path: Path, whole: dict[int, tuple[float, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, checkpoint_every_steps=4).fit(stream(), steps=8)
    file = tmp_path / "checkpoints" / "8" / POSITIONS_FILE
    positions = json.loads(file.read_text())
    assert sorted(positions) == list("01234567")
    file.write_text(file.read_text().replace("next_index", "next_indeX", 1))
    assert checkpoints(["verify", str(tmp_path)]) != 0
    assert "stream.json does not match its digest" in capsys.readouterr().out
    trainer(tmp_path).fit(stream(), steps=12)
    assert saved_steps(tmp_path) == [4, 12]  # 8 is quarantined
    assert checksums(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"stream_shards": 4}, "stream_shards was 8, and is 4 now"),
        (lambda: {"data": stream().map(lambda example: {"x": example["x"] + 1})}, "crc32 was"),
        (lambda: {"data": {"x": np.arange(40, dtype=np.int32)}}, "examples was None"),
    ],
)
def test_a_run_does_not_continue_with_other_shards_or_data(
    tmp_path: Path, change: Callable[[], dict[str, Any]], message: str
) -> None:
    trainer(tmp_path).fit(stream(), steps=2)
    options = change()
    data = options.pop("data", stream())
    with pytest.raises(UserError, match=message):
        trainer(tmp_path, **options).fit(data, steps=4)


def test_evaluation_on_a_stream_is_refused() -> None:
    with pytest.raises(UserError, match="training data only"):
        trainer(None).fit(stream(), validation=stream(), steps=2)


@pytest.mark.slow
def test_a_dataset_has_no_file_of_positions(tmp_path: Path) -> None:
    data = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    linear_model.trainer(workdir=str(tmp_path)).fit(data, steps=2)
    assert not (tmp_path / "checkpoints" / "2" / POSITIONS_FILE).exists()


@pytest.mark.slow
def test_a_loop_continues_at_the_step_that_it_has_recorded(
    tmp_path: Path, whole: dict[int, tuple[float, float]]
) -> None:
    seen: dict[int, int] = {}

    def loop(steps: int, leave_at: int, breaks: int) -> None:
        with Loop(
            steps=steps, global_batch_size=8, workdir=str(tmp_path), terminal=Terminal(quiet=True)
        ) as run:
            state = run.start(lambda key: {"params": {"w": jnp.zeros(())}}, train=stream())
            step = run.compile_step(lambda state, batch, key: (state, {"loss": jnp.float32(0)}))
            for _ in range(breaks):
                for batch in run.batches():
                    if run.step == leave_at:
                        break  # this batch is not recorded, and comes again
                    x = np.asarray(batch["x"])
                    seen[run.step + 1] = int((x * x % 4093).sum())
                    state, output = step(state, batch)
                    run.end_step(state, output)
                leave_at = leave_at + 2

    loop(12, leave_at=3, breaks=2)
    assert sorted(seen) == [1, 2, 3, 4, 5]
    loop(12, leave_at=99, breaks=1)
    assert {step: total / 8 for step, total in seen.items()} == {
        step: loss for step, (loss, _) in whole.items()
    }


def loader(index: int, count: int) -> grain.DataLoader:
    return grain.DataLoader(
        data_source=[{"x": np.int32(x)} for x in range(48)],
        sampler=grain.samplers.IndexSampler(48, shuffle=True, num_epochs=1, seed=0),
        shard_options=grain.sharding.ShardOptions(index, count),
        worker_count=1,
    )


@pytest.mark.nightly
def test_the_worker_processes_of_a_pipeline_end_with_the_fit() -> None:
    workers = stream().mp_prefetch(grain.MultiprocessingOptions(num_workers=2))

    def fail(event: Any) -> None:
        assert len(multiprocessing.active_children()) == 2
        raise OSError("in a callback")

    for data in (workers, Stream(loader)):
        trainer(None, stream_shards=2).fit(data, steps=3)
        assert multiprocessing.active_children() == []
        with pytest.raises(OSError, match="in a callback"):
            trainer(None, stream_shards=2, callbacks={"step": fail}).fit(data, steps=3)
        assert multiprocessing.active_children() == []
    with Loop(steps=3, global_batch_size=8, stream_shards=2, terminal=Terminal(quiet=True)) as run:
        run.start(lambda key: {"params": {"w": jnp.zeros(())}}, train=workers)
        for _ in run.batches():
            break
        assert multiprocessing.active_children() == []
