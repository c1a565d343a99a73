"""An endless stream of tokens, cut into windows, whose position is exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fpexp.data.ahead import Ahead
from fpexp.data.order import Order, Place
from fpexp.data.tokenizer import Tokenizer, Tokens
from fpexp.errors import FpexpError, UserError

OTHER_DATA = (
    "the saved position is in other data",
    "give back the files and settings that it was saved with, or start a new run",
)


class WindowStream(Protocol):
    """What training reads. The position is of what was handed out, whatever was read ahead."""

    context: int

    def read(self, n: int) -> Tensor:
        """Return the next `n` windows, (n, context + 1) int64: inputs are `[:, :-1]`, targets `[:, 1:]`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; a `UserError` names what differs when it is one of other data."""
        ...

    def close(self) -> None:
        """End threads and close files; harmless when called again."""
        ...


class TokenStream:
    """doc1 sep doc2 sep ... of the documents in `order`; one separator a document, an empty one gives nothing else.

    Window k has inputs `tokens[k c : (k + 1) c]` and targets one further, c = `context`: every token but the first of
    all is a target once, none lost or repeated, through documents and epochs. Row i + 1 of `read` begins with the last
    token of row i. `corpus` says what the tokens are of; a state of another corpus is refused.
    """

    def __init__(
        self,
        order: Order,
        tokenizer: Tokenizer,
        context: int,
        workers: int = 0,
        corpus: Mapping[str, Any] | None = None,
    ) -> None:
        self.context = context
        self._order, self._tokenizer, self._workers = order, tokenizer, workers
        self._corpus = dict(corpus or {})
        self._ahead: Ahead | None = None
        self._go_to(Place(), 0)

    def read(self, n: int) -> Tensor:
        """Return the next `n` windows, (n, context + 1) int64."""
        advance = n * self.context
        tokens = self._peek(advance + 1)
        if len(tokens) <= advance:
            raise FpexpError(f"the token stream ended before {n} more windows of {self.context}")
        self._drop(advance)
        return torch.from_numpy(tokens.astype(np.int64)).unfold(0, self.context + 1, self.context).contiguous()

    def take(self, count: int) -> Tokens:
        """Return the next `count` tokens (count,) and go past them; fewer only where the last epoch ends."""
        tokens = self._peek(count)
        self._drop(len(tokens))
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """Return the document of the last token that was handed out, and the `offset` of the next one in it."""
        place = self._ready[0][0] if self._ready else self._first
        return {"corpus": self._corpus, "place": asdict(place), "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of a `state_dict`."""
        check_same(state["corpus"], self._corpus, *OTHER_DATA)
        self.close()
        self._go_to(Place(**state["place"]), state["offset"])

    def close(self) -> None:
        """End the threads."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _go_to(self, place: Place, offset: int) -> None:
        self._ready: deque[tuple[Place, Tokens]] = deque()  # the first is read up to `_offset`
        self._available = -offset
        self._offset = offset
        self._first = place

    def _peek(self, count: int) -> Tokens:
        """Return the next `count` tokens (fewer at the end), and stay before them."""
        while self._available < count and self._fill():
            pass
        pieces, missing, offset = [], min(count, self._available), self._offset
        for _, tokens in self._ready:
            if missing <= 0:
                break
            pieces.append(tokens[offset : offset + missing])
            missing -= len(pieces[-1])
            offset = 0
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def _fill(self) -> bool:
        """Take in a chunk; return False at the end. After an error the next call begins again where it was."""
        if self._ahead is None:
            self._restart()
        assert self._ahead is not None
        try:
            encoded = next(self._ahead, None)
        except BaseException:
            self.close()
            raise
        if encoded is None:
            return False
        separator = np.array([self._tokenizer.separator], np.int32)
        for place, tokens in encoded:
            whole = np.concatenate((tokens, separator))
            if not self._ready and self._offset > len(whole):
                raise FpexpError("the saved position is behind the end of its document: the documents have changed")
            self._ready.append((place, whole))
            self._available += len(whole)
        return True

    def _restart(self) -> None:
        """Read on behind what is ready."""
        documents = self._order.documents(self._ready[-1][0] if self._ready else self._first)
        if self._ready:
            next(documents)
        self._ahead = Ahead(documents, self._tokenizer, self._workers)

    def _drop(self, count: int) -> None:
        self._available -= count
        self._offset += count
        while self._ready and self._offset > len(self._ready[0][1]):
            self._offset -= len(self._ready.popleft()[1])


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str, mend: str) -> None:
    """Raise a `UserError` beginning with `what` that names what differs between two descriptions of a corpus, and ends
    with what to do.
    """
    differing = [key for key in {*found, *wanted} if _essence(found.get(key)) != _essence(wanted.get(key))]
    if differing:
        key = min(differing, key=lambda key: (_is_content(key), key != "source", key))  # a hash says least
        if _is_content(key):
            raise UserError(f"{what}: files were added, removed or changed; {mend}")
        raise UserError(f"{what}: {key} was {_short(found.get(key))} and is {_short(wanted.get(key))}; {mend}")


def _is_content(key: str) -> bool:
    return key.rpartition(".")[2] == "content"


def _essence(value: Any) -> Any:
    """Leave out the name of what has an identity: a tokenizer's file may be moved."""
    if isinstance(value, Mapping) and "identity" in value:
        return {key: item for key, item in value.items() if key != "name"}
    return value


def _short(value: Any) -> str:
    text = ", ".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, Mapping) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."
