"""A user without an entry in /etc/passwd and without HOME, as in many containers."""

import os
import stat
from pathlib import Path

import pytest

from spmdtrain import UserError
from spmdtrain.record import storage, user_folders


def test_the_cache_is_in_a_private_folder_without_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_folders.cache_folder() == Path("/somewhere/.cache/spmdtrain")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as without an entry
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private = tmp_path / f"spmdtrain-{os.getuid()}"
    assert user_folders.cache_folder() == private / "cache"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_a_workdir_below_an_unknown_home_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError, as without an entry
    with pytest.raises(UserError, match=r"~/run.*HOME"):
        storage.folder_of("~/run")
