"""Images, compose files and server configurations, as far as they can be judged without a Docker daemon."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdq.bridge.server import CLOSE_S
from pdq.core import names
from pdq.core.settings import DrainSettings
from tests.contract.deployed import DEPLOY, SETTINGS, parse, unknown_settings

ROOT = DEPLOY.parent
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
COMPOSE = DEPLOY / "compose"
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
ROLES = {"autoscaler", "bridge", "reaper", "worker-sim", "worker-torch"}
PROGRAM = Path(sys.executable).parent


def instructions() -> Iterator[tuple[str, str]]:
    text = re.sub(r"\\\n(?:\s*#.*\n)*", " ", re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE))
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        yield instruction, rest.strip()


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By name: what the stage starts from, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    current: list[tuple[str, str]] = []
    for instruction, rest in instructions():
        if instruction == "FROM":
            origin, _, name = rest.partition(" AS ")
            found[name] = origin, (current := [])
        else:
            current.append((instruction, rest))
    return found


def inherited(stage: str, wanted: str) -> str | None:
    """The last such instruction that holds for the stage."""
    while stage in stages():
        origin, found = stages()[stage]
        if matching := [rest for instruction, rest in found if instruction == wanted]:
            return matching[-1]
        stage = origin
    return None


# --- All files --------------------------------------------------------------------------------------------------------


def test_every_setting_that_is_named_anywhere_exists() -> None:
    streams = {names.PREFILL_STREAM, names.DECODE_STREAM, names.LOCAL_STREAM, names.DEAD_STREAM}
    for file in (path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        found = set(re.findall(r"\bPDQ_[A-Z0-9_]+[A-Z0-9]\b", file.read_text())) - streams
        assert not unknown_settings(found), file


def test_the_guide_links_to_files_and_shows_commands_that_exist() -> None:
    guide = DEPLOY / "README.md"
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", guide.read_text()):
        assert (DEPLOY / link).exists(), link
    shown = set(re.findall(r"--target (\S+)|for role in ([^;]+);", guide.read_text()))
    assert {role for _, roles in shown for role in roles.split()} == ROLES


# --- Images -----------------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([PROGRAM / "hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_stage_starts_from_a_pinned_python_or_another_stage() -> None:
    [pin] = [rest for instruction, rest in instructions() if instruction == "ARG"]
    assert re.fullmatch(r"PYTHON=3\.\d+\.\d+-slim-\w+", pin)
    assert {origin for origin, _ in stages().values()} - set(stages()) == {"python:${PYTHON}"}


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_image_runs_unprivileged_and_hands_signals_to_its_program(role: str) -> None:
    user = inherited(role, "USER")
    assert user is not None
    assert int(user.split(":")[0]) > 0
    entrypoint = json.loads(inherited(role, "ENTRYPOINT") or "")
    assert Path(entrypoint[0]).name == "tini"
    assert entrypoint[-1] == "pdq"
    parse([*json.loads(inherited(role, "CMD") or "")[:1], *(["decode"] if role.startswith("worker") else [])])


@pytest.mark.parametrize("role", sorted(ROLES))
def test_no_image_asks_a_hub_for_anything(role: str) -> None:
    base = [rest for instruction, rest in stages()["base"][1] if instruction == "ENV"]
    assert any("HF_HUB_OFFLINE=1" in rest for rest in base)
    assert inherited(role, "ENTRYPOINT") == inherited("base", "ENTRYPOINT")


def test_only_workers_carry_ucx_only_torch_workers_torch_and_only_the_autoscaler_a_kubernetes_client() -> None:
    made = {
        part: subprocess.run(
            [sys.executable, DEPLOY / "docker" / "requirements.py", part],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split("\n")
        for part in ("control", "worker", "torch", "kubernetes")
    }  # fmt: skip
    assert not [line for line in made["control"] if re.match("ucx|torch|transformers|kubernetes", line)]
    assert [line for line in made["kubernetes"] if line] == ["kubernetes-asyncio>=36"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*made["control"], *made["worker"]} - {""} == set(project["dependencies"])
    sources = {role: re.findall(r"--from=(\S+)", json.dumps(stages()[role][1])) for role in ROLES}
    assert sources == {
        "autoscaler": ["build-autoscaler"],
        "bridge": ["build"],
        "reaper": ["build"],
        "worker-sim": ["build-worker"],
        "worker-torch": ["build-torch"],
    }


def test_everything_that_is_copied_exists_and_is_let_through_to_the_builder() -> None:
    lines = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    copied = [
        rest.split()[:-1] for instruction, rest in instructions() if instruction == "COPY" and "--from" not in rest
    ]
    for source in (path for paths in copied for path in paths):
        assert (ROOT / source).exists(), source
        assert source in let_through


# --- Compose ----------------------------------------------------------------------------------------------------------


def compose(*files: str) -> dict[str, Any]:
    """Services, the later files laid over the earlier ones as compose does for the keys that they use."""
    services: dict[str, Any] = {}
    for file in files:
        for name, service in yaml.safe_load((COMPOSE / file).read_text())["services"].items():
            services[name] = {**services.get(name, {}), **service}
    return services


VARIANTS = {"sim": ("compose.yaml",), "torch": ("compose.yaml", "compose.torch.yaml")}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def programs(variant: str) -> dict[str, Mapping[str, Any]]:
    return {
        name: service for name, service in compose(*VARIANTS[variant]).items() if service["image"].startswith("pdq-")
    }


@every_variant
def test_compose_services_run_commands_that_exist_with_settings_that_exist(variant: str) -> None:
    assert set(programs(variant)) == {"bridge", "prefill", "decode", "reaper"}
    for name, service in programs(variant).items():
        assert name in (parse(service["command"]), service["command"][1:2][0] if service["command"][1:] else "")
        assert not unknown_settings(service["environment"])
        assert set(re.findall(r"\b(PDQ_[A-Z_]+)=", json.dumps(service))) <= SETTINGS


@every_variant
def test_compose_builds_every_image_from_a_target_of_the_dockerfile(variant: str) -> None:
    for service in programs(variant).values():
        build = service["build"]
        assert (COMPOSE / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]) == DOCKERFILE
        assert build["target"] in ROLES
        assert service["image"].startswith(f"pdq-{build['target']}:")


@every_variant
def test_compose_services_wait_for_servers_that_report_health(variant: str) -> None:
    services = compose(*VARIANTS[variant])
    for service in programs(variant).values():
        for server, how in service["depends_on"].items():
            assert how["condition"] == "service_healthy"
            assert services[server]["healthcheck"]["test"]


@every_variant
def test_compose_gives_programs_time_to_drain_and_no_shell_in_between(variant: str) -> None:
    for service in programs(variant).values():
        assert int(service["stop_grace_period"].removesuffix("s")) >= DrainSettings().deadline_s + CLOSE_S
        assert isinstance(service["command"], list)
        if "entrypoint" in service:
            assert service["entrypoint"][0] == "/usr/bin/tini"
            assert " exec pdq " in service["entrypoint"][4]


def test_the_shell_line_of_compose_workers_leaves_the_program_in_the_shells_place(tmp_path: Path) -> None:
    entrypoint = [part.replace("$$", "$") for part in programs("sim")["decode"]["entrypoint"][2:]]
    stand_in = tmp_path / "pdq"
    stand_in.write_text('#!/bin/sh\necho "$PPID $PDQ_TRANSPORT_UCX_HOST $*"\n')
    stand_in.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen([*entrypoint, "worker", "decode"], stdout=subprocess.PIPE, text=True, env=environ) as process:
        parent, address, *arguments = (process.communicate(timeout=30)[0]).split()
    assert int(parent) != process.pid  # the shell is gone: what it was is the program now
    assert address.count(".") == 3
    assert arguments == ["worker", "decode"]


def test_compose_mounts_what_exists_and_declares_its_volumes() -> None:
    declared = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["volumes"]
    for service in compose("compose.yaml").values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (COMPOSE / source).exists() if "/" in source else source in declared
