"""What the project is made of: licences of its dependencies, the lock, and pinned actions."""

import re
import runpy
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from conftest import REPOSITORY
from packaging.requirements import Requirement

LOCK = runpy.run_path(str(REPOSITORY / ".ci" / "lock.py"))
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))

# Permissive ones, and the MPL, which covers single files. As packages write them.
ALLOWED = set(
    """
    0bsd|3-clause bsd license|afl-2.1|apache 2.0|apache license|apache license 2.0|apache-2.0
    apache software license|bsd|bsd license|bsd-2-clause|bsd-3-clause|cc0-1.0|dfsg approved|isc
    mit|mit license|mit-0|mit-cmu|mozilla public license 2.0 (mpl 2.0)|mpl-2.0|psf-2.0
    python software foundation license|unlicense|zlib
    """.strip()
    .replace("\n", "|")
    .split("|")
)
ALLOWED = {name.strip("( )") for name in ALLOWED}

# What their metadata says, and why they are used all the same.
EXCEPTIONS = {
    "crc32c": "GNU Lesser General Public License v2 or later (LGPLv2+)",  # imported, unchanged
    "libtpu": "Google Cloud Platform Terms of Service",  # not open; of the extra `tpu` alone
    "namex": "",  # of Keras; Apache-2.0 by its repository, its metadata has nothing
}


def licence_of(distribution: Distribution) -> str:
    """Returns what a package's metadata says: expressions first, then classifiers, then text."""
    metadata = distribution.metadata
    if expressions := metadata.get_all("License-Expression"):
        return expressions[0]
    names = [name for name in metadata.get_all("Classifier") or [] if name.startswith("License")]
    if names:
        return " AND ".join(name.rpartition(" :: ")[2] for name in names)
    return (metadata.get_all("License") or [""])[0].strip().partition("\n")[0]


def is_allowed(licence: str) -> bool:
    """Returns whether all parts of an expression are allowed; of alternatives one is enough."""
    return all(
        any(name.strip("( )").lower() in ALLOWED for name in part.split(" OR "))
        for part in licence.split(" AND ")
    )


@pytest.mark.parametrize(
    ("licence", "allowed"),
    [
        ("Apache-2.0 AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("AGPL-3.0", False),
        ("", False),
    ],
)
def test_licences_are_told_apart(licence: str, allowed: bool) -> None:
    assert is_allowed(licence) == allowed


def test_all_dependencies_have_a_licence_that_is_allowed() -> None:
    needed: dict[str, Distribution] = LOCK["needed"]("spmdtrain", LOCK["EXTRAS"])
    assert {"jax", "numpy", "ray", "pytest"} <= needed.keys()
    found = {name: licence_of(one) for name, one in needed.items()}
    refused = {name: x for name, x in found.items() if not is_allowed(x)}
    assert refused.items() <= EXCEPTIONS.items()


def test_the_lock_has_all_that_the_project_asks_for() -> None:
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    needed: dict[str, Distribution] = LOCK["needed"]("spmdtrain", LOCK["EXTRAS"])
    assert needed.keys() - {"spmdtrain"} <= locked.keys(), "run .ci/lock.py > requirements.lock"
    for requirement in map(Requirement, needed["spmdtrain"].requires or []):
        if version := locked.get(requirement.name.lower()):
            assert requirement.specifier.contains(version), f"{requirement}: {version}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_may_only_read(path: Path) -> None:
    text = path.read_text()
    uses = re.findall(r"uses: *(\S+)", text)
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}", action), action
    workflow: dict[str, Any] = yaml.safe_load(text)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"] == {"contents": "read"}
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
