"""The configuration of a run from its `config.json`."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spmdtrain import MeshSpec, RunConfig, ShardingOptions, UserError
from spmdtrain.config.experiment import load_experiment
from spmdtrain.config.options import ContextOptions, ExpertOptions
from spmdtrain.config.run_config import config_as_json
from spmdtrain.document.terminal import Terminal
from spmdtrain.replay.recorded_run import read_run
from spmdtrain.replay.rerun import config_on_devices, restore_config

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
