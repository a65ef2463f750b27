"""What a profile of kind slurm may say, what is said of what it may not, and the script that it becomes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pipeline.cluster.test_security import signed
from tilewright.pipeline.cluster.profiles import INSTALLED_PROFILES, load_profiles
from tilewright.pipeline.cluster.security import shared
from tilewright.pipeline.errors import ClusterError
from tilewright.workflows.batch.folder import JobFolder, Submitted
from tilewright.workflows.batch.profile import (
    BatchProfile,
    memory_mib,
    read_profile,
    time_seconds,
)
from tilewright.workflows.batch.script import job_script, signal_seconds


def script_of(folder: str = "/shared/jobs/1", grace: float = 20, **options: Any) -> list[str]:
    return job_script(read_profile("p", options), JobFolder(Path(folder)), "matmul", grace, {}).splitlines()


def test_a_script_asks_for_what_the_profile_says() -> None:
    assert script_of(
        nodes=4,
        gpus_per_node="h100:4",
        cpus_per_gpu=16,
        mem="480G",
        time="1-12",
        partition="gpu",
        account="physics",
        qos="long",
        constraint="rack1|rack2",
        interface="ib0",
        activate="module load python; source ~/env/bin/activate",
        extra=["--exclusive", "--dependency=afterok:12"],
    ) == [
        "#!/bin/bash",
        "#SBATCH --job-name=tilewright-matmul",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=64",
        "#SBATCH --gpus-per-node=h100:4",
        "#SBATCH --mem=480G",
        "#SBATCH --time=1-12",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=physics",
        "#SBATCH --qos=long",
        "#SBATCH --constraint='rack1|rack2'",
        "#SBATCH --signal=B:TERM@80",
        "#SBATCH --output=/shared/jobs/1/result",
        "#SBATCH --error=/shared/jobs/1/log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --exclusive",
        "#SBATCH --dependency=afterok:12",
        "module load python; source ~/env/bin/activate",
        "exec python -m tilewright.workflows.batch.keeper /shared/jobs/1",
    ]


def test_a_script_without_more_names_the_interpreter_and_asks_for_cores() -> None:
    lines = script_of(folder="/a b/50%")
    assert lines[-1] == f"exec {sys.executable} -m tilewright.workflows.batch.keeper '/a b/50%'"
    assert "#SBATCH --cpus-per-task=4" in lines, "not one core"
    assert "#SBATCH --output='/a b/50%%/result'" in lines, "Slurm has patterns in names"
    assert not [line for line in lines if "gpus" in line or "--mem" in line or "--time" in line]
    assert "#SBATCH --no-requeue" in script_of(tries=1)


@pytest.mark.parametrize(
    ("time", "grace", "seconds"),
    [
        (None, 20, 80),
        ("1:00:00", 20, 80),
        ("2", 20, 60),
        ("5", 300, 150),
        ("1-0", 600, 660),
        ("UNLIMITED", 0, 60),
    ],
)
def test_a_job_gets_its_signal_in_time(time: str | None, grace: float, seconds: int) -> None:
    assert signal_seconds(BatchProfile(time=time), grace) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:01:05", 7265), ("1-2", 93600), ("1-2:30", 95400), ("0-0:0:59", 59)],
)
def test_times_are_read_as_slurm_reads_them(text: str, seconds: float) -> None:
    assert time_seconds(text) == seconds
    assert time_seconds("infinite") is None


@pytest.mark.parametrize(
    ("text", "mib"), [("512", 512), ("64G", 65536), ("1T", 2**20), ("2048K", 2), ("8gb", 8192), ("0", 0)]
)
def test_memory_is_read_as_slurm_reads_it(text: str, mib: float) -> None:
    assert memory_mib(text) == mib


def test_each_worker_has_its_cores_and_its_memory() -> None:
    gpus = read_profile("p", {"nodes": 2, "gpus_per_node": 4, "cpus_per_gpu": 8, "mem": "16896M"})
    assert (gpus.tasks, gpus.cpus, gpus.workers, gpus.threads) == (1, 32, 8, 4)
    assert gpus.memory_limit() == 4096 * 2**20
    cores = read_profile("p", {"nodes": 3, "ntasks_per_node": 5, "cpus_per_task": 7, "threads_per_worker": 3})
    assert (cores.tasks, cores.cpus, cores.workers, cores.threads) == (5, 7, 15, 3)
    assert cores.memory_limit() == 0.9 / 5
    assert read_profile("p", {"gpus_per_node": 0, "mem": 0}).memory_limit() == 0.9, "all of a node"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"node": 2}, "no key 'node'; did you mean 'nodes'? There are nodes, gpus_per_node, "),
        ({"gpus-per-node": 2}, "no key 'gpus-per-node'; did you mean 'gpus_per_node'?"),
        ({"colour": 1}, "no key 'colour'; there are nodes, "),
        ({"nodes": 0}, "nodes: 0 is no whole number of 1 or more"),
        ({"tries": True}, "tries: True is no whole number"),
        ({"gpus_per_node": "four"}, "gpus_per_node: 'four' is no number of GPUs, nor a type and a number"),
        ({"gpus_per_node": 1.5}, "gpus_per_node: 1.5 is no number of GPUs"),
        ({"gpus_per_node": 2, "ntasks_per_node": 2}, "leave one of them out"),
        ({"gpus_per_node": 2, "cpus_per_task": 2}, "say cpus_per_gpu"),
        ({"cpus_per_gpu": 2}, "say cpus_per_task"),
        ({"mem": "8 GB"}, "mem: '8 GB' is no memory as Slurm writes it"),
        ({"mem": 1.5}, "mem: 1.5 is no memory"),
        ({"mem": 64}, "mem: 64 of a node is too little for 1 worker; give it 1024M or more"),
        ({"gpus_per_node": 8, "mem": "4G"}, "too little for 8 workers; give it 4608M or more"),
        ({"time": 3600}, "time: YAML reads a number, 3600,"),
        ({"time": "soon"}, "time: 'soon' is no time of a minute or more"),
        ({"time": "0:30"}, "time: '0:30' is no time of a minute or more"),
        ({"partition": "a\n#SBATCH --exclusive"}, "partition: 'a\\n#SBATCH --exclusive' is not a name"),
        ({"account": ""}, "account: '' is not a name"),
        ({"interface": "--host"}, "interface: '--host' is not a name"),
        ({"activate": "a\nb"}, "activate: 'a\\nb' is not a line of the shell"),
        ({"security": "yes"}, "security: 'yes' is no mapping, such as {tls_ca_file: ..., "),
        ({"security": {"tls_ca_file": "nope.pem"}}, "security: tls_ca_file: there is no file nope.pem"),
        ({"security": {}}, "security: {} names no file; give some, "),
        ({"security": {"require_encryption": False}}, "security: require_encryption is no file, which is all"),
        ({"scheduler_port": 80}, "scheduler_port: 80 is neither a port nor a range of ports"),
        ({"worker_port": "40000-40009"}, "worker_port: '40000-40009' is neither a port nor a range of ports"),
        ({"gpus_per_node": 4, "worker_port": "40000:40002"},
         "worker_port: 40000:40002 has 3 ports, and the 4 workers of a node need 4; give it 4 or more, such as '4000"),
        ({"ntasks_per_node": 2, "metrics_port": 9100}, "metrics_port: 9100 has 1 port, and the metrics of the 2 work"),
        ({"worker_port": 40000, "nanny_port": 40000}, "worker_port: 40000 and nanny_port: 40000 have 1 port together"),
        ({"scheduler_port": 8787, "dashboard_address": ":8787"}, "scheduler_port: 8787 and dashboard_address: 8787 ha"),
        ({"dashboard_address": "0.0.0.0"}, "dashboard_address: '0.0.0.0' is no address such as \":8787\", on 127."),
        ({"dashboard_address": "a b:8787"}, "dashboard_address: 'a b:8787' is no address"),
        ({"local_directory": "scratch"}, "local_directory: 'scratch' is no folder of a node: it begins with /"),
        ({"local_directory": "/a\nb"}, "local_directory: '/a\\nb' is no folder of a node"),
        ({"extra": {"a": 1}}, "extra: {'a': 1} is not a list of options of sbatch"),
        ({"extra": ["exclusive"]}, "extra: ['exclusive'] is not a list of options"),
        ({"extra": ["--comment='x"]}, "No closing quotation"),
        ({"extra": ["--array=1-4"]}, "extra: --array=1-4 cannot be chosen: one command is one job"),
        ({"extra": ["-o out"]}, "extra: -o out cannot be chosen: the job's files"),
        ({"extra": ["--signal=USR1@9"]}, "tilewright.grace-seconds says how long"),
        ({"extra": ["--gpus-per-node=2"]}, "has a key of its own; say gpus_per_node"),
        ({"extra": ["--exclusive --partition=b"]}, "extra: --partition=b has a key of its own; say partition"),
        ({"partition": "a", "extra": ["-p b"]}, "extra: -p b asks for what partition: a asks for; keep partition"),
        ({"partition": "a", "extra": ["-pb"]}, "extra: -pb asks for what partition: a asks for"),
        ({"time": "9", "extra": ["--time=8"]}, "extra: --time=8 asks for what time: 9 asks for"),
        ({"mem": "9G", "extra": ["--mem-per-cpu=2G"]}, "extra: --mem-per-cpu=2G asks for what mem: 9G asks for"),
        ({"gpus_per_node": 4, "extra": ["--gres=gpu:2"]}, "extra: --gres=gpu:2 asks for what gpus_per_node: 4 asks"),
        ({"gpus_per_node": 4, "extra": ["--gres nvme:1,gpu:h100:2"]}, "--gres nvme:1,gpu:h100:2 asks for what gpus_"),
        ({"gpus_per_node": 4, "extra": ["--tres-per-node=gres/gpu:2"]}, "asks for what gpus_per_node: 4 asks for"),
        ({"extra": ["-G 2"]}, "extra: -G 2 has a key of its own; say gpus_per_node"),
        ({"extra": ["--gres=gpu"]}, "extra: --gres=gpu has a key of its own; say gpus_per_node"),
        ({"extra": ["--part=b"]}, "extra: --part=b may be short for --partition; write it out"),
        ({"extra": ["--gpu=2"]}, "may be short for --gpus, --gpus-per-node, --gpus-per-socket, --gpus-per-task"),
        ({"extra": ["-D /elsewhere"]}, "extra: -D /elsewhere cannot be chosen: the command runs where it was given"),
        ({"extra": ["--wait"]}, "extra: --wait cannot be chosen: the command follows its job by itself"),
    ],
)  # fmt: skip
def test_what_slurm_does_not_take_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(said)) as told:
        read_profile("profile 'p' of f.yaml", options)
    assert str(told.value).startswith("profile 'p' of f.yaml: ")


def test_a_script_shows_what_is_fixed_on_nodes() -> None:
    lines = script_of(
        nodes=2,
        gpus_per_node=4,
        scheduler_port=40000,
        worker_port="40001:40008",
        nanny_port="40009:40016",
        metrics_port="9100:9103",
        dashboard_address=":8787",
        local_directory="$SLURM_TMPDIR/dask",
    )
    assert lines[-7:-1] == [
        "# scheduler: port 40000 of the first node",
        "# workers: port 40001:40008 of each node",
        "# nannies: port 40009:40016 of each node",
        "# metrics: port 9100:9103 of each node",
        "# dashboard: 127.0.0.1:8787 of the first node",
        "# temporary files: $SLURM_TMPDIR/dask, as it stands on each node",
    ]
    assert not [line for line in script_of() if line.startswith("# ")]


def test_a_profile_with_ports_is_the_same_behind_its_file(tmp_path: Path) -> None:
    found = read_profile("p", {"worker_port": 40000, "metrics_port": "9100:9101", "local_directory": "~/x"})
    folder = JobFolder(tmp_path)
    folder.write_submitted(Submitted(("dot",), found, "/", 0.0))
    assert folder.submitted().profile == found


def test_other_options_of_sbatch_are_handed_on() -> None:
    extra = ["--gres=nvme:1 --licenses=fast", "-d afterok:12", "-x c7", "--mem-bind=local", "--time-min=10"]
    found = script_of(gpus_per_node=1, mem="8G", time="20", extra=extra)
    assert [f"#SBATCH {text}" for text in extra] == found[-6:-1]


def test_files_of_certificates_are_named_for_all_roles_and_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes look for them from wherever they are."""
    files = {name: Path(path) for name, path in signed(tmp_path, "ours").items()}
    monkeypatch.chdir(tmp_path)
    given = {name: path.name for name, path in files.items()}
    found = read_profile("p", {"security": given}).security
    assert found == {name: str(tmp_path / path) for name, path in shared(given).items()}
    assert len(found) == 7
    assert read_profile("p", {}).security is True
    assert read_profile("p", {"security": False}).security is False

    texts = {name: path.read_text() for name, path in files.items()}
    with pytest.raises(
        ClusterError, match="security: tls_ca_file is a text and no file, which is all"
    ) as told:
        read_profile("p", {"security": texts})
    assert "PRIVATE KEY" not in str(told.value)


def test_a_time_without_quotes_is_refused_since_yaml_reads_another() -> None:
    options = yaml.safe_load("{time: 1:30:00}")
    with pytest.raises(ClusterError, match='put it in quotes: time: "1:30:00"'):
        read_profile("p", options)


def test_keys_that_are_null_say_nothing() -> None:
    assert read_profile("p", {"kind": "slurm", "mem": None, "gpus_per_node": None}) == BatchProfile()


def test_the_built_in_profile_is_one() -> None:
    profile = load_profiles(INSTALLED_PROFILES)["slurm"]
    found = read_profile("p", profile.options)
    assert (found.gpus, found.cpus, time_seconds(str(found.time))) == (1, 8, 3600)


@pytest.mark.parametrize("text", ["rack1&rack2", "a'b", 'x"y', "[a|b]", "a#b", "$HOME"])
def test_texts_of_a_script_are_quoted(text: str) -> None:
    line = next(line for line in script_of(constraint=text) if "--constraint" in line)
    assert shlex.split(line)[-1 if "#SBATCH" not in line else 1] == f"--constraint={text}"
