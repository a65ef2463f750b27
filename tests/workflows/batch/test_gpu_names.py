"""What names of GPUs tell without Slurm."""

from __future__ import annotations

import pytest

from tilewright.pipeline.errors import ClusterError
from tilewright.pipeline.forecast.hardware import MODELS, model_called
from tilewright.workflows.batch.gpu_names import CAPABILITIES, LEAST, doubts, model_in
from tilewright.workflows.batch.profile import read_profile


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("h100", "h100"), ("H100", "h100"), ("nvidia_h100_80gb_hbm3", "h100"), ("h100_nvl", "h100"),
        ("a100_3g.20gb", "a100"), ("nvidia_a100-sxm4-80gb", "a100"), ("tesla_v100-sxm2-32gb", "v100"),
        ("rtx_2080_ti", "rtx2080"), ("rtx3090", "rtx3090"), ("nvidia_l40s", "l40s"), ("mi250x", "mi250x"),
        ("h1000", None), ("ampere", None), ("gpu", None),
    ],
)  # fmt: skip
def test_a_model_is_a_whole_word_of_a_name(name: str, model: str | None) -> None:
    assert model_in(name) == model


def test_models_that_plans_know_are_known() -> None:
    for name, gpu in MODELS.items():
        found = model_in(name)
        assert found is not None
        assert CAPABILITIES[found] >= LEAST
        assert model_called(name) == gpu


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus_per_node": "k80:4"}, "p: gpus_per_node: k80 has compute capability 3.7, and kernels need 5.0 at least"),
        ({"gpus_per_node": 4, "constraint": "rack1&mi250"}, "p: constraint: mi250 is a GPU of AMD's, and kernels"),
        ({"gpus_per_node": "mi300a:4"}, "p: gpus_per_node: mi300a is a GPU of AMD's"),
    ],
)  # fmt: skip
def test_gpus_on_which_no_kernel_runs_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ClusterError) as raised:
        read_profile("p", options)
    assert str(raised.value).startswith(said)
    read_profile("p", {"constraint": "mi250"})  # its cores work


@pytest.mark.parametrize(
    ("gpus", "constraint", "said"),
    [
        ("h100", None, None),
        ("h100", "h100&nvlink", None),
        ("a100_80", "a100", None),
        (None, "rack1", None),
        (
            "h100",
            "a100",
            "p says gpus_per_node: h100 and constraint: a100: no node has both, if these are its GPUs",
        ),
        (
            "h1000",
            None,
            "p says gpus_per_node: h1000, which is no model that is known here; did you mean h100?",
        ),
        (
            "v100",
            None,
            "p says gpus_per_node: v100, of compute capability 7.0: CUDA 13 has no code for it, so that",
        ),
    ],
)
def test_what_may_be_wrong_is_doubted(gpus: str | None, constraint: str | None, said: str | None) -> None:
    given = {"gpus_per_node": gpus, "constraint": constraint}
    found = doubts("p", [(key, name) for key, text in given.items() for name in (text or "").split("&") if name],
                   unknown=False)  # fmt: skip
    assert [line[: len(said or "")] for line in found] == ([] if said is None else [said])
