"""Fixtures for all tests: a runtime folder, a notebook folder, kernels, and a check that no sandbox is left."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gcs_server import GCS
from hypothesis import settings
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from kernel_templates import have_template
from kernels import Notebook, Open
from leftovers import leftovers
from servers import READY, Server, link_templates
from traitlets import TraitError

from sandbox_provisioner.errors import SandboxError
from sandbox_provisioner.gvisor import bundle
from sandbox_provisioner.gvisor.bundle import BundleSpec
from sandbox_provisioner.gvisor.interpreter import visible
from sandbox_provisioner.gvisor.runsc import Runsc, find
from sandbox_provisioner.gvisor.runtime_dir import runtime_root
from sandbox_provisioner.templates.store import TemplateShelf

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

os.environ["SANDBOX_SIGNING_KEY"] = "the key of all tests that have no other one"
"""Without it, a test would create a key in the home of the user who runs it."""
os.environ["SANDBOX_TEMPLATE"] = "none"
"""Kernels start without templates, unless a test or --templates says otherwise."""


def pytest_configure() -> None:
    """Restore the default signal handlers: a shell lets its background processes ignore these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--templates", action="store_true", help="start the kernels of all tests as copies of templates")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that only root can run, for other users."""
    if os.geteuid() != 0:
        left_out = [item for item in items if item.get_closest_marker("root")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> TemplateShelf:
    """The templates of this run."""
    return TemplateShelf(tmp_path_factory.mktemp("data") / "sandbox" / "templates")


@pytest.fixture(autouse=True)
def templates(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, shelf: TemplateShelf
) -> Callable[[str, Path], None]:
    """Return a function that, with --templates, provides a kernelspec's template."""
    if not request.config.getoption("--templates") and not request.node.get_closest_marker("templates"):
        return lambda name, folder: None
    monkeypatch.setenv("SANDBOX_TEMPLATE", "use")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(shelf.folder.parents[1]))
    monkeypatch.setenv("TEST_TEMPLATES", str(shelf.folder))

    def provide(name: str, folder: Path) -> None:
        with monkeypatch.context() as context, ThreadPoolExecutor(1) as elsewhere, suppress(SandboxError, TraitError):
            context.setenv("JUPYTER_PATH", str(folder.parent))
            elsewhere.submit(have_template, name, shelf).result()

    return provide


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runtime folder of this test. Fails if the test leaves anything in it."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    monkeypatch.setenv("SANDBOX_RUNTIME_DIR", str(folder))
    yield runtime_root()
    assert leftovers(folder / "jupyter-sandbox") == []


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> None:
    """Collect the garbage of other test modules, so that it does not affect measurements in this one."""
    gc.collect()


@pytest.fixture(scope="session")
def gcs_process() -> Iterator[GCS]:
    """An emulated Google Cloud Storage for all tests of this run."""
    server = GCS()
    yield server
    server.close()


@pytest.fixture
def gcs(gcs_process: GCS, monkeypatch: pytest.MonkeyPatch) -> Iterator[GCS]:
    """The emulated Google Cloud Storage with an empty bucket and without faults. Sets STORAGE_EMULATOR_HOST."""
    gcs_process.reset()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_process.url)
    yield gcs_process
    gcs_process.reset()


@pytest.fixture(scope="session")
def runsc() -> Runsc:
    """The runsc under test."""
    return find()


@pytest.fixture(scope="session")
def spec() -> BundleSpec:
    """A sandbox in which this test run's Python works, without further settings."""
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/home/tester"}
    return BundleSpec(
        python=os.path.realpath(sys.executable),
        home="/home/tester",
        user="tester",
        mounts=tuple(visible([sys.executable], environment)),
        environment=environment,
    )


@pytest.fixture
def unprotected_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start sandboxes whose PID 1 does not keep other processes from its pipe, as in images of older versions."""
    guest = tmp_path / "guest"
    shutil.copytree(bundle.GUEST, guest)
    (guest / "seccomp.py").write_text("def confine(): pass")
    monkeypatch.setattr(bundle, "GUEST", guest)


@pytest.fixture
def notebook_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of notebooks, in which kernels work."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def kernelspecs(tmp_path: Path) -> KernelSpecManager:
    """A manager of kernelspecs with an own folder for this test, in addition to those of the environment."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    manager = KernelSpecManager()
    manager.kernel_dirs = [str(folder), *manager.kernel_dirs]
    return manager


@pytest.fixture
def sandboxed(kernelspecs: KernelSpecManager, templates: Callable[[str, Path], None]) -> Callable[..., str]:
    """Return a function that creates a sandboxed copy of a kernelspec, with settings, and returns its name."""

    def make(name: str = "python3", spec: dict[str, Any] | None = None, **config: Any) -> str:
        content = dict(spec) if spec else kernelspecs.get_kernel_spec(name).to_dict()
        stanza = {"provisioner_name": "sandbox-provisioner", "config": config}
        content["metadata"] = {**content.get("metadata", {}), "kernel_provisioner": stanza}
        folder = Path(kernelspecs.kernel_dirs[0], f"{name}-sandbox")
        folder.mkdir(exist_ok=True)
        (folder / "kernel.json").write_text(json.dumps(content))
        templates(folder.name, folder.parent)
        return folder.name

    return make


@pytest.fixture
def start_kernel(
    kernelspecs: KernelSpecManager, notebook_folder: Path
) -> Iterator[Callable[..., tuple[KernelManager, BlockingKernelClient]]]:
    """Return a function that starts a kernel and waits until it answers. All end after the test."""
    started: list[tuple[KernelManager, BlockingKernelClient]] = []

    def start(
        name: str, manager: dict[str, Any] | None = None, **launch: Any
    ) -> tuple[KernelManager, BlockingKernelClient]:
        km = KernelManager(kernel_name=name, kernel_spec_manager=kernelspecs, **(manager or {}))
        km.start_kernel(**launch)
        kc = km.client()
        started.append((km, kc))
        kc.start_channels()
        kc.wait_for_ready(timeout=READY)
        return km, kc

    yield start
    for km, kc in started:
        kc.stop_channels()
        if km.has_kernel:
            km.shutdown_kernel(now=True)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own data folder of Jupyter for this test."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    link_templates(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def open_notebook(
    start_kernel: Callable[..., tuple[KernelManager, BlockingKernelClient]],
    sandboxed: Callable[..., str],
    notebook_folder: Path,
    data: Path,
) -> Open:
    """Return a function that opens a notebook: its kernel is started or restored."""

    def start(name: str = "a.ipynb", **config: Any) -> Notebook:
        env = {**os.environ, **({"JPY_SESSION_NAME": str(notebook_folder / name)} if name else {})}
        return Notebook(*start_kernel(sandboxed(**config), env=env))

    return start


@pytest.fixture
def serve(tmp_path: Path, notebook_folder: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that starts a Jupyter server. All are stopped with SIGTERM after the test."""
    servers: list[Server] = []

    def start(*options: str, name: str = "") -> Server:
        servers.append(Server(tmp_path, *options, name=name))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
