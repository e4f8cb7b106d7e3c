"""The files of launch/, as far as they can be tried without a cluster.

The YAML against the parts of the schemas that it uses, the scripts in it and beside it under
stand-ins for what they call, and what comes out of them through the package's own readers.
"""

import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]
from helpers import BOUND, REPOSITORY, environment, metrics, saved_steps, status
from packaging.specifiers import SpecifierSet

from spmdtrain.cluster import job_token
from spmdtrain.cluster.spec import ClusterSpec, Role, from_tf_config
from spmdtrain.config import command_line

pytestmark = pytest.mark.slow

LAUNCH = REPOSITORY / "launch"
JOBSET, TFJOB = LAUNCH / "jobset.yaml", LAUNCH / "tfjob.yaml"
SBATCH, TPU_POD = LAUNCH / "slurm.sbatch", LAUNCH / "tpu_pod.sh"
SKYPILOT, XPK = LAUNCH / "skypilot.yaml", LAUNCH / "xpk.sh"
DOCKERFILE, SENT = LAUNCH / "Dockerfile", LAUNCH / "Dockerfile.dockerignore"
FILES = [JOBSET, TFJOB, SBATCH, TPU_POD, SKYPILOT, XPK, DOCKERFILE]
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def load(path: Path) -> dict[str, Any]:
    """The job itself, which follows its network policy if it has one."""
    *_, content = yaml.safe_load_all(path.read_text())
    assert isinstance(content, dict)
    return content


# -- the schemas -----------------------------------------------------------------------------------

# Of kubernetes-sigs/jobset (v1alpha2), kubeflow/training-operator (v1) and Kubernetes (batch/v1,
# core/v1): the parts that the files use, in the words of JSON Schema. An object has the properties
# that are listed and no others.
LABEL = {"type": "string", "pattern": "^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"}
TEXT = {"type": "string", "minLength": 1}
COUNT = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
SOME = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}


def an(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


def some(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": values}


CONTAINER = an(
    *("name", "image"),
    name=LABEL,
    image=TEXT,
    workingDir=TEXT,
    command=some(TEXT),
    args=some(TEXT),
    env=some(
        an(
            "name",
            name=TEXT,
            value=TEXT,
            valueFrom=an("secretKeyRef", secretKeyRef=an("name", "key", name=LABEL, key=TEXT)),
        )
    ),
    # The name of a port has 15 letters at most.
    ports=some(
        an(
            "containerPort",
            name={"type": "string", "pattern": "^[a-z][a-z0-9-]{0,14}$"},
            containerPort={"type": "integer", "minimum": 1, "maximum": 65535},
        )
    ),
    resources=an(limits=an(**{"nvidia.com/gpu": SOME})),
    volumeMounts=some(an("name", "mountPath", name=LABEL, mountPath=TEXT)),
)
POD = an(
    "containers",
    restartPolicy=one_of("Always", "OnFailure", "Never"),
    terminationGracePeriodSeconds=COUNT,
    containers=some(CONTAINER),
    volumes=some(
        an("name", name=LABEL, persistentVolumeClaim=an("claimName", claimName=LABEL)),
    ),
)
POD_FAILURE_RULE = an(
    "action",
    action=one_of("FailJob", "FailIndex", "Ignore", "Count"),
    onExitCodes=an(
        *("operator", "values"),
        containerName=LABEL,
        operator=one_of("In", "NotIn"),
        values=some({"type": "integer", "minimum": 1, "maximum": 255}),
    ),
    onPodConditions=some(
        an("type", "status", type=TEXT, status=one_of("True", "False", "Unknown"))
    ),
)
JOBSET_SCHEMA = an(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=an("name", name=LABEL),
    spec=an(
        "replicatedJobs",
        network=an(
            enableDNSHostnames={"type": "boolean"},
            publishNotReadyAddresses={"type": "boolean"},
        ),
        failurePolicy=an(
            maxRestarts=COUNT,
            rules=some(
                an(
                    *("name", "action"),
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    action=one_of(
                        "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"
                    ),
                    onJobFailureReasons=some(
                        one_of(
                            "BackoffLimitExceeded",
                            "DeadlineExceeded",
                            "FailedIndexes",
                            "MaxFailedIndexesExceeded",
                            "PodFailurePolicy",
                        )
                    ),
                )
            ),
        ),
        replicatedJobs=some(
            an(
                *("name", "template"),
                name=LABEL,
                replicas=SOME,
                template=an(
                    "spec",
                    spec=an(
                        "template",
                        completionMode=one_of("Indexed", "NonIndexed"),
                        parallelism=COUNT,
                        completions=COUNT,
                        backoffLimit=COUNT,
                        podFailurePolicy=an("rules", rules=some(POD_FAILURE_RULE)),
                        template=an("spec", spec=POD),
                    ),
                ),
            )
        ),
    ),
)
REPLICA = an(
    "template",
    replicas=SOME,
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    template=an(
        "spec",
        metadata=an(
            annotations=an(**{"sidecar.istio.io/inject": one_of("true", "false")}),
        ),
        spec=POD,
    ),
)
TFJOB_SCHEMA = an(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion=one_of("kubeflow.org/v1"),
    kind=one_of("TFJob"),
    metadata=an("name", name=LABEL),
    spec=an(
        "tfReplicaSpecs",
        runPolicy=an(
            cleanPodPolicy=one_of("All", "Running", "None"),
            activeDeadlineSeconds=SOME,
            backoffLimit=COUNT,
            ttlSecondsAfterFinished=COUNT,
        ),
        tfReplicaSpecs=an(Chief=REPLICA, Worker=REPLICA, PS=REPLICA, Evaluator=REPLICA),
    ),
)
# Of SkyPilot 0.14 (sky/utils/schemas.py): a task, its resources, the recovery of a managed job.
EXIT_CODE = {"type": "integer", "minimum": 0, "maximum": 255}
VARIABLES: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": {"type": ["string", "null"]}},
    "additionalProperties": False,
}
SKYPILOT_SCHEMA = an(
    name=TEXT,
    workdir=TEXT,
    num_nodes={"type": "integer"},
    resources=an(
        accelerators={"type": "string", "pattern": "^[A-Za-z0-9-]+:[0-9]+$"},
        use_spot={"type": "boolean"},
        job_recovery=an(
            max_restarts_on_errors=COUNT,
            recover_on_exit_codes=some(EXIT_CODE) | {"uniqueItems": True},
        ),
    ),
    envs=VARIABLES,
    secrets=VARIABLES,
    setup=TEXT,
    run=TEXT,
)
SCHEMAS = {JOBSET: JOBSET_SCHEMA, TFJOB: TFJOB_SCHEMA, SKYPILOT: SKYPILOT_SCHEMA}


def faults(value: Any, schema: dict[str, Any]) -> list[str]:
    """The violations of a schema, each with its place."""
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{error.json_path.removeprefix('$')}: {error.message}" for error in found]


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_the_yaml_fits_its_schema(path: Path) -> None:
    assert faults(load(path), SCHEMAS[path]) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "fault"),
    [
        (JOBSET, "v1alpha2", "v1alpha1", ".apiVersion: 'jobset.x-k8s.io/v1alpha1' is not one of"),
        (JOBSET, "FailJobSet", "FailSet", ".spec.failurePolicy.rules[0].action: 'FailSet'"),
        (JOBSET, "wrong_or", "wrong-or", ".rules[0].name: 'wrong-or_not_finite' does not match"),
        (JOBSET, "values: [2, 3, 4]", "values: [0]", ".values[0]: 0 is less than the minimum of 1"),
        (JOBSET, 'status: "True"', "status: True", ".status: True is not of type 'string'"),
        (JOBSET, "parallelism: 4", "paralellism: 4", "('paralellism' was unexpected)"),
        (JOBSET, "name: digits", "name: Digits", ".metadata.name: 'Digits' does not match"),
        (TFJOB, "tfReplicaSpecs", "replicaSpecs", ".spec: 'tfReplicaSpecs' is a required property"),
        (TFJOB, "    Worker:", "    Workers:", "('Workers' was unexpected)"),
        (TFJOB, "replicas: 3", "replicas: 3.5", ".Worker.replicas: 3.5 is not of type"),
        (
            TFJOB,
            "cleanPodPolicy: None",
            "cleanPodPolicy: null",
            ".cleanPodPolicy: None is not of type",
        ),
        (TFJOB, "tfjob-port, ", "tfjob-port, port: 1, ", ".ports[0]: Additional properties"),
        (SKYPILOT, "num_nodes: 2", "nodes: 2", "('nodes' was unexpected)"),
        (SKYPILOT, 'MAX_RESTARTS: "10"', "MAX_RESTARTS: 10", ".envs.MAX_RESTARTS: 10 is not of"),
        (SKYPILOT, "codes: [75]", "codes: [-1]", "recover_on_exit_codes[0]: -1 is less than the"),
    ],
)
def test_the_schema_would_notice(path: Path, old: str, new: str, fault: str) -> None:
    body = path.read_text().removeprefix(header(path))
    assert old in (body.partition("\n---\n")[2] or body)
    *_, job = yaml.safe_load_all(body.replace(old, new))
    found = faults(job, SCHEMAS[path])
    assert any(fault in one for one in found), found


