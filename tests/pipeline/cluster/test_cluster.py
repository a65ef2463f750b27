"""Profiles, addresses and clients; and what is said of a wrong one."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import dask
import pytest
import yaml
from dask.utils import parse_timedelta
from distributed import Client, LocalCluster
from distributed.batched import BatchedSend
from distributed.core import Status
from distributed.utils import LoopRunner

from tilewright.pipeline import config
from tilewright.pipeline.cluster import cluster as cluster_module
from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster import profiles as profiles_module
from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.cluster.profiles import INSTALLED_PROFILES, MACHINE_FOLDER, load_profiles
from tilewright.pipeline.errors import ClusterError, DeviceUnavailableError, OptionError

ROOT = Path(__file__).resolve().parents[3]
PROFILER = "distributed.worker.profile.enabled"


def profile_file(folder: Path, **profiles: object) -> Path:
    path = folder / "profiles.yaml"
    path.write_text(yaml.safe_dump({"profiles": profiles}))
    return path


def test_the_installed_profiles_are_the_repositorys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert INSTALLED_PROFILES.read_text() == (ROOT / "cluster.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    assert set(load_profiles()) == {"local", "cpu", "cuda", "existing", "slurm"}


def test_profiles_of_a_file_add_to_the_built_in_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built_in = load_profiles()
    Path("cluster.yaml").write_text("profiles: {site: {kind: existing}, cpu: {kind: cpu, n_workers: 2}}")
    profiles = load_profiles()
    assert set(profiles) == {"local", "cpu", "cuda", "existing", "slurm", "site"}
    assert profiles["local"] == built_in["local"]
    assert profiles["cpu"].options == {"kind": "cpu", "n_workers": 2}, (
        "one of the same name is replaced whole"
    )
    with open_cluster("local") as own:
        assert len(own.nthreads()) == 1
    other = profile_file(tmp_path, other={"kind": "local"})
    assert set(load_profiles(other)) == {"local", "cpu", "cuda", "existing", "slurm", "other"}
    with dask.config.set({"tilewright.cluster-file": str(other)}):
        assert load_profiles() == load_profiles(other)


@dataclass
class Places:
    """Where files of profiles are looked for, the farthest first."""

    machine: Path
    installation: Path
    dasks: Path
    user: Path
    here: Path = Path("cluster.yaml")

    def write(self, place: str, **profiles: dict[str, object]) -> Path:
        path: Path = getattr(self, place)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump({"profiles": profiles}))
        return path


@pytest.fixture
def of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Places of a machine of its own; a file of Dask's there names one."""
    found = Places(
        tmp_path / "etc" / "cluster.yaml",
        tmp_path / "prefix" / "etc" / "tilewright" / "cluster.yaml",
        tmp_path / "opt" / "site.yaml",
        tmp_path / "home" / "tilewright" / "cluster.yaml",
    )
    monkeypatch.setattr(profiles_module, "MACHINE_FOLDER", found.machine.parent)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "dask").mkdir()
    (tmp_path / "dask" / "site.yaml").write_text(f"tilewright: {{cluster-file: {found.dasks}}}")
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path / "dask")])
    monkeypatch.delenv("DASK_TILEWRIGHT__CLUSTER_FILE", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with dask.config.set({"tilewright.cluster-file": str(found.dasks)}):  # as Dask has read it there
        yield found


PLACES = ("machine", "installation", "dasks", "user", "here")


def test_a_nearer_file_of_profiles_wins_and_hides_no_other(of_places: Places) -> None:
    """A site's own file took the place of the user's, without a word."""
    paths = []
    for count, place in enumerate(PLACES, 1):
        said = {"kind": "cpu", "n_workers": count}
        paths.append(
            of_places.write(
                place, shared=said, **{f"of_{place}": said}, **({} if count > 2 else {"far": said})
            )
        )
    found = profiles_module.find_profiles()
    assert [file.path for file in found.files] == [INSTALLED_PROFILES, *paths]
    assert not found.absent
    for count, place in enumerate(PLACES, 1):
        assert found.profiles[f"of_{place}"].options["n_workers"] == count
    assert (found.profiles["shared"].options["n_workers"], found.profiles["shared"].file) == (5, paths[4])
    assert found.replaced("shared") == paths[3::-1]
    assert (found.profiles["far"].file, found.replaced("far")) == (paths[1], [paths[0]])
    assert found.replaced("of_user") == []
    named = re.escape(
        f"of_here, shared of cluster.yaml; of_user of {paths[3]}; of_dasks of {paths[2]}; far, of_installation of"
        f" {paths[1]}; of_machine of {paths[0]}; cpu, cuda, existing, local, slurm (built-in): choose one"
    )
    with pytest.raises(ClusterError, match=named), open_cluster("gpu"):
        pass


@pytest.mark.parametrize("how", ["argument", "environment", "python"])
def test_a_file_of_profiles_that_is_named_is_the_only_one(
    how: str, of_places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in PLACES:
        of_places.write(place, **{place: {"kind": "cpu"}})
    own = profile_file(tmp_path, own={"kind": "cpu"})
    if how == "environment":
        monkeypatch.setenv("DASK_TILEWRIGHT__CLUSTER_FILE", str(own))
    with dask.config.set({} if how == "argument" else {"tilewright.cluster-file": str(own)}):
        found = profiles_module.find_profiles(own if how == "argument" else None)
        assert found.only
        assert [file.path for file in found.files] == [INSTALLED_PROFILES, own]
        with (
            pytest.raises(ClusterError, match="no other file was read, since that one was named"),
            open_cluster("here", own if how == "argument" else None),
        ):
            pass


def test_places_of_profiles_without_a_file_are_told(of_places: Places) -> None:
    of_places.write("dasks", one={"kind": "cpu"})
    of_places.here.mkdir()  # a folder is none
    found = profiles_module.find_profiles()
    assert [file.path for file in found.files] == [INSTALLED_PROFILES, of_places.dasks]
    assert list(found.absent) == [
        of_places.machine, of_places.installation, of_places.user, of_places.here,
    ]  # fmt: skip


def test_a_file_that_two_places_mean_is_read_once(of_places: Places) -> None:
    of_places.write("dasks", one={"kind": "cpu"})
    of_places.here.symlink_to(of_places.dasks)
    found = profiles_module.find_profiles()
    assert [file.path for file in found.files] == [INSTALLED_PROFILES, of_places.here]
    assert found.replaced("one") == []


def test_a_file_of_profiles_that_dasks_names_has_to_be_there(of_places: Places) -> None:
    said = f"no profiles file {of_places.dasks}, which tilewright.cluster-file names in .*site.yaml; mend it there"
    with pytest.raises(ClusterError, match=said):
        load_profiles()


def test_paths_of_settings_have_their_variables_replaced(
    of_places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of a site's settings serves all of its users."""
    monkeypatch.setenv("OF_USER", "ann")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "ann").mkdir()
    own = profile_file(tmp_path / "ann", one={"kind": "cpu"})
    (tmp_path / "dask" / "site.yaml").write_text(
        f"tilewright: {{cluster-file: '{tmp_path}/$OF_USER/profiles.yaml'}}"
    )
    with dask.config.set({"tilewright.cluster-file": f"{tmp_path}/$OF_USER/profiles.yaml"}):
        assert [file.path for file in profiles_module.find_profiles().files] == [INSTALLED_PROFILES, own]
    with dask.config.set({"tilewright.cluster-file": "~/${OF_USER}/profiles.yaml"}):
        found = profiles_module.find_profiles()
        assert (found.only, found.files[-1].path) == (True, own)
    with dask.config.set({"tilewright.jobs-folder": "~/$OF_USER/jobs"}):
        assert config.path_of("jobs-folder") == f"{tmp_path}/ann/jobs"
    with (
        dask.config.set({"tilewright.jobs-folder": "/scratch/$NO_SUCH_VARIABLE"}),
        pytest.raises(
            OptionError, match=r"jobs-folder .*'/scratch/\$NO_SUCH_VARIABLE' has a variable that is not"
        ),
    ):
        config.path_of("jobs-folder")


def test_a_broken_file_of_a_place_is_named(of_places: Places) -> None:
    of_places.write("dasks", one={"kind": "cpu"})
    of_places.write("machine", one={"kind": "cloud"})
    with pytest.raises(ClusterError, match=f"{of_places.machine}, line 2: profile 'one' has kind 'cloud'"):
        load_profiles()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("profiles:\n a:\n  kind: cpu\n  n_workers: 1\n  n_workers: 2", "lines 4 and 5 have the key 'n_workers'"),
        ("profiles:\n a: {kind: cpu}\n b: {kind: cpu}\n a: {kind: local}", "lines 2 and 4 have the key 'a' 2 times"),
        ("profiles: {a: {kind: cpu, kind: local}}", "line 1 has the key 'kind' 2 times"),
        ("profiles: {a: {kind: cpu}}\nprofiles:\n b: {kind: cpu}", "lines 1 and 2 have the key 'profiles' 2 times"),
        ("profiles:\n a:\n  kind: cpu\n  env:\n   X: 1\n   X: 3\n   'X': 4", "lines 5, 6 and 7 have the key 'X'"),
    ],
)  # fmt: skip
def test_a_key_that_is_said_twice_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """YAML's own reader takes the last one silently."""
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=re.escape(f"{path}: {said}")):
        load_profiles(path)


