"""Settings fail loudly, and name the variable."""

from __future__ import annotations

import pytest

from app.errors import SettingsError
from app.settings import load_settings


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"BATON_PORT": "http"}, "BATON_PORT: must be a whole number, not 'http'"),
        ({"BATON_NUM_BLOCKS": "0"}, "BATON_NUM_BLOCKS: must be at least 1"),
        ({"BATON_NUM_BLOKS": "5"}, "BATON_NUM_BLOKS is no setting: did you mean BATON_NUM_BLOCKS?"),
        ({"BATON_XYZ": "5"}, "BATON_XYZ is no setting"),
        ({"BATON_PORT": "70000"}, "BATON_PORT: must be at most 65535"),
        ({"BATON_QUEUE_TIMEOUT_S": "0"}, "BATON_QUEUE_TIMEOUT_S: must be above 0"),
        ({"BATON_QUEUE_TIMEOUT_S": "soon"}, "BATON_QUEUE_TIMEOUT_S: must be a number, not 'soon'"),
        ({"BATON_DEVICE": "cuda"}, "BATON_DEVICE: say cpu or gpu:0, not 'cuda'"),
        ({"BATON_KV_CACHE_DTYPE": "half"}, "BATON_KV_CACHE_DTYPE: say float16 or float32, not 'half'"),
        ({"BATON_LOG_LEVEL": "LOUD"}, "BATON_LOG_LEVEL: say DEBUG, INFO, WARNING or ERROR, not 'LOUD'"),
        ({"BATON_NAMESPACE": "A"}, "BATON_NAMESPACE: say 1 to 32 of a-z, 0-9, _ and -, not 'A'"),
        ({"BATON_RECORD_TTL_S": "inf"}, "BATON_RECORD_TTL_S: must be a number of seconds up to 31536000 (a year)"),
        ({"BATON_QUEUE_TIMEOUT_S": "nan"}, "BATON_QUEUE_TIMEOUT_S: "),
        ({"BATON_DEDUP_WINDOW_S": "1e16"}, "BATON_DEDUP_WINDOW_S: must be a number of seconds up to 31536000"),
        ({"BATON_DEDUP_WINDOW_S": "90000"}, "BATON_DEDUP_WINDOW_S=90000 must not be longer than BATON_RECORD_TTL_S"),
        ({"BATON_HEARTBEAT_S": "10"}, "BATON_NODE_TTL_S=5 must be at least twice BATON_HEARTBEAT_S"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], line: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as error:
        load_settings()
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["BATON_REDIS_URL", "BATON_BROKER_URL"])
@pytest.mark.parametrize(
    "url",
    ["foo", "foo://h", "redis:/h", "redis://", "redis://:secret@h:x/0", "redis://[h/0", "redis://h/abc", "unix://"],
)
def test_what_is_no_address_of_a_server_is_refused_by_name_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(name, url)
    with pytest.raises(SettingsError, match=f"^{name}: ") as error:
        load_settings()
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)


def test_options_in_the_ledgers_address_are_those_that_the_client_takes() -> None:
    for url in ("redis://h/0?socket_timeout=x", "redis://h/0?colour=red", "rediss://h/0?ssl_cert_reqs=perhaps"):
        with pytest.raises(SettingsError, match=r"^BATON_REDIS_URL: has an option that the client does not take"):
            load_settings(redis_url=url)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://me:pw@[::1]:1/3", "rediss://h:1/0?ssl_cert_reqs=none", "unix:///a/b.sock?db=1"]
)
def test_addresses_of_servers(url: str) -> None:
    assert load_settings(redis_url=url, broker_url=url).redis_url == url
    assert load_settings(broker_url="").broker_url == ""


def test_a_suggestion_is_made_only_for_what_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_FOO", "1")
    with pytest.raises(SettingsError) as error:
        load_settings()
    assert str(error.value) == "BATON_FOO is no setting"


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "1234")
    assert load_settings().port == 1234
    assert load_settings(port=99).port == 99
