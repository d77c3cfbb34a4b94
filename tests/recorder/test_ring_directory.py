"""Where rings are and how they are called; who else may not write there."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hicache_obs.config import read_text
from hicache_obs.errors import ConfigError
from hicache_obs.readers.ring import RingReader
from hicache_obs.recorder.process import pid_namespace, process_start
from hicache_obs.recorder.ring_directory import RingName, create_ring, list_rings, open_ring_directory
from hicache_obs.records import CaptureMode, Ranks

SMALL = {"slots": 8, "arena_words": 16}


@pytest.mark.parametrize(
    ("environment", "directory", "source"),
    [
        ({"HICACHE_OBS_DIR": "/x/y", "XDG_RUNTIME_DIR": "/run/user/7"}, "/x/y", "HICACHE_OBS_DIR"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/hicache-obs", "default"),
        ({"XDG_RUNTIME_DIR": "/run/user/7/"}, "/run/user/7/hicache-obs", "default"),
        ({"XDG_RUNTIME_DIR": ""}, f"/tmp/hicache-obs-{os.geteuid()}", "default"),
        ({}, f"/tmp/hicache-obs-{os.geteuid()}", "default"),
    ],
)
def test_the_directory_comes_from_the_environment(environment, directory, source):
    assert read_text("ring_dir", environment) == (directory, source)


def test_an_empty_directory_name_is_refused():
    with pytest.raises(ConfigError, match=r"HICACHE_OBS_DIR: ''; expected a directory"):
        read_text("ring_dir", {"HICACHE_OBS_DIR": ""})


def test_a_ring_is_made_where_the_agent_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "a" / "rings"))
    ranks = Ranks(tp=3, pp=2, dp=1)
    with closing(create_ring("scheduler", ranks, **SMALL)) as ring:
        assert ring.path == tmp_path / "a" / "rings" / f"scheduler-dp1-pp2-tp3.{os.getpid()}.ring"
        assert stat.S_IMODE(ring.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(ring.path.parent.stat().st_mode) == 0o700
        assert list_rings(ring.path.parent) == [ring.path]
        with closing(RingReader(ring.path)) as reader:
            assert reader.info.ranks == ranks


def test_a_second_ring_of_a_process_gets_a_name_of_its_own(tmp_path):
    names = []
    for _ in range(3):
        with closing(create_ring("demo", directory=tmp_path / "r", **SMALL)) as ring:
            names.append(ring.path.name)
    pid = os.getpid()
    assert names == [f"demo-dp0-pp0-tp0.{pid}{again}.ring" for again in ("", "-2", "-3")]
    assert [RingName.parse(name) for name in names] == [RingName("demo", Ranks(), pid, n) for n in (1, 2, 3)]


@pytest.mark.parametrize("number", [1, 2, 17])
def test_a_name_says_what_it_was_made_of(number):
    name = RingName("scheduler", Ranks(tp=15, pp=3, dp=127), 4_194_304, number)
    assert RingName.parse(str(name)) == name


@pytest.mark.parametrize(
    "name",
    ["x.ring", "a-dp0-pp0-tp0.ring", "A-dp0-pp0-tp0.1.ring", "a-dp0-pp0-tp0.1.ring.old", "a-dp-1-pp0-tp0.1.ring"],
)
def test_other_names_say_nothing(name):
    assert RingName.parse(name) is None


@pytest.mark.parametrize("role", ["", "Demo", "a-b", "../x", "a" * 33, "a\n"])
def test_a_role_is_a_word(tmp_path, role):
    with pytest.raises(ConfigError, match=r"^ring role .*: must be a lower-case letter"):
        create_ring(role, directory=tmp_path / "r", **SMALL)


def test_an_option_that_is_not_allowed_is_told_once(tmp_path):
    with pytest.raises(ConfigError, match="ring slots=7: must be from 8"):
        create_ring("demo", directory=tmp_path / "r", slots=7)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, mode):
    path = tmp_path / "r"
    path.mkdir()
    path.chmod(mode)
    mend = "name a folder inside it" if mode == 0o1777 else "chmod 700 it"  # of /tmp nobody should take it away
    with pytest.raises(ConfigError, match=rf"others may write to it \(mode {mode:04o}\); {mend}, or choose"):
        open_ring_directory(path)
    path.chmod(0o755)
    assert open_ring_directory(path) == path


def test_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="link: is a symbolic link, which others may turn"):
        open_ring_directory(tmp_path / "link")
    assert open_ring_directory(tmp_path / "real") == tmp_path / "real"


def test_a_dangling_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="link: is a symbolic link"):
        open_ring_directory(tmp_path / "link")


def test_another_users_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "r").mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, this process is user {owner + 1}"):
        open_ring_directory(tmp_path / "r")


def test_a_file_is_refused(tmp_path):
    (tmp_path / "r").write_text("")
    with pytest.raises(ConfigError, match=re.escape(f"ring directory {tmp_path / 'r'}: is not a directory")):
        open_ring_directory(tmp_path / "r")


def test_a_place_where_nothing_can_be_made_is_named():
    with pytest.raises(ConfigError, match="ring directory /proc/none/r: No such file or directory; choose another"):
        open_ring_directory("/proc/none/r")


def test_who_only_looks_makes_nothing(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory; has an observed process run here"):
        open_ring_directory(tmp_path / "r", create=False)
    assert not (tmp_path / "r").exists()


def test_links_and_folders_are_no_rings(tmp_path):
    (tmp_path / "b.ring").write_text("")
    (tmp_path / "a.ring").write_text("")
    (tmp_path / "c.ring").symlink_to(tmp_path / "a.ring")
    (tmp_path / "d.ring").mkdir()
    (tmp_path / "e.txt").write_text("")
    assert [path.name for path in list_rings(tmp_path)] == ["a.ring", "b.ring"]


def test_the_header_names_the_process_for_good(tmp_path):
    with closing(create_ring("demo", directory=tmp_path / "r", mode=CaptureMode.ENFORCE, **SMALL)) as ring:
        reader = RingReader(ring.path)
        info = reader.info
        assert (info.pid, info.process_start) == (os.getpid(), process_start(os.getpid()))
        assert info.pid_namespace == pid_namespace() > 0
        assert info.first_mode is CaptureMode.ENFORCE
        assert not reader.closed
    assert reader.closed
    reader.close()


def test_a_process_that_ended_is_not_running_even_before_it_is_waited_for():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = process_start(process.pid)
        assert started is not None
        assert started >= (process_start(os.getpid()) or 0)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}/stat").exists()
        assert process_start(process.pid) is None
    assert process_start(process.pid) is None


def test_writers_and_agent_need_no_torch():
    code = "import sys, hicache_obs.recorder.ring_directory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
