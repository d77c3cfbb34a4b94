"""Drives the real SGLang classes on the CPU, in the scheduler's own order, and says what the pages ended with.

    python harness.py SCENARIO...        each in a fork of its own; one JSON line per scenario on standard output
    python harness.py --serve            the same for every request on standard input, each in a fork of its own: SGLang
                                         is imported once, which takes longer than most scenarios

Real: the plugin loaded by ``load_plugins()``, HiCacheController or HybridCacheController, pools, allocator, transfer
engine, layer counters, ``ModelRunner.forward``, ``Scheduler._apply_war_barrier``. Not real: the model (a forward
writes a number to its slots, layer by layer), and the copy kernel that only CUDA has. With ``deferred`` streams the
device is hicache_obs's virtual one: copies and forwards really run later, and in the worst legal order.

A scenario is words joined by ``+``: see ``guest.engine.Scenario``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from typing import Any

from guest.engine import Engine, Scenario, TreeEngine, published
from guest.faults import fault, load
from guest.scenarios import ACTIONS, loadback, retraction, tree

from hicache_obs.sglang import install


def run(words: str) -> dict[str, Any]:
    """One scenario in this process."""
    if fault() == "disk":  # what a full disk says, to any file of this process
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    scenario = Scenario(words)
    action = next((fn for word, fn in ACTIONS.items() if word in scenario), loadback)
    with published():
        engine = (TreeEngine if action in (tree, retraction) else Engine)(scenario)
        if fault() == "ring":  # more than the smallest ring holds, and nobody reads it
            for _ in range(100):
                engine.device.Event().record()
        try:
            result = action(engine)
        except RuntimeError as error:
            if "raise" not in scenario:
                raise
            result = {"raised": f"{type(error).__name__}: {error}", "content": [], "expected": []}
    result["scenario"] = words
    for installed in install.INSTALLED:
        session = installed.session
        dropped = {} if session.ring is None else {str(why.name): n for why, n in session.ring.dropped.items()}
        session.close()
        result["calls"] = session.counters.calls
        result["errors"] = session.counters.errors
        result["fences_added"] = session.counters.fences_added
        result["missing"] = {name: found.value for name, found in installed.missing.items()}
        result["hooked"] = len(installed.hooked)
        result["unobservable"] = {hazard.value: reason for hazard, reason in session.missing.items()}
        result["off"] = session.off
        result["dropped"] = dropped
        result["ring"] = None if session.ring is None else str(session.ring.path)
    return result


def main(scenarios: list[str]) -> int:
    for words in scenarios:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "w") as out:
                try:
                    json.dump(run(words), out)
                except BaseException as error:  # noqa: BLE001 the parent reports it
                    json.dump({"scenario": words, "error": "".join(traceback.format_exception(error))}, out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            print(answer.read(), flush=True)
        os.waitpid(child, 0)
    return 0


def serve() -> None:
    """Answer requests: ``{"environ": {...}, "scenarios": [...], "stdout": PATH, "stderr": PATH}``, a line each.

    A request is run in a fork that has these variables and no others of ours; the answer is a line with its exit
    code, once it is over.
    """
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(request["environ"])
            code = 70
            try:
                load()
                code = main(request["scenarios"])
            except BaseException:  # noqa: BLE001 whoever asked reads it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        load()
        sys.exit(main(sys.argv[1:]))
