"""Optional libraries: the message if one is missing, and an extra for each."""

import sys
import tomllib
from pathlib import Path

import pytest
from conftest import REPOSITORY

from spmdtrain.errors import UserError, import_extra


def test_a_missing_library_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert import_extra("json.decoder", "json", "JSON files").JSONDecoder
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError) as caught:
        import_extra("pyarrow.parquet", "parquet", "Parquet files")
    assert str(caught.value) == (
        "Parquet files need pyarrow, which is not installed: pip install 'spmdtrain[parquet]'"
    )
    (tmp_path / "halved.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"cannot be imported \(No module named 'no_such_module'\)"):
        import_extra("halved", "parquet", "Parquet files")


def test_tests_install_the_library_of_each_extra_for_data() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name in (
        "arrayrecord",
        "parquet",
        "huggingface",
        "zstd",
        "tokenizers",
        "sentencepiece",
        "chat",
    ):
        assert {*extras[name]} <= {*extras["dev"]}, name
