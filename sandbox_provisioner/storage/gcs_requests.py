"""Send requests to Google Cloud Storage: retry temporary failures, and translate the others into our errors.

Google's packages are imported at the first request, so that the package works without them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from ..config import BUCKET
from ..errors import RateLimitedError, StorageError, StorageUnavailableError

TIMEOUT = 30.0
"""Seconds that one request may go without a response."""

Result = TypeVar("Result")


class MissingError(Exception):
    """The object or bucket does not exist: HTTP status 404."""


class PreconditionError(Exception):
    """A precondition, such as a generation, did not hold: HTTP status 412."""


class Requests:
    """The requests to one bucket. Temporary failures are retried for ``patience`` seconds.

    ``on_time`` is called for each response with the server's time, in whole seconds since 1970, rounded down.
    """

    def __init__(self, bucket: str, patience: float = 60.0, on_time: Callable[[float], None] | None = None) -> None:
        if not BUCKET.fullmatch(bucket):
            remedy = "A bucket's name has 3 to 222 lower-case letters, digits, '-', '_' and '.'."
            raise StorageError(bucket, f"{bucket!r} is not a valid bucket name.", remedy)
        self.name = bucket
        self.patience = patience
        self._on_time = on_time
        self._lock = threading.Lock()
        self._bucket: Any = None

    def bucket(self) -> Any:
        """Return Google's Bucket object; sends no request. Raises StorageError if the client cannot be created."""
        with self._lock:
            if self._bucket is None:
                self._bucket = self._client().bucket(self.name)
            return self._bucket

    def _client(self) -> Any:
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage import Client

        try:
            client = Client(project=None)
        except GoogleAuthError as error:
            raise self._denied(error) from error
        if self._on_time:
            client._http.hooks["response"].append(self._report_time)
        return client

    def _report_time(self, answer: Any, **_: Any) -> None:
        """Report the time in the headers of a response. Called by ``requests`` for each response."""
        try:
            server_time = parsedate_to_datetime(answer.headers.get("Date", ""))
        except ValueError:
            return
        if self._on_time:
            self._on_time(server_time.timestamp())

    def retry(self) -> Any:
        """Return Google's default retry policy with our time limit and delays."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        return DEFAULT_RETRY.with_timeout(self.patience).with_delay(initial=0.1, maximum=5.0, multiplier=2.0)

    def ask(self, request: Callable[[], Result], retried: list[Exception] | None = None) -> Result:
        """Call ``request``, with retries, and return its result. Raises StorageError, MissingError, PreconditionError.

        Each failure that was retried is added to ``retried``: that attempt may have succeeded on the server.
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
                raise ConnectionError("a response was cut short") from error

        try:
            answer: Result = self.retry()(send, on_error=None if retried is None else retried.append)()
        except google.NotFound as error:
            raise MissingError from error
        except google.PreconditionFailed as error:
            raise PreconditionError from error
        except google.RetryError as error:
            raise self._unavailable(error.cause) from error
        except (google.Unauthorized, google.Forbidden, GoogleAuthError) as error:
            raise self._denied(error) from error
        except (google.GoogleAPICallError, RequestException, HTTPError) as error:
            raise StorageError(self.name, f"A request to the bucket {self.name} failed: {error}.") from error
        return answer

    def ask_bucket(self, request: Callable[[], Result], retried: list[Exception] | None = None) -> Result:
        """Do the same as ``ask``, for a request that gets status 404 only if the bucket does not exist."""
        try:
            return self.ask(request, retried)
        except MissingError as error:
            problem = f"Bucket {self.name} does not exist, or these credentials cannot access it."
            remedy = "Check the bucket's name; `gcloud storage buckets list` shows yours."
            raise StorageError(self.name, problem, remedy) from error

    def _unavailable(self, cause: BaseException | None) -> StorageUnavailableError:
        from google.api_core.exceptions import TooManyRequests

        tried = f" for {self.patience:g} s" if self.patience else ""
        if isinstance(cause, TooManyRequests):
            problem = f"The bucket {self.name} refused a request{tried} because of too many requests: {cause}."
            return RateLimitedError(self.name, problem, "Try again in a few seconds.")
        problem = f"The bucket {self.name} could not be reached{tried}: {cause}."
        return StorageUnavailableError(self.name, problem, "Try again when the network is back.")

    def _denied(self, error: Exception) -> StorageError:
        problem = f"Google denied access to bucket {self.name}: {error}."
        remedy = (
            "Check that GOOGLE_APPLICATION_CREDENTIALS, or this machine's service account, is an identity that has "
            "the role Storage Object User on the bucket."
        )
        return StorageError(self.name, problem, remedy)
