"""Test several kernels in sandboxes: ipykernel with jupyter_kernel_test's suite, and two others."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import jupyter_kernel_test
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from kernels import run
from leftovers import leftovers
from servers import READY

pytestmark = [pytest.mark.runsc, pytest.mark.template_copies]

Start = Callable[..., tuple[KernelManager, BlockingKernelClient]]

BASH = {
    "argv": [sys.executable, "-m", "bash_kernel", "-f", "{connection_file}"],
    "display_name": "Bash",
    "language": "bash",
    "env": {"PS1": "$"},
}


class TestSandboxedIPykernel(jupyter_kernel_test.KernelTests):
    """jupyter_kernel_test's suite, with input for each of its tests."""

    kernel_name = "python3-sandbox"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples: ClassVar = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples: ClassVar = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples: ClassVar = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples: ClassVar = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result: ClassVar = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    ]
    code_display_data: ClassVar = [
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('\\\\frac{1}{2}'))", "mime": "text/latex"},
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")  # a plain ipykernel fails the suite's "range" as well
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory(prefix="suite-")
        top = Path(cls.folder.name)
        twin = KernelSpecManager().get_kernel_spec("python3").to_dict()
        twin["metadata"]["kernel_provisioner"] = {"provisioner_name": "sandbox-provisioner", "config": {}}
        (top / "kernels" / cls.kernel_name).mkdir(parents=True)
        (top / "kernels" / cls.kernel_name / "kernel.json").write_text(json.dumps(twin))
        (top / "run").mkdir(mode=0o700)
        variables = {"JUPYTER_PATH": str(top), "SANDBOX_RUNTIME_DIR": str(top / "run")}
        with mock.patch.dict(os.environ, variables):
            super().setUpClass()

    def execute_helper(self, *given: Any, **options: Any) -> Any:
        """Execute code like the suite's method, but wait longer than 0.1 s for messages."""
        get = self.kc.iopub_channel.get_msg
        with mock.patch.object(self.kc.iopub_channel, "get_msg", lambda timeout: get(timeout=READY)):
            return super().execute_helper(*given, **options)

    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        left = leftovers(Path(cls.folder.name, "run", "jupyter-sandbox"))
        cls.folder.cleanup()
        assert left == []


def interrupt_once_busy(km: KernelManager, kc: BlockingKernelClient, code: str) -> dict[str, Any]:
    """Execute ``code``, which prints and then sleeps, interrupt it after the output, and return its reply."""
    request = kc.execute(code)
    while kc.get_iopub_msg(timeout=READY)["msg_type"] != "stream":
        pass
    km.interrupt_kernel()
    while (reply := kc.get_shell_msg(timeout=READY))["parent_header"].get("msg_id") != request:
        pass
    content: dict[str, Any] = reply["content"]
    return content


class Other(NamedTuple):
    """Code that the test runs in a kernel other than ipykernel."""

    set_x: str
    show_x: str
    with_x: str
    without_x: str
    sleep: str


OTHERS = {
    "bash": Other("x=5", 'echo "[$x]"', "[5]", "[]", "sh -c 'echo begun; exec sleep 100'"),
    "xpython": Other(  # by default, xeus-python ignores SIGINT, also outside a sandbox
        "x = 5; import signal; signal.signal(signal.SIGINT, signal.default_int_handler)",
        "print(globals().get('x'))",
        "5",
        "None",
        "print('begun', flush=True); import time; time.sleep(100)",
    ),
}


@pytest.mark.debian
@pytest.mark.parametrize("kernel", OTHERS)
def test_start_execute_interrupt_and_restart_in_other_languages(
    start_kernel: Start, sandboxed: Callable[..., str], kernel: str
) -> None:
    code = OTHERS[kernel]
    km, kc = start_kernel(sandboxed(kernel, spec=BASH if kernel == "bash" else None))
    run(kc, code.set_x)
    assert interrupt_once_busy(km, kc, code.sleep)["status"] != "ok"
    assert run(kc, code.show_x).strip() == code.with_x
    km.restart_kernel()
    kc.wait_for_ready(timeout=READY)
    assert run(kc, code.show_x).strip() == code.without_x