def test_keys_that_are_merged_may_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(
        "profiles:\n small: &small {kind: cpu, n_workers: 1}\n large: {<<: *small, n_workers: 9}\n"
    )
    assert load_profiles(path)["large"].options == {"kind": "cpu", "n_workers": 9}


def loaded(tmp_path: Path, text: str) -> dict[str, profiles_module.Profile]:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return load_profiles(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("profiles:\n\ta: {kind: cpu}", "is not valid YAML: line 2, column 1: a tab stands where YAML takes spaces"),
        ("profiles:\n  a: @b", "is not valid YAML: line 2, column 6: found character that cannot start any token ('@'"),
        (
            "profiles:\n a: [1\n b: 2",
            "line 3, column 3: did not find expected ',' or ']' (while parsing a flow sequence that begins in line 2)",
        ),
        ("profiles:\n a:\n  time: 2024-13-01", "line 3, column 9: month must be in 1..12"),
        ("profiles:\n a: {x: !!bool maybe}", "line 2, column 9: 'maybe'"),
        ("profiles:\n a: *b", "line 2, column 5: found undefined alias"),
        ("profiles:\n a: \x07", "line 2: control characters are not allowed"),
        ("a: 1\n---\nb: 2", "line 2, column 1: but found another document"),
        (b"profiles:\n # caf\xe9\n", "line 2: it is no text in UTF-8"),
        ("profile:\n a: {kind: cpu}", ", line 1: a file of profiles has no key 'profile'; did you mean 'profiles'? A"),
        ("profiles:\n a: {kind: cpu}\nmine: 3", ", line 3: a file of profiles has no key 'mine'; all profiles stand"),
        ("profiles:\n a:\n  - kind", ", line 2: profile 'a' is ['kind'], and no mapping of keys"),
        ("profiles: 7", ", line 1 has no mapping 'profiles'"),
        ("profiles:\n a: {kind: cuba}", ", line 2: profile 'a' has kind 'cuba'; did you mean 'cuda'? It may be local"),
        ("profiles:\n a: {extend: cpu}", "says no kind ('extend' may be meant for 'extends'), and extends none"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_told_by_its_name_and_line(
    text: str | bytes, said: str, tmp_path: Path
) -> None:
    """A tab was found in "<unicode string>", and a key beside ``profiles`` was taken for none of it, silently."""
    path = tmp_path / "own.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ClusterError) as raised:
        load_profiles(path)
    assert str(raised.value).startswith(str(path))
    assert said in str(raised.value)


def test_what_stands_for_its_anchors_alone_is_read_by_nobody(tmp_path: Path) -> None:
    found = loaded(
        tmp_path, "x-small: &small {n_workers: 1}\nprofiles: {a: {kind: cpu, <<: *small}, 7: {kind: cpu}}"
    )
    assert found["a"].options == {"kind": "cpu", "n_workers": 1}
    assert found["7"].options == {"kind": "cpu"}


def test_a_profile_has_what_it_does_not_say_of_the_one_that_it_extends(of_places: Places) -> None:
    """A profile of the same name that was meant to change one key lost all the others of a site's, silently."""
    site = of_places.write("machine", gpu={
        "kind": "slurm", "nodes": 4, "time": "1:00:00", "partition": "gpu", "extra": ["--exclusive"],
        "security": {"tls_ca_file": "ca.pem", "tls_client_cert": "own.pem"},
    }, short={"extends": "gpu", "time": "0:10:00"})  # fmt: skip
    of_places.write("dasks", one={"kind": "cpu"})
    own = of_places.write("user", gpu={
        "extends": "gpu", "time": "2:00:00", "partition": None, "extra": ["--nice"],
        "security": {"tls_client_cert": "mine.pem", "tls_client_key": "mine-key.pem"},
    })  # fmt: skip
    here = of_places.write(
        "here", gpu={"extends": "gpu", "nodes": 2}, night={"extends": "gpu", "qos": "night"}, own={"extends": "cpu"}
    )  # fmt: skip
    found = profiles_module.find_profiles()
    gpu, night, short = (found.profiles[name] for name in ("gpu", "night", "short"))
    merged = {
        "kind": "slurm", "nodes": 2, "time": "2:00:00", "partition": None, "extra": ["--nice"],
        "security": {"tls_ca_file": "ca.pem", "tls_client_cert": "mine.pem", "tls_client_key": "mine-key.pem"},
    }  # fmt: skip
    assert gpu.options == merged
    assert night.options == merged | {"qos": "night"}
    assert (short.options["time"], short.options["nodes"]) == ("0:10:00", 4), "it means that of its own file"
    assert found.profiles["own"].options == load_profiles(INSTALLED_PROFILES)["cpu"].options
    assert (gpu.file, gpu.extends) == (here, (("gpu", own), ("gpu", site)))
    assert gpu.called("gpu") == (
        f"profile 'gpu' of cluster.yaml (which extends that of {own}, which extends that of {site})"
    )
    assert night.called("night").endswith(
        f"(which extends gpu, which extends that of {own}, which extends that of {site})"
    )
    assert (
        found.profiles["own"].called("own") == "profile 'own' of cluster.yaml (which extends cpu (built-in))"
    )
    assert found.replaced("gpu") == []
    assert found.lost("gpu") is None


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ("a: {extends: b}\n b: {extends: c}\n c: {extends: a}", (", line 4: profile 'c' extends 'a', and so itself: a"
         " extends b extends c extends a; take extends out of one of them, or give it another profile; there are a, b,"
         " c of ")),
        ("a: {extends: b}\n b: {extends: b}", (", line 3: profile 'b' extends 'b', and there is no such profile in a"
         " file farther than ")),
        ("a: {extends: cdua, n_workers: 2}", "line 2: profile 'a' extends 'cdua', and there is no such profile in "),
        ("a: {extends: cdua, n_workers: 2}", ("; did you mean 'cuda'? There are cpu, cuda, existing, local, slurm"
         " (built-in); and no other file was read")),
        ("a: {extends: [cpu]}", "line 2: profile 'a' extends ['cpu'], which is no profile's name; give one, or null"),
        ("a: {extends: true}", "line 2: profile 'a' extends True, which is no profile's name"),
        ("a: {extends: null}", "line 2: profile 'a' says no kind, and extends none that does; it may be local, cpu"),
    ],
)  # fmt: skip
def test_what_no_profile_can_extend_is_refused(profiles: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=re.escape(said)):
        loaded(tmp_path, f"profiles:\n {profiles}")


