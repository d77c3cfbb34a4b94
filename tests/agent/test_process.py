"""``hicache-obs agent`` as a process: one port, one directory, signals, and disks that fail."""

from __future__ import annotations

import builtins
import os
import re
import resource
import signal
import socket
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from hicache_obs import __version__
from hicache_obs.cli import main
from hicache_obs.readers import open_trace
from hicache_obs.readers.ring import RingReader
from hicache_obs.readers.ring_header import read_state
from hicache_obs.recorder.agent_lock import running_agent
from hicache_obs.records import NO_OP, RING_VERSION, EventRecord, Lost

RACE = {"hazard": "waw_forward_restore"}


def scrape(url, accept="*/*"):
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept})) as answer:
        return answer.read().decode()


def test_one_port_serves_all_ranks_and_sigterm_ends_it(
    agent_process, ring, rings, tmp_path, round_of, fill, value, eventually
):
    agent = agent_process("--journal", str(tmp_path / "j"))
    url = agent.url()
    assert running_agent(rings) == {
        "pid": str(agent.process.pid),
        "version": __version__,
        "layout": str(RING_VERSION),
        "url": url,
        "journal": str(tmp_path / "j"),
    }
    for tp in range(3):
        fill(ring(tp), round_of(1, times=True))
    eventually(lambda: scrape(url).count("hicache_obs_rings{") == 3)
    eventually(lambda: value(scrape(url), "violations_total", tp_rank="2", **RACE) == 1)
    writer = ring(3)
    fill(writer, round_of(1))
    assert agent.end(signal.SIGTERM) == 0
    with closing(RingReader(writer.path)) as reader:
        assert reader.pending == 0
    (folder,) = (tmp_path / "j").glob("*tp3*")
    assert [int(record.op) for record in open_trace(folder) if record.op != NO_OP] == [10, 11]
    assert running_agent(rings) == {}


def test_ctrl_c_ends_it_as_well(agent_process):
    agent = agent_process()
    agent.url()
    assert agent.end(signal.SIGINT) == 0


def test_a_second_agent_ends_with_a_message(agent_process, rings, capsys):
    agent = agent_process()
    agent.url()
    assert main(["agent", "--dir", str(rings), "--port", "0"]) == 2
    assert capsys.readouterr().err == (
        f"hicache-obs: agent: another agent (process {agent.process.pid}) reads the rings in {rings}; "
        "stop it, or name another --dir\n"
    )


def test_a_killed_agents_lock_is_nobodys(agent_process, rings):
    agent = agent_process()
    agent.url()
    agent.end(signal.SIGKILL)
    assert (rings / "agent.lock").exists()
    assert running_agent(rings) == {}
    agent_process().url()


def test_a_port_that_is_taken_is_named_and_nothing_has_been_read(rings, ring, round_of, fill, capsys):
    writer = ring(0)
    fill(writer, round_of(1))
    writer.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main(["agent", "--dir", str(rings), "--port", str(port)]) == 2
    assert capsys.readouterr().err.endswith(
        f"hicache-obs: --bind, --port: port {port} on 127.0.0.1 is in use; choose another or 0 for any free port\n"
    )
    assert running_agent(rings) == {}
    assert read_state(writer.path).read == 0
    assert main(["agent", "--dir", str(rings), "--once"]) == 1


def test_an_address_of_another_machine_is_named(rings, capsys):
    assert main(["agent", "--dir", str(rings), "--port", "0", "--bind", "192.0.2.1"]) == 2
    assert "--bind, --port: address 192.0.2.1 is not one of this machine" in capsys.readouterr().err


def test_settings_come_from_the_environment(rings, ring, round_of, fill, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(rings))
    monkeypatch.setenv("HICACHE_OBS_JOURNAL", str(tmp_path / "j"))
    monkeypatch.setenv("HICACHE_OBS_FINISHED", "keep")
    writer = ring()
    fill(writer, round_of(1))
    writer.close()
    assert main(["agent", "--once"]) == 1
    assert writer.path.exists()
    assert len(list((tmp_path / "j").glob("*/*.arrows"))) == 1
    monkeypatch.setenv("HICACHE_OBS_FINISHED", "burn")
    assert main(["agent", "--once"]) == 2
    assert capsys.readouterr().err.endswith("HICACHE_OBS_FINISHED: 'burn'; expected move or keep\n")


