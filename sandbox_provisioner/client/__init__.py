"""Python client of the REST API: ``SandboxClient`` blocks; ``AsyncSandboxClient`` is for asyncio programs."""

from ..sandbox.model import (
    Capabilities,
    Deleted,
    EffectiveSetting,
    EffectiveSettings,
    NamedState,
    PlainNotebook,
    Rewound,
    Sandbox,
    State,
    Stored,
)
from ._async import AsyncSandboxClient
from ._sync import SandboxClient
from .discovery import RunningServer, running_servers
from .errors import AnswerError, NoServerError, ProblemError, ServerUnreachableError
from .models import CreateSandbox, Event, Exit, Output, Reference

__all__ = [
    "AnswerError",
    "AsyncSandboxClient",
    "Capabilities",
    "CreateSandbox",
    "Deleted",
    "EffectiveSetting",
    "EffectiveSettings",
    "Event",
    "Exit",
    "NamedState",
    "NoServerError",
    "Output",
    "PlainNotebook",
    "ProblemError",
    "Reference",
    "Rewound",
    "RunningServer",
    "Sandbox",
    "SandboxClient",
    "ServerUnreachableError",
    "State",
    "Stored",
    "running_servers",
]
