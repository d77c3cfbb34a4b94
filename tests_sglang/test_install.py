"""Installing changes nothing; hooks exist only when asked for, and only in scheduler processes."""

from __future__ import annotations

import re

LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"
HOOKS = "from sglang.srt.plugins.hook_registry import HookRegistry; print('hooks', len(HookRegistry._hooks))"
MODULES = "import sys; print('modules', sorted(name for name in sys.modules if name.startswith('hicache_obs')))"
CACHE = "print([name for name in ('scheduler', 'cache_controller') if f'sglang.srt.managers.{name}' in sys.modules])"


def test_no_other_distribution_was_changed(sglang_folder):
    before, after = (
        set((sglang_folder / f"freeze-{when}.txt").read_text().splitlines()) for when in ("before", "after")
    )
    ours = {line for line in after if "hicache" in line.lower()}
    assert len(before) > 50
    assert before - after == set()
    names = {re.split(r"[=@ ]", line)[0].lower() for line in after - before - ours if line and line[0] not in "-#"}
    assert names <= {
        "click", "jsonschema", "jsonschema-specifications", "markdown-it-py", "mdurl", "nvtx", "opentelemetry-api",
        "opentelemetry-sdk", "opentelemetry-semantic-conventions", "prometheus-client", "pyarrow", "pygments",
        "referencing", "rich", "rpds-py",
    }  # fmt: skip


def test_unset_means_no_hook_and_no_import(run_python, environment):
    done = run_python(f"{LOAD}; {HOOKS}; {MODULES}", variables=environment("0.5.23", ""))
    assert done.returncode == 0, done.stderr
    assert "hooks 0" in done.stdout
    assert "modules ['hicache_obs', 'hicache_obs.sglang', 'hicache_obs.sglang.plugin']" in done.stdout


def test_a_launcher_gets_no_hook_and_imports_no_cache(run_python, environment):
    variables = environment("0.5.23", "observe", HICACHE_OBS_PROCESSES="scheduler")
    done = run_python(f"{LOAD}; {HOOKS}; {MODULES}; {CACHE}", variables=variables)
    assert done.returncode == 0, done.stderr
    assert "hooks 0" in done.stdout
    assert "hicache_obs.sglang.install" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


SCHEDULER = """
from sglang.srt.plugins import load_plugins
def run_scheduler_process(tp_rank, pp_rank, dp_rank):
    load_plugins()
    torch.cpu.Event().record()
run_scheduler_process(3, 1, None)
from hicache_obs.sglang.install import INSTALLED
(installed,) = INSTALLED
print(len(installed.hooked), installed.missing, installed.session.ring.path.name)
"""


def test_a_scheduler_is_hooked_and_its_ranks_are_those_it_was_started_with(run_python, environment):
    done = run_python(SCHEDULER, variables=environment("0.5.23", "observe", HICACHE_OBS_PROCESSES="scheduler"))
    assert done.returncode == 0, done.stderr
    assert re.search(r"\b47 \{\} scheduler-dp0-pp1-tp3\.\d+\.ring", done.stdout)


def test_a_wrong_setting_is_said_and_nothing_is_hooked(run_python, environment):
    done = run_python(f"{LOAD}; {HOOKS}", variables=environment("0.5.23", "watch"))
    assert done.returncode == 0
    assert "hooks 0" in done.stdout
    assert "HICACHE_OBS: 'watch'; expected off or observe or enforce" in done.stderr


def test_doctor_names_the_release_and_warns_of_a_filter(run_python, environment):
    command = "import sys; from hicache_obs.cli import main; sys.exit(main(['doctor']))"
    done = run_python(command, variables=environment("0.5.23", "observe", SGLANG_PLUGINS="other"))
    text = " ".join(done.stdout.split())
    assert "SGLang 0.5.23:" in text
    assert "SGLANG_PLUGINS=other leaves hicache_obs out" in text
