"""Settings fail loudly, and name the variable."""

from __future__ import annotations

import pytest

from app.errors import SettingsError
from app.settings import load_settings


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"BATON_PORT": "http"}, "BATON_PORT: Input should be a valid integer"),
        ({"BATON_NUM_BLOCKS": "0"}, "BATON_NUM_BLOCKS: Input should be greater than or equal to 1"),
        ({"BATON_NUM_BLOKS": "5"}, "BATON_NUM_BLOKS is no setting: did you mean BATON_NUM_BLOCKS?"),
        ({"BATON_XYZ": "5"}, "BATON_XYZ is no setting"),
        ({"BATON_DEVICE": "tpu"}, "BATON_DEVICE: "),
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


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "1234")
    assert load_settings().port == 1234
    assert load_settings(port=99).port == 99
