"""examples/cluster: what a scheduler would start is a command that etude takes, on every machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude.run import full

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "cluster" / "slurm.sbatch"
STUBS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node-a\\nnode-b\\n"; else echo "$@" > "$NOTES/requeued"; fi',
    # The words after the options, once for each machine.
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\\nfor n in 0 1; do SLURM_NODEID=$n "$@" || code=$?; done\\n'
    "exit ${code:-0}",
    "etude": f'"{sys.executable}" -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@" >> "$NOTES/words"\\n'
    "exit $EXIT_CODE",
}


@pytest.mark.parametrize("exit_code", [0, 1, 75])
def test_slurm_starts_one_command_on_each_machine_and_again_after_a_preemption(tmp_path, ask, monkeypatch, exit_code):
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    for name, body in STUBS.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + body.replace("\\n", "\n") + "\n")
        (tmp_path / name).chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "NOTES": tmp_path, "EXIT_CODE": exit_code,
        "SHARED": tmp_path / "shared",
        "SLURM_JOB_NAME": "etude", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_NNODES": 2, "SLURM_JOB_ID": 7,
    }  # fmt: skip
    environment = {name: str(value) for name, value in variables.items()}
    assert subprocess.run(["bash", SCRIPT], env=environment, cwd=ROOT).returncode == exit_code
    assert (tmp_path / "requeued").exists() == (exit_code == 75)

    calls = []
    monkeypatch.setattr(full, "run", lambda *arguments: calls.append(arguments))
    monkeypatch.chdir(ROOT)
    for line in (tmp_path / "words").read_text().splitlines():
        code, _, error = ask(*json.loads(line))
        assert (code, error) == (0, "")
    for number, (entry, out, toml, overrides, resume, nproc, backend, node) in enumerate(calls):
        assert entry.name == "recipe" and out == tmp_path / "shared" / "runs" / "etude" and toml["cluster"]
        assert overrides == [("checkpoint", str(tmp_path / "shared" / "qwen3-30b-a3b"))]
        assert (resume, nproc, backend) == (False, None, "nccl")
        assert (node.count, node.number, node.host, node.port) == (2, number, "node-a", 29500)
    assert len(calls) == 2
