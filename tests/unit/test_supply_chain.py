"""Licenses of the dependencies, the lock, the set-up by make, and the workflow of CI."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from conftest import REPOSITORY
from packaging.requirements import Requirement

import spmdtrain

LOCK = runpy.run_path(str(REPOSITORY / ".ci" / "lock.py"))
# Without the flags of the make that runs the tests.
ENV = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))

# Permissive ones, and the MPL, which covers single files. As packages write them.
ALLOWED = set(
    """
    0bsd|3-clause bsd license|afl-2.1|apache 2.0|apache license|apache license 2.0|apache-2.0
    apache software license|bsd|bsd license|bsd-2-clause|bsd-3-clause|cc0-1.0|dfsg approved|isc
    isc license (iscl)|mit|mit license|mit-0|mit-cmu|mozilla public license 2.0 (mpl 2.0)|mpl-2.0
    psf-2.0|python software foundation license|unlicense|zlib
    """.strip()
    .replace("\n", "|")
    .split("|")
)
ALLOWED = {name.strip("( )") for name in ALLOWED}

# What their metadata says, and why they are used nevertheless.
EXCEPTIONS = {
    # Of twine alone, which checks the wheel; its Emacs mode is the part under the GPL.
    "docutils": "Public Domain AND BSD License AND GNU General Public License (GPL)",
    "crc32c": "GNU Lesser General Public License v2 or later (LGPLv2+)",  # imported, unchanged
    "libtpu": "Google Cloud Platform Terms of Service",  # not open; of the extra `tpu` alone
    "namex": "",  # of Keras; Apache-2.0 by its repository, its metadata has nothing
}


def license_of(distribution: Distribution) -> str:
    """Returns what a package's metadata says: expressions first, then classifiers, then text."""
    metadata = distribution.metadata
    if expressions := metadata.get_all("License-Expression"):
        return expressions[0]
    names = [name for name in metadata.get_all("Classifier") or [] if name.startswith("License")]
    if names:
        return " AND ".join(name.rpartition(" :: ")[2] for name in names)
    return (metadata.get_all("License") or [""])[0].strip().partition("\n")[0]


def is_allowed(license: str) -> bool:
    """Returns whether all parts of an expression are allowed; of alternatives one is enough."""
    return all(
        any(name.strip("( )").lower() in ALLOWED for name in part.split(" OR "))
        for part in license.split(" AND ")
    )


@pytest.mark.parametrize(
    ("license", "allowed"),
    [
        ("Apache-2.0 AND MIT", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("AGPL-3.0", False),
        ("", False),
    ],
)
def test_allowed_and_other_licenses_are_distinguished(license: str, allowed: bool) -> None:
    assert is_allowed(license) == allowed


@pytest.mark.slow
def test_all_dependencies_have_a_license_that_is_allowed() -> None:
    needed: dict[str, Distribution] = LOCK["needed"]("spmdtrain", LOCK["EXTRAS"])
    assert {"jax", "numpy", "ray", "pytest"} <= needed.keys()
    found = {name: license_of(one) for name, one in needed.items()}
    refused = {name: x for name, x in found.items() if not is_allowed(x)}
    assert refused.items() <= EXCEPTIONS.items()


@pytest.mark.slow
def test_the_lock_has_all_that_the_project_asks_for() -> None:
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if not line.startswith("#"))
    needed: dict[str, Distribution] = LOCK["needed"]("spmdtrain", LOCK["EXTRAS"])
    if any(one.version != locked.get(name, one.version) for name, one in needed.items()):
        pytest.skip("the installed versions are not those of requirements.lock")
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


def test_the_workflow_runs_what_the_makefile_and_the_scripts_offer() -> None:
    jobs = yaml.safe_load((REPOSITORY / ".github/workflows/test.yml").read_text())["jobs"]
    runs = {
        name: re.findall(r"(\.ci/.*)", job["steps"][-1]["run"])[0].split()
        for name, job in jobs.items()
    }
    tests = {"lint", "test", "integration", "drill"}
    assert runs.keys() == tests | {"nightly", "container", "wheel", "lowest", "newest", "audit"}
    for job in ("drill", "nightly"):  # without root's rights some tests would be skipped
        assert jobs[job]["steps"][-1]["run"].startswith("sudo ")
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    for script, *arguments in runs.values():
        assert os.access(REPOSITORY / script, os.X_OK) and {*arguments} <= {*targets}, script
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for job in ("test", "wheel"):
        assert jobs[job]["strategy"]["matrix"]["python"] == [
            name.rpartition(" ")[2] for name in project["classifiers"] if ":: Python :: 3." in name
        ]


