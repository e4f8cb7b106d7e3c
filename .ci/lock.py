"""Prints requirements.lock: the installed versions of all dependencies of spmdtrain and its tests.

.venv/bin/python .ci/lock.py > requirements.lock
"""

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("dev", "examples", "ps", "tpu")
"""The extras that `make` installs."""


def needed(name: str, extras: Iterable[str] = ()) -> dict[str, importlib.metadata.Distribution]:
    """Returns a distribution and its direct and indirect dependencies, by canonical name."""
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
