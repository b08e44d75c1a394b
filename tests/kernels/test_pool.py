"""The thread pool: a stress program of its own, and what Python sees of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.build import FLAGS, SOURCES, find_compiler
from slipstream.kernels.cpu.library import Kernels
from slipstream.kernels.cpu.matrix import PackedMatrix
from slipstream.kernels.formats import Format
from tests.kernels.emulate import random_matrix

# Loads what numpy and torch do not: quick in a child.
THREADS = "from slipstream.kernels.cpu.library import kernels; print(kernels().threads)"


@pytest.mark.usefixtures("library")
def test_stress(tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    program = tmp_path / "pool_stress"
    sources = [Path(__file__).with_name("pool_stress.cpp"), SOURCES / "pool.cpp", SOURCES / "error.cpp"]
    subprocess.run([*compiler, *FLAGS, f"-I{SOURCES}", *map(str, sources), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_threads_can_be_set(library: Kernels) -> None:
    library.set_threads(3)
    assert library.threads == 3
    for bad in (0, -1, 65):
        with pytest.raises(ConfigError, match=r"threads must be from 1 to 64, but got"):
            library.set_threads(bad)
    assert library.threads == 3


def test_threads_are_at_most_the_cpus_that_the_process_may_use(library: Kernels) -> None:
    one = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{one}}}); {THREADS}"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) == 1
    assert 1 <= library.threads <= len(os.sched_getaffinity(0))


def test_two_python_threads_at_once(library: Kernels) -> None:
    library.set_threads(2)
    packed = PackedMatrix.pack([random_matrix(Format.Q8, 500, 64)])
    inputs = [torch.randn(9, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected = [packed(x) for x in inputs]
    right = [0, 0]

    def call(which: int) -> None:
        right[which] = sum(torch.equal(packed(inputs[which]), expected[which]) for _ in range(300))

    threads = [Thread(target=call, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [300, 300]


def test_a_forked_child_has_kernels(library: Kernels) -> None:
    library.set_threads(2)
    packed = PackedMatrix.pack([random_matrix(Format.Q8, 500, 64)])
    x = torch.randn(9, 64)
    expected = packed(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(packed(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(packed(x), expected)
