"""What is known on the submitting host of the GPUs that a profile names, by their names alone.

Sites give their GPUs what names they like, and Slurm alone knows which it has. But a name that is a model's says what
the job's workers will find, and one that is nearly a model's is likely misspelt.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from tilewright.kernels.words import did_you_mean
from tilewright.pipeline.errors import ClusterError

Capability = tuple[int, int]

CAPABILITIES: dict[str, Capability] = {
    "k20": (3, 5), "k40": (3, 5), "k80": (3, 7), "m40": (5, 2), "m60": (5, 2),
    "p100": (6, 0), "p4": (6, 1), "p40": (6, 1), "gtx1080": (6, 1), "gtx1080ti": (6, 1),
    "v100": (7, 0), "v100s": (7, 0), "titanv": (7, 0),
    "t4": (7, 5), "rtx2080": (7, 5), "rtx2080ti": (7, 5), "titanrtx": (7, 5),
    "a100": (8, 0), "a30": (8, 0), "a2": (8, 6), "a10": (8, 6), "a16": (8, 6), "a40": (8, 6),
    "a4000": (8, 6), "a5000": (8, 6), "a6000": (8, 6), "rtx3080": (8, 6), "rtx3090": (8, 6),
    "l4": (8, 9), "l40": (8, 9), "l40s": (8, 9), "rtx4090": (8, 9),
    "h100": (9, 0), "h200": (9, 0), "gh200": (9, 0), "h20": (9, 0), "h800": (9, 0),
    "b200": (10, 0), "gb200": (10, 0), "b300": (10, 3), "gb300": (10, 3), "rtx5090": (12, 0),
}  # fmt: skip
"""Of models of NVIDIA's, as CUDA's documentation lists them, by the part of their names that sites agree on."""
OTHERS = dict.fromkeys(
    ("mi50", "mi60", "mi100", "mi200", "mi210", "mi250", "mi250x", "mi300", "mi300a", "mi300x"), "AMD"
)
"""Models for which there is no CUDA, and whose they are."""
LEAST: Capability = (5, 0)
"""What Numba compiles kernels for."""
LEAST_OF_CUDA_13: Capability = (7, 5)


def model_in(name: str) -> str | None:
    """The model that a type of GPUs or a feature of nodes names: a whole word of it, as ``a100`` in
    ``nvidia_a100-sxm4-80gb``; None where there is none, or it is not known."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    pairs = [first + second for first, second in itertools.pairwise(words)]  # rtx_3090
    return next((word for word in [*pairs, *words] if word in CAPABILITIES or word in OTHERS), None)


def check_gpus(called: str, names: Sequence[tuple[str, str]]) -> None:
    """Raise ClusterError where one of the names, each with the key that says it, is that of GPUs on which no kernel
    runs."""
    for key, name in names:
        model = model_in(name)
        if model in OTHERS:
            raise ClusterError(
                f"{called}: {key}: {name} is a GPU of {OTHERS[model]}'s, and kernels are for NVIDIA's: take nodes with"
                f" one of these, such as {key}: h100, or without gpus_per_node, whose cores work"
            )
        if model is not None and CAPABILITIES[model] < LEAST:
            raise ClusterError(
                f"{called}: {key}: {name} has compute capability {_text(CAPABILITIES[model])}, and kernels need"
                f" {_text(LEAST)} at least; take other GPUs, or leave gpus_per_node away, so that cores work"
            )


def doubts(called: str, names: Sequence[tuple[str, str]], *, unknown: bool) -> list[str]:
    """What may be wrong with GPUs of these names, for people; whether it is Slurm knows. unknown: whether a type that
    is like no model's name is worth a word, which may be the site's own."""
    found = []
    models = {model: f"{key}: {name}" for key, name in names if (model := model_in(name)) is not None}
    if len(models) > 1:
        found.append(
            f"{called} says {' and '.join(models.values())}: no node has both, if these are its GPUs"
        )
    for model, said in models.items():
        if model in CAPABILITIES and CAPABILITIES[model] < LEAST_OF_CUDA_13:
            found.append(
                f"{called} says {said}, of compute capability {_text(CAPABILITIES[model])}: CUDA 13 has no code for it,"
                " so that nodes need the wheels of CUDA 12 (cu12); nothing was tried on one, and its tensor cores are"
                " not used"
            )
    for key, name in names:
        if key == "gpus_per_node" and model_in(name) is None:
            usable = [model for model, capability in CAPABILITIES.items() if capability >= LEAST]
            near = did_you_mean(name, usable, name="{}")
            if near:
                found.append(f"{called} says {key}: {name}, which is no model that is known here{near}")
            elif unknown:
                found.append(
                    f"{called} says {key}: {name}, which is no model that is known here, so that it is right if Slurm"
                    f" has GPUs of this type; known are {', '.join(usable)}"
                )
    return found


def _text(capability: Capability) -> str:
    return ".".join(map(str, capability))
