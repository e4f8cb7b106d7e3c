"""A replayed step: its configuration and conditions, its examples, and its comparison."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spmdtrain import (
    ArrayDataset,
    MappedDataset,
    MeshSpec,
    RunConfig,
    ShardingOptions,
    Subset,
    UserError,
)
from spmdtrain.config.experiment import load_experiment
from spmdtrain.config.options import ContextOptions, ExpertOptions
from spmdtrain.config.run_config import config_as_json
from spmdtrain.data.mixture import Mixture
from spmdtrain.data.sources.text_files import TextSource
from spmdtrain.data.sources.token_files import TokenFile
from spmdtrain.data.text import Packed, Tokenized
from spmdtrain.document.terminal import Terminal
from spmdtrain.record.storage import source_digest
from spmdtrain.replay.command import other_conditions
from spmdtrain.replay.recorded_run import RecordedStep, compare_step, difference_of, read_run
from spmdtrain.replay.rerun import (
    Rerun,
    config_on_devices,
    describe_values,
    place_of_example,
    restore_config,
)

EXPERIMENT = '''
"""An experiment with options of all kinds."""
from dataclasses import dataclass
from typing import Literal
from spmdtrain import RunConfig

@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 4
    global_batch_size: int | None = 64
    hidden: tuple[int, ...] = (8, 8)
    names: tuple[str, ...] = ("a",)
    flag: bool = True
    unroll: bool | None = None
    rate: float = 0.1
    kind: Literal["x", "y"] = "x"
    text: str = ""
    limit: int | None = 3
    pairs: tuple[tuple[int, int], ...] = ()

def build(config):
    raise NotImplementedError
'''


def test_a_file_that_may_be_of_someone_else_is_not_executed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside.py"
    run.mkdir()
    monkeypatch.chdir(tmp_path)

    def restore(named: str, config: str | None = None) -> None:
        (run / "config.json").write_text(json.dumps({"config": {"seed": 1}, "experiment": named}))
        restore_config(read_run(str(run)), config, Terminal())

    for file in (run / "inside.py", outside):
        file.write_text(EXPERIMENT + "\nprint('executed')\n")
    (tmp_path / "link.py").symlink_to(run / "inside.py")
    for named, why in (
        (run / "inside.py", "lies inside the run"),
        (tmp_path / "link.py", "lies inside the run"),
        (run / ".." / "run" / "inside.py", "lies inside the run"),
        ("outside.py", "no absolute path"),
    ):
        with pytest.raises(UserError, match=rf"{why}.*--config FILE"):
            restore(str(named))
    outside.chmod(0o666)
    with pytest.raises(UserError, match="every user can write to the file"):
        restore(str(outside))
    outside.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(outside, 12345, -1)
        with pytest.raises(UserError, match="the file belongs to user 12345"):
            restore(str(outside))
        os.chown(outside, 0, -1)
    assert "executed" not in capsys.readouterr().out
    restore(str(outside))
    assert f"executing {outside}, as config.json" in capsys.readouterr().out.replace("\n", "")
    restore(str(run / "inside.py"), str(run / "inside.py"))  # the user has named it
    assert "executed" in capsys.readouterr().out


def test_every_kind_of_option_has_its_value_again(tmp_path: Path) -> None:
    file = tmp_path / "kinds.py"
    file.write_text(EXPERIMENT)
    default = load_experiment(str(file), frozenset()).preset(None)
    of_experiment: dict[str, Any] = {
        **{"epochs": None, "steps": 30, "hidden": (), "names": ("b c", "d"), "flag": False},
        **{"unroll": False, "rate": -1e-7, "kind": "y", "text": "--no value", "limit": None},
        **{"pairs": ((1, 2), (3, 4)), "freeze": ("kernel$",), "skip_steps": ("5:7", "9:12")},
    }
    used = replace(
        default,
        workdir="elsewhere",
        **of_experiment,
        mesh=replace(default.mesh, data=-1, devices=("0", "1")),
        jit=False,
        cpu_devices=3,
        learning_rate=3e-3,
    )
    run = tmp_path / "run"
    run.mkdir()
    content: Any = {"config": config_as_json(used), "experiment": str(file)}
    (run / "config.json").write_text(json.dumps(content))
    _, found = restore_config(read_run(str(run)), None, Terminal())
    # Of another class, because the file was loaded again.
    assert vars(found) == vars(used) | {"workdir": str(run)}

    content["config"]["gone"] = 1
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"trained with gone=1, and the configuration of .*kinds.py"
    ):
        restore_config(read_run(str(run)), None, Terminal())
    file.rename(tmp_path / "moved.py")
    with pytest.raises(UserError, match=r"kinds\.py.* does not exist: .*--config FILE"):
        restore_config(read_run(str(run)), None, Terminal())
    del content["experiment"]
    (run / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="does not record its experiment"):
        restore_config(read_run(str(run)), None, Terminal())
    with pytest.raises(UserError, match="not the workdir of a run"):
        read_run(str(tmp_path))


def test_on_devices_that_do_not_fit_the_mesh_all_split_the_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, Any] = {"seed": 3, "sharding": ShardingOptions(min_size=8)}
    used = RunConfig(
        strategy="fully_sharded",
        mesh=MeshSpec(fsdp=2, context=2, expert=2),
        context=ContextOptions(method="ring"),
        expert=ExpertOptions(capacity_factor=3),
        **given,
    )
    mirrored = RunConfig(mesh=MeshSpec(devices=(0, 1)), cpu_devices=2, **given)
    assert config_on_devices(used, 2, Terminal()) == replace(mirrored, strategy="mirrored")
    assert "mirrored, because the run's own placement does not fit" in capsys.readouterr().out
    kept = config_on_devices(used, 8, Terminal())
    assert kept.mesh == replace(used.mesh, devices=tuple(range(8)))
    assert kept.strategy == "fully_sharded" and kept.context == used.context


# -- conditions under which a replayed step may differ in its bits ---------------------------------


@pytest.mark.parametrize(
    ("exact", "expected"),
    [
        (
            None,
            [
                "other devices: the run made step 15 on 4",
                "other processes: the run made step 15 in 2",
            ],
        ),
        (16, []),
    ],
)
def test_other_devices_and_processes_are_named_unless_the_run_is_exact(
    exact: int | None, expected: list[str], tmp_path: Path
) -> None:
    kind = jax.devices()[0].device_kind
    config = {"config": {"exact": exact}, "versions": {}, "device_kind": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # The second start made the steps again from 10 on.
    starts = [(0, 1, 8), (20, 1, 8), (10, 2, 4)]
    events = [
        {"time": 1.0, "event": "start", "step": step, "processes": processes, "devices": devices}
        for step, processes, devices in starts
    ]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(lines)
    run, made = read_run(str(tmp_path)), Rerun("", 10, "", 8)
    assert other_conditions(run, made, 15) == expected
    assert other_conditions(run, made, 5) == []


def test_an_experiment_that_was_changed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "experiment.py"
    file.write_text("scale = 1.0")
    recorded = {"experiment": str(file), "experiment_sha256": source_digest(str(file))}
    config = {"config": {"exact": 16}, "versions": {}, "device_kind": "", **recorded}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run, made = read_run(str(tmp_path)), Rerun("", 10, "", 8)
    assert other_conditions(run, made, 5) == []
    file.write_text("scale = 1.01")
    (line,) = other_conditions(run, made, 5)
    assert line.startswith(f"another experiment: {file}")
    (other := tmp_path / "copy.py").write_text("scale = 1.0")
    assert other_conditions(run, made, 5, str(other)) == []


# -- the origin of an example, and a summary of its values -----------------------------------------


def test_an_example_is_traced_to_its_file_and_record(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("four four\n")
    packed = Packed(Tokenized(TextSource(str(tmp_path / "*.txt")), "bytes", append=256), 10)
    rows = packed.rows(np.arange(len(packed)))
    places = [place_of_example(packed, row) for row in range(len(packed))]
    texts = [describe_values(packed, rows, row)[0] for row in range(len(packed))]
    found = dict(zip(texts, places, strict=True))
    assert found["tokens 'four four'"] == f"{tmp_path}/b.txt: line 1 (record 3)"
    assert (
        found["tokens 'three | one'"]
        == f"{tmp_path}/a.txt: line 1 (record 0); {tmp_path}/a.txt: line 3 (record 2)"
    )
    np.arange(40, dtype=np.uint16).tofile(tmp_path / "t.bin")
    assert place_of_example(TokenFile(str(tmp_path / "t.bin"), 8), 2) == (
        f"{tmp_path}/t.bin: token 16"
    )


def test_an_example_of_a_mixture_of_parts_has_its_index_in_the_whole() -> None:
    arrays: dict[str, np.ndarray] = {"image": np.ones((9, 2, 2), np.float32), "label": np.arange(9)}
    arrays["image"][7, 0, 0] = np.nan
    part = MappedDataset(Subset(arrays, np.array([8, 7])), lambda rows: rows)
    mixture = Mixture({"b": (part, 1.0), "a": (ArrayDataset(arrays), 1.0)})
    assert place_of_example(mixture, 10) == "b: example 7 of ArrayDataset"
    assert place_of_example(mixture, 4) == "a: example 4 of ArrayDataset"
    image, label = describe_values(mixture, mixture.rows(np.array([10])), 0)
    assert image.startswith("image float32[2,2] from 1 to 1, 1 of 4 NaN (crc32 ")
    assert label == "label 7"


# -- comparison of what two runs have recorded of a step -------------------------------------------

SUMS = {"step": "1", "opt_state/mu": "2", "params/a": "3", "params/b": "4"}


def test_a_step_is_equal_in_all_that_both_have_recorded() -> None:
    logged = RecordedStep({"accuracy": 0.5, "gradient_norm": 2.0, "loss": math.nan}, SUMS)
    same = compare_step(7, logged, RecordedStep(dict(logged.metrics), dict(SUMS)))
    assert same.is_equal and list(same.metrics) == ["loss", "gradient_norm", "accuracy"]
    assert compare_step(7, logged, RecordedStep({"loss": math.nan})).is_equal
    assert not compare_step(7, RecordedStep({"loss": 1.0}), RecordedStep({}, SUMS)).is_comparable
    other = SUMS | {"opt_state/mu": "9", "params/b": "9"}
    found = compare_step(7, logged, RecordedStep(dict(logged.metrics), other))
    assert not found.is_equal and found.different_arrays == ["params/b", "opt_state/mu"]


def test_loss_and_gradient_norm_decide_whether_a_difference_is_that_of_rounding() -> None:
    def within(loss: float, norm: float, accuracy: float = 0.5) -> bool:
        logged = RecordedStep({"loss": 2.0, "gradient_norm": 4.0, "accuracy": 0.5})
        again = RecordedStep({"loss": loss, "gradient_norm": norm, "accuracy": accuracy})
        return compare_step(1, logged, again).is_within_tolerance

    assert within(2.0, 4.0) and within(2.0 + 1.9e-5, 4.0 - 3.9e-5, accuracy=0.25)
    assert not within(2.0 + 2.1e-5, 4.0) and not within(2.0, 4.0 + 4.1e-5)
    assert not within(math.nan, 4.0)
    assert not compare_step(1, RecordedStep({}, SUMS), RecordedStep({}, SUMS)).is_within_tolerance


def test_how_far_two_arrays_differ() -> None:
    a, b = np.array([1.0, -4.0, math.nan], np.float32), np.array([1.0, -3.0, math.nan], np.float32)
    found = difference_of(a, b)
    assert (found.absolute, found.elements, found.size) == (1.0, 1, 3)
    assert math.isnan(difference_of(a, np.array([1.0, -4.0, 2.0], np.float32)).absolute)
    whole = difference_of(np.array([0, 0]), np.array([0, 3]))
    assert (whole.absolute, whole.relative) == (3.0, math.inf)
    assert difference_of(np.array([2.0, 1.0]), np.array([2.0, 2.0])).relative == 0.5