@pytest.mark.parametrize(
    ("path", "label"),
    [(JOBSET, "jobset.sigs.k8s.io/jobset-name"), (TFJOB, "training.kubeflow.org/job-name")],
    ids=["jobset", "tfjob"],
)
def test_only_pods_of_the_job_may_connect_to_them(path: Path, label: str) -> None:
    policy, job = yaml.safe_load_all(path.read_text())
    own = {"matchLabels": {label: job["metadata"]["name"]}}
    assert policy == {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": job["metadata"]["name"]},
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def token_of(pod: dict[str, Any]) -> dict[str, str] | None:
    """The secret from which a pod has its job token; None if it has none."""
    found = [one for one in container(pod)["env"] if one["name"] == job_token.TOKEN]
    return found[0]["valueFrom"]["secretKeyRef"] if found else None


def test_the_pods_that_train_share_the_token_of_a_secret() -> None:
    expected = {"name": "digits-token", "key": "token"}
    assert token_of(jobs()["workers"]["template"]) == expected
    assert token_of(jobs()["evaluator"]["template"]) is None  # it joins no job
    pods = {name: token_of(one["template"]) for name, one in replicas().items()}
    assert pods == {"Chief": expected, "Worker": expected, "Evaluator": None}
    for path in (JOBSET, TFJOB):
        assert 'secret generic digits-token --from-literal=token="$(openssl' in header(path)


# -- stand-ins -------------------------------------------------------------------------------------


def stand_in(folder: Path, name: str, text: str) -> Path:
    """A command of this name in the folder that comes first on PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


# Records its arguments, and ends with the next of the codes that it is given.
PYTHON = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >>"$LOG"
echo "${SPMDTRAIN_JOB_TOKEN_FILE:-}" >>"$(dirname "$LOG")/files"
read -r code <"$CODES"
sed -i 1d "$CODES"
exit "${code:-0}"
"""
NOTES = '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n'


def outside(folder: Path, codes: str = "0", **variables: object) -> dict[str, str]:
    """An environment in which the commands of folder/bin come first."""
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes.split()))
    own = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "CODES": str(folder / "codes"),
    }
    return environment() | own | {name: str(value) for name, value in variables.items()}


