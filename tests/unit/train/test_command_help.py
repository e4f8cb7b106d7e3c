"""The help of commands with an experiment's options, and the shell's completion."""

import ast
import dataclasses
import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest
from helpers import BOUND, DIGITS

from spmdtrain import UserError
from spmdtrain.__main__ import COMMANDS, write_completion
from spmdtrain.config.command_line import (
    Options,
    parse_command_line,
)
from spmdtrain.config.experiment import load_experiment
from spmdtrain.config.options import field_docs
from spmdtrain.config.run_config import OPTIONS, config_as_json
from spmdtrain.plan.command import Options as PlanOptions


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, of: type = Options) -> str:
    with pytest.raises(SystemExit) as end:
        parse_command_line(arguments, of)
    assert end.value.code == 0
    return capsys.readouterr().out


def options(text: str) -> list[str]:
    found = re.findall(r"^  --(?:\[no-\])?([\w.-]+)", text, re.MULTILINE)
    return [name.replace("-", "_") for name in found]


def test_every_option_of_a_run_has_a_group() -> None:
    assert [name for name, row in OPTIONS.items() if row.option.group is None] == []


def test_help_shows_usual_options_and_help_all_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = printed(capsys, "--config", str(DIGITS), "--help")
    whole = printed(capsys, "--config", str(DIGITS), "--help-all")
    assert options(usual)[:5] == ["hidden", "dropout", "config", "preset", "mode"]
    assert {"keep_best", "mesh.data"} <= set(options(usual)) < set(options(whole))
    assert {"mesh.replica", "jit", "servers.max_shards"} <= {*options(whole)} - {*options(usual)}
    hidden = len(options(whole)) - len(options(usual))
    assert f"--help-all shows {hidden} more options" in usual
    # One sentence, with the meaning of None as the default.
    words = " ".join(usual.split())
    assert "Steps between two evaluations. [default: at the end of each epoch]" in words
    assert "multiply by r (linear)" in " ".join(whole.split())
    assert max(map(len, usual.splitlines())) <= 80
    plan = printed(capsys, "--help", of=PlanOptions)
    assert "--topology STR" in plan and "(required)" in plan


def test_docstrings_of_fields_are_found_in_all_forms() -> None:
    @dataclasses.dataclass
    class Base:
        kept: int = 0
        """Said by the base."""
        changed: int = 0
        """Said before."""

    @dataclasses.dataclass
    class Config(Base):
        kept: int = 1
        changed: int = 1
        """Said
        again."""
        beside: int = 0  # Said beside it.
        # Said above it,
        # in two lines.
        above: int = 0
        silent: int = 0

    assert field_docs(Config) == {
        "kept": "Said by the base.",
        "changed": "Said again.",
        "beside": "Said beside it.",
        "above": "Said above it, in two lines.",
    }


def test_a_completion_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent/file cannot be written: No such file"):
        write_completion(["zsh", str(tmp_path / "absent" / "file")])


@pytest.mark.slow
def test_the_shell_completes_commands_options_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "completion.bash"
    assert write_completion(["bash", str(file), "--config", str(DIGITS)]) == 0
    script = f"""
source {file}
complete_words() {{
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  $(complete -p spmdtrain | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
  echo "${{COMPREPLY[*]}}"
}}
complete_words spmdtrain ""
complete_words spmdtrain run --learning-rate-
complete_words spmdtrain run --hid
complete_words spmdtrain run --resume ""
"""
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=BOUND)
    assert ended.stderr == ""
    commands, rates, own, choices = (set(x.split()) for x in ended.stdout.splitlines())
    assert commands == {*COMMANDS, "-h", "--help"}
    assert rates == {f"--learning-rate-{x}" for x in ("scaling", "base-batch-size", "table")}
    assert (own, choices) == ({"--hidden"}, {"auto", "never", "must"})
    # The help has the options that the parser has.
    spec = next(x for x in file.read_text().splitlines() if x.startswith("COMPLETION_SPEC = "))
    parsed = ast.literal_eval(spec.removeprefix("COMPLETION_SPEC = "))["subcommands"]["run"]
    flags = {option["flags"][0].removeprefix("--") for option in parsed["options"]} - {"-h"}
    whole = printed(capsys, "--config", str(DIGITS), "--help-all")
    assert {name.replace("_", "-") for name in options(whole)} == flags


def test_the_schema_accepts_what_the_command_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(printed(capsys, "--config", str(DIGITS), "--schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    default = config_as_json(load_experiment(str(DIGITS), frozenset()).preset(None))
    assert valid(default)
    assert valid({"steps": 3, "mesh": {"data": -1, "devices": [0, "cpu:1"]}, "hidden": [8]})
    assert valid({"learning_rate_table": {"32": 0.1}, "trackers": []})
    for wrong in (
        {"steps": -1},
        {"steps": 2.5},
        {"ema_decay": 1},
        {"resume": "maybe"},
        {"hiden": 8},
        {"mesh": {"data": "2"}},
        {"sharding": {"min_size": 0}},
        {"expert": {"capacity_factor": 0.5}},
    ):
        assert not valid(wrong), wrong
    hidden = schema["properties"]["hidden"]
    assert (hidden["type"], hidden["default"]) == ("array", default["hidden"])
    assert (
        hidden["description"]
        == field_docs(type(load_experiment(str(DIGITS), frozenset()).preset(None)))["hidden"]
    )
    assert "hidden" not in json.loads(printed(capsys, "--schema"))["properties"]
