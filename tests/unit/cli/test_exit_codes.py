"""Test the exit status of ``jupyter sandbox`` for errors of this process and of a server."""

from __future__ import annotations

import pytest

from sandbox_provisioner import errors
from sandbox_provisioner.cli.exit_codes import HELP, exit_status
from sandbox_provisioner.client import ServerUnreachableError
from sandbox_provisioner.client.errors import refusal
from sandbox_provisioner.errors.kinds import ExitStatus
from sandbox_provisioner.server import problem_details


def newer_problem(status: int) -> dict[str, object]:
    """Return a problem detail of a kind that this version does not know."""
    return {"type": "urn:sandbox:newer", "title": "Newer", "status": status, "detail": "A newer problem."}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.SandboxError("It failed."), ExitStatus.FAILED),
        (errors.UnsaveableError("a", ["a device"]), ExitStatus.FAILED),
        (errors.StorageUnavailableError("gs://b", "It is away."), ExitStatus.FAILED),
        (errors.AmbiguousSandboxError("a", ["a1", "a2"]), ExitStatus.USAGE),
        (errors.UnknownSandboxError("a", []), ExitStatus.MISSING),
        (errors.SandboxNotFoundError("a", "/s"), ExitStatus.MISSING),
        (errors.SavepointNotFoundError("a", "n", []), ExitStatus.MISSING),
        (errors.SnapshotNotFoundError("It is not there."), ExitStatus.MISSING),
        (errors.SandboxExistsError("a", "/s"), ExitStatus.CONFLICT),
        (errors.SavepointExistsError("a", "n"), ExitStatus.CONFLICT),
        (errors.LeaseHeldError("sandboxes/a/lock", "lab-7"), ExitStatus.CONFLICT),
        (errors.FencedError("a", "lab-7"), ExitStatus.CONFLICT),
        (errors.StateError("a", "start", "running"), ExitStatus.CONFLICT),
        (errors.LinkClosedError("The sandbox has ended."), ExitStatus.CONFLICT),
        (errors.TooManySavepointsError("a", 10), ExitStatus.CONFLICT),
        (errors.NotebookInUseError("a.ipynb"), ExitStatus.CONFLICT),
        (errors.ConfigurationError("storage_dir", "It is wrong."), ExitStatus.UNABLE),
        (errors.StorageNotHereError("a", "gcs", "gs://b", "/s"), ExitStatus.UNABLE),
        (errors.DiskFullError("no space"), ExitStatus.UNABLE),
    ],
)
def test_same_exit_status_here_and_through_server(error: errors.SandboxError, status: ExitStatus) -> None:
    assert exit_status(error) == status
    problem = problem_details.describe(error)
    assert exit_status(refusal("http://x/", problem["status"], problem)) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError("no"), ExitStatus.FAILED),
        (ServerUnreachableError("http://x/", "refused"), ExitStatus.UNABLE),
        (refusal("http://x/", 403, {}), ExitStatus.UNABLE),
        (refusal("http://x/", 404, {}), ExitStatus.UNABLE),
        (refusal("http://x/", 500, {}), ExitStatus.FAILED),
        (refusal("http://x/", 409, newer_problem(409)), ExitStatus.CONFLICT),
        (refusal("http://x/", 422, newer_problem(422)), ExitStatus.FAILED),
    ],
)
def test_exit_status_of_other_errors(error: Exception, status: ExitStatus) -> None:
    assert exit_status(error) == status


def test_help_lists_every_exit_status() -> None:
    assert all(f"\n  {status.value}  " in HELP for status in ExitStatus)
