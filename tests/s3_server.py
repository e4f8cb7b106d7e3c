"""A server of S3 with one bucket, in memory: the one of moto."""

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

BUCKET = "bucket"
KEY, SECRET = "AKIAWRITTENNOWHERE", "written/nowhere+secret"


@dataclass
class S3Server:
    """The server, and the objects in its bucket."""

    server: ThreadedMotoServer
    address: str

    def environment(self) -> dict[str, str]:
        """The variables by which s3fs and TensorStore use this server and no other."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_MAX_ATTEMPTS": "2",
        }

    @cached_property
    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
        )

    def names(self, prefix: str) -> list[str]:
        """The names of the objects below a folder."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def under(self, prefix: str) -> dict[str, bytes]:
        """The objects below a folder, by their names in it."""
        return {
            name.removeprefix(prefix): self.client.get_object(Bucket=BUCKET, Key=name)[
                "Body"
            ].read()
            for name in self.names(prefix)
        }

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=BUCKET, Key=name)

    def deny(self) -> None:
        """Refuses every request until `allow`: no key is valid."""
        self.tell("reset-auth", b"0")

    def allow(self) -> None:
        self.tell("reset-auth", b"inf")

    def tell(self, action: str, content: bytes) -> None:
        request = urllib.request.Request(
            f"{self.address}/moto-api/{action}", content, {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request).close()

    def clear(self) -> None:
        if objects := [{"Key": name} for name in self.names("")]:
            self.client.delete_objects(Bucket=BUCKET, Delete={"Objects": objects})

    @contextmanager
    def down(self) -> Iterator[None]:
        """Nothing answers at the address of the server until the end of the block."""
        self.server.stop()
        try:
            yield
        finally:
            self.server = _started(int(self.address.rpartition(":")[2]))


def _started(port: int) -> ThreadedMotoServer:
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    return server


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Serves an empty bucket until the end of the block."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = _started(0)
    host, port = server.get_host_and_port()
    storage = S3Server(server, f"http://{host}:{port}")
    try:
        storage.tell("reset", b"")
        storage.allow()
        storage.client.create_bucket(Bucket=BUCKET)
        yield storage
    finally:
        storage.server.stop()