def test_hooks_before_a_commit_format_as_ci_does() -> None:
    (source,) = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    pins = {pin for hook in source["hooks"] for pin in hook.get("additional_dependencies", ())}
    assert len(pins) == 1 and pins <= {*(REPOSITORY / "requirements.lock").read_text().split()}


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_issue_forms_ask_for_something(name: str) -> None:
    form = yaml.safe_load((REPOSITORY / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
    assert ids and len({*ids}) == len(ids)


def test_the_newest_release_of_the_changelog_is_the_version_of_the_package() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    unreleased, *released = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert unreleased == ("Unreleased", "")
    assert next(version for version, _ in released) == spmdtrain.__version__
    assert all(date for _, date in released)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == spmdtrain.__version__


def test_the_links_of_the_package_s_readme_lead_to_files_of_the_release() -> None:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    urls = pyproject["project"]["urls"]
    hook = pyproject["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (REPOSITORY / "README.md").read_text()
    for rule in hook["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    text = text.replace("$HFPR_VERSION", spmdtrain.__version__)
    raw = urls["Repository"].replace("github.com", "raw.githubusercontent.com")
    bases = [f"{raw}/v{spmdtrain.__version__}/"]
    bases.append(f"{urls['Repository']}/blob/v{spmdtrain.__version__}/")
    found = re.findall(r"(!?)\[[^]]*\]\(([^)#]+)", text)
    for is_image, link in found:
        if not is_image and not link.startswith(urls["Repository"]):
            assert link.startswith("https://"), link
            continue
        (path,) = (link.removeprefix(base) for base in bases if link.startswith(base))
        assert link.startswith(bases[0]) == bool(is_image) and (REPOSITORY / path).exists(), link
    assert len([link for _, link in found if link.startswith(tuple(bases))]) > 30


# -- the audit of the lock -------------------------------------------------------------------------

# Makes an environment whose pip and pip-audit do what the environment variables say.
AUDIT_PYTHON = f"""#!/bin/sh
mkdir -p "$3/bin"
ln -s {sys.executable} "$3/bin/python"
printf '#!/bin/sh\\nexit $PIP_CODE\\n' > "$3/bin/pip"
cat > "$3/bin/pip-audit" <<'END'
#!/bin/sh
while test "$1" != --output; do shift; done
printf %s "$FOUND" > "$2"
echo 'ConnectionError: no route' >&2
test -z "$VULNERABLE" -a -n "$FOUND"
END
chmod +x "$3"/bin/pip*
"""
SOUND = {"name": "jax", "version": "0.7.0", "vulns": []}
BAD = {"name": "pip", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
SKIPPED = {"name": "ray", "skip_reason": "timeout"}


@pytest.mark.parametrize(
    ("found", "pip", "ci", "code", "line"),
    [
        ([SOUND], 0, "", 0, "1 of 1 audited, 0 known vulnerabilities"),
        ([SOUND, BAD], 0, "", 1, "pip 1.0: PYSEC-1; fixed in 1.1"),
        ([SOUND, SKIPPED], 0, "", 0, "because PyPI did not answer for them: ray"),
        ([SOUND, SKIPPED], 0, "1", 1, "because PyPI did not answer for them: ray"),
        (None, 0, "", 0, "not audited: PyPI does not answer"),
        (None, 0, "1", 1, "not audited: PyPI does not answer"),
        (None, 1, "", 0, "not audited: pip-audit cannot be installed"),
        (None, 1, "1", 1, "not audited: pip-audit cannot be installed"),
    ],
)
def test_the_audit_fails_for_a_vulnerability_and_in_ci_for_no_answer(
    tmp_path: Path, found: list[Any] | None, pip: int, ci: str, code: int, line: str
) -> None:
    (tmp_path / "python").write_text(AUDIT_PYTHON)
    (tmp_path / "python").chmod(0o755)
    said = "" if found is None else json.dumps({"dependencies": found})
    vulnerable = "1" if found and BAD in found else ""
    env = ENV | {"PYTHON": str(tmp_path / "python"), "PIP_CODE": str(pip), "CI": ci}
    env |= {"FOUND": said, "VULNERABLE": vulnerable, "TMPDIR": str(tmp_path)}
    ended = subprocess.run([REPOSITORY / ".ci/audit"], env=env, capture_output=True, text=True)
    assert ended.returncode == code and line in ended.stdout + ended.stderr, ended


# -- the set-up ------------------------------------------------------------------------------------

# Records its arguments. Makes a virtual environment with itself as its Python; installs nothing.
PYTHON = """#!/bin/sh
echo "$*" >> log
case "$*" in
  *"venv --clear"*) rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip install"*) test ! -e offline ;;
esac
"""
NEW, TRAINING, EVERYTHING = "venv --clear .venv", ".[examples]", ".[dev,examples,tpu,ps]"


def made(folder: Path, *targets: str, code: int = 0) -> list[str]:
    """Runs make in a folder; returns what it has installed."""
    (folder / "log").write_text("")
    command = ["make", "PYTHON=./python", *targets]
    ended = subprocess.run(command, cwd=folder, env=ENV, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    lines = (folder / "log").read_text().splitlines()
    marks = (NEW, TRAINING, EVERYTHING)
    return [mark for line in lines for mark in marks if mark in line]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The Makefile and what it needs, with a Python that installs nothing."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def outdate(folder: Path) -> None:
    """Makes the installation older than the Makefile and pyproject.toml."""
    for stamp in (folder / ".venv").glob(".ready*"):
        os.utime(stamp, (0, 0))


def test_training_installs_less_than_the_tests_and_either_may_come_first(clone: Path) -> None:
    assert made(clone, "train") == [NEW, TRAINING]
    assert made(clone, "train") == []
    assert made(clone, "unit") == [EVERYTHING]  # added to what is there
    assert made(clone, "train", "unit", "lint", "drill") == []
    outdate(clone)
    assert made(clone, "train") == [TRAINING]
    assert made(clone, "unit") == [EVERYTHING]
    assert made(clone, "clean", "unit") == [NEW, EVERYTHING]
    assert made(clone, "train") == []
    assert made(clone, "-j4", "clean", "train", "test") == [NEW, TRAINING, EVERYTHING]


@pytest.mark.parametrize("before", [(), ("train",), ("unit",)], ids=["clone", "train", "test"])
def test_an_interrupted_installation_starts_over(clone: Path, before: tuple[str, ...]) -> None:
    for target in before:
        made(clone, target)
    outdate(clone)
    (clone / "offline").touch()
    made(clone, "unit", code=2)
    (clone / "offline").unlink()
    assert made(clone, "train") == [NEW, TRAINING]


def test_ci_installs_the_locked_versions(clone: Path) -> None:
    shutil.copytree(REPOSITORY / ".ci", clone / ".ci")
    env = ENV | {"PYTHON": "./python"}
    subprocess.run([clone / ".ci" / "run", "lint"], env=env, check=True, capture_output=True)
    (line,) = (x for x in (clone / "log").read_text().splitlines() if "pip install" in x)
    assert "--constraint requirements.lock" in line and EVERYTHING in line


# -- the browser of the tests of HTML pages --------------------------------------------------------


@pytest.mark.parametrize(
    ("programs", "user", "code", "asked", "printed"),
    [
        (["google-chrome", "apt-get"], 0, 0, [], ""),
        (["apt-get"], 0, 0, ["update", "install"], "installing chromium ...\n"),
        (["apt-get"], 0, 1, ["update"], "are skipped\n"),  # no network
        (["apt-get"], 1000, 0, [], "are skipped\n"),
        ([], 0, 0, [], "are skipped\n"),
    ],
)
def test_ci_installs_a_browser_if_it_can_and_never_fails_without_one(
    tmp_path: Path, programs: list[str], user: int, code: int, asked: list[str], printed: str
) -> None:
    for name, text in {
        "id": f"echo {user}",
        **dict.fromkeys(programs, f'echo "$1" >> {tmp_path}/asked; exit {code}'),
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    bash = shutil.which("bash")
    assert bash is not None
    command = [bash, str(REPOSITORY / ".ci" / "browser")]
    ended = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith(printed) and bool(ended.stdout) == bool(printed)
    log = tmp_path / "asked"
    assert (log.read_text().split() if log.exists() else []) == asked