def bash(
    *arguments: object, env: dict[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return subprocess.run(
        ["bash", *map(str, arguments)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=BOUND,
    )


def said(folder: Path) -> list[str]:
    """What the stand-ins have been asked, in order."""
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


def understood(arguments: str, monkeypatch: pytest.MonkeyPatch) -> command_line.Command:
    """What `spmdtrain.run` makes of a recorded command line of Python."""
    words = shlex.split(arguments)
    words = words[words.index("-m") :]
    assert words[:2] == ["-m", "spmdtrain.run"]
    monkeypatch.chdir(REPOSITORY)
    return command_line.parse_command_line(words[2:])


# -- JobSet ----------------------------------------------------------------------------------------


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def in_container(
    pod: dict[str, Any], folder: Path, codes: str = "0", **variables: object
) -> subprocess.CompletedProcess[str]:
    """Run what a container runs, with stand-ins for Python and for the network."""
    stand_in(folder / "bin", "python", PYTHON)
    for name in ("getent", "sleep"):
        if not (folder / "bin" / name).exists():
            stand_in(folder / "bin", name, NOTES)
    one = container(pod)
    words = shlex.join([*one["command"], *one["args"]])
    return bash("-c", f"exec {words}", env=outside(folder, codes, **variables))


def jobs() -> dict[str, dict[str, Any]]:
    return {job["name"]: job["template"]["spec"] for job in load(JOBSET)["spec"]["replicatedJobs"]}


def test_a_jobset_s_pods_are_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, workers = load(JOBSET), jobs()["workers"]
    count = workers["parallelism"]
    # What JobSet calls its first pod, and the subdomain of them all.
    first = f"{content['metadata']['name']}-workers-0-0.{content['metadata']['name']}"
    assert workers["completionMode"] == "Indexed" and workers["completions"] == count
    assert content["spec"]["network"]["enableDNSHostnames"] is True
    (port,) = container(workers["template"])["ports"]
    for index in range(count):
        done = in_container(workers["template"], tmp_path, JOB_COMPLETION_INDEX=index)
        assert done.returncode == 0, done.stderr
        waited, arguments = said(tmp_path)[-2:]
        assert waited == f"getent hosts {first}"
        command = understood(arguments, monkeypatch)
        options = command.options
        assert options.coordinator == f"{first}:{port['containerPort']}"
        assert (options.processes, options.process_id) == (count, index)
        assert options.role is None
    config = command.config
    evaluator = jobs()["evaluator"]
    assert in_container(evaluator["template"], tmp_path).returncode == 0
    beside = understood(said(tmp_path)[-1], monkeypatch)
    assert beside.options.role == "evaluate" and beside.options.coordinator is None
    assert config.evaluated_by == "evaluator" and config.workdir == beside.config.workdir
    # Where that folder is, all pods have the claim.
    for job in (workers, evaluator):
        (mount,) = container(job["template"])["volumeMounts"]
        (volume,) = job["template"]["spec"]["volumes"]
        assert str(config.workdir).startswith(mount["mountPath"] + "/")
        assert volume["name"] == mount["name"]
    assert workers["template"]["spec"]["volumes"] == evaluator["template"]["spec"]["volumes"]


@pytest.mark.parametrize("job", ["workers", "evaluator"])
@pytest.mark.parametrize(
    ("code", "action"),
    [
        (2, "FailJob"),
        (3, "FailJob"),
        (4, "FailJob"),
        (75, "Ignore"),
        (1, None),
        (137, None),
        (143, None),
    ],
)
def test_a_jobset_s_rules_by_exit_code(
    tmp_path: Path, job: str, code: int, action: str | None
) -> None:
    spec = jobs()[job]
    assert in_container(spec["template"], tmp_path, str(code)).returncode == code
    own = container(spec["template"])["name"]
    rules = spec["podFailurePolicy"]["rules"]
    matching = [
        rule["action"]
        for rule in rules
        if "onExitCodes" in rule
        and rule["onExitCodes"]["containerName"] == own
        and rule["onExitCodes"]["operator"] == "In"
        and code in rule["onExitCodes"]["values"]
    ]
    assert matching == ([] if action is None else [action])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # else there can be no such policy


def test_a_jobset_fails_for_good_or_is_restarted() -> None:
    policy = load(JOBSET)["spec"]["failurePolicy"]
    (rule,) = policy["rules"]
    # FailJob above is what fails a job for this reason; all others restart the set.
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["maxRestarts"] > 0
    workers = jobs()["workers"]
    assert workers["backoffLimit"] == 0  # one pod alone cannot come back: the others are at it
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] >= 120
    evicted = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert evicted in workers["podFailurePolicy"]["rules"]


def test_a_jobset_s_pod_waits_for_the_first_one_s_name(tmp_path: Path) -> None:
    """Kubernetes knows a pod's name from when it runs; the run itself soon gives it up."""
    pod = jobs()["workers"]["template"]
    stand_in(tmp_path / "bin", "getent", NOTES + "test $(wc -l <$LOG) -gt 6\n")
    assert in_container(pod, tmp_path, JOB_COMPLETION_INDEX=1).returncode == 0
    assert [line.split()[0] for line in said(tmp_path)] == ["getent", "sleep"] * 3 + [
        "getent",
        "-m",
    ]
    (tmp_path / "log").unlink()
    stand_in(tmp_path / "bin", "getent", NOTES + "exit 2\n")
    never = in_container(pod, tmp_path, JOB_COMPLETION_INDEX=1)
    assert (never.returncode, never.stderr) == (1, "the first pod has no address\n")


# -- TFJob -----------------------------------------------------------------------------------------


def replicas() -> dict[str, dict[str, Any]]:
    specs: dict[str, dict[str, Any]] = load(TFJOB)["spec"]["tfReplicaSpecs"]
    return specs


def tf_config_of(kind: str, index: int, *, lists_evaluator: bool, domain: str = "") -> str:
    """What the training operator puts into TF_CONFIG; older ones list the evaluator, too.

    It takes the name of the job and the namespace, for each replica the port called tfjob-port of
    the container called tensorflow, and lower case for the types. `domain` is an operator's
    CUSTOM_CLUSTER_DOMAIN.
    """
    job, namespace = load(TFJOB)["metadata"]["name"], "research"
    cluster = {}
    for name, spec in replicas().items():
        if name == "Evaluator" and not lists_evaluator:
            continue
        one = container(spec["template"])
        assert one["name"] == "tensorflow"  # no other container is given the variable
        (port,) = [p["containerPort"] for p in one["ports"] if p["name"] == "tfjob-port"]
        cluster[name.lower()] = [
            f"{job}-{name.lower()}-{number}.{namespace}.svc{domain}:{port}"
            for number in range(spec["replicas"])
        ]
    task = {"type": kind.lower(), "index": index}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


@pytest.mark.parametrize("lists_evaluator", [True, False])
@pytest.mark.parametrize("domain", ["", ".cluster.local"])
def test_the_tf_config_of_a_tfjob(lists_evaluator: bool, domain: str) -> None:
    specs: list[ClusterSpec] = []
    for kind, replica in replicas().items():
        for index in range(replica["replicas"]):
            text = tf_config_of(kind, index, lists_evaluator=lists_evaluator, domain=domain)
            specs.append(from_tf_config(text))
    assert [(s.name, s.role, s.rank, s.is_chief) for s in specs] == [
        ("chief", Role.TRAIN, 0, True),
        ("worker 0", Role.TRAIN, 1, False),
        ("worker 1", Role.TRAIN, 2, False),
        ("worker 2", Role.TRAIN, 3, False),
        ("evaluator 0", Role.EVALUATE, None, False),
    ]
    assert {s.num_processes for s in specs} == {4}
    assert {str(s.coordinator) for s in specs} == {f"digits-chief-0.research.svc{domain}:2222"}
    assert {"evaluator" in s.jobs for s in specs} == {lists_evaluator}
    # Every pod waits for the name of the one that all of them meet at.
    for kind in ("Chief", "Worker"):
        (script,) = container(replicas()[kind]["template"])["args"]
        assert "until getent hosts digits-chief-0;" in script


def test_a_tfjob_s_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, lines = {}, {}
    for kind, replica in replicas().items():
        done = in_container(replica["template"], tmp_path)
        assert done.returncode == 0, done.stderr
        lines[kind] = said(tmp_path)[-1]
        found[kind] = understood(lines[kind], monkeypatch)
    assert lines["Chief"] == lines["Worker"]
    assert found["Chief"].options.role is None  # TF_CONFIG says who is who
    assert {command.config.workdir for command in found.values()} == {"/runs/digits"}
    assert found["Chief"].config.evaluated_by == "evaluator"
    assert found["Evaluator"].options.role is None
    assert load(TFJOB)["spec"]["runPolicy"]["cleanPodPolicy"] == "None"


@pytest.mark.parametrize("kind", ["Chief", "Worker", "Evaluator"])
@pytest.mark.parametrize(
    ("code", "reported", "pause"),
    [
        (0, 0, False),
        (2, 2, False),
        (3, 3, False),
        (4, 4, False),
        (75, 200, False),
        (1, 200, True),
    ],
)
def test_a_tfjob_s_exit_codes(
    tmp_path: Path, kind: str, code: int, reported: int, pause: bool
) -> None:
    """The operator takes a code below 128 as final, and comes back after any other."""
    replica = replicas()[kind]
    assert replica["restartPolicy"] == "ExitCode"
    assert in_container(replica["template"], tmp_path, str(code)).returncode == reported
    paused = any(line.startswith("sleep") for line in said(tmp_path))
    assert paused == (pause and kind != "Evaluator")  # no task waits for the evaluator


@pytest.mark.parametrize("kind", ["Chief", "Evaluator"])
@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("delay", ["", "sleep 0.5; "], ids=["", "at once"])
def test_a_tfjob_s_pod_passes_sigterm_on(tmp_path: Path, kind: str, shell: str, delay: str) -> None:
    """Kubernetes sends it to the shell; the training behind it is what has something to save."""
    pod = replicas()[kind]["template"]
    stand_in(tmp_path / "bin", "getent", NOTES)
    stand_in(
        tmp_path / "bin",
        "python",
        '#!/bin/bash\ntrap "echo saved >>$LOG; exit 75" TERM\necho began >>$LOG\n'
        "while true; do read -rt 0.1 <> <(:); done\n",
    )
    one = container(pod)
    assert one["command"] == ["sh", "-c"]
    (script,) = one["args"]
    process = subprocess.Popen(
        [shell, "-c", script.replace("pid=$!", f"{delay}pid=$!")],
        env=outside(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: "began" in said(tmp_path))
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, said(tmp_path)[-1]) == (200, "saved")
    assert errors == "exit code 75: reported to the operator as 200, so that it restarts the pod\n"


def until(condition: Any, seconds: float = BOUND) -> None:
    """Return when a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


# -- Slurm -----------------------------------------------------------------------------------------

# Starts the tasks of a step with the variables that Slurm gives them, and ends with the highest of
# their codes. `TASKS` is what Slurm knows from the lines #SBATCH.
SRUN = """#!/bin/bash
echo "srun $*" >>"$LOG"
tasks=$TASKS
while [[ ${1:-} == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; esac
  shift
done
for ((i = 0; i < tasks; i++)); do
  SLURM_NTASKS=$tasks SLURM_STEP_NUM_TASKS=$tasks SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 \\
    SLURM_STEP_NODELIST=localhost SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NODEID=0 "$@" &
  pids+=($!)
  echo "task $!" >>"$LOG"
done
highest=0
for pid in "${pids[@]}"; do
  wait "$pid"
  code=$?
  ((code > highest)) && highest=$code
done
exit $highest
"""
NO_REQUEUE = NOTES + "echo 'Requested operation is presently disabled' >&2\nexit 1\n"


def in_slurm(folder: Path, codes: str, **variables: object) -> dict[str, str]:
    """The environment in which sbatch would run the script."""
    stand_in(folder / "bin", "srun", SRUN)
    if not (folder / "bin" / "scontrol").exists():
        stand_in(folder / "bin", "scontrol", NOTES)
    slurm = {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": 1,
        "SLURM_NTASKS": 1,
        "TASKS": 1,
        "WORKDIR": folder / "run",
    }
    return outside(folder, codes, **(slurm | variables))


def sbatch(folder: Path, codes: str, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm would, with a stand-in for Python that ends with these codes."""
    python = stand_in(folder / "bin", "python", PYTHON)
    stand_in(folder / "bin", "sleep", NOTES)
    return bash(SBATCH, env=in_slurm(folder, codes, PYTHON=python, **variables))


def test_what_sbatch_asks_slurm_for() -> None:
    lines = re.findall("(?m)^#SBATCH --([a-z-]+)(?:=(.*))?$", SBATCH.read_text())
    asked = dict(lines)
    assert asked["signal"] == "TERM@120"  # without B: to the steps, not to the script
    assert "requeue" in asked and asked["open-mode"] == "append"
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert not asked.keys() & {"gpus-per-task", "gpu-bind", "no-requeue"}
    # Slurm reads no such line below the first command.
    commands = [line for line in SBATCH.read_text().splitlines() if line[:1] not in ("#", "")]
    assert "#SBATCH" not in SBATCH.read_text().split(f"\n{commands[0]}\n")[1]


@pytest.mark.parametrize(
    ("codes", "ended", "requeued", "attempts"),
    [
        ("0", 0, False, 1),
        ("2", 2, False, 1),
        ("3", 3, False, 1),
        ("4", 4, False, 1),
        ("75", 0, True, 1),
        ("1 137 0", 0, False, 3),
        ("1 2", 2, False, 2),
        ("134 75", 0, True, 2),
        ("1 1 1 1 1", 1, False, 4),
    ],
)
def test_sbatch_by_exit_code(
    tmp_path: Path, codes: str, ended: int, requeued: bool, attempts: int
) -> None:
    done = sbatch(tmp_path, codes)
    assert done.returncode == ended, done.stderr
    lines = said(tmp_path)
    assert ("scontrol requeue 4242" in lines) == requeued
    assert len([line for line in lines if line.startswith("srun")]) == attempts


def test_sbatch_where_slurm_may_not_requeue(tmp_path: Path) -> None:
    """As after `scontrol update Requeue=0`, by which a user stops a job for good."""
    stand_in(tmp_path / "bin", "scontrol", NO_REQUEUE)
    done = sbatch(tmp_path, "75")
    assert done.returncode == 75
    assert done.stderr.splitlines()[-1] == "Slurm did not requeue it: submit it again to resume"


def test_sbatch_gives_all_tasks_one_token(tmp_path: Path) -> None:
    show = "#!/bin/bash\necho token $SPMDTRAIN_JOB_TOKEN >>$LOG\n"
    for given in ("", "given-token-of-the-user"):
        python = stand_in(tmp_path / "bin", "python", show)
        variables = in_slurm(tmp_path, "0", PYTHON=python, TASKS=2, SPMDTRAIN_JOB_TOKEN=given)
        assert bash(SBATCH, env=variables).returncode == 0
        one, other = [line for line in said(tmp_path) if line.startswith("token")][-2:]
        assert one == other
        assert one == f"token {given}" if given else re.fullmatch("token [0-9a-f]{64}", one)
        assert not any(one.split()[1] in line for line in said(tmp_path) if "srun" in line)


@pytest.mark.parametrize("evaluator", ["", "1"])
def test_sbatch_s_commands(tmp_path: Path, evaluator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sbatch(tmp_path, "0 0", EVALUATOR=evaluator).returncode == 0
    lines = [understood(line, monkeypatch) for line in said(tmp_path) if " -m " in f" {line}"[:9]]
    training = [line for line in lines if line.options.role is None]
    assert [line.options.cluster for line in training] == ["auto"]
    assert len(lines) == (2 if evaluator else 1)
    expected = "evaluator" if evaluator else "training"
    assert training[0].config.evaluated_by == expected
    assert {line.config.workdir for line in lines} == {str(tmp_path / "run")}


def free_job_id() -> int:
    """A job for which the port is free that JAX takes for it: 61440 and the rest by 4096."""
    while True:
        number = random.randrange(1, 4096)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 61440 + number)) != 0:
                return number


def real_sbatch(folder: Path, options: str) -> tuple[list[str], dict[str, str]]:
    """The script with options for the experiment in it, for two real processes on this machine."""
    text = SBATCH.read_text()
    line = "--config experiments/digits_mlp.py"
    assert text.count(line) == 1
    (folder / "job.sbatch").write_text(text.replace(line, f"{line} {options}"))
    variables = in_slurm(
        folder,
        "",
        PYTHON=sys.executable,
        TASKS=2,
        SLURM_NTASKS=2,
        SLURM_JOB_ID=free_job_id(),
        JAX_NUM_CPU_DEVICES=1,
    )
    return ["bash", str(folder / "job.sbatch")], variables


@pytest.mark.drill
def test_sbatch_trains_and_is_requeued(tmp_path: Path) -> None:
    """Two real processes that find each other by Slurm's variables, stopped and started again."""
    command, variables = real_sbatch(tmp_path, "--steps 1000000 --log-every 1")
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen(
            command,
            env=variables,
            cwd=REPOSITORY,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: "\nstep 3/" in (tmp_path / "out").read_text())
        second = [int(line.split()[1]) for line in said(tmp_path) if line.startswith("task")][1]
        os.kill(second, signal.SIGTERM)  # what Slurm sends to all of them
        assert job.wait(60) == 0, (tmp_path / "out").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert said(tmp_path)[-1] == f"scontrol requeue {variables['SLURM_JOB_ID']}"
    workdir = tmp_path / "run"
    assert status(workdir)["status"] == "preempted"
    step = saved_steps(workdir)[-1]
    assert step >= 3
    # Slurm would now run the same script again; this one has an end.
    command, variables = real_sbatch(tmp_path, f"--steps {step + 3} --resume must --log-every 1")
    again = subprocess.run(
        command, env=variables, cwd=REPOSITORY, capture_output=True, text=True, timeout=BOUND
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search("(?m)^2 x cpu of 2 processes, mirrored, mesh data=2$", again.stdout)
    assert f"resumed from step {step} of" in again.stdout
    assert status(workdir)["status"] == "finished"
    assert [line["step"] for line in metrics(workdir, "train")] == list(range(1, step + 4))


# -- Cloud TPU -------------------------------------------------------------------------------------

# Records its arguments, one to a line; runs what it is to run on the machines on this one.
GCLOUD = """#!/bin/bash
{ echo gcloud; printf '  %s\\n' "$@"; } >>"$LOG"
for argument in "$@"; do
  case $argument in --command=*) [[ $RUNS ]] && (cd "$HOME" && bash -c "${argument#*=}") ;; esac
done
true
"""


def tpu_pod(
    folder: Path,
    *arguments: str,
    codes: str = "0",
    runs: str = "",
    gcloud: str = GCLOUD,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    stand_in(folder / "bin", "gcloud", gcloud)
    stand_in(folder / "bin", "sleep", NOTES)
    variables |= {"HOME": str(folder), "RUNS": runs}
    return bash(TPU_POD, *arguments, env=outside(folder, codes, **variables), cwd=REPOSITORY)


BUCKET = {"WORKDIR": "gs://my-bucket/runs/a b", "TPU": "mine", "ZONE": "europe-west4-b"}
CREATED = "--node-id=mine --accelerator-type=v5litepod-16"


@pytest.mark.parametrize(
    ("verb", "spot", "words"),
    [
        ("create", "", f"queued-resources create mine {CREATED}"),
        ("create", "1", f"queued-resources create mine {CREATED} --spot"),
        ("install", "", "tpu-vm ssh mine --worker=all"),
        ("train", "", "tpu-vm ssh mine --worker=all"),
        ("logs", "", "tpu-vm ssh mine --worker=0"),
        ("stop", "", "tpu-vm ssh mine --worker=all"),
        ("delete", "", "queued-resources delete mine --force"),
    ],
)
def test_what_tpu_pod_asks_gcloud(tmp_path: Path, verb: str, spot: str, words: str) -> None:
    done = tpu_pod(tmp_path, verb, SPOT=spot, **BUCKET)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "log").read_text().split("gcloud\n")[1:]
    assert len(calls) == (2 if verb == "install" else 1)
    for call in calls:
        assert call.startswith("  compute\n  tpus\n") and "  --zone=europe-west4-b\n" in call
    asked = [line.strip() for line in calls[-1].splitlines()]
    assert set(words.split()) <= set(asked), asked
    assert ("--spot" in asked) == bool(spot)
    if verb == "install":
        assert "scp" in calls[0] and "mine:spmdtrain.tar.gz" in calls[0]
        assert "pip install --quiet '.[tpu,gcs,examples]'" in calls[1]


# Copies as `gcloud compute tpus tpu-vm scp FILE NAME:TARGET` would.
SCP = """#!/bin/bash
[[ $4 == scp ]] && cp -p "$5" "$HOME/${6#*:}"
true
"""


def test_tpu_pod_installs_a_token_for_all_machines(tmp_path: Path) -> None:
    tokens = set()
    for _ in range(2):
        assert tpu_pod(tmp_path, "install", gcloud=SCP, **BUCKET).returncode == 0
        archive = tmp_path / "spmdtrain.tar.gz"
        assert archive.stat().st_mode & 0o777 == 0o600
        with tarfile.open(archive) as content:
            token = content.getmember("job_token")
            assert token.mode == 0o600
            file = content.extractfile(token)
            assert file is not None
            tokens.add(file.read().decode())
    assert len(tokens) == 2 and all(re.fullmatch("[0-9a-f]{64}", token) for token in tokens)


@pytest.mark.parametrize(
    ("codes", "attempts", "restarts"),
    [
        ("0", 1, 0),
        ("2", 1, 0),
        ("3", 1, 0),
        ("4", 1, 0),
        ("75", 1, 0),
        ("1 134 75 0", 3, 2),
        ("1 1 1 1", 3, 3),
    ],
)
def test_tpu_pod_trains(
    tmp_path: Path, codes: str, attempts: int, restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "spmdtrain", "empty", "")
    (tmp_path / "spmdtrain" / ".venv").mkdir()
    stand_in(tmp_path / "spmdtrain" / ".venv" / "bin", "python", PYTHON)
    done = tpu_pod(tmp_path, "train", codes=codes, runs="1", MAX_RESTARTS="2", **BUCKET)
    assert done.returncode == 0, done.stderr
    last = codes.split()[attempts - 1]

    def ended() -> bool:
        log = tmp_path / "spmdtrain" / "train.log"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        pauses = len([line for line in said(tmp_path) if line.startswith("sleep")])
        return lines[-1:] == [f"exit code {last}"] and (len(lines), pauses) == (attempts, restarts)

    until(ended)
    time.sleep(0.3)  # would it begin again?
    calls = [line for line in said(tmp_path) if line.startswith("-u -m")]
    assert len(calls) == attempts
    command = understood(calls[-1], monkeypatch)
    assert command.options.cluster == "auto" and command.config.workdir == BUCKET["WORKDIR"]
    # Relative to the folder that the token was installed in, where the command runs.
    assert (tmp_path / "files").read_text().split() == ["job_token"] * attempts


def test_tpu_pod_stops_what_trains_and_not_the_shell_around_it(tmp_path: Path) -> None:
    assert tpu_pod(tmp_path, "stop", **BUCKET).returncode == 0
    (command,) = [line for line in said(tmp_path) if "--command" in line]
    pattern = re.search("'(.*)'", command)
    assert pattern is not None
    training = ".venv/bin/python -u -m spmdtrain.run --config experiments/digits_mlp.py"
    assert re.search(pattern[1], training)
    assert not re.search(pattern[1], f"bash -c \n for restart in ...; do {training}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "usage: launch/tpu_pod.sh create|"), (("fly",), "usage: "), (("train",), "set WORKDIR")],
)
def test_tpu_pod_s_usage(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = tpu_pod(tmp_path, *arguments)
    assert done.returncode == 2 and done.stderr.startswith(message)
    assert said(tmp_path) == []


# -- SkyPilot --------------------------------------------------------------------------------------


def on_sky_node(
    folder: Path, codes: str = "0", **variables: object
) -> subprocess.CompletedProcess[str]:
    """Runs what a machine of the job runs, with a stand-in for its Python."""
    task = load(SKYPILOT)
    (folder / "spmdtrain").mkdir(exist_ok=True)
    stand_in(folder / "spmdtrain" / "bin", "python", PYTHON)
    stand_in(folder / "bin", "sleep", NOTES)
    given = task["envs"] | {"WORKDIR": "s3://my-bucket/a b", "HOME": folder} | variables
    return bash("-c", task["run"], env=outside(folder, codes, **given), cwd=REPOSITORY)


def test_sky_s_machines_are_one_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = load(SKYPILOT)
    assert task["secrets"] == {job_token.TOKEN: None}  # no job starts without one
    count = task["num_nodes"]
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NUM_NODES": count}
    for rank in range(count):
        done = on_sky_node(tmp_path, SKYPILOT_NODE_RANK=rank, **nodes)
        assert done.returncode == 0, done.stderr
        command = understood(said(tmp_path)[-1], monkeypatch)
        options = command.options
        assert options.coordinator == "10.0.0.7:2222"
        assert (options.processes, options.process_id) == (count, rank)
        assert command.config.workdir == "s3://my-bucket/a b"


def test_sky_s_machines_install_a_python_that_is_new_enough(tmp_path: Path) -> None:
    # Theirs may be 3.10, and SkyPilot always puts uv there.
    (tmp_path / ".local").mkdir()
    stand_in(tmp_path / ".local" / "bin", "uv", NOTES)
    done = bash("-c", load(SKYPILOT)["setup"], env=outside(tmp_path, HOME=tmp_path))
    assert done.returncode == 0, done.stderr
    made, filled = said(tmp_path)
    assert made == f"uv venv --quiet --allow-existing --python 3.12 {tmp_path}/spmdtrain"
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains("3.12")
    start = f"uv pip install --quiet --python {tmp_path}/spmdtrain .["
    assert filled.startswith(start)
    assert {*filled.removeprefix(start).removesuffix("]").split(",")} <= EXTRAS.keys()


@pytest.mark.parametrize(
    ("codes", "attempts", "code"),
    [
        ("0", 1, 0),
        ("2", 1, 2),
        ("3", 1, 3),
        ("4", 1, 4),
        ("75", 1, 75),
        ("1 134 0", 3, 0),
        ("1 137 134 0", 3, 134),
    ],
)
def test_sky_s_machines_by_exit_code(tmp_path: Path, codes: str, attempts: int, code: int) -> None:
    nodes = {"SKYPILOT_NODE_IPS": "a", "SKYPILOT_NUM_NODES": 1, "SKYPILOT_NODE_RANK": 0}
    done = on_sky_node(tmp_path, codes, MAX_RESTARTS=2, **nodes)
    assert done.returncode == code, done.stderr
    assert len([line for line in said(tmp_path) if line.startswith("-u -m")]) == attempts
    recovery = load(SKYPILOT)["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}


def test_sky_s_bucket_has_to_be_named(tmp_path: Path) -> None:
    done = on_sky_node(tmp_path, WORKDIR=load(SKYPILOT)["envs"]["WORKDIR"])
    assert done.returncode == 2 and done.stderr.startswith("set WORKDIR")


# -- XPK -------------------------------------------------------------------------------------------

# Of xpk 1.16, `xpk workload create --help` and so on: the options that the file uses.
XPK_OPTIONS = {
    "create": {
        *("workload", "cluster", "zone", "project", "tpu-type", "num-slices", "docker-image"),
        *("env-file", "max-restarts", "restart-on-exit-codes", "command"),
        "termination-grace-period-seconds",
    },
    "list": {"cluster", "zone", "project"},
    "delete": {"workload", "cluster", "zone", "project"},
}
# Records its arguments, one to a line, and the variables of its file.
XPK_COMMAND = """#!/bin/bash
printf '%s\\n' "$@" >>"$LOG"
while [[ $# -gt 0 && $1 != --env-file ]]; do shift; done
[[ $# -gt 0 ]] && for name in $(cat "$2"); do echo "$name=${!name}" >>"$LOG.env"; done
true
"""


def xpk(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    stand_in(folder / "bin", "xpk", XPK_COMMAND)
    return bash(XPK, *arguments, env=outside(folder, **variables), cwd=REPOSITORY)


def xpk_options(folder: Path, verb: str) -> dict[str, str]:
    """The options that xpk was given, by name."""
    workload, asked, *words = (folder / "log").read_text().splitlines()
    assert (workload, asked) == ("workload", verb)
    found = dict(zip(words[::2], words[1::2], strict=True))
    assert {name.removeprefix("--") for name in found} <= XPK_OPTIONS[verb]
    return found


@pytest.mark.parametrize("project", ["", "mine"])
@pytest.mark.parametrize("token", ["", "a token of sixteen"])
def test_an_xpk_workload(
    tmp_path: Path, project: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"WORKDIR": BUCKET["WORKDIR"], "PROJECT": project, job_token.TOKEN: token}
    done = xpk(tmp_path, "create", **variables)
    assert done.returncode == 0, done.stderr
    options = xpk_options(tmp_path, "create")
    assert options.get("--project", "") == project
    assert options["--tpu-type"] == "v5litepod-16" and options["--num-slices"] == "1"
    assert not Path(options["--env-file"]).exists()
    name, _, given = (tmp_path / "log.env").read_text().strip().partition("=")
    assert name == job_token.TOKEN
    assert given == token if token else re.fullmatch("[0-9a-f]{64}", given)
    assert given not in (tmp_path / "log").read_text()
    assert options["--command"].startswith("exec python ")
    command = understood(options["--command"], monkeypatch)
    assert command.options.cluster == "auto" and command.config.workdir == BUCKET["WORKDIR"]
    # As xpk reads them, which adds 42 and 127 to 255.
    restarted = {42, *range(127, 256)}
    for part in options["--restart-on-exit-codes"].split(","):
        first, _, last = part.partition("-")
        restarted |= {*range(int(first), int(last or first) + 1)}
    assert {*range(256)} - restarted == {0, 2, 3, 4}


@pytest.mark.parametrize("verb", ["list", "delete"])
def test_what_else_xpk_is_asked(tmp_path: Path, verb: str) -> None:
    assert xpk(tmp_path, verb, ZONE="here").returncode == 0
    assert xpk_options(tmp_path, verb)["--zone"] == "here"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "usage: launch/xpk.sh create|"), (("fly",), "usage: "), (("create",), "set WORKDIR")],
)
def test_xpk_s_usage(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = xpk(tmp_path, *arguments)
    assert done.returncode == 2 and done.stderr.startswith(message)
    assert said(tmp_path) == []


# -- the image -------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with continued lines joined."""
    lines = [x for x in DOCKERFILE.read_text().splitlines() if not x.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "")
    return [
        (name, rest) for line in joined.split("\n") if line for name, rest in [line.split(" ", 1)]
    ]


def test_the_image_has_what_the_package_and_the_experiments_need() -> None:
    copied = [
        Path(name) for what, rest in instructions() if what == "COPY" for name in rest.split()[:-1]
    ]
    assert all((REPOSITORY / name).exists() for name in copied)
    sent = [x.removeprefix("!") for x in SENT.read_text().splitlines() if x.startswith("!")]
    assert [*map(Path, sent)] == copied
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {"README.md", *project["license-files"]} <= {*sent}
    for path in (JOBSET, TFJOB):  # they run in /app, relative to which the experiment is named
        assert "workingDir: /app" in path.read_text()
    assert ("WORKDIR", "/app") in instructions()


def test_the_image_s_user_is_not_root_and_its_extras_exist() -> None:
    steps = instructions()
    given = dict(rest.split("=") for what, rest in steps if what == "ARG")
    assert [rest for what, rest in steps if what == "USER"] == ["${USER_ID}"]
    assert int(given["USER_ID"]) > 0
    named = [given["EXTRAS"], *re.findall(r"\b[a-z0-9]+(?:,[a-z0-9]+)+\b", header(DOCKERFILE))]
    assert len(named) > 3
    assert {extra for names in named for extra in names.split(",")} <= EXTRAS.keys()
    assert f"Python :: {given['PYTHON']}" in (REPOSITORY / "pyproject.toml").read_text()


# -- all of them -----------------------------------------------------------------------------------


def header(path: Path) -> str:
    """The comment that a file begins with."""
    lines = path.read_text().splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line for line in lines[:end] if not line.startswith(("#!", "#SBATCH")))


def test_there_are_no_other_files() -> None:
    assert sorted(LAUNCH.iterdir()) == sorted([*FILES, SENT])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_header_says_how_to_use_the_file(path: Path) -> None:
    text, head = path.read_text(), header(path)
    for word in ("Needs:", "Change", "Submit:", "Watch:", "Stop:", "What happens by exit code"):
        assert word in head, word
    for code in ("0", "2", "3", "75"):
        assert re.search(rf"\b{code}\b", head[head.index("by exit code") :])
    assert "\t" not in text and text.isascii() and max(map(len, text.splitlines())) <= 120
    body = text[len(head) :]
    # Everything that is there to be replaced is named there.
    placeholders = re.findall(r"registry\.example\S+|claimName: ([a-z-]+)|BUCKET", body)
    placeholders += re.findall(r"\$\{([A-Z_]+):-", body)
    placeholders += re.findall("(?m)^  name: ([a-z]+)$", body)
    for placeholder in filter(None, placeholders):
        assert placeholder in head, placeholder


@pytest.mark.parametrize("path", [SBATCH, TPU_POD, XPK], ids=lambda path: path.name)
def test_bash_can_read_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
