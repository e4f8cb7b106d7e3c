"""Token authentication of Ray: who reaches the ports of a job cannot use them."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from spmdtrain import UserError
from spmdtrain.cluster.spec import Address
from spmdtrain.parameter_server.ray_nodes import (
    JOB_TOKEN,
    MODE,
    TOKEN,
    TOKEN_PATH,
    create_token,
    enable_authentication,
    read_token,
    remove_token,
)
from spmdtrain.record.user_folders import private_folder

CHIEF = Address("127.0.0.1", 2222)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """Without tokens, and with a folder for temporary files of its own."""
    with (
        mock.patch.dict(os.environ),
        mock.patch("tempfile.tempdir", str(tmp_path)),
    ):
        for name in (JOB_TOKEN, MODE, TOKEN, TOKEN_PATH):
            os.environ.pop(name, None)
        yield


def token(action: object, *arguments: object) -> str:
    """Returns the token that a task sets, and unsets it."""
    assert callable(action)
    action(*arguments)
    return os.environ.pop(TOKEN)


def test_tasks_derive_the_same_token_from_the_secret_of_their_job() -> None:
    os.environ[JOB_TOKEN] = "sixteen letters and more"
    created = token(create_token, CHIEF, False)
    assert created == token(read_token, CHIEF, False)
    assert len(created) == 64 and "sixteen letters and more" not in created
    assert created != token(create_token, Address("127.0.0.1", 2223), False)
    os.environ[JOB_TOKEN] = "another one of sixteen letters"
    assert created != token(read_token, CHIEF, False)


def test_tasks_of_one_user_on_loopback_share_a_fresh_token_in_a_private_file() -> None:
    with pytest.raises(UserError, match=r"No such file .*SPMDTRAIN_JOB_TOKEN"):
        read_token(CHIEF, True)
    created = token(create_token, CHIEF, True)
    assert created == token(read_token, CHIEF, True)
    folder = private_folder()
    (file,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, file)] == [0o700, 0o600]
    other = token(create_token, Address("127.0.0.2", CHIEF.port), True)
    assert created == token(read_token, CHIEF, True) != other  # of another job
    remove_token(Address("127.0.0.2", CHIEF.port))
    assert created != token(create_token, CHIEF, True)
    remove_token(CHIEF)
    assert not list(folder.iterdir())


def test_a_job_without_a_secret_on_other_addresses_is_refused() -> None:
    for action in (create_token, read_token):
        with pytest.raises(UserError, match=r"secret.*SPMDTRAIN_JOB_TOKEN"):
            action(Address("10.0.0.1", 2222), False)


def test_disabled_authentication_is_refused() -> None:
    os.environ[MODE] = "disabled"
    with pytest.raises(UserError, match=r"RAY_AUTH_MODE=disabled.*unset"):
        enable_authentication()


@pytest.mark.parametrize("made", ["open", "link"])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, made: str) -> None:
    folder = tmp_path / f"spmdtrain-{os.getuid()}"
    target = folder if made == "open" else tmp_path / "elsewhere"
    target.mkdir()
    target.chmod(0o755 if made == "open" else 0o700)
    if made == "link":
        folder.symlink_to(target)
    with pytest.raises(UserError, match=f"{folder} .*0700"):
        private_folder()
