"""Signatures formed on a GPU equal those of the cores, and of Python's own means: in the simulator, on a GPU, and as
machine code where there is neither."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.duplicates import naive_shingles as naive
from tests.kernels.gemm.machine_code import assemble, assert_no_spills, sampled
from tests.sampling import examples
from tilewright.kernels.choices import FORMS, HASHES, SCHEMES, SHINGLES
from tilewright.kernels.duplicates.folding import COUNT_SHIFT, LENGTH_SHIFT, UNSETTLED, folding_of
from tilewright.kernels.duplicates.signing import Signing, Signs, sign_on_cores
from tilewright.kernels.duplicates.signing_memory import TABLES_NBYTES, signer_nbytes
from tilewright.kernels.gpu.compiled import compiling_for
from tilewright.kernels.gpu.device_choice import SIMULATOR
from tilewright.kernels.histograms.token_kinds import TokenKind

pytest_device = pytest.mark.parametrize(
    "device",
    [pytest.param("simulator", marks=pytest.mark.simulator), pytest.param("gpu", marks=pytest.mark.gpu)],
)

# Letters that become several when folded, marks that combine, Hangul that does, what is no UTF-8, and words at the
# lengths where hashes take another step.
SPECIAL = (
    *(
        "aa",
        "b ",
        "Ab ",
        "Ä",
        "ẞ ",
        "ﬁ",
        "Ⅳ ",
        "\u0301",
        "\u037a",
        ", ",
        "\n",
        "😀",
        "ΐ ",
        "ǰ",
        "가",
        "\u1161",
    ),
    *("K ", "x" * 16 + " ", "y" * 54 + " ", "z" * 61 + " ", "\ufffd", "é ", "नि "),
)
fragments = st.one_of(
    st.sampled_from(SPECIAL).map(str.encode),
    st.sampled_from([b"\xff", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\x80\x80"]),
    st.text(max_size=3).map(lambda text: text.encode(errors="surrogatepass")),
)
documents_of = st.lists(st.lists(fragments, max_size=14).map(b"".join), min_size=1, max_size=5)
kinds = st.builds(
    TokenKind,
    st.just("shingle"),
    st.sampled_from(SHINGLES),
    st.integers(1, 6),
    st.booleans(),
    st.none() | st.sampled_from(FORMS),
)
signings = st.builds(
    Signing,
    kinds,
    st.sampled_from(HASHES),
    st.sampled_from(SCHEMES),
    st.sampled_from([4, 7, 17]),
    st.sampled_from([1, 2**32 - 1]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
)


def usual(unit: str = "word", n: int = 5, **changes: Any) -> Signing:
    kind = TokenKind("shingle", unit, n, changes.pop("casefold", False), changes.pop("normalise", None))
    of: dict[str, Any] = {
        "hash": "sha1",
        "scheme": "affine32",
        "num_perm": 128,
        "seed": 1,
        "bands": 21,
        "rows": 6,
    }
    return Signing(kind, **{**of, **changes})


def signed(documents: list[bytes], signing: Signing, signer: Any = None) -> Signs:
    from numba import cuda

    from tilewright.kernels.duplicates.device_signing import DeviceSigner

    data = np.frombuffer(b"".join(documents), np.uint8)
    edges = np.cumsum([0, *map(len, documents)])
    text = cuda.to_device(np.append(data, np.uint8(0)))
    signer = DeviceSigner(signing) if signer is None else signer
    found: Signs = signer.sign(text, data, edges, cuda.stream(), signatures=True)
    return found


def assert_as_on_cores(documents: list[bytes], signing: Signing, signer: Any = None) -> Signs:
    data = np.frombuffer(b"".join(documents), np.uint8)
    wanted = sign_on_cores(data, np.cumsum([0, *map(len, documents)]), signing, signatures=True)
    found = signed(documents, signing, signer)
    np.testing.assert_array_equal(found.shingled, wanted.shingled)
    assert found.signatures is not None
    assert wanted.signatures is not None
    np.testing.assert_array_equal(found.signatures, wanted.signatures)
    np.testing.assert_array_equal(found.keys, wanted.keys)
    return found


@pytest_device
@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(documents=documents_of, signing=signings)
def test_equals_python(device: str, documents: list[bytes], signing: Signing) -> None:
    found = assert_as_on_cores(documents, signing)
    kind = signing.kind
    expected = [naive.shingles(text, kind.unit, kind.n, kind.casefold, kind.normalise) for text in documents]
    assert found.shingled.tolist() == [bool(row) for row in expected]
    assert found.signatures is not None
    assert found.signatures.tolist() == [
        naive.signature(
            [naive.hash_of(each, signing.hash) for each in row],
            signing.scheme,
            signing.num_perm,
            signing.seed,
        )
        for row in expected
    ]


@pytest_device
@pytest.mark.parametrize("unit", SHINGLES)
def test_documents_beyond_tiles_and_empty_ones(device: str, unit: str) -> None:
    from tilewright.kernels.duplicates.device_minhash import CHUNK
    from tilewright.kernels.duplicates.signing_memory import TILE

    signing = usual(unit, 2, num_perm=5, bands=2, rows=2)
    long = b" ".join(b"w%d" % number for number in range(CHUNK + 3))
    for documents in (
        [b""],
        [b"", b"", b""],
        [b"", b"ab cd ef", b"", b"", b"x"],
        [b". ,"],
        [long, b"", long + b" more"],
        [b"a", b"b"] * (CHUNK // 2 + 1),
        [b"x" * (2 * TILE + 3), b"x" * TILE, b"y"],
        [bytes(TILE), b"\xff" * (TILE + 1)],
    ):
        assert_as_on_cores(documents, signing)


@pytest_device
def test_a_signer_is_used_again_for_more_and_for_fewer(device: str) -> None:
    from tilewright.kernels.duplicates.device_signing import DeviceSigner

    signing = usual("word", 2, num_perm=6, bands=2, rows=3, casefold=True, normalise="NFC")
    signer = DeviceSigner(signing)
    for documents in (
        [b"One two THREE four"],
        [b"a b c d " * 9, "e\u0301 x".encode(), b"one"],
        [b"", b"TWO one"],
    ):
        found = assert_as_on_cores(documents, signing, signer)
        assert found.others == sum("\u0301".encode() in each for each in documents)
    assert signer.nbytes > 0


@pytest_device
@pytest.mark.parametrize("unit", SHINGLES)
@pytest.mark.parametrize(("length", "documents"), [(1, 1), (7, 3), (40, 5), (3, 40)])
def test_a_signer_takes_what_a_plan_says(device: str, unit: str, length: int, documents: int) -> None:
    """Of characters that much, and of words no more."""
    from numba import cuda

    from tilewright.kernels.duplicates.device_signing import DeviceSigner

    signing = usual(unit, 2, num_perm=6, bands=3, rows=2)
    text = (b"ab" * length)[:length]
    data, edges = np.frombuffer(text * documents, np.uint8), length * np.arange(documents + 1)
    for ends in (None, edges[1:]):
        signer = DeviceSigner(signing)
        tables = signer.nbytes
        signer.sign(cuda.to_device(data), data, edges, cuda.stream(), signatures=True, ends=ends)
        planned = signer_nbytes(
            len(data), documents, unit=unit, num_perm=6, bands=3, with_ends=ends is not None
        )
        if unit == "character":
            assert signer.nbytes - tables == planned - TABLES_NBYTES
        assert signer.nbytes <= planned


@pytest_device
@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(documents=documents_of, signing=signings, gaps=st.lists(st.sampled_from([0, 1, 2]), min_size=5))
def test_what_stands_between_documents_is_of_none(
    device: str, documents: list[bytes], signing: Signing, gaps: list[int]
) -> None:
    """The documents are only on the device; behind each stand so many bytes that are of no document."""
    from numba import cuda

    from tilewright.kernels.duplicates.device_signing import DeviceSigner

    behind = [b"\r\n"[2 - gap :] for gap in gaps[: len(documents)]]
    data = np.frombuffer(b"".join(each + end for each, end in zip(documents, behind, strict=True)), np.uint8)
    lengths = [len(each) + len(end) for each, end in zip(documents, behind, strict=True)]
    edges = np.cumsum([0, *lengths])
    ends = edges[:-1] + [len(each) for each in documents]
    text = cuda.to_device(np.append(data, np.uint8(0)))
    found = DeviceSigner(signing).sign(text, None, edges, cuda.stream(), signatures=True, ends=ends)
    edges = np.cumsum([0, *map(len, documents)])
    wanted = sign_on_cores(np.frombuffer(b"".join(documents), np.uint8), edges, signing, signatures=True)
    for name in ("shingled", "keys", "signatures"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)


@pytest.mark.parametrize("casefold", [False, True])
@pytest.mark.parametrize("form", [None, *FORMS])
def test_what_is_folded_by_a_table_is_what_python_folds(
    casefold: bool, form: Any, rng: np.random.Generator
) -> None:
    """Whatever stands beside it: random texts of characters that the table settles."""
    kind = TokenKind("shingle", "character", 1, casefold, form)
    folding = folding_of(kind)
    settled = np.flatnonzero(folding.numbers != UNSETTLED)
    settled = settled[(settled < 0xD800) | (settled >= 0xE000)]
    assert len(settled) > 900_000
    # Those that fold, that are near such as combine, and all others.
    special = np.flatnonzero(folding.numbers > UNSETTLED)
    chosen = np.concatenate(
        [rng.choice(settled, 20_000), special, rng.choice(settled[settled < 0x3100], 20_000)]
    )
    rng.shuffle(chosen)
    text = "".join(map(chr, chosen.tolist()))
    becomes = []
    for code in chosen.tolist():
        number = int(folding.numbers[code])
        if number:
            packed = int(folding.folded[number])
            data = packed.to_bytes(8, "little")[: packed >> LENGTH_SHIFT & 15]
            assert len(data.decode()) == packed >> COUNT_SHIFT
            becomes.append(data.decode())
        else:
            becomes.append(chr(code))
    assert "".join(becomes) == kind.folded(text)
    if form is not None:
        assert all(folding.numbers[ord(mark)] == UNSETTLED for mark in "\u0301\u0327")
        assert unicodedata.normalize(form, "é") == "é" or folding.numbers[ord("é")] == UNSETTLED


def large_documents(rng: np.random.Generator) -> dict[str, list[bytes]]:
    """Some MB: natural, of several scripts, and noise, in documents of many lengths."""
    ranks = rng.zipf(1.2, 1_000_000) % 300_000
    words = [b"%x" % (rank * 2654435761 % 2**32) for rank in range(300_000)]
    english = b" ".join([words[rank] for rank in ranks.tolist()])
    cuts = np.unique(rng.integers(0, len(english), 3000))
    codes = rng.choice(
        [ord("\n"), 0x20, *range(0x4E00, 0x4F00), *range(0x410, 0x450), 0x301, 0x1F600], 500_000
    )
    scripts = "".join(map(chr, codes.tolist())).encode()
    edges = bytes.fromhex("0a0d20417f808f909fa0bfc0c1c2dfe0e1ecedeeeff0f1f3f4f5ff")
    noise = bytes(rng.choice(np.frombuffer(edges, np.uint8), 500_000))
    return {
        "english": [
            english[a:b] for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(english)], strict=True)
        ],
        "one": [english],
        "scripts": [scripts[place : place + 77_777] for place in range(0, len(scripts), 77_777)],
        "noise": [noise[:10], noise[10:]],
        "lines": english[:400_000].replace(b"a", b"\n").splitlines(),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("hash_name", HASHES)
@pytest.mark.parametrize("unit", SHINGLES)
def test_equals_the_cpu(unit: str, hash_name: str, scheme: str, rng: np.random.Generator) -> None:
    for casefold in (False, True):
        signing = usual(unit, 5, hash=hash_name, scheme=scheme, casefold=casefold)
        for documents in large_documents(rng).values():
            assert_as_on_cores(documents, signing)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "num_perm", "bands", "rows"), [(1, 1, 1, 1), (13, 300, 20, 13), (1000, 129, 1, 129)]
)
@pytest.mark.parametrize("form", [None, "NFC", "NFKD"])
def test_any_sizes_equal_the_cpu(
    n: int, num_perm: int, bands: int, rows: int, form: Any, rng: np.random.Generator
) -> None:
    for unit in SHINGLES:
        signing = usual(unit, n, num_perm=num_perm, bands=bands, rows=rows, normalise=form)
        for documents in large_documents(rng).values():
            few = [each[:5000] for each in documents[:200]]
            assert_as_on_cores(few, signing)


def compiled_variants() -> list[Any]:
    if SIMULATOR:
        return []
    from tilewright.kernels.duplicates.device_minhash import variants

    return sampled(list(variants()), 6)


@pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
@pytest.mark.parametrize("variant", compiled_variants())
def test_becomes_machine_code(variant: Any, tmp_path: Path) -> None:
    from numba import cuda

    with compiling_for((9, 0)):
        text, _ = cuda.compile_ptx(variant.function, variant.signature, cc=(9, 0))
    report = assemble(text, "sm_90", tmp_path)
    assert_no_spills(report)
    assert " 0 bytes stack frame" in report
    assert ".f64" not in text, "words and numbers with a sign become floats together"
