"""`doctor`: what it sees, what it makes of it, and that a bad finding fails it."""

from __future__ import annotations

import json
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from slipstream.cli import checks, engine_checks
from slipstream.cli.main import main
from slipstream.config import EngineConfig
from tests.tiny_checkpoints import save, tiny

CPUINFO = "processor : 0\nmodel name\t: A Core\nflags\t\t: fpu avx2 avx512f avx512_vnni {}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, an empty cache."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("tiny"))


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Exit code, and the checks by name."""
    code = main(["doctor", "--json", *argv])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    found: dict[str, list[dict[str, Any]]] = {}
    for check in report["checks"]:
        found.setdefault(check["name"], []).append(check)
    return code, found


def test_a_sound_machine(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--port", "0", "--num-threads", "3", "--dtype", "bfloat16", "--cpu-kernels", "off"]
    code, found = doctor(capsys, str(checkpoint), *how)
    assert code == 0
    assert found["device"][0]["device"] == "cpu"
    assert found["dtype"][0]["text"].startswith("bfloat16: as --dtype or SLIPSTREAM_DTYPE says")
    assert found["threads"][0]["num_threads"] == 3
    assert found["attention"][0]["attention_backend"] in ("reference", "cpu")
    assert found["model"][0]["status"] == "ok"
    assert found["weights"][0]["text"] == "bfloat16 100%, multiplied by torch: --cpu-kernels is off"
    assert found["model memory"][0]["weight_bytes"] == 2 * tiny("llama").num_parameters()
    assert found["packages"][0]["versions"]["torch"] == metadata.version("torch")
    assert found["memory"][0]["free_bytes"] > 0
    assert found["cpu"][0]["num_threads"] == psutil.cpu_count()
    assert found["hub"][0]["status"] == "info"  # tests are offline
    assert found["same tokens"][0]["same_tokens"] == "but for near ties"


def test_weights_and_what_multiplies_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "none")
    _, found = doctor(capsys, str(checkpoint), "--port", "0")
    assert found["weights"][0]["text"] == "float32 100%, multiplied by torch: SLIPSTREAM_CPU_ISA is none"
    assert found["weights"][0]["cpu_kernels"] is False
    monkeypatch.setattr("slipstream.kernels.choice.why_not_kernels", lambda *how, build=True: None)
    monkeypatch.setattr("slipstream.weights.held.why_not_kernels", lambda *how, build=True: None)
    _, found = doctor(capsys, str(checkpoint), "--port", "0", "--cpu-kernels", "exact", "--kv-cache-dtype", "bfloat16")
    assert found["weights"][0]["text"] == "float32 100%, multiplied by our CPU kernels in float32"
    whole = found["model memory"][0]["kv_full_context_bytes"]
    _, found = doctor(capsys, "not-here/at-all", "--port", "0")
    assert found["weights"][0]["text"] == "as their file holds them, multiplied by our CPU kernels"
    _, found = doctor(capsys, str(checkpoint), "--port", "0")
    assert found["model memory"][0]["kv_full_context_bytes"] == 2 * whole


def test_a_bitwise_engine_keeps_every_token() -> None:
    assert engine_checks.same_tokens("float32", is_bitwise=True).facts == {"same_tokens": "always"}
    assert engine_checks.same_tokens("float32").facts == {"same_tokens": "but for near ties"}


def test_the_table(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(checkpoint), "--port", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ok    settings      all settings are known and hold\n")
    assert "may differ where the two best scores nearly tie" in " ".join(out.split())
    assert err == "no problems\n" or err.endswith("warn\n")


def test_settings_that_do_not_hold_fail_it_and_the_rest_is_still_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--lag", "5")
    assert code == 1
    assert found["settings"][0] == {
        "name": "settings",
        "status": "fail",
        "text": "--lag must be at most 1, but got '5'",
        "hint": "slipstream config show",
    }
    assert "device" in found


def test_a_misspelled_variable_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_PAGE_SIZ", "4")
    _, found = doctor(capsys)
    assert [check["status"] for check in found["settings"]] == ["ok", "warn"]
    assert "did you mean SLIPSTREAM_PAGE_SIZE?" in found["settings"][1]["text"]


def test_float64_keeps_every_token() -> None:
    assert engine_checks.same_tokens("float64").facts == {"same_tokens": "always"}


def test_cuda_that_is_not_there_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, found = doctor(capsys, "--device", "cuda", "--allow-untested")
    assert code == 1
    assert found["device"][0]["status"] == "fail"


def test_an_attention_backend_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--attention-backend", "nonsense")
    assert code == 1
    assert any(
        check["status"] == "fail" and "nonsense" in check["text"]
        for check in found.get("attention", []) + found.get("engine", [])
    )


def test_a_drafter_with_a_wrong_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--speculate", "ngram:witdh=3")
    assert code == 1
    assert found["engine"][0]["status"] == "fail" and "but got 'witdh'" in found["engine"][0]["text"]
    assert found["engine"][0]["hint"] == "did you mean width?"


def test_a_model_that_is_not_here_yet_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--port", "0")
    assert code == 0
    assert found["model"][0]["status"] == "info"
    assert found["model"][0]["hint"].startswith("slipstream pull smollm2-135m")
    assert doctor(capsys, "no-such-model")[0] == 1


def test_a_model_that_does_not_fit(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real._replace(available=1000))
    code, found = doctor(capsys, str(checkpoint))
    assert code == 1
    assert found["model memory"][0]["status"] == "fail"
    assert found["memory"][0]["status"] == "warn"


@pytest.mark.parametrize(
    ("system", "machine", "status"),
    [("Linux", "x86_64", "ok"), ("Linux", "aarch64", "warn"), ("Darwin", "arm64", "warn"), ("Windows", "AMD64", "warn")],
)
def test_platforms(system: str, machine: str, status: str) -> None:
    check = checks.check_platform(system, machine)
    assert check.status == status
    assert ("untested" in check.text) == (status == "warn")


def test_cpu_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_cpuinfo", lambda: CPUINFO.format("amx_tile amx_bf16").splitlines())
    check = checks.check_cpu()
    assert check.facts["features"] == ["AVX2", "AVX-512", "BF16", "VNNI", "AMX"]
    assert check.text.startswith("A Core, ")
    monkeypatch.setattr(checks, "_cpuinfo", lambda: CPUINFO.replace("avx2", "sse2").format("").splitlines())
    check = checks.check_cpu()
    assert (check.status, check.facts["features"]) == ("warn", ["AVX-512", "VNNI"])


def test_a_container_has_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_container_limit", lambda: 5 * 10**8)
    check = checks.check_memory()
    assert (check.status, check.facts["total_bytes"]) == ("warn", 5 * 10**8)


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'c++ 99'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"{compiler} -O2")
    assert checks.check_compiler().text == "c++ 99"
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = checks.check_compiler()
    assert (check.status, check.text) == ("warn", "no-such-compiler cannot be run")


def test_every_version_is_named_however_it_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    for spelled in ("huggingface_hub>=0.30", "huggingface-hub>=0.30"):
        monkeypatch.setattr(metadata, "requires", lambda name, spelled=spelled: [spelled])
        (check,) = [check for check in checks.check_packages() if check.status == "info"]
        assert f"huggingface-hub {metadata.version('huggingface_hub')}" in check.text and "None" not in check.text


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=999", "no-such-package>=1", "numpy>=1", "extra-only ; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda name: required)
    failed = [check for check in checks.check_packages() if check.status == "fail"]
    assert [check.text for check in failed] == [
        f"torch must be >=999, but got {metadata.version('torch')}",
        "no-such-package must be >=1, but got none",
    ]


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_disk("cache", tmp_path / "not" / "yet", "h").status == "ok"
    assert not (tmp_path / "not").exists()  # looking changes nothing
    (tmp_path / "file").touch()
    assert checks.check_disk("cache", tmp_path / "file" / "in", "h").status == "fail"
    monkeypatch.setattr(checks, "LOW_DISK_BYTES", 10**18)
    assert checks.check_disk("cache", tmp_path, "h").status == "warn"


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    check = checks.check_hub()
    assert (check.status, check.facts["is_reachable"]) == ("warn", False)
    monkeypatch.setattr(httpx, "head", lambda url, **options: httpx.Response(200))
    check = checks.check_hub()
    assert (check.status, check.facts["is_reachable"]) == ("ok", True)


def test_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        check = checks.check_port("127.0.0.1", taken.getsockname()[1])
        assert (check.status, check.facts["is_free"]) == ("warn", False)
    assert checks.check_port("127.0.0.1", 0).status == "ok"
    assert checks.check_port("no.such.host.invalid", 1).status == "warn"


def test_a_check_says_what_it_knows() -> None:
    assert EngineConfig().model in engine_checks.check_model(EngineConfig())[0].text
