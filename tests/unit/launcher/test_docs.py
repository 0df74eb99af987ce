from pathlib import Path

import pytest

from app.docs import DocsError, fill, main, settings_table, state_diagrams
from app.protocol.tables import REQUEST_STEPS
from app.settings import Settings


def test_every_setting_but_the_supervisors_own_is_in_the_table() -> None:
    table = settings_table()
    for name, field in Settings.model_fields.items():
        assert (f"`BATON_{name.upper()}`" in table) == (name not in ("incarnation", "failpoints"))
        assert field.description
    assert "| `BATON_PORT` | `8000` | Port that web listens on. |" in table


def test_the_diagrams_have_every_step_of_the_tables() -> None:
    diagrams = state_diagrams()
    for old, after in REQUEST_STEPS.items():
        for new in after:
            assert f"    {old} --> {new}\n" in diagrams
    assert "    FINISHED --> [*]\n" in diagrams


def test_only_what_is_between_markers_is_replaced_and_twice_changes_nothing() -> None:
    text = "before\n<!-- settings -->old<!-- /settings -->\nafter <!-- other -->\n"
    once = fill(text, "README.md")
    assert once == f"before\n<!-- settings -->\n{settings_table()}\n<!-- /settings -->\nafter <!-- other -->\n"
    assert fill(once, "README.md") == once


@pytest.mark.parametrize("text", ["<!-- settings -->", "<!-- /states -->", "<!-- states --><!-- /states -->" * 2])
def test_a_marker_without_its_partner_is_refused(text: str) -> None:
    with pytest.raises(DocsError, match="README"):
        fill(text, "README.md")


def test_check_says_what_is_out_of_date_and_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme, other = tmp_path / "README.md", tmp_path / "docs" / "states.md"
    other.parent.mkdir()
    old = "<!-- settings -->\n<!-- /settings -->"
    readme.write_text(old)
    other.write_text("<!-- states -->\n<!-- /states -->")
    assert main(["--check"], root=tmp_path) == 1
    assert capsys.readouterr().err == "out of date: README.md, docs/states.md; run `make docs`\n"
    assert readme.read_text() == old
    assert main([], root=tmp_path) == 0
    assert main(["--check"], root=tmp_path) == 0
    assert "stateDiagram-v2" in other.read_text()


def test_wrong_markers_are_an_error_with_the_documents_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("<!-- settings -->")
    assert main(["--check"], root=tmp_path) == 1
    assert capsys.readouterr().err.startswith("README.md: ")
