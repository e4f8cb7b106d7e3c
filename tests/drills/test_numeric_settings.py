"""Processes whose environments give a program another meaning are refused when they meet."""

import re
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
from helpers import saved_steps
from processes import codes, differing, drill, job, run_line, show

from spmdtrain import UserError
from spmdtrain.distributed import numeric_settings


def of_other_keras(folder: Path) -> str:
    """A folder for PYTHONPATH, in which the metadata of Keras name another version."""
    metadata = folder / "keras-0.0.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: keras\nVersion: 0.0.1\n")
    return str(folder)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("JAX_THREEFRY_PARTITIONABLE", "0", "jax_threefry_partitionable is False there and True"),
        (
            "XLA_FLAGS",
            "--xla_dump_to=/nowhere --xla_cpu_enable_fast_math=true",
            "XLA_FLAGS --xla_cpu_enable_fast_math is true there and not set here",
        ),
        ("PYTHONPATH", "", f"keras is 0.0.1 there and {version('keras')} here"),
    ],
    ids=["threefry", "fast math", "library"],
)
def test_a_process_of_another_meaning_ends_all_before_the_training(
    tmp_path: Path, variable: str, value: str, named: str
) -> None:
    """It trained to wrong numbers, or (threefry) all processes hung without a word."""
    config, workdir = drill(tmp_path), tmp_path / "run"
    value = value or of_other_keras(tmp_path)

    def line(rank: int) -> list[str]:
        plain = run_line(config, "--workdir", workdir)
        return ["env", f"{variable}={value}", *plain] if rank == 1 else plain

    ended = differing(line)
    assert codes(ended) == [2, 2], show(ended)
    for one in ended:
        last = one.output.splitlines()[-1]
        assert re.match(rf"error: worker 0 \(.*\) and chief differ: {named}", last), show(ended)
    assert not workdir.exists() or saved_steps(workdir) == []


@pytest.mark.drill
def test_settings_that_a_script_changes_later_are_compared_before_the_training(
    tmp_path: Path,
) -> None:
    rows = "    rows = Rows(config)\n"
    changed = '"highest" if process_group.rank() else None'
    setting = f"    import jax; jax.config.update('jax_default_matmul_precision', {changed})\n"
    ended = job(drill(tmp_path, (rows, rows + setting)), "--workdir", tmp_path / "run", check=False)
    assert codes(ended) == [2, 2], show(ended)
    difference = "jax_default_matmul_precision is highest in worker 0 and not set in chief"
    assert difference in ended[0].output, show(ended)


def test_the_settings_are_those_of_the_thread_and_have_no_places_of_one_host() -> None:
    before = numeric_settings.settings()
    assert "jax_default_device" not in before and "jax_num_cpu_devices" not in before
    with jax.enable_x64(True), jax.default_device(jax.devices()[3]):
        after = numeric_settings.settings()
    assert {name for name in before if before[name] != after[name]} == {"jax_enable_x64"}
    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("raise"):
        after = numeric_settings.settings()
    changed = {name: after[name] for name in before if before[name] != after[name]}
    assert changed == {
        "jax_default_matmul_precision": "highest",
        "jax_numpy_rank_promotion": "raise",
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("--xla_a=1 --xla_b", {"--xla_a": "1", "--xla_b": "true"}),
        (" --xla_b=True  --xla_a=1", {"--xla_a": "1", "--xla_b": "true"}),
        ("--xla_a=1 --xla_a=2", {"--xla_a": "2"}),  # as XLA takes them
        ("--xla_force_host_platform_device_count=2 --xla_dump_to=/x --xla_gpu_cuda_data_dir=/", {}),
    ],
)
def test_flags_are_compared_by_what_xla_makes_of_them(text: str, found: dict[str, str]) -> None:
    assert numeric_settings.xla_flags(text) == found


def test_flags_may_be_in_a_file(tmp_path: Path) -> None:
    """As XLA has it: what does not begin with a hyphen is the name of a file."""
    path = tmp_path / "flags"
    path.write_text("--xla_a=1\n--xla_b\n")
    assert numeric_settings.xla_flags(str(path)) == {"--xla_a": "1", "--xla_b": "true"}


def test_only_the_flags_of_xla_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "foo")
    assert numeric_settings.settings()["LIBTPU_INIT_ARGS foo"] == "true"
    monkeypatch.setenv("XLA_FLAGS", "foo")
    with pytest.raises(UserError, match="'foo'"):
        numeric_settings.settings()
