"""What `doctor` looks at without loading torch: the machine, the installation, disks, the hub and the port."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from slipstream.cli.table import size_text
from slipstream.config import EngineConfig

HUB_TIMEOUT_S = 3.0
LOW_DISK_BYTES = 2 * 10**9
LOW_MEMORY_BYTES = 10**9

# Linux's name of a CPU feature -> ours, where one of several counts.
CPU_FEATURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("AVX2", ("avx2",)),
    ("AVX-512", ("avx512f",)),
    ("BF16", ("avx512_bf16", "amx_bf16")),
    ("VNNI", ("avx512_vnni", "avx_vnni")),
    ("AMX", ("amx_tile",)),
)


_SHOWN = ("torch", "numpy", "huggingface-hub", "safetensors", "tokenizers")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `info` is neither good nor bad; `facts` are what the text says, for programs."""

    name: str
    status: Literal["ok", "info", "warn", "fail"]
    text: str
    hint: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"name": self.name, "status": self.status, "text": self.text, "hint": self.hint, **self.facts}


def host_checks(config: EngineConfig) -> Iterator[Check]:
    """All of them, in the order they are shown."""
    yield check_platform(platform.system(), platform.machine())
    yield check_cpu()
    yield check_memory()
    yield check_gpu()
    yield check_compiler()
    yield from check_packages()
    yield from check_disks()
    yield check_hub()
    yield check_port(config.host, config.port)


def check_platform(system: str, machine: str) -> Check:
    """Whether anybody has run this system."""
    text = f"{system} on {machine}, Python {platform.python_version()}"
    facts = {"system": system, "machine": machine, "python": platform.python_version()}
    if system == "Linux" and machine.lower() in ("x86_64", "amd64"):
        return Check("platform", "ok", text, facts=facts)
    return Check("platform", "warn", f"{text}: untested", "Linux on x86_64 is what the tests run on", facts)


def check_cpu() -> Check:
    """Its name, cores and the instructions that kernels care about."""
    import psutil

    flags = _cpu_flags()
    found = [name for name, any_of in CPU_FEATURES if flags.intersection(any_of)]
    cores, threads = psutil.cpu_count(logical=False), psutil.cpu_count(logical=True)
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else threads
    text = f"{_cpu_name()}, {cores} cores, {threads} threads, {usable} usable; {', '.join(found) or 'no vector features known'}"
    facts = {"num_cores": cores, "num_threads": threads, "num_usable": usable, "features": found}
    if "AVX2" in found or not flags:
        return Check("cpu", "ok", text, facts=facts)
    return Check("cpu", "warn", text, "without AVX2 matrix products are several times slower", facts)


def check_memory() -> Check:
    """Of the machine, or of the container where that has less."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    limit = _container_limit()
    if limit is not None and limit < total:
        total, free = limit, min(free, limit)
    text = f"{size_text(free)} free of {size_text(total)}"
    facts = {"free_bytes": free, "total_bytes": total}
    if free < LOW_MEMORY_BYTES:
        return Check("memory", "warn", text, "the default model needs about a gigabyte", facts)
    return Check("memory", "ok", text, facts=facts)


def check_gpu() -> Check:
    """What nvidia-smi lists. Whether torch can use it is another question."""
    listed = _said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    names = [line.strip() for line in (listed or "").splitlines() if line.strip()]
    return Check("gpu", "info", "; ".join(names) or "none", facts={"gpus": names})


def check_compiler() -> Check:
    """The C++ compiler that builds CPU kernels on their first use."""
    compiler = os.environ.get("CXX") or "g++"
    version = _said(*compiler.split(), "--version")
    if version is None:
        hint = "without one only torch's own kernels run; install g++, or name another in CXX"
        return Check("compiler", "warn", f"{compiler} cannot be run", hint, {"compiler": None})
    return Check("compiler", "ok", version.splitlines()[0], facts={"compiler": version.splitlines()[0]})


def check_packages() -> Iterator[Check]:
    """Whether every requirement is there, in a version that will do."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    try:
        required = [Requirement(text) for text in metadata.requires("slipstream") or ()]
    except metadata.PackageNotFoundError:
        yield Check("packages", "warn", "slipstream is not installed as a package", "pip install . puts its requirements in")
        return
    versions: dict[str, str | None] = {}
    for one in required:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            found = None
        versions[canonicalize_name(one.name)] = found
        if found is None or not one.specifier.contains(found, prereleases=True):
            text = f"{one.name} must be {one.specifier or 'installed'}, but got {found or 'none'}"
            yield Check("packages", "fail", text, f"pip install '{one}'", {"package": one.name, "version": found})
    shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if versions.get(name))
    yield Check("packages", "info", f"slipstream {metadata.version('slipstream')}, {shown}", facts={"versions": versions})
    if util.find_spec("pip") is None:
        yield Check("packages", "warn", "pip is not there, and aliases are fetched with it", "python -m ensurepip")


def check_disks() -> Iterator[Check]:
    """Where models are kept: ours and the hub's."""
    from huggingface_hub import constants

    from slipstream.paths import cache_dir

    yield check_disk("cache", cache_dir(), "SLIPSTREAM_CACHE names another folder")
    yield check_disk("hub cache", Path(constants.HF_HUB_CACHE), "HF_HOME names another folder")


def check_disk(name: str, folder: Path, hint: str) -> Check:
    """Whether the folder can be written, or made, and how much fits."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    facts: dict[str, Any] = {"path": str(folder)}
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{folder} cannot be written", hint, facts)
    free = shutil.disk_usage(there).free
    text, facts = f"{folder}, {size_text(free)} free", facts | {"free_bytes": free}
    return Check(name, "warn", text, hint, facts) if free < LOW_DISK_BYTES else Check(name, "ok", text, facts=facts)


def check_hub() -> Check:
    """Whether the hub answers, shortly. Aliases, files and what is in the cache do not need it."""
    import httpx
    from huggingface_hub import constants

    url = constants.ENDPOINT
    facts: dict[str, Any] = {"url": url, "is_reachable": False}
    if constants.HF_HUB_OFFLINE:
        return Check("hub", "info", f"{url} is not asked: HF_HUB_OFFLINE is set", facts=facts)
    try:
        status = httpx.head(url, timeout=HUB_TIMEOUT_S, follow_redirects=True).status_code
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        hint = "aliases, folders, .gguf files and what is in its cache work without it"
        return Check("hub", "warn", f"{url} does not answer: {type(error).__name__}", hint, facts)
    return Check("hub", "ok", f"{url} answers", facts=facts | {"is_reachable": True, "status": status})


def check_port(host: str, port: int) -> Check:
    """Whether `slipstream serve` could listen there now."""
    facts: dict[str, Any] = {"host": host, "port": port}
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        hint = "a server may be running already; --port takes another one, 0 a free one"
        return Check("port", "warn", f"{host}:{port} is not free: {reason}", hint, facts | {"is_free": False})
    return Check("port", "ok", f"{host}:{port} is free", facts=facts | {"is_free": True})


def _cpu_flags() -> set[str]:
    for line in _cpuinfo():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []


def _container_limit() -> int | None:
    """Bytes that the control group allows, where it limits."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(path).read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue
    return None


def _said(*command: str) -> str | None:
    """What a command prints; None where it cannot be run, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
