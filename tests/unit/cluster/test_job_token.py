"""The job's token: from the environment or a file, made by the launcher, checked by the doctor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment
from processes import BOUND, as_task, free_port, tf_config

from spmdtrain.cluster import job_token
from spmdtrain.cluster.command import check_token
from spmdtrain.cluster.job_token import TOKEN, TOKEN_FILE
from spmdtrain.cluster.spec import from_tf_config
from spmdtrain.distributed import failures, process_group
from spmdtrain.distributed.progress import CONTEXT
from spmdtrain.errors import UserError
from spmdtrain.launch.task_env import environments_of

GOOD = "0123456789abcdef"


def unheard(text: str) -> None:
    raise AssertionError(text)


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{GOOD}\n")
    file.chmod(0o600)
    assert job_token.read({TOKEN: GOOD}, warn=unheard) == GOOD.encode()
    assert job_token.read({TOKEN_FILE: str(file), TOKEN: ""}, warn=unheard) == GOOD.encode()
    assert job_token.read({}, warn=unheard) == b""


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "No such file"),
        ("short\n", 0o600, "the token has 5 characters; expected 16 to 4096"),
        ("x" * 5000, 0o600, "the token has 4098 characters"),
        ("", 0o600, "the token has 0 characters"),
    ],
)
def test_a_file_that_holds_no_token_is_an_error(
    tmp_path: Path, content: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(UserError) as error:
        job_token.read({TOKEN_FILE: str(file)}, warn=unheard)
    assert str(error.value).startswith(f"{TOKEN_FILE}={file}: ") and said in str(error.value)


@pytest.mark.timeout(30)
def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    for place in ("token", "."):
        with pytest.raises(UserError, match=r"not a regular file|cannot be read"):
            job_token.read({TOKEN_FILE: str(tmp_path / place)}, warn=unheard)


def test_a_short_token_is_an_error_that_does_not_show_it() -> None:
    with pytest.raises(UserError, match="6 characters") as error:
        job_token.read({TOKEN: "hidden"}, warn=unheard)
    assert "hidden" not in str(error.value)


def test_both_variables_are_an_error() -> None:
    with pytest.raises(UserError, match="both set"):
        job_token.read({TOKEN: GOOD, TOKEN_FILE: "/token"}, warn=unheard)


def test_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path) -> None:
    file, said = tmp_path / "token", list[str]()
    file.write_text(GOOD)
    file.chmod(0o644)
    assert job_token.read({TOKEN_FILE: str(file)}, warn=said.append) == GOOD.encode()
    (warning,) = said
    assert "readable by all users" in warning


def test_an_exposed_job_without_a_token_is_warned_of() -> None:
    said = list[str]()
    assert job_token.read({}, exposed="10.0.0.1:2222", warn=said.append) == b""
    (warning,) = said
    assert "10.0.0.1:2222 can join or end it" in warning
    assert job_token.read({TOKEN: GOOD}, exposed="10.0.0.1:2222", warn=unheard) == GOOD.encode()


def test_tokens_differ_and_are_long_enough() -> None:
    one, other = job_token.create(), job_token.create()
    assert one != other and len(one) == 64
    assert job_token.read({TOKEN: one}, warn=unheard) == one.encode()


def test_the_launcher_gives_all_tasks_one_token() -> None:
    names = ["chief", "worker 0", "evaluator"]
    given = environments_of(names, None, {}, [])
    (token,) = {given[name][TOKEN] for name in names}
    assert len(token) == 64
    assert environments_of(names, None, {}, [])["chief"][TOKEN] != token
    assert environments_of(["chief"], None, {TOKEN: GOOD}, [])["chief"][TOKEN] == GOOD
    assert TOKEN not in environments_of(["chief"], None, {TOKEN_FILE: "/token"}, [])["chief"]


@pytest.mark.parametrize(
    ("host", "environ", "level"),
    [
        ("10.0.0.1", {}, "warning"),
        ("10.0.0.1", {TOKEN: GOOD}, "ok"),
        ("10.0.0.1", {TOKEN: "short"}, "error"),
        ("127.0.0.1", {}, None),
    ],
)
def test_the_doctor_checks_the_token(host: str, environ: dict[str, str], level: str | None) -> None:
    cluster = {"worker": [f"{host}:1", f"{host}:2"]}
    spec = from_tf_config(json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))
    found = check_token(spec, environ)
    assert [one.level for one in found] == ([level] if level else [])
    assert check_token(from_tf_config(None), environ) == []


@pytest.mark.drill
@pytest.mark.parametrize("token", ["", GOOD])
def test_process_0_warns_if_other_machines_reach_a_job_without_a_token(token: str) -> None:
    addresses = [f"192.0.2.{number}:{free_port()}" for number in (1, 2)]
    script = "import spmdtrain; spmdtrain.initialize(timeout=0.1)"
    done = subprocess.run(
        as_task(tf_config(addresses, 0), [sys.executable, "-c", script]),
        env=environment() | {TOKEN: token},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert "gave up after 0.1 s" in done.stderr
    assert done.stderr.count("warning: this job has no token: any program") == (not token)


# -- through JAX's key-value store -----------------------------------------------------------------


class Store:
    """A key-value store to which a stranger has written."""

    def __init__(self, value: object) -> None:
        self._value = json.dumps(value)

    def key_value_try_get(self, key: str) -> str:
        return self._value

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        return self._value


EVIL = "a\x1b[2J\u202eb"


def test_another_process_s_reason_is_shown_escaped() -> None:
    record = {"rank": 0, "name": EVIL, "code": 1, "reason": EVIL, "lost": False}
    found = failures.first_failure(process_group.Job(["chief", "worker 0"], 1, Store(record)))
    assert found is not None
    assert failures.describe_failure(found) == r"a\x1b[2J\u202eb failed: a\x1b[2J\u202eb"


def test_another_process_s_error_is_raised_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "test_another_process_s_error_is_raised_escaped"
    sent = [f"broadcast in {name}", "", [f"{EVIL}\nsecond", None]]
    job = process_group.Job(["chief", "worker 0"], 1, Store(sent))
    job.client.key_value_set = lambda *_: None
    monkeypatch.setattr(CONTEXT, "job", job)
    with pytest.raises(UserError) as error:
        process_group.run_on_all(lambda: None, UserError)
    assert str(error.value) == "a\\x1b[2J\\u202eb\nsecond"
    job.client = Store([EVIL, EVIL, None])
    with pytest.raises(UserError, match=r"in chief by a\\x1b\[2J\\u202eb \[a\\x1b") as error:
        process_group.broadcast(None)
    assert "\x1b" not in str(error.value)