def test_what_is_lost_of_a_hidden_profile_is_told(of_places: Places) -> None:
    machine = of_places.write("machine", gpu={"kind": "slurm", "nodes": 4, "mem": "9G", "qos": None})
    of_places.write("dasks", one={"kind": "cpu"})
    for own, lost in (
        ({"kind": "slurm", "nodes": 3}, "mem"),
        ({"kind": "cpu"}, "mem, nodes"),
        ({"kind": "slurm", "nodes": 3, "mem": None}, None),
        ({"kind": "cpu", "extends": None}, None),
        ({"extends": "gpu"}, None),
    ):
        of_places.write(
            "here", gpu=own, cuda={"kind": "cuda"}, local={"kind": "local", "threads_per_worker": 9}
        )
        found = profiles_module.find_profiles()
        assert found.lost("gpu") == (lost and (
            f"profile 'gpu' of cluster.yaml takes the place of that of {machine}, whose {lost} it does not have;"
            " extends: gpu would keep what it does not say, and extends: null says that this is meant"
        ))  # fmt: skip
        assert found.replaced("gpu") == ([] if own.get("extends") else [machine])
    assert "the place of the built-in one, whose threads_per_worker, dashboard_address it" in str(
        found.lost("cuda")
    )
    assert found.lost("local") is None
    assert found.lost("one") is None
    assert found.lost("none") is None


def test_messages_name_the_file_of_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = "there is no profile 'gpu'; the profiles are cpu, cuda, existing, local, slurm"
    empty = "says neither address nor scheduler_file; set one in your cluster.yaml"
    for name, said in (
        ("gpu", f"{known} (built-in); and there is no file of others at {MACHINE_FOLDER}/cluster.yaml, "),
        ("gpu", "cluster.yaml, cluster.yaml: choose one, or define it in cluster.yaml ("),
        ("existing", f"built-in profile 'existing' {empty}"),
    ):
        with pytest.raises(ClusterError, match=re.escape(said)), open_cluster(name):
            pass
    Path("cluster.yaml").write_text(
        "profiles: {site: {kind: existing}, odd: {kind: local, n_wrokers: 3},"
        " promised: {kind: cpu, asynchronous: true}, threads: {kind: cpu, processes: false},"
        " near: {kind: existing, adress: 'tcp://there:1'}, slow: {kind: existing, address: 'tcp://there:1',"
        " timeout: soon}, both: {kind: existing, address: 'tcp://there:1', scheduler_file: f.json},"
        " apart: {kind: local, processes: true}, pair: {kind: local, n_workers: 2}, other: {kind: cpu, workers: 2}}"
    )
    for name, said in (
        (
            "gpu",
            "near, odd, other, pair, promised, site, slow, threads of cluster.yaml; cpu, cuda, existing, local, slurm",
        ),
        ("site", f"profile 'site' of cluster.yaml {empty}"),
        (
            "odd",
            "profile 'odd' of cluster.yaml: the cluster has no option 'n_wrokers'; did you mean 'n_workers'?",
        ),
        ("other", "'other' of cluster.yaml: the cluster has no option 'workers'; did you mean 'n_workers'?"),
        ("near", "'near' of cluster.yaml: a client has no option 'adress'; did you mean 'address'?"),
        ("slow", "'slow' of cluster.yaml: timeout: 'soon' is no time, such as 30"),
        ("both", "'both' of cluster.yaml says address, tcp://there:1, and scheduler_file, f.json; leave one"),
        ("promised", "profile 'promised' of cluster.yaml: asynchronous: True would have nobody wait"),
        ("threads", "profile 'threads' of cluster.yaml: processes: False does not go with kind cpu, whose"),
        (
            "apart",
            "'apart' of cluster.yaml: processes: True does not go with kind local, which is one worker",
        ),
        ("pair", "'pair' of cluster.yaml: n_workers: 2 does not go with kind local, which is one worker"),
    ):
        with pytest.raises(ClusterError, match=re.escape(said)), open_cluster(name):
            pass


def test_dasks_own_setting_says_where_an_existing_scheduler_is(processes: Client) -> None:
    """As `DASK_SCHEDULER_ADDRESS` does where a site starts clusters for its users."""
    address = processes.scheduler_info()["address"]
    with dask.config.set({"scheduler-address": address}), open_cluster("existing") as found:
        assert found.scheduler_info()["address"] == address
        assert found is not processes
    with (
        dask.config.set({"scheduler-address": 7}),
        pytest.raises(ClusterError, match="address: 7 is no scheduler's address"),
        open_cluster("existing"),
    ):
        pass


def test_a_client_is_used_and_left_open(client: Client) -> None:
    with open_cluster(client) as same:
        assert same is client
    assert client.status == "running"


