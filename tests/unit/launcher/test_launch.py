import os
from pathlib import Path

import pytest

from app.cli import main
from app.launcher.checks import free_port


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("scheme", ["redis://127.0.0.1:{port}/0", "unix://{folder}/nobody.sock"])
def test_a_given_server_that_cannot_be_reached_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    url = scheme.format(port=free_port("127.0.0.1", 0, ""), folder=tmp_path)
    options = ("--home", str(tmp_path / "home"), "--port", "0", "--flower-port", "0")
    assert main(["up", *options, "--redis-url", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("baton: the ledger cannot be reached (")
    assert "BATON_REDIS_URL" in error
    assert error.count("\n") == 1
