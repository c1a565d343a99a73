"""Documents -> tokens, ahead of their use and in their order, whatever the number of threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, Full, Queue
from typing import Any

from fpexp.data.order import Place
from fpexp.data.tokenizer import Tokenizer, Tokens

CHUNK_DOCUMENTS = 64
CHUNK_CHARACTERS = 200_000
"""A chunk is what one thread tokenises at once; it ends at the first of the two."""
CHUNKS_AHEAD = 4  # a worker
POLL = 0.2  # seconds between looks at whether the stream was closed

Encoded = list[tuple[Place, Tokens]]


def chunks(documents: Iterator[tuple[Place, str]]) -> Iterator[list[tuple[Place, str]]]:
    """Yield consecutive documents in lists of a convenient size."""
    chunk: list[tuple[Place, str]] = []
    characters = 0
    for place, text in documents:
        chunk.append((place, text))
        characters += len(text)
        if len(chunk) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def encode(tokenizer: Tokenizer, chunk: list[tuple[Place, str]]) -> Encoded:
    """Return each document's place and tokens, without the separator."""
    tokens = tokenizer.encode_batch([text for _, text in chunk])
    return [(place, found) for (place, _), found in zip(chunk, tokens, strict=True)]


class Ahead:
    """Iterates over encoded chunks. One thread reads, `workers` threads encode; 0 does both when asked.

    Errors of the threads are raised where their chunk is asked for. Closing, or losing the last reference, ends the
    threads; a reader that is waiting for the network is left to its wait, which does not keep the process alive.
    """

    def __init__(self, documents: Iterator[tuple[Place, str]], tokenizer: Tokenizer, workers: int) -> None:
        self._inline: Iterator[Encoded] | None = None
        if workers == 0:
            self._inline = (encode(tokenizer, chunk) for chunk in chunks(documents))
            return
        self._queue: Queue[Future[Encoded] | BaseException | None] = Queue(CHUNKS_AHEAD * workers)
        closed = threading.Event()
        pool = ThreadPoolExecutor(workers, thread_name_prefix="fpexp-tokenise")
        reader = threading.Thread(
            target=_read, args=(documents, tokenizer, pool, self._queue, closed), name="fpexp-read", daemon=True
        )
        self._finalizer = weakref.finalize(self, _end, pool, closed, reader)
        reader.start()

    def __iter__(self) -> Iterator[Encoded]:
        return self

    def __next__(self) -> Encoded:
        if self._inline is not None:
            return next(self._inline)
        item = self._get()
        if isinstance(item, Future):
            return item.result()
        self.close()
        raise StopIteration if item is None else item

    def _get(self) -> Future[Encoded] | BaseException | None:
        while True:
            try:
                return self._queue.get(timeout=POLL)  # without one, a signal that another thread takes would wait too
            except Empty:
                continue

    def close(self) -> None:
        """End the threads, and with them the iteration."""
        if self._inline is None:
            self._finalizer()
            self._inline = iter(())


def _read(
    documents: Iterator[tuple[Place, str]],
    tokenizer: Tokenizer,
    pool: ThreadPoolExecutor,
    queue: Queue[Any],
    closed: threading.Event,
) -> None:
    last: BaseException | None = None
    try:
        for chunk in chunks(documents):
            if not _put(queue, pool.submit(encode, tokenizer, chunk), closed):
                return
    except BaseException as error:  # raised where the stream is read
        last = error
    _put(queue, last, closed)


def _put(queue: Queue[Any], item: Any, closed: threading.Event) -> bool:
    """Wait for room; return whether the item is in before the stream was closed."""
    while not closed.is_set():
        try:
            queue.put(item, timeout=POLL)
        except Full:
            continue
        return True
    return False


def _end(pool: ThreadPoolExecutor, closed: threading.Event, reader: threading.Thread) -> None:
    closed.set()
    pool.shutdown(wait=False, cancel_futures=True)
    if reader is not threading.current_thread() and reader.is_alive():
        reader.join(2 * POLL)
