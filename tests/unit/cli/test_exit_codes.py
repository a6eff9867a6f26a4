"""The exit status of ``jupyter sandbox`` means the same, whoever found out what is wrong."""

from __future__ import annotations

import pytest

from sandbox_provisioner import errors
from sandbox_provisioner.cli.exit_codes import HELP, ExitStatus, exit_status
from sandbox_provisioner.client import ServerUnreachableError
from sandbox_provisioner.client.errors import refusal
from sandbox_provisioner.server import problem_details


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
        (errors.ConfigurationError("storage_dir", "It is wrong."), ExitStatus.UNABLE),
        (errors.StorageNotHereError("a", "gcs", "gs://b", "/s"), ExitStatus.UNABLE),
        (errors.DiskFullError("no space"), ExitStatus.UNABLE),
    ],
)
def test_an_error_has_the_same_status_here_and_on_a_server(error: errors.SandboxError, status: ExitStatus) -> None:
    assert exit_status(error) == status
    told = problem_details.describe(error)
    assert exit_status(refusal("http://x/", told["status"], told)) == status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OSError("no"), ExitStatus.FAILED),
        (ServerUnreachableError("http://x/", "refused"), ExitStatus.UNABLE),
        (refusal("http://x/", 403, None), ExitStatus.UNABLE),
        (refusal("http://x/", 404, None), ExitStatus.UNABLE),
        (refusal("http://x/", 500, None), ExitStatus.FAILED),
    ],
)
def test_what_is_wrong_on_the_way_has_one_too(error: Exception, status: ExitStatus) -> None:
    assert exit_status(error) == status


def test_each_is_documented() -> None:
    assert all(f"\n  {status.value}  " in HELP for status in ExitStatus)