# -- --once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fenced", "code", "text"),
    [
        (True, 0, "0 violation, 0 contradiction, 0 latent, 0 unknown"),
        (False, 1, "0 violation, 0 contradiction, 1 latent, 0 unknown"),
    ],
)
def test_once_reads_what_is_there_and_says_what_it_found(rings, ring, round_of, fill, capsys, fenced, code, text):
    writer = ring(2)
    records = round_of(1, fenced=fenced)
    fill(writer, records)
    assert main(["agent", "--dir", str(rings), "--once"]) == code
    explained = "" if fenced else f"to have them explained: hicache-obs check {rings}/*.ring\n"
    assert capsys.readouterr().out == (
        f"dp0 pp0 tp2: {len(records)} records, 0 lost, 1 page pairs checked; operation pairs: {text}\n{explained}"
    )


def test_once_says_where_the_records_are_now(rings, ring, round_of, fill, tmp_path, capsys):
    for arguments, where in (((), rings / "finished/*.ring"), (("--journal", str(tmp_path / "j")), tmp_path / "j/*")):
        writer = ring(0)
        fill(writer, round_of(1))
        writer.close()
        assert main(["agent", "--dir", str(rings), "--once", *arguments]) == 1
        assert capsys.readouterr().out.endswith(f"to have them explained: hicache-obs check {where}\n")
        assert [main(["check", str(path)]) for path in where.parent.glob(where.name)] == [1]
    assert main(["status", "--dir", str(rings)]) == 3
    assert "; 2 of ended processes, read to their end, in " in capsys.readouterr().out


