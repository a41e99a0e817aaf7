"""What launches a run on a cluster: that it parses, and names flags that there are."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import settings
from parallel import Layout

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
SBATCH, JOBSET = LAUNCH / "train.sbatch", LAUNCH / "jobset.yaml"


def flags() -> set[str]:
    """Those of train.py, as tyro derives them from its settings."""
    names = [f.name for f in dataclasses.fields(settings.Config)]
    parts = {"layout": Layout, "model": settings.llama.Config}
    names += [f"{part}.{f.name}" for part, of in parts.items() for f in dataclasses.fields(of)]
    return {"--" + name.replace("_", "-") for name in names}


@pytest.mark.parametrize("path", [SBATCH, JOBSET], ids=lambda path: path.name)
def test_flags_are_those_of_train(path):
    command = path.read_text().rpartition("examples/train.py")[2]
    named = set(re.findall(r"(?<![\w-])--[a-z][\w.-]+", command.partition("||")[0]))
    assert {"--coordinator", "--processes", "--process", "--run"} <= named
    assert named <= flags()


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_shell_scripts_parse():
    yaml = pytest.importorskip("yaml")
    subprocess.run(["bash", "-n", SBATCH], check=True)
    job = yaml.safe_load(JOBSET.read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    subprocess.run(["bash", "-n", "-c", *container["args"]], check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_a_jobs_script_starts_again_until_the_run_is_done(tmp_path):
    """With a Slurm of its own, whose `srun` fails twice: a hang, then a preemption."""
    (tmp_path / "scontrol").write_text(
        '#!/bin/bash\nif [[ $1 == requeue ]]; then echo "requeued $2"; else echo one; fi\n'
    )
    (tmp_path / "srun").write_text(
        '#!/bin/bash\necho "$COORDINATOR ${@: -3}" >> "$RUN/starts"\n'
        'echo {} > "$RUN/run.json"\n'
        'case $(wc -l < "$RUN/starts") in 1) exit 75 ;; *) exit 143 ;; esac\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/bash\n")
    for name in ("scontrol", "srun", "sleep"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RUN": str(tmp_path), "SLURM_JOB_ID": "7"}
    env |= {"SLURM_JOB_NODELIST": "one,two", "SLURM_NTASKS": "2"}
    command = ["bash", SBATCH, "--tp", "8"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["start 0 ended with code 75; once more", "requeued 7"]
    first, second = (tmp_path / "starts").read_text().splitlines()
    assert first == f"one:20007 {tmp_path} --tp 8"
    assert second == "one:20008 --resume --tp 8"


def test_the_jobs_sizes_agree():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(JOBSET.read_text())
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["completions"] == job["parallelism"] == int(env["NODES"])
    workers = f"{found['metadata']['name']}-{found['spec']['replicatedJobs'][0]['name']}-0-0"
    host, port = env["COORDINATOR"].split(":")
    assert host == f"{workers}.{found['metadata']['name']}"
    assert int(port) == container["ports"][0]["containerPort"]
