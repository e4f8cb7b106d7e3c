"""Eight virtual CPU devices for every test, set before anything touches a backend."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
# What one test has compiled the next ones need not.
os.environ["XDG_CACHE_HOME"] = os.path.abspath(f"{__file__}/../../.pytest_cache/xdg")

from pathlib import Path

import jax
import pytest

REPOSITORY = Path(__file__).parent.parent
DATA = Path(os.environ.get("SPMDTRAIN_DATA", REPOSITORY.parent / "shared" / "data"))

# Workers take whole files: the long ones first, or the last of them keeps one worker alone.
LONG = (
    *("shakespeare_strategies", "flowers", "strategy_matrix", "gradients", "reductions"),
    *("resume", "same_numbers", "command", "keras", "faults", "shakespeare", "transformer"),
    *("restore", "remote", "launch", "retention", "loop", "gan", "processes", "docs"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of long files first, in each file in their order."""
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture(autouse=True, scope="session")
def eight_devices() -> None:
    """A sharding test on one device would prove nothing."""
    assert len(jax.devices()) == 8


@pytest.fixture
def mnist() -> Path:
    """The folder of MNIST's files; skips where it is absent."""
    folder = DATA / "mnist"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is absent (SPMDTRAIN_DATA says where it is)")
    return folder
