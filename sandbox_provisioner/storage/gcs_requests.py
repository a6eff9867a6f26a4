"""Requests to Google Cloud Storage: tried again while the failure may pass, and their failures in our words.

Nothing of Google's is imported before the first request, so the package works without it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from ..errors import RateLimitedError, StorageError, StorageUnavailableError

BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")

TIMEOUT = 30.0
"""How long one request may go without an answer, in seconds."""

Result = TypeVar("Result")


class NotThere(Exception):
    """What was asked about does not exist: Google's 404."""


class NotMet(Exception):
    """A precondition did not hold: Google's 412."""


class Requests:
    """What is sent to one bucket. A failure that may pass is met by trying again for ``patience`` seconds.

    ``on_time`` is called with the server's time, in seconds since 1970, rounded down, whenever it answers.
    """

    def __init__(self, bucket: str, patience: float = 60.0, on_time: Callable[[float], None] | None = None) -> None:
        if not BUCKET.fullmatch(bucket):
            remedy = "A bucket's name has 3 to 222 lower-case letters, digits, '-', '_' and '.'."
            raise StorageError(bucket, f"{bucket!r} cannot be the name of a bucket.", remedy)
        self.name = bucket
        self.patience = patience
        self._on_time = on_time
        self._lock = threading.Lock()
        self._bucket: Any = None

    def bucket(self) -> Any:
        """Google's own object for the bucket. It asks nothing of the server by itself."""
        with self._lock:
            if self._bucket is None:
                self._bucket = self._client().bucket(self.name)
            return self._bucket

    def _client(self) -> Any:
        try:
            from google.auth.exceptions import GoogleAuthError
            from google.cloud.storage import Client
        except ImportError as error:
            problem = f"The bucket {self.name} cannot be used: google-cloud-storage is not installed."
            raise StorageError(self.name, problem, "`pip install 'sandbox-provisioner[gcs]'`.") from error
        try:
            client = Client(project=None)
        except GoogleAuthError as error:
            raise self._denied(error) from error
        if self._on_time:
            client._http.hooks["response"].append(self._hear)
        return client

    def _hear(self, answer: Any, **_: Any) -> None:
        """Report the time in the headers of an answer. Called by ``requests`` for each answer."""
        try:
            said = parsedate_to_datetime(answer.headers.get("Date", ""))
        except ValueError:
            return
        if self._on_time:
            self._on_time(said.timestamp())

    def retry(self) -> Any:
        """Google's judgement on what may pass, with our patience."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return DEFAULT_RETRY.with_timeout(self.patience).with_delay(initial=0.1, maximum=5.0, multiplier=2.0)

    def ask(self, request: Callable[[], Result], unsure: list[Exception] | None = None) -> Result:
        """The answer to ``request``; NotThere, NotMet, or an error of ours.

        Each failure that was met by trying again is added to ``unsure``: the request may have been carried out.
        """
        self.bucket()
        from google.api_core import exceptions as google
        from google.auth.exceptions import GoogleAuthError
        from requests import JSONDecodeError, RequestException
        from urllib3.exceptions import HTTPError

        def send() -> Result:
            try:
                return request()
            except JSONDecodeError as error:
                raise ConnectionError("an answer was cut short") from error

        failures: list[Exception] = [] if unsure is None else unsure
        try:
            answer: Result = self.retry()(send, on_error=failures.append)()
        except google.NotFound as error:
            raise NotThere from error
        except google.PreconditionFailed as error:
            raise NotMet from error
        except google.RetryError as error:
            raise self._unavailable(error.cause) from error
        except (google.Unauthorized, google.Forbidden, GoogleAuthError) as error:
            raise self._denied(error) from error
        except (google.GoogleAPICallError, RequestException, HTTPError) as error:
            raise StorageError(self.name, f"A request to the bucket {self.name} failed: {error}.") from error
        return answer

    def _unavailable(self, cause: BaseException | None) -> StorageUnavailableError:
        from google.api_core.exceptions import TooManyRequests

        tried = f" for {self.patience:g} s" if self.patience else ""
        if isinstance(cause, TooManyRequests):
            problem = f"The bucket {self.name} refused a request{tried} because of too many requests: {cause}."
            return RateLimitedError(self.name, problem, "Try again in a few seconds.")
        problem = f"The bucket {self.name} could not be reached{tried}: {cause}."
        return StorageUnavailableError(self.name, problem, "Try again when the network is back.")

    def no_bucket(self) -> StorageError:
        """The error for a bucket that does not exist."""
        problem = f"There is no bucket {self.name}, or these credentials may not see it."
        return StorageError(self.name, problem, "Check the bucket's name; `gcloud storage buckets list` shows yours.")

    def _denied(self, error: Exception) -> StorageError:
        problem = f"Google does not let this server use the bucket {self.name}: {error}."
        remedy = (
            "Check that GOOGLE_APPLICATION_CREDENTIALS, or this machine's service account, is an identity that has "
            "the role Storage Object User on the bucket."
        )
        return StorageError(self.name, problem, remedy)
