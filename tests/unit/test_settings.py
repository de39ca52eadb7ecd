import traceback
from pathlib import Path

import msgspec
import pytest

from pdq.cli.settings import listing, written
from pdq.core import environment
from pdq.core.errors import InvalidSettings
from pdq.core.settings import Secret, Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert environment.load({}) == Settings()


def test_every_default_written_to_the_environment_reads_back_as_itself() -> None:
    environ = {name: written(default) for name, _, _, default in environment.variables()}
    assert environment.load(environ) == Settings()


def test_a_variable_sets_its_field_and_no_other() -> None:
    loaded = environment.load({"PDQ_LEASE_TTL_MS": "2500"})
    assert loaded.lease.ttl_ms == 2500
    assert msgspec.structs.replace(loaded, lease=Settings().lease) == Settings()


def test_lists_are_comma_separated_and_may_be_empty() -> None:
    loaded = environment.load({"PDQ_TRANSPORT_ORDER": "shm, ucx", "PDQ_TRANSPORT_WRITE_THROUGH": ""})
    assert loaded.transport.order == ("shm", "ucx")
    assert loaded.transport.write_through == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PDQ_LEASE_TTL_MS", "soon"),
        ("PDQ_LEASE_TTL_MS", "99"),
        ("PDQ_LEASE_TTL_MS", "10.5"),
        ("PDQ_BRIDGE_PORT", "65536"),
        ("PDQ_QUEUE_ACK_WAIT_S", "-1"),
        ("PDQ_HANDOFF_ORDER", "on_finish"),
        ("PDQ_TRANSPORT_ORDER", "ucx,carrier-pigeon"),
    ],
)
def test_a_value_that_does_not_parse_is_an_error_that_names_it(name: str, value: str) -> None:
    with pytest.raises(InvalidSettings, match=name) as caught:
        environment.load({name: value})
    assert value in str(caught.value)


def test_a_misspelt_variable_is_an_error_that_names_the_right_one() -> None:
    with pytest.raises(InvalidSettings, match=r"unknown setting PDQ_LEASE_TTL.*did you mean PDQ_LEASE_TTL_MS"):
        environment.load({"PDQ_LEASE_TTL": "5000"})


def test_variables_of_other_programs_and_places_are_left_alone() -> None:
    assert environment.load({"PATH": "/bin", "PDQ_STATE_DIR": "/tmp/x", "PDQ_LOG_LEVEL": "debug"}) == Settings()


def test_every_variable_is_listed_with_its_meaning() -> None:
    found = {variable.name: variable for variable in listing()}
    assert set(found) == {name for name, *_ in environment.variables()} | set(environment.PLACES)
    assert not [variable.name for variable in found.values() if not variable.meaning]


# --- Secrets ----------------------------------------------------------------------------------------------------------

SECRET = "correct horse:battery/staple@%"


def test_secrets_are_shown_by_nothing_but_reveal() -> None:
    environ = {
        "PDQ_NATS_USER": "pdq",
        "PDQ_NATS_PASSWORD": SECRET,
        "PDQ_REDIS_PASSWORD": SECRET,
        "PDQ_REDIS_URL": "redis://:inline@host",
    }
    loaded = environment.load(environ)
    assert loaded.nats.password.reveal() == loaded.redis.password.reveal() == SECRET
    for shown in (repr(loaded), str(loaded), f"{loaded.nats.password}", repr(loaded.redis)):
        assert "horse" not in shown
        assert "inline" not in shown
    assert loaded.nats.password == Secret(SECRET) != Secret("")


@pytest.mark.parametrize("variable", ["PDQ_NATS_PASSWORD", "PDQ_NATS_TOKEN", "PDQ_REDIS_PASSWORD", "PDQ_REDIS_URL"])
def test_what_may_hold_a_password_can_come_from_a_file(variable: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("redis://from-a-file\n")
    _, group, field = variable.lower().split("_")
    found = getattr(getattr(environment.load({f"{variable}_FILE": str(tmp_path / "secret")}), group), field)
    assert found in (Secret("redis://from-a-file"), "redis://from-a-file")


def test_a_secret_that_cannot_be_read_or_is_given_twice_is_an_error_that_shows_no_value(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match=r"PDQ_NATS_PASSWORD_FILE='.*/none' cannot be read: No such file"):
        environment.load({"PDQ_NATS_PASSWORD_FILE": str(tmp_path / "none")})
    with pytest.raises(InvalidSettings, match="PDQ_NATS_PASSWORD and PDQ_NATS_PASSWORD_FILE are both set") as caught:
        environment.load({"PDQ_NATS_PASSWORD_FILE": "x", "PDQ_NATS_PASSWORD": SECRET})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(InvalidSettings, match="PDQ_NATS_TOKEN has a line break") as caught:
        environment.load({"PDQ_NATS_TOKEN": SECRET + "\nx"})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_only_what_may_hold_a_password_has_a_file_variable() -> None:
    with pytest.raises(InvalidSettings, match="unknown setting PDQ_LEASE_TTL_MS_FILE"):
        environment.load({"PDQ_LEASE_TTL_MS_FILE": "x"})
