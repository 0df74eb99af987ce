"""`make test` in two pytests: nothing is left out, nothing runs twice, and a failure of either is one of both."""

from __future__ import annotations

import pytest

from tests.side_by_side import COMPUTING, NOT_TESTED, ROOT, computing_only, driving_only, status, wants_one


def ignored(options: list[str], path: str) -> bool:
    folders = [option.removeprefix("--ignore=") for option in options]
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def test_every_test_file_runs_in_exactly_one_of_them() -> None:
    paths = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    wanted = [path for path in paths if not path.startswith(NOT_TESTED)]
    assert len(wanted) > 100
    runs = {path: (not ignored(driving_only(), path), not ignored(computing_only(), path)) for path in wanted}
    assert [path for path, (driving, computing) in runs.items() if driving == computing] == []
    assert {path for path, (_, computing) in runs.items() if computing} == {
        path for path in wanted if path.startswith(tuple(f"{folder}/" for folder in COMPUTING))
    }


@pytest.mark.parametrize(
    ("codes", "together"), [([0, 0], 0), ([1, 0], 1), ([0, 1], 1), ([2, 1], 2), ([0, 5], 0), ([5, 1], 1), ([5, 5], 5)]
)
def test_the_status_is_that_of_the_one_that_failed(codes: list[int], together: int) -> None:
    assert status(codes) == together


@pytest.mark.parametrize(
    ("arguments", "one"),
    [
        (["-m", "not matrix", "-k", "lease", "-x"], False),
        (["--durations=20"], False),
        (["tests/api/test_drain.py"], True),
        ([f"{__file__}::test_the_status_is_that_of_the_one_that_failed"], True),
        (["--junitxml=report.xml"], True),
        (["--pdb"], True),
    ],
)
def test_paths_and_what_cannot_be_shared_make_it_one(arguments: list[str], one: bool) -> None:
    assert wants_one(arguments) is one
