"""Make subclasses of Jupyter Server's classes that run the same code with the functions of ``file_functions``."""

from __future__ import annotations

from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any

from jupyter_server.services.contents import filecheckpoints, fileio, filemanager, largefilemanager
from traitlets import TraitType

from .file_functions import REPLACEMENTS

MODULES = (fileio, filecheckpoints, filemanager, largefilemanager)


def _rebind(function: Any, names: dict[str, Any], own_class: CellType) -> Any:
    """Return a copy of a function with the globals ``names`` and, for ``super()``, the class in ``own_class``."""
    if hasattr(function, "__wrapped__"):
        return contextmanager(_rebind(function.__wrapped__, names, own_class))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(own_class if name == "__class__" else cell for name, cell in cells.items())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__qualname__, copy.__annotations__ = function.__qualname__, function.__annotations__
    return copy


def _guarded_names(module: ModuleType) -> dict[str, Any]:
    """Return a copy of a module's globals in which the module's own functions use the guarded file functions."""
    names = {name: value for name, value in vars(module).items() if not isinstance(value, TraitType)}
    names |= REPLACEMENTS
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            names[name] = _rebind(value, names, CellType())
    return names


def _guarded_classes() -> dict[type, type]:
    """Return a guarded subclass for each class in MODULES."""
    guarded: dict[type, Any] = {}
    for module in MODULES:
        names = _guarded_names(module)
        for stock in [value for value in vars(module).values() if isinstance(value, type)]:
            if stock.__module__ == module.__name__:
                guarded[stock] = _guarded_class(stock, names, guarded)
    return guarded


def _guarded_class(stock: type, names: dict[str, Any], guarded: dict[type, Any]) -> type:
    own_class = CellType()
    members: dict[str, Any] = {"__module__": __name__, "__doc__": stock.__doc__}
    ours = [base for base in stock.__bases__ if base in guarded]
    # Copy mixins such as GenericCheckpointsMixin, which override methods of the guarded class that comes after them.
    for mixin in stock.__bases__[: stock.__bases__.index(ours[-1])] if ours else ():
        if mixin not in guarded:
            members |= {name: value for name, value in vars(mixin).items() if isinstance(value, FunctionType)}
    for name, value in vars(stock).items():
        if isinstance(value, FunctionType):
            members[name] = _rebind(value, names, own_class)
    confined = type(stock)(f"Confined{stock.__name__}", (*(guarded[base] for base in ours), stock), members)
    own_class.cell_contents = confined
    return confined


REBOUND = _guarded_classes()
"""Maps each class in MODULES to its copy with guarded file functions."""
