"""Test the emulated Google Cloud Storage: it answers the real client and raw HTTP requests as Google does."""

from __future__ import annotations

import io
import json
import os
import urllib.error
import urllib.request
from datetime import datetime, timedelta
from http.client import IncompleteRead
from typing import Any

import pytest
from gcs_server import GCS
from google.api_core.exceptions import ClientError, NotFound
from google.cloud import storage

MIB = 1024 * 1024


@pytest.fixture
def bucket(gcs: GCS) -> storage.Bucket:
    return storage.Client().bucket(gcs.bucket)


def raw(
    gcs: GCS, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send a request without a client library. Return the status, the headers and the body."""
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(gcs.url + path, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def put(gcs: GCS, name: str, data: bytes = b"data", conditions: str = "") -> tuple[int, dict[str, Any]]:
    path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=media&name={name}{conditions}"
    status, _, body = raw(gcs, "POST", path, data, {"Content-Type": "text/plain"})
    return status, json.loads(body or b"{}")


def test_real_client_writes_reads_patches_and_deletes(bucket: storage.Bucket) -> None:
    blob = bucket.blob("folder/name with ü.txt")
    blob.metadata = {"a": "1", "b": "2"}
    blob.upload_from_string(b"hello", checksum="crc32c")
    assert (blob.metageneration, blob.size, blob.crc32c, blob.md5_hash) == (
        1,
        5,
        "mnG7TA==",
        "XUFAKrxLKna5cZ2REBfFkg==",
    )
    assert bucket.get_blob(blob.name).metadata.items() >= {("a", "1"), ("b", "2")}
    generation = blob.generation
    blob.metadata = {"a": None, "c": "3"}
    blob.patch()
    assert (blob.generation, blob.metageneration) == (generation, 2)
    assert blob.metadata.items() >= {("b", "2"), ("c", "3")}
    assert "a" not in blob.metadata
    assert blob.updated > blob.time_created
    assert blob.download_as_bytes(start=1, end=3) == b"ell"
    blob.delete()
    with pytest.raises(NotFound):
        blob.download_as_bytes()


def test_large_upload_is_resumable(bucket: storage.Bucket) -> None:
    data = os.urandom(3 * MIB + 17)
    blob = bucket.blob("large", chunk_size=MIB)
    blob.upload_from_file(io.BytesIO(data), size=len(data), checksum="crc32c")
    assert bucket.blob("large").download_as_bytes() == data


def test_list_has_pages_prefixes_and_order(bucket: storage.Bucket) -> None:
    for name in ("a/1", "a/2", "a/b/3", "b/4", "c"):
        bucket.blob(name).upload_from_string(name)
    assert [blob.name for blob in bucket.list_blobs(page_size=2)] == ["a/1", "a/2", "a/b/3", "b/4", "c"]
    listing = bucket.list_blobs(prefix="a/", delimiter="/", page_size=1)
    assert [blob.name for blob in listing] == ["a/1", "a/2"]
    assert listing.prefixes == {"a/b/"}
    assert [blob.name for blob in bucket.list_blobs(start_offset="a/b", end_offset="c")] == ["a/b/3", "b/4"]


def test_list_can_be_truncated(bucket: storage.Bucket) -> None:
    for name in ("a", "b", "c"):
        bucket.blob(name).upload_from_string(name)
    assert [blob.name for blob in bucket.list_blobs(max_results=2)] == ["a", "b"]


def test_buckets_are_created_found_and_deleted_when_empty(gcs: GCS) -> None:
    client, name = storage.Client(), f"{gcs.bucket}-made-by-the-client"
    bucket = client.create_bucket(name)
    assert client.lookup_bucket(name) is not None
    bucket.blob("x").upload_from_string("x")
    with pytest.raises(ClientError):
        bucket.delete()
    bucket.blob("x").delete()
    bucket.delete()
    assert client.lookup_bucket(name) is None
    with pytest.raises(NotFound):
        bucket.blob("x").upload_from_string("x")


def test_generations_grow_after_a_delete(gcs: GCS) -> None:
    seen = []
    for _ in range(5):
        status, resource = put(gcs, "name", conditions="&ifGenerationMatch=0")
        assert (status, resource["metageneration"]) == (200, "1")
        seen.append(int(resource["generation"]))
        assert raw(gcs, "DELETE", f"/storage/v1/b/{gcs.bucket}/o/name")[0] in (200, 204)
    assert seen == sorted(set(seen))


def test_every_request_checks_every_condition(gcs: GCS) -> None:
    generation = put(gcs, "name")[1]["generation"]
    path = f"/storage/v1/b/{gcs.bucket}/o/name"
    verbs: list[tuple[str, str, bytes | None]] = [
        ("GET", f"{path}?", None),
        ("GET", f"{path}?alt=media", None),
        ("PATCH", f"{path}?", b"{}"),
        ("POST", f"/upload{path.removesuffix('/name')}?uploadType=media&name=name", b"new"),
        ("DELETE", f"{path}?", None),
    ]
    for method, url, body in verbs:
        current = json.loads(raw(gcs, "GET", path)[2])
        generation, metageneration = current["generation"], current["metageneration"]
        refused = {
            "ifGenerationMatch=1": 412,
            "ifGenerationMatch=0": 412,
            "ifMetagenerationMatch=99": 412,
            f"ifGenerationNotMatch={generation}": 304,
            f"ifMetagenerationNotMatch={metageneration}": 304,
            f"ifGenerationMatch={generation}&ifMetagenerationMatch=99": 412,
        }
        for condition, status in refused.items():
            assert raw(gcs, method, f"{url}&{condition}", body)[0] == status, (method, url, condition)
        met = f"ifGenerationMatch={generation}&ifMetagenerationMatch={metageneration}&ifGenerationNotMatch=1"
        assert raw(gcs, method, f"{url}&{met}", body)[0] in (200, 204), (method, url)


def test_condition_on_a_missing_object_is_404_except_for_a_write(gcs: GCS) -> None:
    path = f"/storage/v1/b/{gcs.bucket}/o/name"
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", b"{}")):
        assert raw(gcs, method, f"{path}?ifGenerationMatch=5", body)[0] == 404
    assert put(gcs, "name", conditions="&ifGenerationMatch=5")[0] == 412


def test_errors_have_googles_format(gcs: GCS) -> None:
    answers = [put(gcs, "name", conditions=f"&ifGenerationMatch={value}")[1]["error"] for value in ("5", "x")]
    assert [(answer["code"], answer["errors"][0]["reason"]) for answer in answers] == [
        (412, "conditionNotMet"),
        (400, "invalid"),
    ]
    assert all(answer["message"] == answer["errors"][0]["message"] for answer in answers)


def test_resumable_upload_reports_progress_and_can_be_cancelled(gcs: GCS) -> None:
    start = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=resumable&name=big&ifGenerationMatch=0"
    location = raw(gcs, "POST", start, b"{}")[1]["Location"].removeprefix(gcs.url)
    data = os.urandom(600 * 1024)
    status, headers, _ = raw(gcs, "PUT", location, b"", {"Content-Range": "bytes */*"})
    assert (status, "Range" in headers) == (308, False)
    first = {"Content-Range": f"bytes 0-262143/{len(data)}"}
    status, headers, _ = raw(gcs, "PUT", location, data[:262144], first)
    assert (status, headers["Range"]) == (308, "bytes=0-262143")
    status, headers, _ = raw(gcs, "PUT", location, b"", {"Content-Range": f"bytes */{len(data)}"})
    assert (status, headers["Range"]) == (308, "bytes=0-262143")
    rest = {"Content-Range": f"bytes 262144-{len(data) - 1}/{len(data)}"}
    assert raw(gcs, "PUT", location, data[262144:], rest)[0] == 200
    assert raw(gcs, "PUT", location, b"", {"Content-Range": f"bytes */{len(data)}"})[0] == 200
    assert raw(gcs, "GET", f"/storage/v1/b/{gcs.bucket}/o/big?alt=media")[2] == data

    late = raw(gcs, "POST", start, b"{}")[1]["Location"].removeprefix(gcs.url)
    assert raw(gcs, "PUT", late, b"x", {"Content-Range": "bytes 0-0/1"})[0] == 412
    assert raw(gcs, "DELETE", late)[0] == 499
    assert raw(gcs, "PUT", late, b"x", {"Content-Range": "bytes 0-0/1"})[0] == 404


def test_resumable_upload_keeps_multiples_of_256_kib(gcs: GCS) -> None:
    start = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=resumable&name=big"
    location = raw(gcs, "POST", start, b"{}")[1]["Location"].removeprefix(gcs.url)
    status, headers, _ = raw(gcs, "PUT", location, b"x" * 300_000, {"Content-Range": "bytes 0-299999/600000"})
    assert (status, headers["Range"]) == (308, "bytes=0-262143")


def test_wrong_checksum_is_refused(bucket: storage.Bucket) -> None:
    for checksums in ({"crc32c": "AAAAAA=="}, {"md5_hash": "AAAAAAAAAAAAAAAAAAAAAA=="}):
        blob = bucket.blob("name")
        for key, value in checksums.items():
            setattr(blob, key, value)
        with pytest.raises(ClientError):
            blob.upload_from_string(b"hello", checksum=None)
    assert not bucket.blob("name").exists()


def test_wrong_checksum_in_a_header_is_refused(gcs: GCS) -> None:
    path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=media&name=x"
    for hashes in ("crc32c=AAAAAA==", "md5=AAAAAAAAAAAAAAAAAAAAAA=="):
        assert raw(gcs, "POST", path, b"hello", {"X-Goog-Hash": hashes})[0] == 400
    assert raw(gcs, "GET", f"/storage/v1/b/{gcs.bucket}/o/x")[0] == 404


def test_range_returns_part_of_an_object(gcs: GCS) -> None:
    put(gcs, "name", b"0123456789")
    path = f"/storage/v1/b/{gcs.bucket}/o/name?alt=media"
    for wish, status, body in (("2-4", 206, b"234"), ("7-", 206, b"789"), ("-2", 206, b"89"), ("8-99", 206, b"89")):
        answer = raw(gcs, "GET", path, headers={"Range": f"bytes={wish}"})
        assert (answer[0], answer[2]) == (status, body)
    assert raw(gcs, "GET", path, headers={"Range": "bytes=10-"})[0] == 416


def test_faults_are_injected_as_configured(gcs: GCS) -> None:
    gcs.fault("status", code=429, operation="insert", name="a.*", skip=1, every=2, times=2)
    assert [put(gcs, "a1")[0] for _ in range(7)] == [200, 200, 429, 200, 429, 200, 200]
    assert put(gcs, "b")[0] == 200
    gcs.fault("cut", operation="insert")
    with pytest.raises(OSError):
        put(gcs, "cut")
    gcs.fault("lose", operation="insert")
    with pytest.raises(OSError):
        put(gcs, "lost")
    path = f"/storage/v1/b/{gcs.bucket}/o"
    assert [raw(gcs, "GET", f"{path}/{name}")[0] for name in ("cut", "lost")] == [404, 200]
    put(gcs, "long", b"x" * MIB)
    gcs.fault("truncate", operation="media")
    with pytest.raises((IncompleteRead, ConnectionError)):
        raw(gcs, "GET", f"{path}/long?alt=media")
    assert [fault["struck"] for fault in gcs.faults()] == [2, 1, 1, 1]
    assert gcs.requests()[-1] == ("media", "long")


def test_clock_can_be_set_ahead(gcs: GCS) -> None:
    before = put(gcs, "name")[1]
    gcs.set_clock(3600)
    after = put(gcs, "name")[1]
    assert int(after["generation"]) > int(before["generation"])
    passed = datetime.fromisoformat(after["updated"]) - datetime.fromisoformat(before["updated"])
    assert passed >= timedelta(hours=1)


def test_mutation_limit_responds_like_google(gcs: GCS) -> None:
    gcs.limit_mutations(rate=0.001, burst=2.0)
    assert [put(gcs, "a")[0], put(gcs, "a")[0], put(gcs, "b")[0]] == [200, 200, 200]
    message = (
        f"The object {gcs.bucket}/a exceeded the rate limit for object mutation operations (create, update, and "
        "delete). Please reduce your request rate. See https://cloud.google.com/storage/docs/gcs429."
    )
    detail = {"message": message, "domain": "usageLimits", "reason": "rateLimitExceeded"}
    assert put(gcs, "a") == (429, {"error": {"code": 429, "message": message, "errors": [detail]}})
    assert raw(gcs, "DELETE", f"/storage/v1/b/{gcs.bucket}/o/a")[0] == 429
    assert raw(gcs, "GET", f"/storage/v1/b/{gcs.bucket}/o/a")[0] == 200
    assert gcs.refused_mutations() == 2
    gcs.limit_mutations(0)
    assert put(gcs, "a")[0] == 200
