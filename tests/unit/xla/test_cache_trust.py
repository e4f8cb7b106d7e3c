"""Corrupted programs in the cache, and caches that others can write to: none of them is used."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.compilation_cache import reset_cache

from spmdtrain.record.user_folders import keep_file
from spmdtrain.xla.compiler import CacheFolder, keep_programs


def test_a_program_under_the_name_of_another_is_not_run(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path)
    folder.put("a", b"the program a")
    folder.put("b", b"the program b")
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "c").rename(tmp_path / "b")
    with pytest.warns(UserWarning, match="corrupted"):
        assert folder.get("a") is None
    folder.put("a", b"the program a")
    assert folder.get("a") == b"the program a"


@pytest.fixture
def own_cache() -> Any:
    """The cache as it was, afterward."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    reset_cache()


def test_a_cache_that_was_moved_is_of_use(tmp_path: Path, own_cache: None) -> None:
    def compile_one() -> None:
        jax.clear_caches()
        jax.jit(lambda x: 3 * x + 1).lower(jnp.ones(3)).compile()

    keep_programs(str(tmp_path / "here"))
    compile_one()
    names = {path.name for path in (tmp_path / "here").iterdir()}
    shutil.move(tmp_path / "here", tmp_path / "there")
    keep_programs(str(tmp_path / "there"))
    compile_one()
    assert {path.name for path in (tmp_path / "there").iterdir()} == names and names


@pytest.mark.parametrize("fault", ["of another user", "writable by others", "closed"])
def test_a_cache_that_others_can_write_to_is_not_used(
    fault: str, tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_programs(None)
    folder = Path(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    says = "Permission denied"
    if fault == "of another user":
        user = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: user)
        says = "belongs to user"
    elif fault == "writable by others":
        folder.parent.chmod(0o775)
        says = f"{folder.parent}: others can write to it"
    else:

        def refused(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refused)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.warns(UserWarning, match=f"not used: .*{says}"):
        keep_programs(None)
    assert jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]


def test_only_the_user_can_write_into_any_folder_of_the_cache(
    tmp_path: Path, own_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    try:
        keep_file(tmp_path / "cache" / "spmdtrain" / "plans" / "x.json", b"{}")
        keep_programs(None)
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700} and len(folders) >= 5
