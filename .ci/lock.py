"""Prints requirements.lock: what is installed here of all that spmdtrain and its tests need.

.venv/bin/python .ci/lock.py > requirements.lock
"""

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("dev", "examples", "ps", "tpu")
"""Those that `make` installs."""


def needed(name: str, extras: Iterable[str] = ()) -> dict[str, importlib.metadata.Distribution]:
    """Returns the installed distributions that one needs, directly or not, itself included."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen = set()
    left = [(name, frozenset(extras))]
    while left:
        one = (name, extras) = left.pop()
        if one in seen:
            continue
        seen.add(one)
        found[canonicalize_name(name)] = distribution = importlib.metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": x}) for x in (*extras, "")):
                left.append((requirement.name, frozenset(requirement.extras)))
    return found


if __name__ == "__main__":
    print("# Versions that the tests ran with, by .ci/lock.py")
    for name, distribution in sorted(needed("spmdtrain", EXTRAS).items()):
        if name != "spmdtrain":
            print(f"{name}=={distribution.version}")
