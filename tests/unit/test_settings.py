import msgspec
import pytest

from pdq.cli.settings import listing, written
from pdq.core import settings
from pdq.core.errors import InvalidSettings
from pdq.core.settings import Settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert settings.load({}) == Settings()


def test_every_default_written_to_the_environment_reads_back_as_itself() -> None:
    environ = {name: written(default) for name, _, _, default in settings.variables()}
    assert settings.load(environ) == Settings()


def test_a_variable_sets_its_field_and_no_other() -> None:
    loaded = settings.load({"PDQ_LEASE_TTL_MS": "2500"})
    assert loaded.lease.ttl_ms == 2500
    assert msgspec.structs.replace(loaded, lease=Settings().lease) == Settings()


def test_lists_are_comma_separated_and_may_be_empty() -> None:
    loaded = settings.load({"PDQ_TRANSPORT_ORDER": "shm, ucx", "PDQ_TRANSPORT_WRITE_THROUGH": ""})
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
        settings.load({name: value})
    assert value in str(caught.value)


def test_a_misspelt_variable_is_an_error_that_names_the_right_one() -> None:
    with pytest.raises(InvalidSettings, match=r"unknown setting PDQ_LEASE_TTL.*did you mean PDQ_LEASE_TTL_MS"):
        settings.load({"PDQ_LEASE_TTL": "5000"})


def test_variables_of_other_programs_and_places_are_left_alone() -> None:
    assert settings.load({"PATH": "/bin", "PDQ_STATE_DIR": "/tmp/x", "PDQ_LOG_LEVEL": "debug"}) == Settings()


def test_every_variable_is_listed_with_its_meaning() -> None:
    found = {variable.name: variable for variable in listing()}
    assert set(found) == {name for name, *_ in settings.variables()} | set(settings.PLACES)
    assert not [variable.name for variable in found.values() if not variable.meaning]
