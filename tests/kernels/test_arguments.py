"""Arguments of wrong types and values are refused by an error of ours that says which one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tilewright.kernels import DocumentOffsets, dot, histogram, matmul
from tilewright.kernels.arguments import as_count, check_choice, check_flag, shown
from tilewright.kernels.errors import (
    DeviceMemoryError,
    DTypeError,
    OptionError,
    OutputError,
    ShapeError,
    TilewrightError,
)

A = np.arange(6.0).reshape(2, 3)
TEXT = np.frombuffer(b"some text", np.uint8)
VECTOR = np.arange(3.0)
MASKED = np.ma.masked_equal(A, 3)
RAGGED = [[1], [2, 3]]
TWO = np.array([1, 2])


class NoText:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __str__ = __repr__


class NoArray:
    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("no array\nof two lines")


@pytest.mark.parametrize("value", ["yes", "", 1, 0, None, TWO, np.int8(1), 1.0, NoText()])
def test_only_truth_values_are_flags(value: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "transpose_a": lambda: matmul(A, A.T, transpose_a=value),
        "transpose_b": lambda: matmul(A, A.T, transpose_b=value),
        "accumulate": lambda: matmul(A, A.T, accumulate=value),
        "conjugate": lambda: dot(VECTOR, VECTOR, conjugate=value),
    }
    for name, call in calls.items():
        with pytest.raises(OptionError, match=rf"^{name}=.* is neither true nor false; pass True or False"):
            call()


def test_truth_values_of_numpy_are_flags() -> None:
    np.testing.assert_array_equal(matmul(A, A, transpose_a=np.True_, transpose_b=np.False_), A.T @ A)
    assert check_flag("raw", np.False_) is False


@pytest.mark.parametrize("value", [TWO, [], {}, None, 3, NoText(), b"auto", "AUTO"])
def test_a_word_is_one_of_those_there_are(value: Any) -> None:
    """An array cannot be compared with a word, nor can a list be looked up."""
    with pytest.raises(OptionError, match=r"^device=.* is unknown; it may be 'auto', 'cuda', 'cpu'"):
        matmul(A, A.T, device=value)
    with pytest.raises(OptionError, match=r"^precision=.* is unknown; it may be 'full'"):
        matmul(A, A.T, precision=value)
    with pytest.raises(OptionError, match=r"^by=.* is no kind of histogram; it may be 'byte'"):
        histogram(TEXT, by=value)


def test_a_word_of_numpy_is_one() -> None:
    assert type(check_choice("device", np.str_("cpu"), ("auto", "cpu"))) is str


@pytest.mark.parametrize("stream", ["0", 2.5, True, -1, object(), NoText()])
def test_what_is_no_stream_is_refused_on_a_cpu_too(stream: Any) -> None:
    for call in (
        lambda: matmul(A, A.T, stream=stream, device="cpu"),
        lambda: dot(VECTOR, VECTOR, stream=stream, device="cpu"),
        lambda: histogram(TEXT, stream=stream, device="cpu"),
    ):
        with pytest.raises(OptionError, match=r"^stream=.* is not a CUDA stream"):
            call()


@pytest.mark.parametrize("value", [RAGGED, NoArray()])
def test_what_is_no_array_is_named(value: Any) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "b": lambda: matmul(A, value),
        "y": lambda: dot(VECTOR, value),
        "data": lambda: histogram(value),
        "offsets": lambda: histogram(TEXT, offsets=value),
    }
    for name, call in calls.items():
        with pytest.raises(DTypeError, match=f"^{name} is no array that NumPy understands") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_masks_are_not_ignored() -> None:
    """Neither is a masked array without a mask taken: whether it is would depend on the data."""
    calls: dict[str, Callable[[], Any]] = {
        "a": lambda: matmul(MASKED, A.T),
        "b": lambda: matmul(A.T, np.ma.array(A)),
        "x": lambda: dot(MASKED[0], VECTOR),
        "data": lambda: histogram(np.ma.array(TEXT, mask=TEXT > 100)),
        "offsets": lambda: DocumentOffsets(np.ma.array([0, 3], mask=[0, 1])),
    }
    for name, call in calls.items():
        with pytest.raises(OptionError, match=rf"^{name} is a masked array, .* pass {name}\.filled\(0\)"):
            call()
    for masked in (np.ma.zeros((2, 2)), np.ma.zeros(256, np.int64)):
        with pytest.raises(OutputError, match=r"^out is a masked array"):
            matmul(A, A.T, masked) if masked.ndim == 2 else histogram(TEXT, out=masked)


def test_unsigned_offsets_beyond_int64_are_named_as_they_are() -> None:
    with pytest.raises(ShapeError, match=r"^offsets reach to 9223372036854775808; they must fit int64"):
        DocumentOffsets(np.array([0, 2**63], np.uint64))


@pytest.mark.parametrize(
    "dtype", [NoText(), {"names": ["a"]}, [("a", "f4")], "i4,f4", "(2,3)f8", "O", "M8[s]", "a\0b"]
)
def test_what_is_no_element_type_is_refused(dtype: Any) -> None:
    with pytest.raises(DTypeError, match=r"^dtype="):
        matmul(A, A.T, dtype=dtype)


def test_a_result_that_no_memory_holds_is_an_error_of_ours() -> None:
    long = np.broadcast_to(1.0, (2**31, 1))
    with pytest.raises(DeviceMemoryError, match="a product of 2147483648 × 2147483648 needs"):
        matmul(long, long.T, device="cpu")
    with pytest.raises(DeviceMemoryError, match=r"a histogram of \d+ × 1114112 needs"):
        histogram(TEXT, by="codepoint", offsets=np.zeros(2**26, np.int64), device="cpu")


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("a\nb\r\n  c", "a b c"),
        ("name\0 and \x1b[31m", r"name\x00 and \x1b[31m"),
        ("a\u2028b\x85c", "a b c"),
        ("tab\there", r"tab\x09here"),
        ("Ünd 👍 \udcff", "Ünd 👍 \udcff"),
    ],
)
def test_a_message_is_one_line_without_control_characters(message: str, line: str) -> None:
    for error in (TilewrightError, OptionError, DeviceMemoryError):
        assert str(error(message)) == line


def test_values_are_shown_in_one_short_line() -> None:
    assert shown("a") == "'a'"
    assert shown("a  b") == "'a  b'"
    assert shown(NoText()) == f"an object of {__name__}.NoText"
    assert shown(10**5000) == "an object of builtins.int"
    assert shown(np.zeros((3, 3))) == "array([[0., 0., 0.], [0., 0., 0.], [0., 0., 0.]])"
    assert len(shown("x" * 1000)) == 80


def test_counts_are_whole_numbers_of_python_or_numpy() -> None:
    assert [as_count(value) for value in (3, np.int8(3), np.uint64(3), 2**70)] == [3, 3, 3, 2**70]
    assert [as_count(value) for value in (True, np.True_, 3.0, "3", None, TWO)] == [None] * 6
