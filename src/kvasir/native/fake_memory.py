"""The fake core's memory: cells, sequences and the rules llama.cpp has for them.

Owns what every sequence really holds. A cell carries a number that stands for its K and V: it is made
from the cell before it, so a memory that was shared, cut or restored wrongly gives other logits, as on
a real model. Knows nothing of rows, samplers or vocabularies; `fake.py` calls it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvasir.errors import BadOption, Unsupported

_MASK = (1 << 64) - 1
_MAGIC = b"KVFK"
_CELL = struct.Struct("<qQI?")  # position, value, token, window part present
_HEAD = struct.Struct("<4scI16s")  # magic, part, number of cells, digest of what follows
_STATE = struct.Struct("<qQ")


def mix(*parts: int) -> int:
    """Hash integers to 64 bits; the same on every machine and in every run."""
    h = 0x9E3779B97F4A7C15
    for part in parts:
        h = ((h ^ (part & _MASK)) * 0xBF58476D1CE4E5B9) & _MASK
        h = ((h ^ (h >> 29)) * 0x94D049BB133111EB) & _MASK
        h ^= h >> 32
    return h


@dataclass(slots=True)
class Cell:
    """One token's place in the memory; several sequences may hold it."""

    pos: int
    value: int
    token: int
    window: bool = True  # the sliding-window part is still there
    seqs: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """The state of one sequence in a recurrent memory: no history, only where it stands."""

    pos: int
    value: int


@dataclass(frozen=True, slots=True)
class Layout:
    """What a memory is made of; fixed when the context is made."""

    kind: str
    unified: bool
    n_stream_cells: int
    n_seq_max: int
    window: int
    keeps_window: bool
    shift_refusal: str | None

    @property
    def has_cells(self) -> bool:
        """Whether there are attention cells at all."""
        return self.kind != "recurrent"

    @property
    def has_state(self) -> bool:
        """Whether there is a recurrent state."""
        return self.kind in ("recurrent", "hybrid")