def test_once_in_a_directory_that_does_not_exist(tmp_path, capsys):
    assert main(["agent", "--once", "--dir", str(tmp_path / "typo")]) == 2
    assert capsys.readouterr().err == (
        f"hicache-obs: --dir {tmp_path}/typo: No such file or directory; has an observed process run here?\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_once_without_rings_checks_nothing(rings, capsys):
    assert main(["agent", "--dir", str(rings), "--once"]) == 3
    assert capsys.readouterr().out == f"no rings to read in {rings}\n"


def test_once_with_a_blind_rank_is_not_clean(rings, ring, round_of, fill):
    fill(ring(), round_of(1, fenced=True))
    (rings / "scheduler-dp0-pp0-tp1.1.ring").write_bytes(b"x" * 5000)
    assert main(["agent", "--dir", str(rings), "--once"]) == 3


# -- disks and permissions -----------------------------------------------------------------------------------


def limit_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_full_disk_costs_the_journal_and_nothing_else(
    agent_process, ring, tmp_path, round_of, fill, value, eventually
):
    agent = agent_process("--journal", str(tmp_path / "j"), preexec_fn=limit_files)
    url = agent.url()
    writer = ring(slots=1024, arena_words=2048)  # never half full: nothing is left out
    for n in range(100):
        fill(writer, round_of(n, times=True))
        if n < 8:  # in batches of their own
            eventually(lambda n=n: value(scrape(url), "records_total") == 5 * (n + 1))
    eventually(lambda: value(scrape(url), "violations_total", **RACE) == 100)
    assert value(scrape(url), "ring_errors_total", reason="journal") > 0
    assert value(scrape(url), "blind") == 0
    assert agent.end() == 0
    assert "journal" in agent.log.read_text()
    assert "File too large" in agent.log.read_text()
    (folder,) = (tmp_path / "j").iterdir()
    found = [int(record.op) for record in open_trace(folder) if not isinstance(record, Lost) and record.op != NO_OP]
    assert found
    assert found == [op for n in range(100) for op in (10 * n, 10 * n + 1) * 2][: len(found)]


def test_a_journal_directory_without_permission_is_refused_at_once(rings, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(rings))
    monkeypatch.setenv("HICACHE_OBS_JOURNAL", str(tmp_path / "j"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root, who may run this, may write anywhere
    assert main(["agent", "--port", "0"]) == 2
    assert f"--journal {tmp_path / 'j'}: Permission denied; name a directory" in capsys.readouterr().err


def test_a_journal_path_that_is_a_file_is_refused_at_once(rings, tmp_path, capsys):
    (tmp_path / "j").write_text("")
    assert main(["agent", "--dir", str(rings), "--port", "0", "--journal", str(tmp_path / "j")]) == 2
    assert f"--journal {tmp_path / 'j'}: File exists; name a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["agent", "--port", "0"], ["agent", "--once"], ["status"], ["off"], ["on"]])
def test_another_users_directory_is_refused(rings, command, monkeypatch, capsys):
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert main([*command, "--dir", str(rings)]) == 2
    assert capsys.readouterr().err == (
        f"hicache-obs: ring directory {rings}: belongs to user {owner}, this process is user {owner + 1}; "
        "choose another with HICACHE_OBS_DIR or --dir\n"
    )


def test_a_ring_without_permission_blinds_its_rank_only(node, ring, round_of, fill, value, monkeypatch):
    agent, metrics = node()
    secret, good = ring(0), ring(1)
    fill(good, round_of(1))
    real = builtins.open

    def refuse(path, *arguments, **options):
        if str(path) == str(secret.path):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    assert agent.cycle(budget_s=9) == 3
    assert [value(metrics, "blind", tp_rank=tp) for tp in "01"] == [1, 0]


def test_a_ring_cut_short_does_not_end_the_process(agent_process, ring, round_of, fill, value, eventually):
    agent = agent_process()
    url = agent.url()
    short = ring(0, slots=1 << 12, arena_words=1 << 12)
    for n in range(300):
        fill(short, round_of(n, fenced=True))
    eventually(lambda: "hicache_obs_rings" in scrape(url))
    os.truncate(short.path, 0)
    fill(ring(1), round_of(1))
    eventually(lambda: 'tp_rank="1"' in scrape(url) and value(scrape(url), "records_total", tp_rank="1") == 3)
    eventually(lambda: value(scrape(url), "blind", tp_rank="0") == 1)
    assert agent.process.poll() is None
    assert agent.end() == 0
    short.disown()


def test_a_directory_removed_under_the_process_does_not_end_it(agent_process, rings, ring, value, eventually):
    agent = agent_process()
    url = agent.url()
    writer = ring()
    eventually(lambda: "hicache_obs_rings{" in scrape(url))
    for path in rings.iterdir():
        path.unlink()
    rings.rmdir()
    writer.append(EventRecord(1, 0, 0, 1, 1))
    eventually(lambda: value(scrape(url), "records_total") == 1)
    eventually(lambda: running_agent(rings).get("pid") == str(agent.process.pid))
    assert agent.end() == 0


# -- the port ------------------------------------------------------------------------------------------------


def test_the_status_page_knows_what_the_metrics_know(agent_process, ring, round_of, fill, value, eventually):
    agent = agent_process()
    url = agent.url()
    home = url.removesuffix("metrics")
    eventually(lambda: not refused(f"{home}-/ready"))
    assert "No rank has been seen" in scrape(home)
    fill(ring(0), round_of(1, times=True))
    fill(ring(1), round_of(1, fenced=True))
    eventually(lambda: value(scrape(url), "violations_total", **RACE) == 1)
    page = scrape(home)
    assert ">VIOLATED<" in page
    (name,) = set(re.findall(r"HC-[0-9a-f]{8}", page))
    assert "1 pair on tp0, last " in page
    assert "forward round 1 writes them on stream" in page
    eventually(lambda: 'scope="row">tp1<' in scrape(home))
    assert scrape(f"{home}-/healthy") == "ok\n"
    assert f'fingerprint="{name}"' in scrape(url, "application/openmetrics-text; version=1.0.0")


def test_what_a_ring_spoiled_is_known_when_it_has_ended(node, ring, round_of, fill):
    agent, _ = node()
    writer = ring()
    fill(writer, round_of(1, times=True))
    agent.drain()
    writer.close()
    agent.drain()
    (entry,) = agent.board.entries()
    assert entry.radius.device_pages == ((0, 1),)


def test_an_agent_that_does_not_turn_is_not_healthy(node, monkeypatch):
    agent, _ = node()
    assert agent.stuck() == "the ring directory has not been read yet"
    agent.cycle(budget_s=1)
    assert agent.stuck() == ""
    now = time.monotonic()
    monkeypatch.setattr("hicache_obs.agent.node.time.monotonic", lambda: now + 61)
    assert agent.stuck() == "the last cycle ended 61 s ago"


def refused(url, **headers):
    """The status of a request that is refused, 0 for one that is not."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)):
            return 0
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_credentials_from_files_guard_the_port(agent_process, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    monkeypatch.setenv("HICACHE_OBS_TOKEN_FILE", str(token))
    agent = agent_process("--bind", "0.0.0.0")
    url = agent.url().replace("0.0.0.0", "127.0.0.1")
    assert refused(url) == refused(url.removesuffix("metrics")) == refused(url, Authorization="Bearer x") == 401
    assert refused(url, Authorization="Bearer s3cret") == 0
    assert refused(url.replace("metrics", "-/healthy")) in (0, 503)
    assert b"s3cret" not in Path(f"/proc/{agent.process.pid}/cmdline").read_bytes()
    assert "credentials travel in clear text" in agent.log.read_text()


@pytest.mark.parametrize(("bind", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_port_that_everybody_may_read_is_warned_about(agent_process, bind, warned):
    agent = agent_process("--bind", bind)
    agent.url()
    assert agent.end() == 0
    assert (
        "can be read by whoever reaches it: set --token-file or --basic-auth-file" in agent.log.read_text()
    ) == warned


def test_a_credential_that_cannot_be_read_ends_it_at_once(rings, tmp_path, capsys):
    assert main(["agent", "--dir", str(rings), "--token-file", str(tmp_path / "none")]) == 2
    assert f"--token-file {tmp_path / 'none'}: No such file or directory" in capsys.readouterr().err
    assert main(["agent", "--dir", str(rings), "--tls-cert", str(tmp_path / "none")]) == 2
    assert f"--tls-cert {tmp_path / 'none'}: needs --tls-key as well" in capsys.readouterr().err
    assert running_agent(rings) == {}


def test_created_times_can_be_switched_off(agent_process, ring, round_of, fill, value, eventually, monkeypatch):
    monkeypatch.setenv("HICACHE_OBS_CREATED", "off")
    url = agent_process().url()
    fill(ring(), round_of(1))
    eventually(lambda: value(scrape(url), "records_total") == 3)
    assert "_created" not in scrape(url, "application/openmetrics-text; version=1.0.0")


# -- textfile ------------------------------------------------------------------------------------------------


def test_once_writes_a_textfile(rings, ring, round_of, fill, value, tmp_path, capsys):
    fill(ring(2), round_of(1))
    path = tmp_path / "hicache.prom"
    assert main(["agent", "--dir", str(rings), "--once", "--textfile", str(path)]) == 1
    text = path.read_text()
    assert value(text, "latent_races_total", tp_rank="2", **RACE) == 1
    assert value(text, "records_total", tp_rank="2") == 3
    assert "_created" not in text
    assert list(tmp_path.glob("*hicache*")) == [path]


def test_a_textfile_that_cannot_be_written_costs_no_record(rings, ring, round_of, fill, tmp_path, capsys):
    writer = ring()
    fill(writer, round_of(1))
    path = tmp_path / "none" / "x.prom"
    assert main(["agent", "--dir", str(rings), "--once", "--textfile", str(path)]) == 2
    assert f"--textfile {path}: cannot be written" in capsys.readouterr().err
    with closing(RingReader(writer.path)) as reader:
        assert reader.pending == 3
    assert main(["agent", "--dir", str(rings), "--textfile", str(tmp_path / "x.prom")]) == 2
    assert capsys.readouterr().err.endswith("needs --once; a running agent is scraped on its port\n")