UNSAID = {"processes": None, "env": None, "threads_per_worker": None, "dashboard_address": ":0"}


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A worker process by a profile that leaves open what it can, started as where Dask's profiler can hang: several
    tests look at the one, since a process takes a second to start."""
    path = profile_file(tmp_path_factory.mktemp("profile"), one=UNSAID | {"kind": "cpu", "n_workers": 1})
    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set({PROFILER: True}),
    ):
        patch.setattr(local_cluster, "PROFILER_HANGS", True)
        with open_cluster("one", path) as client:
            yield client


def schemes(client: Client) -> list[str]:
    return [address.partition("://")[0] for address in client.nthreads()]


def test_what_a_profile_leaves_open_is_as_if_it_said_nothing(tmp_path: Path, of_one_process: Client) -> None:
    with open_cluster(
        "one", profile_file(tmp_path, one=UNSAID | {"kind": "local", "n_workers": None})
    ) as own:
        assert schemes(own) == ["inproc"]
    assert schemes(of_one_process) == ["tcp"]


@pytest.mark.more
def test_a_worker_is_started_for_every_core_that_the_process_may_use() -> None:
    """By Dask, which is asked for so many."""
    script = (
        "import os\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "os.cpu_count = lambda: 3\n"  # the host's
        "from tilewright.pipeline.cluster import cluster\n"
        "class Started:\n"
        "    def __init__(self, **options):\n"
        "        print(options['n_workers'])\n"
        "        raise SystemExit(0)\n"
        "cluster.LocalCluster = Started\n"
        "cluster.open_cluster('cpu').__enter__()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr


def failing(*errors: Exception) -> type:
    """What stands for Dask's class: one that failed leaves parts that the next one waits ten seconds for."""

    class Failing:
        def __init__(self, **options: Any) -> None:
            for error, cause in pairwise(errors):
                error.__cause__ = cause
            raise errors[0]

    return Failing


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (
            (
                RuntimeError("Cluster failed."),
                RuntimeError("Scheduler failed."),
                ValueError("no scheme 'ftp'"),
            ),
            r"did not start \(Cluster failed\. ValueError: no scheme 'ftp'\)",
        ),
        (
            (RuntimeError("Cluster failed: no name"), OSError("no name")),
            r"did not start \(Cluster failed: no name\)",
        ),
        (
            (FileNotFoundError(2, "No such folder", "/none"),),
            r"refused its options .*: .*No such folder: '/none'",
        ),
        ((AttributeError("no level MAYBE"),), r"refused its options .*: no level MAYBE"),
        ((KeyError("no unit"),), r"refused its options .*: 'no unit'"),
    ],
)
def test_why_a_cluster_does_not_start_is_said(
    errors: tuple[Exception, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "LocalCluster", failing(*errors))
    path = profile_file(tmp_path, odd={"kind": "cpu", "n_workers": 1})
    with pytest.raises(ClusterError, match=said):
        open_cluster("odd", path).__enter__()


def test_a_worker_of_this_process_that_does_not_start_is_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = (RuntimeError("Worker failed."), OSError(24, "Too many open files"))
    monkeypatch.setattr(cluster_module, "LocalCluster", failing(*errors))
    with pytest.raises(
        ClusterError, match=r"its worker did not start \(Worker failed\. OSError.*open files\)$"
    ):
        open_cluster("local").__enter__()


def test_who_looks_for_the_root_of_an_error_that_is_its_own_cause_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("Cluster failed.")
    monkeypatch.setattr(cluster_module, "LocalCluster", failing(error, error))
    path = profile_file(tmp_path, odd={"kind": "cpu", "n_workers": 1})
    with pytest.raises(ClusterError, match=r"did not start \(Cluster failed\.\)"):
        open_cluster("odd", path).__enter__()


def test_options_reach_the_cluster_under_their_own_names(tmp_path: Path) -> None:
    path = profile_file(tmp_path, mine={"kind": "local", "threads_per_worker": 3, "name": "mine"})
    with open_cluster("mine", path) as own:
        assert (own.cluster.name, list(own.nthreads().values())) == ("mine", [3])


@pytest.mark.parametrize("kind", ["local", "cpu", "cuda"])
@pytest.mark.parametrize("key", ["n_workers", "threads_per_worker"])
@pytest.mark.parametrize("count", [0, -1, False, True, 1.5, "2"])
def test_what_is_no_number_of_workers_or_threads_is_refused_at_once(
    kind: str, key: str, count: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(cluster_module, "start", lambda kind, options: started.append(options))
    path = profile_file(tmp_path, none={"kind": kind, key: count})
    with pytest.raises(
        ClusterError, match=rf"'none' of .*: {key}: {count!r} is no whole number of 1 or more"
    ):
        open_cluster("none", path).__enter__()
    assert not started


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("limit", "nbytes"), [("40MiB", 40 * 2**20), (10**8, 10**8), (1e-9, r"\d+")])
def test_a_memory_limit_that_no_process_keeps_is_refused(
    kind: str, limit: Any, nbytes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(cluster_module, "start", lambda kind, options: started.append(options))
    path = profile_file(tmp_path, small={"kind": kind, "memory_limit": limit})
    said = rf"'small' of .*: memory_limit: {limit!r} is {nbytes} bytes for a worker.* give it 192 MiB"
    with pytest.raises(ClusterError, match=said):
        open_cluster("small", path).__enter__()
    assert not started


@pytest.mark.parametrize("limit", [-5, -0.5, "-5GiB"])
def test_a_memory_limit_below_nothing_is_refused_as_it_is_given(limit: Any) -> None:
    """Dask takes small numbers for shares of the host's memory."""
    said = re.escape(f"it: memory_limit: {limit!r} is less than nothing; give it 192 MiB or more")
    with pytest.raises(ClusterError, match=said):
        cluster_module._check_memory_limit("it", {"memory_limit": limit})


@pytest.mark.parametrize("kind", ["local", "cpu", "cuda"])
@pytest.mark.parametrize("env", [["a"], "a", {1: "a"}])
def test_what_is_no_environment_is_refused(kind: str, env: Any, tmp_path: Path) -> None:
    path = profile_file(tmp_path, odd={"kind": kind, "env": env})
    with (
        pytest.raises(ClusterError, match=re.escape(f"env: {env!r} is no mapping of variables' names")),
        open_cluster("odd", path),
    ):
        pass


def test_other_memory_limits_are_none_of_ours(tmp_path: Path) -> None:
    for limit in ("auto", None, 0, "192MiB", 0.9):
        cluster_module._check_memory_limit("it", {"memory_limit": limit})
    cluster_module._check_memory_limit("it", {})
    path = profile_file(tmp_path, threads={"kind": "local", "memory_limit": "40MiB"})
    with open_cluster("threads", path) as own:
        assert own.nthreads()


def test_cpu_workers_are_processes_that_see_no_gpu(of_one_process: Client) -> None:
    (facts,) = of_one_process.run(lambda: (os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"])).values()
    assert facts[0] != os.getpid()
    assert facts[1] == ""


def test_nobody_on_the_loop_waits_to_send_when_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python tells of a timeout that nobody took notice of where one comes in the last moment."""
    made: list[BatchedSend] = []
    until: list[float] = []
    create, stop = BatchedSend.__init__, LoopRunner._real_stop

    def creating(sender: BatchedSend, interval: str, *arguments: Any, **options: Any) -> None:
        create(sender, "15ms", *arguments, **options)  # all as slow, and slower, than any of Dask's
        made.append(sender)

    def stopping(runner: LoopRunner, timeout: float) -> None:
        now = time.time()
        until.extend(sender.next_deadline - now for sender in made if sender.next_deadline is not None)
        stop(runner, timeout)

    monkeypatch.setattr(BatchedSend, "__init__", creating)
    monkeypatch.setattr(LoopRunner, "_real_stop", stopping)
    for _ in range(5):
        with open_cluster("local") as own:
            assert own.submit(int, "3", pure=False).result() == 3
    assert made
    assert not [seconds for seconds in until if seconds > 0]


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("profile", ["local", "cpu"])
def test_workers_send_no_heartbeat_while_they_end(profile: str, tmp_path: Path) -> None:
    """One whose answer is late, as a busy client's are, is waited for before anything is closed."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import asyncio, sys, threading
from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster.cluster import open_cluster

asked, ending, held = threading.Event(), threading.Event(), {{}}
end_heartbeats, close = local_cluster._end_heartbeats, local_cluster._close

async def late(address, **options):
    if not ending.is_set():
        held[address] = asyncio.Event(), asyncio.Event()
        asked.set()
        await held[address][0].wait()
    elif address in held:  # the worker asks whether anything is under way
        go_on, answered = held[address]
        go_on.set()
        await answered.wait()
    answer = scheduler.heartbeat_worker(address=address, **options)
    if address in held:
        held.pop(address)[1].set()
    return answer

def told_end(client):
    ending.set()
    end_heartbeats(client)

def told_close(server, *seconds):
    if held:
        print("it is closed while a worker waits for an answer", file=sys.stderr)
    close(server, *seconds)

local_cluster._end_heartbeats, local_cluster._close = told_end, told_close

if __name__ == "__main__":
    with open_cluster({profile!r}) as client:
        scheduler = client.cluster.scheduler
        scheduler.handlers["heartbeat_worker"] = late
        assert asked.wait(60)
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cluster_that_does_not_end_keeps_nobody_from_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Dask's does where a worker process has just been killed and its nanny starts another."""
    monkeypatch.setattr(local_cluster, "CLOSE_SECONDS", 0.1)

    async def wait_for_good() -> None:
        await asyncio.Event().wait()

    servers: list[LocalCluster] = []

    def fail() -> None:
        with open_cluster("local") as own:
            servers.append(own.cluster)
            monkeypatch.setattr(own.cluster, "_close", wait_for_good)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    monkeypatch.undo()
    servers[0].close()


def test_ctrl_c_while_a_cluster_ends_does_not_cut_its_end_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's would stay half closed, and Python's end wait ten seconds for the other half."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    close = LocalCluster._close
    servers: list[LocalCluster] = []

    async def interrupted(self: LocalCluster) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.sleep(0)  # where a call that was given up ends
        await close(self)

    monkeypatch.setattr(LocalCluster, "_close", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), open_cluster("local") as own:
            servers.append(own.cluster)
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in threading.enumerate():  # the signal may come while this one is just starting
        if thread.name.startswith("end of a cluster"):
            thread.join()
    assert servers[0].status == Status.closed


def callbacks_of(client: Client) -> list[str]:
    (found,) = client.run(lambda dask_worker: list(dask_worker.periodic_callbacks)).values()
    return list(found)


@pytest.mark.parametrize(
    ("kind", "hangs"),
    [("local", True), ("local", False), pytest.param("cpu", False, marks=pytest.mark.slow)],
)
def test_the_profiler_is_left_out_where_it_can_hang(
    kind: str, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cluster, "PROFILER_HANGS", hangs)
    options = {"kind": kind, "n_workers": 1, "dashboard_address": ":0"}
    with dask.config.set({PROFILER: True}):
        with open_cluster("one", profile_file(tmp_path, one=options)) as own:
            callbacks = callbacks_of(own)
        assert dask.config.get(PROFILER), "it is this process's own setting again"
    assert ("profile" in callbacks) is not hangs


def test_the_profiler_is_left_out_of_processes_too_where_it_can_hang(of_one_process: Client) -> None:
    assert "profile" not in callbacks_of(of_one_process)


def test_an_address_or_a_scheduler_file_is_connected_to(tmp_path: Path) -> None:
    with LocalCluster(n_workers=1, processes=False, protocol="tcp://", dashboard_address=":0") as cluster:
        with open_cluster(cluster.scheduler_address) as own:
            assert own.submit(sum, [1, 2]).result() == 3
        written = tmp_path / "scheduler.json"
        with Client(cluster) as direct:
            direct.write_scheduler_file(str(written))
        path = profile_file(
            tmp_path, site={"kind": "existing", "scheduler_file": str(written), "address": None}
        )
        with open_cluster("site", path) as own:
            assert own.submit(sum, [1, 2]).result() == 3


def test_wrong_profiles_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ClusterError, match=r"no profile 'gpu'; the profiles are cpu, cuda, existing, local, slurm"
        ),
        open_cluster("gpu"),
    ):
        pass
    os.mkfifo(tmp_path / "pipe")  # nobody writes there
    for name in ("none.yaml", ".", "pipe"):
        with pytest.raises(ClusterError, match="cannot read the profiles file"):
            load_profiles(tmp_path / name)
    for text, match in (
        ("a: [", "not valid YAML"),
        ("just text", "no mapping 'profiles'"),
        ("profiles: {x: {kind: cloud}}", "kind 'cloud'; it may be local, cpu, cuda, existing"),
        ("profiles: {x: 3}", "profile 'x' is 3, and no mapping of keys"),
    ):
        path = tmp_path / "wrong.yaml"
        path.write_text(text)
        with pytest.raises(ClusterError, match=match):
            load_profiles(path)
    path.write_bytes(b"BZh9\xf7")
    with pytest.raises(ClusterError, match="not valid YAML"):
        load_profiles(path)
    for kind in ("local", "cpu"):
        odd = profile_file(tmp_path, odd={"kind": kind, "n_wrokers": 3})
        with pytest.raises(ClusterError, match=r"'odd'.* no option 'n_wrokers'"), open_cluster("odd", odd):
            pass
        odd = profile_file(tmp_path, odd={"kind": kind, "n_workers": 1, "memory_limit": "banana"})
        refused = r"'odd'.*refused its options \{.*'memory_limit': 'banana'.*\}: .*'banana'"
        with pytest.raises(ClusterError, match=refused), open_cluster("odd", odd):
            pass
    empty = profile_file(tmp_path, site={"kind": "existing"})
    with pytest.raises(ClusterError, match="neither address nor scheduler_file"), open_cluster("site", empty):
        pass
    gone = profile_file(tmp_path, site={"kind": "existing", "scheduler_file": str(tmp_path / "gone.json")})
    with pytest.raises(ClusterError, match="no scheduler file"), open_cluster("site", gone):
        pass
    torn = tmp_path / "torn.json"
    for text in ('{"address": "tcp', "{}"):
        torn.write_text(text)
        path = profile_file(tmp_path, site={"kind": "existing", "scheduler_file": str(torn)})
        with pytest.raises(ClusterError, match=r"torn\.json names no address"), open_cluster("site", path):
            pass


@pytest.mark.parametrize("kind", ["local", "cpu"])
@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("death_timeout", "x"),
        ("death_timeout", ""),
        ("death_timeout", float("inf")),
        ("lifetime", "soon"),
        ("scheduler_sync_interval", []),
    ],
)
def test_what_is_no_time_is_refused(kind: str, key: str, given: Any, tmp_path: Path) -> None:
    odd = profile_file(tmp_path, odd={"kind": kind, key: given})
    said = re.escape(f": {key}: {given!r} is no time, such as 30 or 1 minute")
    assert parse_timedelta("1 minute") == 60, "min is none"
    with pytest.raises(ClusterError, match=said), open_cluster("odd", odd):
        pass


