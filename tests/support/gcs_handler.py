"""Handle the requests to the emulated Google Cloud Storage: Google's JSON API, and requests from tests."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
import uuid
from collections import deque
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from gcs_faults import MUTATIONS, Faults, MutationLimit
from gcs_objects import Cloud, Conditions, Refusal, StoredObject, Upload, integer

GRANULE = 256 * 1024
"""Each chunk of a resumable upload, except the last, is stored up to a multiple of this number of bytes."""

BUCKET = r"/storage/v1/b/(?P<bucket>[^/]+)"
OBJECT = BUCKET + r"/o/(?P<name>[^/]+)"
ROUTES = [
    ("GET", r"/storage/v1/b", "list_buckets"),
    ("POST", r"/storage/v1/b", "create_bucket"),
    ("GET", BUCKET, "get_bucket"),
    ("DELETE", BUCKET, "delete_bucket"),
    ("GET", BUCKET + "/o", "list"),
    ("GET", OBJECT, "get"),
    ("GET", "/download" + OBJECT, "media"),
    ("PATCH", OBJECT, "patch"),
    ("DELETE", OBJECT, "delete"),
    ("POST", "/upload" + BUCKET + "/o", "insert"),
    ("PUT", "/upload" + BUCKET + "/o", "chunk"),
    ("DELETE", "/upload" + BUCKET + "/o", "cancel"),
]


class Service:
    """The state of one server."""

    def __init__(self) -> None:
        self.cloud = Cloud()
        self.faults = Faults()
        self.limit = MutationLimit()
        self.requests: deque[tuple[str, str]] = deque(maxlen=100_000)


class Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024
    timeout = 60
    service: Service
    """The state of the server."""
    broken = ""
    """The kind of fault of the response, or empty."""

    def handle_request(self) -> None:
        """Execute a request, with the injected faults, and send the response."""
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.host = f"http://{self.headers.get('Host', '')}"
        self.body = self._read_body()
        self.broken = ""
        if parts.path in ("/faults", "/requests", "/clock", "/limit"):
            self._serve_test(parts.path)
            return
        for method, pattern, operation in ROUTES:
            match = re.fullmatch(pattern, parts.path)
            if match and method == self.command:
                self._serve(operation, {key: unquote(value) for key, value in match.groupdict().items()})
                return
        self._refuse(Refusal(404, "notFound", "Not Found"))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_request

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(pieces)

    def _serve(self, operation: str, names: dict[str, str]) -> None:
        self.names = names
        self.settings: dict[str, Any] = {}
        try:
            operation = self._open(operation)
            self.service.requests.append((operation, names.get("name", "")))
            if not self._apply_faults(operation):
                self._check_limit(operation)
                getattr(self, f"_{operation}")()
        except Refusal as refusal:
            self._refuse(refusal)

    def _open(self, operation: str) -> str:
        """Decode a request. Set the name of its object, and return the operation."""
        if operation == "get" and self.query.get("alt") == "media":
            return "media"
        if operation == "insert":
            return self._open_insert()
        if operation in ("chunk", "cancel"):
            self.names["name"] = self._upload().name
        return operation

    def _apply_faults(self, operation: str) -> bool:
        """Apply the faults of a request. Return True if the request must not be executed."""
        for fault in self.service.faults.strike(operation, self.names.get("name", "")):
            if fault.kind == "delay":
                time.sleep(fault.seconds)
            elif fault.kind == "cut":
                self._cut()
                return True
            elif fault.kind == "status":
                raise Refusal(fault.code, "backendError", "A fault was injected.")
            else:
                self.broken = fault.kind
        return False

    def _check_limit(self, operation: str) -> None:
        """Refuse a change that exceeds the limit. Raises Refusal."""
        if operation not in MUTATIONS:
            return
        bucket, name = self.names["bucket"], self.names["name"]
        if not self.service.limit.allows(bucket, name, self.cloud.now()):
            problem = (
                f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, update, "
                "and delete). Please reduce your request rate. See https://cloud.google.com/storage/docs/gcs429."
            )
            raise Refusal(429, "rateLimitExceeded", problem)

    # Responses

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.broken == "lose":
            self._cut()
            return
        if self.broken == "short":
            body = body[: len(body) // 2]
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        if status != 204:
            self.send_header("Content-Length", str(0 if status == 304 else len(body)))
        self.end_headers()
        if self.broken in ("truncate", "end"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self._cut(reset=self.broken == "truncate")
        elif status != 304:
            self.wfile.write(body)

    def _json(self, content: Any, status: int = 200) -> None:
        fields = self.query.get("fields", "")
        if re.fullmatch(r"[A-Za-z0-9]+(,[A-Za-z0-9]+)*", fields) and isinstance(content, dict):
            content = {key: value for key, value in content.items() if key in fields.split(",")}
        self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json; charset=UTF-8"})

    def _refuse(self, refusal: Refusal) -> None:
        domain = "usageLimits" if refusal.status == 429 else "global"
        detail = {"message": refusal.message, "domain": domain, "reason": refusal.reason}
        if refusal.status == 412:
            detail |= {"locationType": "header", "location": "If-Match"}
        self.query.pop("fields", None)
        self._json({"error": {"code": refusal.status, "message": refusal.message, "errors": [detail]}}, refusal.status)

    def _cut(self, reset: bool = True) -> None:
        """Close the connection. With ``reset``, the client gets an error instead of the end of the response."""
        self.broken = ""
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.service.cloud.now() if timestamp is None else timestamp)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _object(self, stored: StoredObject, status: int = 200) -> None:
        self._json(stored.resource(self.host), status)

    # Requests of tests

    def _serve_test(self, path: str) -> None:
        service = self.service
        if path == "/clock":
            service.cloud.offset = float(json.loads(self.body)["offset"])
        elif path == "/limit" and self.command == "POST":
            service.limit.set(**json.loads(self.body))
        elif path == "/limit":
            self._json({"refused": service.limit.refused})
            return
        elif path == "/requests" and self.command == "DELETE":
            service.requests.clear()
        elif path == "/requests":
            self._json(list(service.requests))
            return
        elif self.command == "POST":
            service.faults.add(json.loads(self.body))
        elif self.command == "DELETE":
            service.faults.clear()
        else:
            self._json([asdict(fault) for fault in service.faults.faults])
            return
        self._answer(204)

    # Buckets

    @property
    def cloud(self) -> Cloud:
        return self.service.cloud

    def _list_buckets(self) -> None:
        items = [bucket.resource(self.host) for _, bucket in sorted(self.cloud.buckets.items())]
        self._json({"kind": "storage#buckets", "items": items})

    def _create_bucket(self) -> None:
        self._json(self.cloud.create_bucket(json.loads(self.body)["name"]).resource(self.host))

    def _get_bucket(self) -> None:
        self._json(self.cloud.bucket(self.names["bucket"]).resource(self.host))

    def _delete_bucket(self) -> None:
        self.cloud.delete_bucket(self.names["bucket"])
        self._answer(204)

    # Objects

    def _target(self) -> tuple[str, str, int | None, Conditions]:
        return (
            self.names["bucket"],
            self.names["name"],
            integer(self.query, "generation"),
            Conditions.parse(self.query),
        )

    def _list(self) -> None:
        items, prefixes, token = self.cloud.page(self.names["bucket"], self.query)
        content = {
            "kind": "storage#objects",
            "nextPageToken": token,
            "prefixes": prefixes,
            "items": [stored.resource(self.host) for stored in items],
        }
        self._json({key: value for key, value in content.items() if value})

    def _get(self) -> None:
        self._object(self.cloud.get(*self._target()))

    def _media(self) -> None:
        stored = self.cloud.get(*self._target())
        size = len(stored.data)
        hashes = f"crc32c={stored.crc32c},md5={stored.md5}"
        headers = {
            "Content-Type": stored.settings.get("contentType", "application/octet-stream"),
            "ETag": stored.etag,
            "Last-Modified": self.date_time_string(stored.updated),
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": str(stored.metageneration),
            "X-Goog-Hash": hashes,
            "X-Goog-Stored-Content-Encoding": stored.settings.get("contentEncoding", "identity"),
            "X-Goog-Stored-Content-Length": str(size),
            "X-Goog-Storage-Class": "STANDARD",
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not wanted or wanted[0] == "bytes=-":
            self._answer(200, stored.data, headers)
            return
        first = int(wanted[1]) if wanted[1] else max(size - int(wanted[2]), 0)
        last = min(int(wanted[2]), size - 1) if wanted[1] and wanted[2] else size - 1
        if first >= size or last < first:
            raise Refusal(416, "requestedRangeNotSatisfiable", "Request range not satisfiable")
        headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._answer(206, stored.data[first : last + 1], headers)

    def _patch(self) -> None:
        self._object(self.cloud.patch(*self._target(), json.loads(self.body or b"{}")))

    def _delete(self) -> None:
        self.cloud.delete(*self._target())
        self._answer(204)

    # Uploads

    def _open_insert(self) -> str:
        """Decode the request of an upload. Set its settings and body, and return the operation."""
        if "upload_id" in self.query:
            self.names["name"] = self._upload().name
            return "chunk"
        kind = self.query.get("uploadType")
        if kind == "multipart":
            self.settings, self.body = self._multipart()
        elif kind == "resumable":
            self.settings = json.loads(self.body or b"{}")
            self.settings.setdefault("contentType", self.headers.get("X-Upload-Content-Type"))
        elif kind == "media":
            self.settings = {"contentType": self.headers.get("Content-Type")}
        else:
            raise Refusal(400, "invalid", f"Invalid value for uploadType: {kind!r}")
        self.names["name"] = str(self.query.get("name") or self.settings.get("name") or "")
        self._add_hashes()
        return "start" if kind == "resumable" else "insert"

    def _add_hashes(self) -> None:
        for pair in self.headers.get("X-Goog-Hash", "").split(","):
            key, _, value = pair.strip().partition("=")
            if value:
                self.settings["md5Hash" if key == "md5" else key] = value

    def _multipart(self) -> tuple[dict[str, Any], bytes]:
        boundary = re.search(r'boundary=(?:"([^"]+)"|([^;\s]+))', self.headers.get("Content-Type", ""))
        if not boundary:
            raise Refusal(400, "parseError", "A multipart upload needs a boundary.")
        mark = b"--" + (boundary[1] or boundary[2]).encode()
        try:
            _, about, media = self.body.split(mark + b"\r\n", 2)
            head, data = media.split(b"\r\n\r\n", 1)
            settings = json.loads(about.split(b"\r\n\r\n", 1)[1])
        except (ValueError, IndexError):
            raise Refusal(400, "parseError", "Malformed multipart body.") from None
        kind = re.search(rb"(?i)content-type:\s*([^\r\n]+)", head)
        settings.setdefault("contentType", kind[1].decode() if kind else None)
        return settings, data[: data.rindex(b"\r\n" + mark + b"--")]

    def _insert(self) -> None:
        bucket, conditions = self.names["bucket"], Conditions.parse(self.query)
        self._object(self.cloud.insert(bucket, self.names["name"], self.body, self.settings, conditions))

    def _start(self) -> None:
        bucket, name = self.names["bucket"], self.names["name"]
        self.cloud.bucket(bucket)
        if not name:
            raise Refusal(400, "required", "Required object name")
        key = uuid.uuid4().hex
        self.cloud.uploads[key] = Upload(bucket, name, self.settings, Conditions.parse(self.query))
        link = f"{self.host}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={key}"
        self._answer(200, b"", {"Location": link, "X-GUploader-UploadID": key})

    def _upload(self) -> Upload:
        upload = self.cloud.uploads.get(self.query.get("upload_id", ""))
        if upload is None:
            raise Refusal(404, "notFound", "No such upload.")
        return upload

    def _cancel(self) -> None:
        self._upload()
        del self.cloud.uploads[self.query["upload_id"]]
        self._answer(499)

    def _chunk(self) -> None:
        with self.cloud.lock:
            upload = self._upload()
            if upload.finished is None and self._append(upload):
                self._add_hashes()
                upload.settings |= self.settings
                self.cloud.finish(upload)
            stored, count = upload.finished, len(upload.data)
        if stored:
            self._object(stored)
        else:
            self._answer(308, b"", {"Range": f"bytes=0-{count - 1}"} if count else {})

    def _append(self, upload: Upload) -> bool:
        """Store the new bytes of a chunk. Return True if it was the last one."""
        text = self.headers.get("Content-Range") or f"bytes 0-*/{len(self.body)}"
        match = re.fullmatch(r"bytes (?:\*|(\d+)-(\d+|\*))/(\d+|\*)", text)
        if not match:
            raise Refusal(400, "badRequest", f"Failed to parse Content-Range header: {text}")
        total = None if match[3] == "*" else int(match[3])
        if match[1] is not None:
            first, have = int(match[1]), len(upload.data)
            if match[2] not in ("*", str(first + len(self.body) - 1)) or first > have:
                raise Refusal(400, "badRequest", f"Invalid Content-Range: {text}; {have} bytes were received.")
            end = first + len(self.body)
            keep = end if end == total else end - end % GRANULE
            upload.data += self.body[have - first : max(keep - first, 0)]
        return total == len(upload.data)
