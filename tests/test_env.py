"""env: made-up environments and processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from exlm import env
from exlm.env import LegacySwitches, OnednnIsaCap, cap_onednn_isa, detect_amx
from exlm.errors import InputError

ISA = "ONEDNN_MAX_CPU_ISA"
SRC = Path(env.__file__).parents[1]


def cpuinfo(*, level: int | None, flags: str) -> str:
    """Two processors as Linux lists them."""
    known = "" if level is None else f"cpuid level\t: {level}\n"
    processor = f"vendor_id\t: GenuineIntel\n{known}wp\t\t: yes\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n"
    return f"processor\t: 0\n{processor}\nprocessor\t: 1\n{processor}\n"


AMX_FLAGS = "fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8 avx512_fp16"
HALF_ANNOUNCED = cpuinfo(level=28, flags=AMX_FLAGS)


@pytest.fixture
def isa_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA, "to be put back as it was")
    monkeypatch.delenv(ISA)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (cpuinfo(level=27, flags="fpu avx2 avx512f"), "none"),
        (cpuinfo(level=28, flags=AMX_FLAGS), "flag_only"),
        (cpuinfo(level=29, flags=AMX_FLAGS), "usable"),
        (cpuinfo(level=32, flags=AMX_FLAGS), "usable"),
        (cpuinfo(level=None, flags=AMX_FLAGS), "flag_only"),
        (cpuinfo(level=28, flags="fpu amx_tiles notamx_tile"), "none"),
        ("processor\t: 0\nFeatures\t: fp asimd evtstrm\nCPU implementer\t: 0x41\n", "none"),
        ("", "none"),
    ],
)
def test_amx_is_read_from_the_flags_and_the_cpuid_level(text: str, expected: str) -> None:
    assert detect_amx(text) == expected


@pytest.mark.usefixtures("isa_unset")
def test_amx_that_cpuid_does_not_describe_is_capped_once(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(HALF_ANNOUNCED)
    assert cap_onednn_isa(tmp_path / "cpuinfo") == OnednnIsaCap(amx="flag_only", capped=True)
    assert os.environ[ISA] == "AVX512_CORE_FP16"
    assert cap_onednn_isa(tmp_path / "cpuinfo") == OnednnIsaCap(amx="flag_only", capped=False)


def test_the_users_own_cap_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA, "AVX2")
    (tmp_path / "cpuinfo").write_text(HALF_ANNOUNCED)
    assert cap_onednn_isa(tmp_path / "cpuinfo") == OnednnIsaCap(amx="flag_only", capped=False)
    assert os.environ[ISA] == "AVX2"


@pytest.mark.usefixtures("isa_unset")
@pytest.mark.parametrize("text", [cpuinfo(level=32, flags=AMX_FLAGS), cpuinfo(level=13, flags="fpu sse2")])
def test_a_cpu_with_working_or_no_amx_is_not_capped(tmp_path: Path, text: str) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cap_onednn_isa(tmp_path / "cpuinfo") == OnednnIsaCap(amx=detect_amx(text), capped=False)
    assert ISA not in os.environ


@pytest.mark.usefixtures("isa_unset")
def test_no_cpuinfo_file_means_no_amx(tmp_path: Path) -> None:
    assert cap_onednn_isa(tmp_path / "absent") == OnednnIsaCap(amx="none", capped=False)
    assert ISA not in os.environ


def test_bfloat16_matmul_works_on_this_machine_with_the_cap() -> None:
    code = "from exlm.env import cap_onednn_isa; cap_onednn_isa(); import torch\n"
    code += "x = torch.ones(64, 64, dtype=torch.bfloat16); print(int((x @ x)[0, 0]))"
    environment = {name: value for name, value in os.environ.items() if name != ISA} | {"PYTHONPATH": str(SRC)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, "64"), ran.stderr


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        ("/big/disk", "/xdg", "/big/disk"),
        ("~/models", "/xdg", "/home/me/models"),
        (None, "/xdg", "/xdg/exlm"),
        ("", "/xdg", "/xdg/exlm"),
        (None, None, "/home/me/.cache/exlm"),
        (None, "", "/home/me/.cache/exlm"),
        (None, "not/absolute", "/home/me/.cache/exlm"),
    ],
)
def test_cache_folder(own: str | None, shared: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("EXLM_CACHE", own), ("XDG_CACHE_HOME", shared)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert env.cache_folder() == Path(expected)


def test_a_cache_folder_in_a_missing_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_CACHE", "~no-such-user/models")
    with pytest.raises(InputError, match=r"~no-such-user is no known home folder: set EXLM_CACHE"):
        env.cache_folder()


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXLM_LOG_LEVEL", raising=False)
    assert env.log_level() == "WARNING"
    monkeypatch.setenv("EXLM_LOG_LEVEL", "debug")
    assert env.log_level() == "DEBUG"
    monkeypatch.setenv("EXLM_LOG_LEVEL", "loud")
    with pytest.raises(InputError, match=r"EXLM_LOG_LEVEL is 'loud'.*DEBUG, INFO"):
        env.log_level()


def test_a_removed_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv("EXLM_STAGING", value)
        with pytest.raises(InputError, match=r"EXLM_STAGING is no longer supported: .* Unset it\."):
            env.refuse_removed_variables()
    monkeypatch.setenv("EXLM_STAGING", "")
    env.refuse_removed_variables()


def test_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_DEVICE", "cuda:1")
    assert env.default_device() == "cuda:1"
    monkeypatch.setenv("EXLM_DEVICE", "")
    assert env.default_device() is None


@pytest.mark.parametrize("name", ["no_flash_attn", "no_xformers", "no_sdpa", "no_graphs"])
def test_a_legacy_switch_is_on_if_the_variable_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    off = dict.fromkeys(("no_flash_attn", "no_xformers", "no_sdpa", "no_graphs"), False)
    for switch in off:
        monkeypatch.delenv(f"EXLLAMA_{switch.upper()}", raising=False)
    assert env.legacy_switches() == LegacySwitches(**off)
    monkeypatch.setenv(f"EXLLAMA_{name.upper()}", "")
    assert env.legacy_switches() == LegacySwitches(**{**off, name: True})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, 20 << 30), ("", 20 << 30), ("0", 0), ("123", 123), ("1.5G", 3 << 29), ("2 GiB", 2 << 30), ("7mb", 7 << 20)],
)
def test_the_bound_of_packed_matrices(value: str | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXLM_PACKED_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("EXLM_PACKED_CACHE", value)
    assert env.packed_cache_bytes() == expected


@pytest.mark.parametrize("value", ["-1", "much", "1e9", "1 X", "G"])
def test_a_bound_that_is_no_size_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_PACKED_CACHE", value)
    with pytest.raises(InputError, match="EXLM_PACKED_CACHE"):
        env.packed_cache_bytes()