@pytest.mark.more
def test_a_cluster_that_refuses_its_options_is_not_called_unclosed(tmp_path: Path) -> None:
    keys = ("host", "worker_class")
    path = profile_file(tmp_path, **{key: {"kind": "local", key: 5} for key in keys})
    script = (
        "import sys, tilewright as tw\n"
        "for profile in sys.argv[2:]:\n"
        "    try:\n        with tw.open_cluster(profile, sys.argv[1]): pass\n"
        "    except tw.ClusterError as error: print(error)\n"
    )
    command = [sys.executable, "-W", "always", "-c", script, str(path), *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    for key, line in zip(keys, done.stdout.splitlines(), strict=True):
        assert f"the cluster refused its options {{'{key}'" in line
    assert "unclosed" not in done.stderr


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("given", [0, 0.1, "1 s", "9s"])
def test_a_time_in_which_no_worker_process_starts_is_refused(kind: str, given: Any, tmp_path: Path) -> None:
    odd = profile_file(tmp_path, odd={"kind": kind, "n_workers": 1, "death_timeout": given})
    said = re.escape(f"death_timeout: {given!r} is less than") + ".* give it 10 s or more"
    with pytest.raises(ClusterError, match=said), open_cluster("odd", odd):
        pass


@pytest.mark.slow
def test_dask_computes_as_before_after_clusters_end_in_their_order() -> None:
    """Each of Dask's clients puts back what it found; in a process of its own, where no other client is open."""
    script = """
import threading
import dask
from tilewright.pipeline.cluster.cluster import open_cluster

began, may_end = threading.Event(), threading.Event()

def first():
    with open_cluster("local"):
        began.set()
        may_end.wait()

thread = threading.Thread(target=first)
thread.start()
began.wait()
with open_cluster("local"):
    may_end.set()
    thread.join()
    print(dask.config.get("scheduler", None))
print(dask.config.get("scheduler", None), dask.delayed(sum)([1, 2]).compute())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["dask.distributed", "None", "3"], done.stderr


@pytest.mark.parametrize("name", ["local", "one"])
def test_workers_are_not_started_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Dask hangs there, and Numba fails once it has to compile."""
    path = profile_file(tmp_path, one={"kind": "cpu", "n_workers": 1})
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = f"profile '{name}'.* cannot start in the working directory, .*; change to another"
    with pytest.raises(ClusterError, match=said), open_cluster(name, path):
        pass


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("start", "said"),
    [
        (
            "failed.set(); await asyncio.sleep(1000)",
            "0 joined, and no further one within 0.5 s; see what they say with --debug, .* longer with death_timeout",
        ),
        (
            "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))",
            r"0 joined, and one could not be started: OSError: \[Errno 28\] No space left .*; free room in /dev/shm,",
        ),
    ],
    ids=["hangs", "fails"],
)
def test_worker_processes_that_do_not_join_are_told_of_and_given_up(
    start: str, said: str, tmp_path: Path
) -> None:
    """Dask hangs where no process can be started, and its cluster's end hangs too: Python's must not."""
    path = profile_file(tmp_path, one={"kind": "cpu", "n_workers": 1})
    script = f"""
import asyncio, errno, os, threading
from distributed.process import AsyncProcess
from tilewright.pipeline.cluster import local as local_cluster
from tilewright.pipeline.cluster.cluster import open_cluster

failed, may_go_on = threading.Event(), local_cluster._Joining.may_go_on

async def start(process):
    {start}

async def terminate(process):
    failed.set()
    raise AttributeError("there is none")

AsyncProcess.start, AsyncProcess.terminate = start, terminate
local_cluster._Joining.may_go_on = lambda joining: not failed.is_set() or may_go_on(joining)
local_cluster.WAIT_SECONDS, local_cluster.JOIN_SECONDS, local_cluster.GIVE_UP_SECONDS = 0.1, 0.5, 0.1
local_cluster.FAILED_SECONDS = 0.2
open_cluster("one", {str(path)!r}).__enter__()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    waited = re.search(r"(?m)^worker processes have not started yet after \d+ s \(0 there\)", ended.stderr)
    assert waited or "could not be started" in said
    last = ended.stderr.splitlines()[-1]
    assert re.search(rf"'one' .*: its worker processes did not start \({said}", last), last


def test_a_cluster_whose_workers_join_one_by_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(local_cluster, "time", SimpleNamespace(monotonic=lambda: now[0]))
    server: Any = SimpleNamespace()
    for death, seconds in ((None, 120), ("5 minutes", 310)):
        now[0] = 0
        server.scheduler = None
        joining = local_cluster._Joining(server, {"death_timeout": death})
        server.scheduler = SimpleNamespace(workers={})
        for number in range(3):
            now[0] += seconds - 1
            assert joining.may_go_on()
            server.scheduler.workers[number] = number
            assert joining.may_go_on()
        del server.scheduler.workers[0]
        now[0] += seconds - 1
        assert joining.may_go_on()
        server.scheduler.workers[0] = 0  # it came back
        now[0] += 1
        assert not joining.may_go_on()
        assert joining.told([]).startswith(f"3 joined, and no further one within {seconds} s; see")


@pytest.mark.parametrize("given", [5, ["f.json"]])
def test_what_is_no_path_of_a_scheduler_file_is_refused(given: Any, tmp_path: Path) -> None:
    odd = profile_file(tmp_path, odd={"kind": "existing", "scheduler_file": given})
    with (
        pytest.raises(ClusterError, match=re.escape(f"scheduler_file: {given!r} is no path")),
        open_cluster("odd", odd),
    ):
        pass


@pytest.mark.parametrize("path", ["", 5])
def test_what_is_no_file_of_profiles_is_refused(path: Any) -> None:
    with pytest.raises(OptionError, match=r"^cluster_file \(--cluster-file\): .* is not a path"):
        load_profiles(path)


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path) -> None:
    path = profile_file(tmp_path, site={"kind": "existing", "address": "tcp://127.0.0.1:1", "timeout": 0.2})
    with (
        pytest.raises(ClusterError, match=r"cannot reach the scheduler at tcp://127\.0\.0\.1:1"),
        open_cluster("site", path),
    ):
        pass


def test_a_scheduler_that_takes_long_to_answer_is_said_to_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, given_up = threading.Event(), threading.Event()
    messages: list[str] = []

    class Silent:
        """In place of a client: its scheduler answers once somebody has been told that it does not."""

        def __init__(self, **options: Any) -> None:
            assert options == {"address": "tcp://host:1", "timeout": "20 s"}
            if not told.wait(20):
                given_up.set()
            raise OSError("nobody is there")

    class Telling(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # Kept here: pytest's own handler is called behind this one, when the test may have ended.
            messages.append(record.getMessage())
            told.set()

    monkeypatch.setattr(cluster_module, "Client", Silent)
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 0.1)
    handler = Telling()
    cluster_module.logger.addHandler(handler)
    path = profile_file(tmp_path, site={"kind": "existing", "address": "tcp://host:1", "timeout": "20 s"})
    try:
        with pytest.raises(ClusterError, match="cannot reach the scheduler"), open_cluster("site", path):
            pass
    finally:
        cluster_module.logger.removeHandler(handler)
    assert not given_up.is_set()
    (text,) = messages
    assert text == (
        "no scheduler answers at tcp://host:1 yet, after 0.1 s; it goes on when one does, and gives up after 20 s"
        " (timeout, in a profile)"
    )


def test_a_scheduler_that_answers_is_not_said_to_be_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_module, "ANSWER_SECONDS", 20)
    before = set(threading.enumerate())
    with (
        LocalCluster(n_workers=0, processes=False, protocol="tcp://", dashboard_address=":0") as cluster,
        open_cluster(cluster.scheduler_address),
    ):
        for timer in set(threading.enumerate()) - before:
            if isinstance(timer, threading.Timer):
                timer.join(10)
                assert not timer.is_alive(), "it was cancelled"
    # By its address: what the test above told may come late, where the machine is busy.
    assert f"no scheduler answers at {cluster.scheduler_address}" not in caplog.text


def test_the_cuda_profile_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.kernels.gpu.device.devices", list)
    monkeypatch.setattr("tilewright.kernels.gpu.device.why_no_gpu", lambda: "No GPU: it was sold.")
    with (
        pytest.raises(DeviceUnavailableError, match=r"the cuda profile needs a GPU: it was sold; use"),
        open_cluster("cuda"),
    ):
        pass


@pytest.mark.parametrize("cluster", [None, 3])
def test_what_names_no_cluster_is_refused(cluster: Any) -> None:
    with (
        pytest.raises(ClusterError, match=f"cluster={cluster}: it must be a profile's name"),
        open_cluster(cluster),
    ):
        pass


@pytest.mark.parametrize(
    ("file", "module", "told"),
    [
        ("/home/me/study.py", None, True),
        ("/home/me/study.py", "study", True),  # python -m study
        ("/usr/bin/tilewright", None, False),
        ("/usr/bin/dask", None, False),
        ("/opt/tilewright/__main__.py", "tilewright.__main__", False),
        (None, None, False),  # a prompt, or a notebook
    ],
)
def test_a_script_that_its_workers_cannot_import_is_told_why(
    file: str | None, module: str | None, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setattr(cluster_module, "_check_script", lambda called: None)
    main.__spec__ = None if module is None else ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(cluster_module, "LocalCluster", failing(RuntimeError("Nanny failed to start.")))
    with pytest.raises(ClusterError, match=r"did not start \(Nanny failed to start\.\)") as raised:
        open_cluster("cpu").__enter__()
    assert ('`if __name__ == "__main__":`' in str(raised.value)) == told


def test_a_script_without_the_guard_ends_and_is_told_why(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from tilewright.pipeline.cluster.cluster import open_cluster\n"
        "with open_cluster('cpu') as client:\n    print(client)\n"
    )
    ended = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert ended.returncode == 1
    assert '`if __name__ == "__main__":`' in ended.stderr.splitlines()[-1]


SCRIPT = """
import tilewright as tw
if __name__ == "__main__":
    with tw.open_cluster("PROFILE", "profiles.yaml") as client:
        print(client.submit(len, "abc").result())
