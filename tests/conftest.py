"""Eight virtual CPU devices for every test, set before anything touches a backend."""

import gc
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# What one test has compiled the next ones need not.
os.environ["XDG_CACHE_HOME"] = os.path.abspath(f"{__file__}/../../.pytest_cache/xdg")

from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from spmdtrain.xla.compiler import keep_programs

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
DATA = Path(os.environ.get("SPMDTRAIN_DATA", REPOSITORY.parent / "shared" / "data"))

# Marks of all tests in a folder. A test elsewhere that takes long bears the mark itself.
MARKS = {"integration": pytest.mark.slow, "drills": pytest.mark.drill}


# On a busy machine an example may take long, of which nothing follows.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without a test of the selected mark: to import them all takes a worker 10 s."""
    mark = config.option.markexpr.partition(" ")[0]
    if collection_path.name.startswith("test_") and mark in ("slow", "drill", "nightly"):
        marks = [MARKS[name].name for name in MARKS if TESTS / name in collection_path.parents]
        if mark not in marks and f"mark.{mark}" not in collection_path.read_text():
            return True
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks a test by its folder."""
    folder = item.path.relative_to(TESTS).parts[0]
    if folder in MARKS:
        item.add_marker(MARKS[folder])


def pytest_collection_finish() -> None:
    """Makes garbage collections rare: among JAX's many objects they take a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(autouse=True, scope="session")
def eight_devices() -> None:
    """A sharding test on one device would prove nothing."""
    assert len(jax.devices()) == 8
    # From the first test on: half of what tests compile, other tests have compiled, too.
    keep_programs(None)


@pytest.fixture
def root() -> None:
    """Skips a drill that needs root's rights. On GitHub, whose drills run as root, it fails."""
    if os.geteuid() != 0:
        stop = pytest.fail if os.environ.get("GITHUB_ACTIONS") else pytest.skip
        stop("only root can mount, and start a process as another user")


@pytest.fixture
def mnist() -> Path:
    """The folder of MNIST's files; skips where it is absent."""
    folder = DATA / "mnist"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (SPMDTRAIN_DATA says where it is)")
    return folder