class Memory:
    """The memory of one fake context. Use it from the thread that steps the context."""

    def __init__(self, layout: Layout, check_open: Callable[[], None]) -> None:
        self._layout = layout
        self._check_open = check_open
        self._cells: list[dict[int, Cell]] = [{} for _ in range(layout.n_seq_max)]
        self._sums = [0] * layout.n_seq_max  # exclusive or of a sequence's cell values, so that none can be missed
        self._states: dict[int, Recurrent] = {}

    @property
    def kind(self) -> str:
        """ "plain", "window", "recurrent", "hybrid" or "none"."""
        return self._layout.kind

    @property
    def window(self) -> int:
        """How many tokens a windowed layer sees; 0 without one."""
        return self._layout.window

    @property
    def can_shift(self) -> bool:
        """Whether `shift` works."""
        return self._layout.shift_refusal is None

    @property
    def n_cells(self) -> int:
        """How many cells there are, over all streams."""
        layout = self._layout
        if not layout.has_cells:
            return layout.n_seq_max
        return layout.n_stream_cells * (1 if layout.unified else layout.n_seq_max)

    @property
    def used_cells(self) -> int:
        """How many cells are taken; a shared cell counts once."""
        if not self._layout.has_cells:
            return len(self._states)
        return len({id(cell) for cells in self._cells for cell in cells.values()})

    def pos_min(self, seq: int) -> int | None:
        """Return the oldest position that is complete: the oldest in the window part, or where a state stands."""
        self._check(seq)
        if self._layout.has_state:
            return self._states[seq].pos if seq in self._states else None
        return min((cell.pos for cell in self._cells[seq].values() if cell.window), default=None)

    def pos_max(self, seq: int) -> int | None:
        """Return the last position of a sequence, or None when it is empty."""
        self._check(seq)
        if self.kind == "recurrent":
            return self._states[seq].pos if seq in self._states else None
        return max(self._cells[seq], default=None)

    def remove(self, seq: int, p0: int, p1: int | None) -> bool:
        """Drop positions p0 to p1; False when this memory cannot, and nothing changed."""
        self._check(seq)
        end = self._length(seq)
        first, last = _span(p0, p1, end)
        if first >= last:
            return True
        whole = first <= self._first(seq) and last >= end
        if self._layout.has_state and not whole:
            return False
        if not whole and last >= end and not self._can_continue(seq, first):
            return False
        for pos in [pos for pos in self._cells[seq] if first <= pos < last]:
            cell = self._cells[seq].pop(pos)
            cell.seqs.discard(seq)
            self._sums[seq] ^= cell.value
        if whole:
            self._states.pop(seq, None)
        return True

    def share(self, src: int, dst: int, n_tokens: int) -> bool:
        """Make `dst` the first `n_tokens` of `src`; False when that is not possible exactly, and `dst` is empty."""
        self._check(src)
        self._check(dst)
        if src == dst:
            raise BadOption(f"a sequence cannot be shared with itself (both are {src})")
        if not 0 <= n_tokens <= self._length(src):
            raise BadOption(f"sequence {src} holds {self._length(src)} tokens; {n_tokens} cannot be shared")
        self._drop(dst)
        if n_tokens == 0:
            return True
        if not self._can_share(src, n_tokens):
            return False
        self._adopt(dst, [cell for cell in self._cells[src].values() if cell.pos < n_tokens])
        if src in self._states:
            self._states[dst] = self._states[src]
        return True

    def copy(self, src: int, dst: int) -> None:
        """Make `dst` a copy of the whole of `src`."""
        self._check(src)
        self._check(dst)
        if src == dst:
            return
        self._drop(dst)
        self._adopt(dst, self._cells[src].values())
        if src in self._states:
            self._states[dst] = self._states[src]

    def keep(self, seq: int) -> None:
        """Drop every sequence but this one."""
        self._check(seq)
        for other in range(self._layout.n_seq_max):
            if other != seq:
                self._drop(other)

    def shift(self, seq: int, p0: int, p1: int | None, delta: int) -> None:
        """Move positions by `delta`; `Unsupported` where a real memory would get it wrong."""
        self._check(seq)
        if self._layout.shift_refusal is not None:
            raise Unsupported(f"this memory cannot shift positions: {self._layout.shift_refusal}")
        first, last = _span(p0, p1, self._length(seq))
        moved = [cell for cell in self._cells[seq].values() if first <= cell.pos < last]
        stay = {pos for pos in self._cells[seq] if not first <= pos < last}
        if any(cell.pos + delta < 0 or cell.pos + delta in stay for cell in moved):
            raise BadOption(f"shifting [{first}, {last}) by {delta} would collide or go below position 0")
        shared = [cell for cell in moved if len(cell.seqs) > 1]
        if len(shared) > self.n_free(seq):
            raise Unsupported("there is no room to separate cells shared with another sequence; free one first")
        for cell in shared:
            cell.seqs.discard(seq)
        cells = [cell for cell in self._cells[seq].values() if cell.pos in stay]
        cells += [replace(cell, pos=cell.pos + delta, seqs={seq}) for cell in moved]
        self._cells[seq] = {cell.pos: cell for cell in sorted(cells, key=lambda cell: cell.pos)}

    def clear(self) -> None:
        """Drop everything."""
        self._check_open()
        for seq in range(self._layout.n_seq_max):
            self._drop(seq)

    def export_span(self, seq: int, p0: int, p1: int, part: str = "base") -> bytes:
        """Return the KV of positions p0 to p1 as bytes; `BadOption` when they are not all there."""
        self._check(seq)
        self._check_part(part)
        if not 0 <= p0 < p1:
            raise BadOption(f"a span needs 0 <= p0 < p1, got [{p0}, {p1})")
        cells = [self._cells[seq].get(pos) for pos in range(p0, p1)]
        present = [cell for cell in cells if cell is not None and (cell.window or part == "base")]
        if len(present) < len(cells):
            raise BadOption(f"the {part} part of [{p0}, {p1}) is not all present in sequence {seq}")
        return _pack(part, present)

    def import_span(self, seq: int, p0: int, payloads: list[bytes], part: str = "base") -> bool:
        """Append spans at p0, the end of the sequence; False when there is no room, and nothing changed."""
        self._check(seq)
        self._check_part(part)
        cells = [cell for payload in payloads for cell in _unpack(part, payload)]
        if [cell.pos for cell in cells] != list(range(p0, p0 + len(cells))):
            raise BadOption(f"the payloads do not hold consecutive positions from {p0} on")
        if part == "window":
            return self._import_window(seq, cells)
        if p0 != len(self._cells[seq]) or p0 != self._length_of_cells(seq):
            raise BadOption(f"a span must start where the sequence ends ({self._length_of_cells(seq)}), got {p0}")
        if len(cells) > self.n_free(seq):
            return False
        self._place(seq, [replace(cell, window=self.kind != "window", seqs=set()) for cell in cells])
        return True

    def state(self, seq: int, *, partial: bool = False) -> bytes:
        """Return a whole sequence, or only what spans cannot carry (`partial`), as bytes."""
        self._check(seq)
        state = self._states.get(seq)
        head = _STATE.pack(state.pos, state.value) if state else b""
        if partial and self._layout.has_state:
            return b"S" + bytes([len(head)]) + head
        cells: list[Cell] = list(self._cells[seq].values())
        if partial and self.kind == "window":
            cells = [cell for cell in cells if cell.window]
        return (b"P" if partial else b"W") + bytes([len(head)]) + head + _pack("state", cells)

    def set_state(self, seq: int, data: bytes, *, partial: bool = False) -> bool:
        """Replace a sequence by what `state` gave; False when it cannot be, and the sequence is then empty."""
        self._check(seq)
        try:
            restored = self._restore(seq, data, partial)
        except BadOption:
            restored = False
        if not restored:
            self._drop(seq)
        return restored

    def flush(self) -> None:
        """Do nothing: the fake applies shifts and copies at once."""
        self._check_open()

    # What the context calls.

    def n_free(self, seq: int) -> int:
        """Count the cells a sequence could still take, leaving the others as they are."""
        layout = self._layout
        return layout.n_stream_cells - (self.used_cells if layout.unified else len(self._cells[seq]))

    def append(self, seq: int, token: int, salt: int) -> None:
        """Decode one token at the end of a sequence: what came before decides the new cell's value."""
        pos = self._length(seq)
        before = self.digest(seq, salt)
        if self._layout.has_state:
            old = self._states.get(seq)
            self._states[seq] = Recurrent(pos, mix(old.value if old else 0, token, salt))
        if self._layout.has_cells:
            self._place(seq, [Cell(pos, mix(before, token), token)])
            if self._layout.kind == "window" and not self._layout.keeps_window:
                self._forget_window(seq, pos)

    def digest(self, seq: int, salt: int) -> int:
        """Hash all that the next token would see; positions count only relative to each other, as with RoPE."""
        cells, first, end = self._cells[seq], self._first(seq), self._length(seq)
        state = self._states.get(seq)
        h = mix(salt, len(cells), end - first, self._sums[seq], state.value if state else 0)
        if self.kind != "window":
            return h
        seen = range(max(first, end - self.window + 1), end)
        return mix(h, *(pos - end for pos in seen if pos not in cells or not cells[pos].window))

    # Below: the steps of the methods above.

    def _check(self, seq: int) -> None:
        self._check_open()
        if not 0 <= seq < self._layout.n_seq_max:
            raise BadOption(f"sequence {seq} does not exist; this context has 0 to {self._layout.n_seq_max - 1}")

    def _check_part(self, part: str) -> None:
        if part not in ("base", "window"):
            raise BadOption(f"part must be 'base' or 'window', got {part!r}")
        if not self._layout.has_cells:
            raise Unsupported("a recurrent memory has no spans; use state() and set_state()")
        if part == "window" and self.kind != "window":
            raise Unsupported(f"a {self.kind} memory has no window part")

    def _first(self, seq: int) -> int:
        return min(self._cells[seq], default=0)

    def _length_of_cells(self, seq: int) -> int:
        return max(self._cells[seq], default=-1) + 1

    def _length(self, seq: int) -> int:
        state = self._states.get(seq)
        return state.pos + 1 if state else self._length_of_cells(seq)

    def _can_continue(self, seq: int, pos: int) -> bool:
        """Tell whether a token at `pos` would find the window it needs."""
        if self.kind != "window":
            return True
        cells = self._cells[seq]
        return all(p in cells and cells[p].window for p in range(max(0, pos - self.window + 1), pos))

    def _can_share(self, src: int, n_tokens: int) -> bool:
        if self._layout.has_state and n_tokens != self._length(src):
            return False
        if not self._layout.has_cells:
            return True
        return all(pos in self._cells[src] for pos in range(n_tokens)) and self._can_continue(src, n_tokens)

    def _drop(self, seq: int) -> None:
        for cell in self._cells[seq].values():
            cell.seqs.discard(seq)
        self._cells[seq] = {}
        self._sums[seq] = 0
        self._states.pop(seq, None)

    def _adopt(self, dst: int, cells: Iterable[Cell]) -> None:
        if not self._layout.unified:
            cells = [replace(cell, seqs=set()) for cell in cells]
        self._place(dst, cells)

    def _place(self, seq: int, cells: Iterable[Cell]) -> None:
        for cell in cells:
            cell.seqs.add(seq)
            self._cells[seq][cell.pos] = cell
            self._sums[seq] ^= cell.value

    def _forget_window(self, seq: int, pos: int) -> None:
        old = self._cells[seq].get(pos - self.window)
        if old is not None and old.seqs == {seq}:
            old.window = False

    def _import_window(self, seq: int, cells: list[Cell]) -> bool:
        mine = self._cells[seq]
        if any(cell.pos not in mine or mine[cell.pos].value != cell.value for cell in cells):
            raise BadOption("this window part does not belong to the base part in memory; import the base part first")
        for cell in cells:
            mine[cell.pos].window = True
        return True

    def _restore(self, seq: int, data: bytes, partial: bool) -> bool:
        tag, n_head = data[:1], data[1] if len(data) > 1 else 255
        only_state = partial and self._layout.has_state
        if tag != (b"S" if only_state else b"P" if partial else b"W") or n_head not in (0, _STATE.size):
            return False
        head, rest = data[2 : 2 + n_head], data[2 + n_head :]
        cells = [] if only_state else _unpack("state", rest)
        if partial and self.kind == "window":
            return self._import_window(seq, cells)
        if not only_state:
            self._drop(seq)
        if len(cells) > self.n_free(seq):
            return False
        self._place(seq, cells)
        self._set_recurrent(seq, head)
        return True

    def _set_recurrent(self, seq: int, head: bytes) -> None:
        self._states.pop(seq, None)
        if head:
            self._states[seq] = Recurrent(*_STATE.unpack(head))


def _span(p0: int, p1: int | None, end: int) -> tuple[int, int]:
    if p0 < 0 or (p1 is not None and p1 < p0):
        raise BadOption(f"a span needs 0 <= p0 <= p1, got [{p0}, {p1})")
    return p0, end if p1 is None else min(p1, end)


def _pack(part: str, cells: Iterable[Cell]) -> bytes:
    body = b"".join(_CELL.pack(cell.pos, cell.value, cell.token, cell.window) for cell in cells)
    return _HEAD.pack(_MAGIC, part[:1].encode(), len(body) // _CELL.size, hashlib.md5(body).digest()) + body


def _unpack(part: str, payload: bytes) -> list[Cell]:
    try:
        magic, tag, n_cells, digest = _HEAD.unpack_from(payload)
    except struct.error as error:
        raise BadOption("these bytes are too short to be a span") from error
    body = payload[_HEAD.size :]
    if magic != _MAGIC or tag != part[:1].encode() or len(body) != n_cells * _CELL.size:
        raise BadOption(f"these bytes are not a {part} span of this memory")
    if hashlib.md5(body).digest() != digest:
        raise BadOption("this span is damaged")
    return [Cell(*fields) for fields in _CELL.iter_unpack(body)]
