"""Test that apt's two formats of source entries are rewritten to name backports."""

from __future__ import annotations

import platform

from sandbox_provisioner.setup.runsc_install import debian

RELEASE = platform.freedesktop_os_release().get("VERSION_CODENAME", "stable")
DEB822 = f"""\
# the archive
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: {RELEASE} {RELEASE}-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/security
Suites: {RELEASE}-security
Components: main

Types: deb
URIs: http://mirror.example/off
Suites: {RELEASE}
Components: main
Enabled: no

Types: deb
URIs: http://mirror.example/folded
Suites:
 other
 {RELEASE}
Components: main contrib
"""


def test_backports_of_stanzas() -> None:
    assert (
        debian.backports_deb822(DEB822)
        == f"""\
Types: deb deb-src
URIs: http://mirror.example/debian
Suites: {RELEASE}-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/folded
Suites: {RELEASE}-backports
Components: main contrib
"""
    )


def test_backports_of_lines() -> None:
    text = f"""\
# deb http://mirror.example/commented {RELEASE} main
deb http://mirror.example/debian {RELEASE} main contrib
deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/more stable main
deb-src http://mirror.example/debian {RELEASE} main
deb http://mirror.example/security {RELEASE}-security main
deb http://mirror.example/flat ./
"""
    assert debian.backports_one_line(text) == (
        f"deb http://mirror.example/debian {RELEASE}-backports main contrib\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/more stable-backports main\n"
    )
