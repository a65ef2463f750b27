"""What kernels of the site's notebooks start with: cells of ``%%bash`` show what a command says in its own order, whole
lines at once, where IPython's would show standard error behind standard output, in pieces."""

import subprocess

from IPython import get_ipython


def bash(line, cell):
    done = subprocess.run(
        ["bash", "-e"], input=cell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}")


get_ipython().register_magic_function(bash, "cell", "bash")
