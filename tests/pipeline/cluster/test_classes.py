"""Profiles of kind class: any cluster that has an address and a way to close, and one line for what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask
import pytest
import yaml
from distributed import LocalCluster

from tilewright.pipeline.cluster.cluster import open_cluster
from tilewright.pipeline.errors import ClusterError

HERE = __name__
closed: list[Any] = []


class Site:
    """As some libraries' clusters: not of Dask's class, and without workers until it is scaled."""

    asynchronous = False

    def __init__(self, **options: Any) -> None:
        if "boom" in options:
            raise OSError("no such queue\nsee the administrator")
        print("noise")
        self.options = options
        self.inner = LocalCluster(n_workers=0, processes=False, dashboard_address=":0")
        self.scheduler_address = self.inner.scheduler_address
        self.talks = dask.config.get("logging")["distributed"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what Dask's client asks of a cluster

    def scale(self, count: int) -> None:
        self.inner.scale(count)

    def adapt(self, *, minimum: int) -> None:
        self.inner.scale(minimum)

    def close(self) -> None:
        closed.append(self.options | {"talks": self.talks})
        self.inner.close()


def of_profile(folder: Path, **profile: Any) -> str:
    path = folder / "profiles.yaml"
    path.write_text(yaml.safe_dump({"profiles": {"site": {"kind": "class", **profile}}}))
    return str(path)


@pytest.mark.parametrize("size", [{"scale": 2}, {"adapt": {"minimum": 2}}])
def test_a_cluster_of_any_class_is_started_scaled_and_ended(
    size: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closed.clear()
    path = of_profile(tmp_path, **{"class": f"{HERE}.Site"}, queue="gpu", **size)
    with open_cluster("site", path) as client:
        client.wait_for_workers(2, timeout=30)
        assert client.submit(sum, [1, 2]).result() == 3
        assert not closed
    assert closed == [{"queue": "gpu", "talks": "info"}]
    assert capsys.readouterr().out == "", "standard output is for results"
    assert client.status == "closed"


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({}, r"class: None names no class; give a dotted name, such as dask_jobqueue\.SLURMCluster$"),
        ({"class": "Site"}, "class: 'Site' names no class"),
        (
            {"class": "no_such.Site"},
            r"no_such cannot be imported \(ModuleNotFoundError: No module named 'no_such'\)",
        ),
        ({"class": f"{HERE}.Sight"}, f"class: {HERE} has no Sight"),
        ({"class": "os.sep"}, "class: os.sep is '/', and nothing that makes a cluster"),
        (
            {"class": "builtins.dict", "a": 1},
            r"what builtins.dict makes, \{'a': 1\}, is no cluster of Dask's",
        ),
        (
            {"class": "distributed.LocalCluster", "n_worker": 2},
            "takes no 'n_worker'; did you mean 'n_workers'",
        ),
        (
            {"class": f"{HERE}.Site", "boom": 1},
            "Site did not start: OSError: no such queue see the administrator",
        ),
        ({"class": f"{HERE}.Site", "scale": 0}, "scale: 0 is no number of workers; it must be 1 or more"),
        ({"class": f"{HERE}.Site", "adapt": 3}, r"adapt: 3 is no mapping, such as \{minimum: 1"),
        ({"class": f"{HERE}.Site", "adapt": {"least": 1}}, "adapt: .*Site refuses it: TypeError: .*'least'"),
        ({"class": f"{HERE}.Site", "adapt": {}, "scale": 1}, "says scale and adapt; leave one away"),
        ({"class": f"{HERE}.Site", "asynchronous": True}, "asynchronous: nobody would wait for the cluster"),
    ],
)
def test_what_is_no_cluster_gets_one_line(profile: dict[str, Any], expected: str, tmp_path: Path) -> None:
    path = of_profile(tmp_path, **profile)
    with (
        pytest.raises(ClusterError, match=f"^profile 'site' of .*{expected}") as told,
        open_cluster("site", path),
    ):
        pass
    assert "\n" not in str(told.value)


def test_a_key_that_is_no_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profiles.yaml"
    path.write_text(f"profiles: {{site: {{kind: class, class: {HERE}.Site, 3: 4}}}}")
    with pytest.raises(ClusterError, match="3 is no keyword"), open_cluster("site", str(path)):
        pass