"""


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("profile", "arguments", "told"),
    [
        ("two", ["-"], "so a script read from standard input cannot start any; save it to a file"),
        ("two", ["/dev/stdin"], "so /dev/stdin, which is no file, cannot start any; save it to a file"),
        ("local", ["-"], None),
        ("two", ["-c", SCRIPT.replace("PROFILE", "two")], None),
    ],
)
def test_a_script_that_is_no_file_starts_no_worker_processes(
    profile: str, arguments: list[str], told: str | None, tmp_path: Path
) -> None:
    profile_file(tmp_path, two={"kind": "cpu", "n_workers": 1})
    ended = subprocess.run(
        [sys.executable, *arguments],
        input=SCRIPT.replace("PROFILE", profile),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    if told is None:
        assert ended.stdout == "3\n", ended.stderr
    else:
        assert ended.returncode == 1
        assert told in ended.stderr.splitlines()[-1]
        assert "Nanny" not in ended.stderr, "nothing was started"


def test_every_setting_has_an_environment_name_and_is_documented() -> None:
    names = [setting.name for setting in config.SETTINGS]
    assert len(set(names)) == len(names)
    for setting in config.SETTINGS:
        assert setting.environment.startswith("DASK_TILEWRIGHT__")
        assert setting.meaning


def test_the_page_of_settings_has_them_as_they_are() -> None:
    def row(setting: config.Setting) -> str:
        default = (
            "unset" if setting.default is None else f"`{yaml.safe_dump(setting.default).splitlines()[0]}`"
        )
        names = f"`{setting.name}`<br>`{setting.environment}`"
        return f"| {names} | {default} | {setting.unit} | {setting.meaning} |"

    page = (Path(__file__).parents[3] / "docs/settings.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [row(setting) for setting in config.SETTINGS]


def test_sizes_are_read_and_refused_by_name() -> None:
    assert config.get("device-memory", "8GiB") == 8 * 2**30
    assert config.get("device-memory", 123) == 123
    assert config.get("device-memory", "1.5kB") == 1500
    assert config.get("device-memory", "100 B") == 100
    for wrong in ("lots", "-3", "0", "", "GiB", "1e400", "nan", [1], True):
        with pytest.raises(OptionError, match=r"^device_memory \(--device-memory\): .* bytes"):
            config.get("device-memory", wrong)
    for wrong in (-5, "-3", 0, 0.5):
        with pytest.raises(
            OptionError, match=rf"{re.escape(repr(wrong))} is less than one byte; it must be more"
        ):
            config.get("device-memory", wrong)
    for wrong in (1.5, "1.5", "1.5B", " 1.5 b "):
        with pytest.raises(OptionError, match=r"device-memory.* is no whole number of bytes; .* say 1\.5GiB"):
            config.get("device-memory", wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retries", "abc"),
        ("retries", -1),
        ("read-threads", 0),
        ("tiles", 0),
        ("verify-rounds", "x"),
        ("verify-rounds", 65),
        ("host-share", 0),
        ("host-share", True),
        ("device-memory-share", True),
        ("cluster-file", 5),
        ("cluster-file", ""),
        ("share-panels", "nonsense"),
        ("share-panels", 1),
        ("share-panels", None),
        ("tiles", None),
        ("workers", 0),
        ("join-seconds", -1),
        ("join-seconds", True),
        ("join-seconds", float("nan")),
        ("panel-nbytes", None),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with (
        dask.config.set({f"tilewright.{name}": value}),
        pytest.raises(OptionError, match=f"tilewright.{name}"),
    ):
        config.get(name)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (
            "device-memry",
            "tilewright.device-memry: there is no such setting; did you mean tilewright.device-memory?",
        ),
        ("retrys", "did you mean tilewright.retries?"),
        ("xyzzy", "there is no such setting; there are accept-finished, cluster-file, "),
    ],
)
def test_settings_that_there_are_not_are_refused(name: str, match: str) -> None:
    with dask.config.set({f"tilewright.{name}": 1}), pytest.raises(OptionError, match=re.escape(match)):
        config.check_all()


def test_settings_are_a_group() -> None:
    with dask.config.set({"tilewright": None}):
        config.check_all()
    with (
        dask.config.set({"tilewright": "8GiB"}),
        pytest.raises(OptionError, match="'8GiB' holds no settings"),
    ):
        config.check_all()


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("environment", [{"DASK_CONFIG": "three"}, {"DASK_TILEWRIGHT": "3"}], ids=str)
def test_a_value_in_place_of_all_settings_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"text")
    command = [sys.executable, "-m", "tilewright", "histogram", "text"]
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "dask.yaml").write_text("tilewright: 3")
    ended = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: tilewright (DASK_TILEWRIGHT): 3 holds no settings; give them names")


def test_pieces_that_take_longer_to_hand_out_than_to_count_are_refused() -> None:
    with (
        dask.config.set({"tilewright.piece-nbytes": "32767"}),
        pytest.raises(
            OptionError, match=r"piece-nbytes .*: 32767 bytes are too few; it must be 32768 or more"
        ),
    ):
        config.check_all()
    with dask.config.set({"tilewright.piece-nbytes": "32 KiB", "tilewright.device-memory": 1}):
        config.check_all()


@pytest.mark.parametrize("name", ["device-memory", "device_memory"])
def test_dasks_two_spellings_of_a_setting_are_one(name: str) -> None:
    with dask.config.set({f"tilewright.{name}": "1GiB"}):
        config.check_all()
        assert config.get("device-memory") == 2**30


def test_a_client_that_cannot_be_waited_for_is_named() -> None:
    async def called_on_its_loop() -> None:
        async with (
            LocalCluster(n_workers=0, processes=False, dashboard_address=":0", asynchronous=True) as server,
            Client(server, asynchronous=True) as client,
        ):
            with pytest.raises(ClusterError, match="asynchronous, and this call waits"), open_cluster(client):
                pass

            def elsewhere() -> bool:
                with open_cluster(client) as same:
                    return same is client and client.nthreads() == {}

            assert await asyncio.to_thread(elsewhere)

    asyncio.run(called_on_its_loop())


def test_a_closed_client_is_named() -> None:
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as server:
        client = Client(server)
        client.close()
        with pytest.raises(ClusterError, match="the client is closed"), open_cluster(client):
            pass


def test_a_cluster_of_dasks_is_used_and_left_open() -> None:
    before = dask.config.get("scheduler", None)
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        for _ in range(2):
            with open_cluster(cluster) as client:
                assert client.submit(len, "abc").result() == 3
            assert client.status == "closed"
            assert cluster.status == Status.running
        with Client(cluster) as own:
            with open_cluster(cluster):
                pass
            assert own.submit(len, "abcd").result() == 4, "nor is a client of the caller's closed"
    assert dask.config.get("scheduler", None) == before
    with (
        pytest.raises(ClusterError, match=r"cannot connect to the LocalCluster: .*closed"),
        open_cluster(cluster),
    ):
        raise AssertionError("is not reached")


def test_what_is_like_a_cluster_of_dasks_is_taken_for_one() -> None:
    """As dask-gateway's, which is not of Dask's class."""
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        alike: Any = SimpleNamespace(
            scheduler_address=cluster.scheduler_address,
            status="running",
            asynchronous=False,
            loop=cluster.loop,
        )
        with open_cluster(alike) as client:
            assert len(client.nthreads()) == 1


def test_a_cluster_that_cannot_be_waited_for_is_named() -> None:
    async def called_on_its_loop() -> None:
        async with LocalCluster(
            n_workers=0, processes=False, dashboard_address=":0", asynchronous=True
        ) as cluster:
            with (
                pytest.raises(ClusterError, match="the LocalCluster is asynchronous, and this call waits"),
                open_cluster(cluster),
            ):
                pass

    asyncio.run(called_on_its_loop())


def test_in_place_of_a_block_what_it_gives_is_asked_for() -> None:
    unused: Any = open_cluster("local")
    with (
        pytest.raises(ClusterError, match=r"pass what its `with` gives: with tilewright\.open_cluster"),
        open_cluster(unused),
    ):
        raise AssertionError("is not reached")


FORKS = """
import multiprocessing, sys
import tilewright as tw
from distributed import Client, LocalCluster

