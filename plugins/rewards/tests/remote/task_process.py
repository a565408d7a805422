"""The process of a task worker for tests: makes the target's task, and answers framed payloads as their answers become ready."""

import asyncio
import logging
import socket
import struct
import sys

from dovetail.interfaces import load_target


async def main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    async def receive() -> bytes:
        (length,) = struct.unpack("!I", await reader.readexactly(4))
        return await reader.readexactly(length)

    async def answer(number: bytes, payload: bytes) -> None:
        body = number + await task.call(payload)
        writer.write(struct.pack("!I", len(body)) + body)

    task = load_target(sys.argv[1])(await receive(), logging.getLogger("worker"))
    writer.write(struct.pack("!I", 4) + bytes(4))
    running = set()
    while True:
        body = await receive()
        running.add(asyncio.create_task(answer(body[:4], body[4:])))


asyncio.run(main(socket.socket(fileno=int(sys.argv[2]))))
