"""Test that processes which runsc leaves behind are reaped, and that other children are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandbox_provisioner.gvisor.zombies import hold_children

pytestmark = pytest.mark.root

PROGRAM = """
import os, subprocess, time
from sandbox_provisioner.gvisor.zombies import hold_children, reap

def zombies():
    states = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            fields = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
            if fields[0] == "Z" and fields[1] == "1":
                states[int(name)] = name
    return sorted(states)

assert os.getpid() == 1
other = subprocess.Popen(["true"])
parent = subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000 & read line"], stdin=subprocess.PIPE)
while len(held := hold_children(parent.pid)) < 2:
    for pidfd in held:
        os.close(pidfd)
    time.sleep(0.01)
children = [int(name) for name in open(f"/proc/{parent.pid}/task/{parent.pid}/children").read().split()]
for child in children:
    os.kill(child, 9)
parent.kill()
assert parent.wait() == -9
while zombies() != sorted([other.pid, *children]):
    time.sleep(0.01)
reap(held)
assert zombies() == [other.pid], zombies()
assert other.wait() == 0
reap([])
"""


def test_orphans_of_runsc_are_reaped_and_other_children_are_not() -> None:
    argv = [
        "unshare",
        "--pid",
        "--fork",
        "--mount-proc",
        "--kill-child",
        sys.executable,
        "-c",
        PROGRAM,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_held_unless_this_process_is_pid_1() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 1000 & echo begun; wait"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout and parent.stdout.readline()
        assert hold_children(parent.pid) == []
        subprocess.run(["pkill", "-P", str(parent.pid)], check=True)
