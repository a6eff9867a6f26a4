"""Code for kernels of several languages, to see their state and to use their features."""

from __future__ import annotations

from typing import NamedTuple


class Language(NamedTuple):
    """Code to set and to show a variable, the beginning of a word to complete, and a cell that waits."""

    set_x: str
    show_x: str
    prefix: str
    wait: str


SHELL = Language("x={}", "echo [$x]", "ech", "echo begun; sleep 100")
SCRIPT = Language("let x = {}", "console.log(x)", "consol", "console.log('begun'); while (true) {}")
PYTHON = Language("x = {}", "print([x])", "prin", "import time; print('begun', flush=True); time.sleep(100)")

LANGUAGES = {
    "bash": SHELL,
    "coconut": PYTHON,
    "gnuplot": Language("x = {}", "print x", "prin", "print 'begun'; pause 100"),
    "octave": Language("x = {};", "disp(x)", "dis", "disp('begun'); fflush(stdout); pause(100)"),
    "python": PYTHON,
    "r": Language("x <- {}", "cat(x)", "prin", "cat('begun\\n'); flush(stdout()); Sys.sleep(100)"),
    "scheme": Language("(define x {})", "x", "defin", "(begin (display 'begun) (letrec ((f (lambda () (f)))) (f)))"),
    "tcl": Language("set x {}", "puts $x", "put", "puts begun; flush stdout; after 100000"),
    "typescript": SCRIPT,
    "javascript": SCRIPT,
    "zsh": SHELL,
}
"""By the name of the language in a kernel's kernel_info reply, in lower case."""
