"""examples/cluster: what a scheduler would start is a command that etude takes, on every machine. SkyPilot's own parser
and the schema of Kubernetes read the files in `make test-cluster`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from etude.run import full, technique

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "cluster"
RECORD = f'"{sys.executable}" -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@" >> "$NOTES/words"\n'
STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" > "$NOTES/requeued"; fi',
    # The words after the options, once for each machine.
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nfor n in 0 1; do SLURM_NODEID=$n "$@" || code=$?; done\n'
    "exit ${code:-0}",
    "ray": 'while [ "$1" != -- ]; do echo "$1" >> "$NOTES/submitted"; shift; done; shift; exec "$@"',
    "etude": f"{RECORD}exit $EXIT_CODE",
}


@pytest.fixture
def play(tmp_path):
    """Runs a command where the scheduler's programs and etude only write down what they were called with. Returns its
    exit code."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(*words, exit_code=0, **variables):
        variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": tmp_path, "EXIT_CODE": exit_code}
        environment = {name: str(value) for name, value in variables.items()}
        return subprocess.run(words, env=environment, cwd=ROOT).returncode

    return run


@pytest.fixture
def commands(tmp_path, ask, monkeypatch):
    """What etude would run for each call that was written down: the arguments of `full.run`."""

    def read():
        calls = []
        monkeypatch.setattr(full, "run", lambda *arguments: calls.append(arguments))
        monkeypatch.setattr(technique, "play_technique", lambda *arguments: calls.append(arguments))
        monkeypatch.chdir(ROOT)
        for line in (tmp_path / "words").read_text().splitlines():
            code, _, error = ask(*json.loads(line))
            assert (code, error) == (0, "")
        return calls

    return read


def check_recipe(calls, shared, host):
    """Two machines of one run of the recipe, which begins or goes on."""
    assert len(calls) == 2
    for number, (entry, out, toml, overrides, resume, nproc, backend, node) in enumerate(calls):
        assert entry.name == "recipe" and out == shared / "runs" / "etude" and toml["cluster"]
        assert overrides == [("checkpoint", str(shared / "qwen3-30b-a3b"))]
        assert (resume, nproc, backend) == (False, None, "nccl")
        assert (node.count, node.number, node.host, node.port) == (2, number, host, 29500)


@pytest.mark.parametrize("exit_code", [0, 1, 75])
def test_slurm_starts_one_command_on_each_machine_and_again_after_a_preemption(tmp_path, play, commands, exit_code):
    script = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", script], check=True)
    variables = {"SLURM_JOB_NAME": "etude", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": 2, "SLURM_JOB_ID": 7}
    assert play("bash", script, exit_code=exit_code, SHARED=tmp_path / "shared", **variables) == exit_code
    assert (tmp_path / "requeued").exists() == (exit_code == 75)
    check_recipe(commands(), tmp_path / "shared", "node-a")


def test_kubernetes_starts_one_command_on_each_machine(play, commands):
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["NODES"]) == 2
    for number in range(2):
        assert play(*container["args"], JOB_COMPLETION_INDEX=number, **variables) == 0
    # The pods' names: of the job with their number, below the service that their template names.
    name = job["metadata"]["name"]
    host = f"{name}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    check_recipe(commands(), Path("/shared"), host)
    ignored = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert ignored == [{"containerName": container["name"], "operator": "In", "values": [75]}]
    assert pod["restartPolicy"] == "Never", "a policy for exit codes needs it"
    mounted = {item["name"] for item in container["volumeMounts"]}
    assert mounted == {item["name"] for item in pod["volumes"]}


def test_skypilot_starts_one_command_on_each_machine(play, commands):
    task = yaml.safe_load((FOLDER / "sky.yaml").read_text())
    for number in range(2):
        variables = {"SKYPILOT_NODE_RANK": number, "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        assert play("bash", "-c", task["run"], SKYPILOT_NUM_NODES=task["num_nodes"], **variables) == 0
    check_recipe(commands(), Path("/shared"), "10.0.0.1")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75] and [*task["volumes"]] == ["/shared"]


@pytest.mark.parametrize("resume", [False, True])
def test_ray_gets_one_job(tmp_path, play, commands, resume):
    script, shared = FOLDER / "ray.sh", tmp_path / "shared"
    subprocess.run(["bash", "-n", script], check=True)
    assert play("bash", script) != 0 and play("bash", script, SHARED=shared) != 0, "neither a folder nor an address"
    assert not (tmp_path / "words").exists()
    words = ["--resume"] if resume else []
    assert play("bash", script, *words, "http://head:8265", SHARED=shared, WORKERS=3) == 0
    assert (tmp_path / "submitted").read_text().split() == ["job", "submit", "--address", "http://head:8265"]
    ((entry, out, toml, overrides, resumes, _),) = commands()
    assert (entry.name, out, toml, resumes) == ("async-rl", shared / "runs" / "async", {}, resume)
    assert {"workers=3", f"checkpoint={shared / 'sft'}", "runtime=ray"} <= {*map(as_setting, overrides)}


def as_setting(item):
    """KEY=VALUE of a setting from the command line, however it came."""
    return item if isinstance(item, str) else "=".join(map(str, item))


def test_the_image_has_what_the_project_s_files_install():
    """Instructions that Docker knows, Debian's packages that the README names, and nothing of the checkout that is not
    the project's."""
    text = (FOLDER / "Dockerfile").read_text()
    lines = text.replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert [name for name, _ in instructions] == [
        "ARG", "FROM", "ARG", "RUN", "WORKDIR", "COPY", "RUN", "COPY", "RUN", "ENTRYPOINT", "CMD",
    ]  # fmt: skip
    assert json.loads(instructions[-1][1])[0] == "etude" and json.loads(instructions[-2][1]) == ["tini", "--"]
    assert {"bubblewrap", "gcc"} <= {*text.split()} and text.count("-c constraints.txt") == 2
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert {".git", ".venv*", "runs"} <= {*ignored}