def child(client):
    try:
        with tw.open_cluster(client or "local") as client:
            print(client.submit(len, b"x" * 20_000_000).result())
    except tw.ClusterError as error:
        print(error)

def fork(client=None):
    forked = multiprocessing.get_context("fork").Process(target=child, args=(client,))
    forked.start()
    forked.join(60)
    assert forked.exitcode == 0, forked.exitcode

fork()  # before anything used Dask
if sys.argv[1] == "ours":
    with tw.open_cluster("local"):
        pass
    fork()
elif sys.argv[1] == "client":
    with tw.open_cluster("local") as client:
        fork(client)
else:
    options = {"processes": False, "dashboard_address": ":0"}
    with LocalCluster(n_workers=1, **options) as cluster, Client(cluster) as client:
        assert client.submit(len, b"x" * 20_000_000).result() == 20_000_000
    fork()
"""


@pytest.mark.more
@pytest.mark.sample(1)
@pytest.mark.parametrize("used", ["dask", "ours", "client"])
def test_a_process_forked_from_one_that_used_dask_is_told(used: str, tmp_path: Path) -> None:
    """It would wait for threads that it does not have. One that was forked before works."""
    (tmp_path / "forks.py").write_text(FORKS)
    command = [sys.executable, "-W", "ignore", "forks.py", used]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    before, after = ended.stdout.splitlines()
    assert before == "20000000"
    assert " was forked from one that had used Dask, whose threads a fork leaves behind; " in after


@pytest.mark.slow
def test_a_dashboard_is_started_for_a_profile_that_asks_for_it(tmp_path: Path) -> None:
    """Its import takes longer than all else of a start."""
    profiles = {
        "bare": {"kind": "cpu", "n_workers": 1},
        "null": {"kind": "cpu", "n_workers": 1, "dashboard_address": None, "scheduler_kwargs": {"idle_timeout": 100}},
        "local": {"kind": "local"},
        "asked": {"kind": "cpu", "n_workers": 1, "dashboard_address": ":0"},
    }  # fmt: skip
    path = profile_file(tmp_path, **profiles)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, tilewright as tw\n"
        "if __name__ == '__main__':\n"
        "    for name in sys.argv[2:]:\n"
        "        with tw.open_cluster(name, config=sys.argv[1]) as client:\n"
        "            assert not client.dashboard_link.endswith(':8787/status'), client.dashboard_link\n"
        "        print(name, 'bokeh' in sys.modules)\n"
    )
    command = [sys.executable, str(script), str(path), *profiles]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["bare False", "null False", "local False", "asked True"], done.stderr
