"""No hooked call does I/O or takes a lock held across I/O: the command that traces it, and what it would see."""

from __future__ import annotations

import subprocess
import sys

# A call that a hook is around opens a file, and takes a lock that another thread holds while it does.
BROKEN = """
import sys, threading
sys.path.insert(0, sys.argv.pop(1))
import hot_path, plugin_hooks

trace = hot_path.trace

def broken(rounds, after_round):
    names = {"__name__": "hicache_obs.broken", "threading": threading}
    exec("lock = threading.Lock()", names)

    def open_a_file():
        with names["lock"]:
            open("/dev/null").close()

    def wait_stream(self, stream):
        with names["lock"]:
            pass
        open("/dev/null").close()

    plugin_hooks.Stream.wait_stream = wait_stream
    thread = threading.Thread(target=open_a_file)
    thread.start()
    thread.join()
    trace(rounds, after_round)

hot_path.trace = broken
sys.exit(hot_path.main())
"""


def run(*command):
    """Exit code, and what was printed."""
    options = ["--rounds", "20", "--timed", "0"]
    done = subprocess.run(
        [sys.executable, *command, *options], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_no_hooked_call_does_io_or_takes_a_lock_held_across_io(checkout):
    code, text = run(str(checkout / "benchmarks" / "hot_path.py"))
    assert code == 0, text
    assert "I/O or sleep in a hooked call: none" in text
    assert text.endswith("both: none\n")
    assert "'recorder.ring:" in text  # it has seen the ring's lock


def test_it_would_be_seen(checkout):
    code, text = run("-c", BROKEN, str(checkout / "benchmarks"))
    assert code == 1, text
    assert "I/O or sleep in a hooked call: {'io.open': " in text
    assert text.endswith("both: broken:1\n")
