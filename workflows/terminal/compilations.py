"""What is said, on the terminal, of kernels that a command had to compile."""

from __future__ import annotations

import click

from tilewright.kernels.shipped.lacking import compilations


def tell_compilations() -> None:
    """Say which kernels this process had to compile although there is a file of shipped ones, which lacks them."""
    found = [one for one in compilations() if one.beyond is not None]
    if not found:
        return
    from tilewright.kernels.numbers import counted  # which imports NumPy

    names = ", ".join(dict.fromkeys(one.kernel for one in found))
    seconds = sum(one.seconds for one in found)
    file = " and ".join(dict.fromkeys(str(one.beyond) for one in found))
    click.echo(
        f"compiled {counted(len(found), 'kernel')} in {seconds:.1f} s, which {file} has not got: {names}",
        err=True,
    )
