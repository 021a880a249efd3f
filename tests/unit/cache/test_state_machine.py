"""Index, tiers and publish against a plain dictionary: what is served is what was offered, and what fits is served."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir.cache import Cache, Key, Match, Reason
from tests.unit.cache.rig import BLOCK, KIB, check, offer_all, row_files, settings, space, temp_files, tree_bytes

RAM_QUOTA = 24 * KIB
TMPFS_QUOTA = 16 * KIB
# The small one is full after ten rows; the large one takes all that a run offers, so nothing may ever be missing.
DISK_QUOTAS = (48 * KIB, 1024 * KIB)
# What a publish makes room for: a row's bytes, its tokens and its header.
ROW_BYTES = 4096 + 4 * BLOCK + 1024

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda bits: [bit for bit in bits for _ in range(BLOCK)]
) | st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK)


class CacheMachine(RuleBasedStateMachine):
    """Offers, searches, restarts, corruption, deletion and pruning in any order."""

    @initialize(disk_bytes=st.sampled_from(DISK_QUOTAS))
    def begin(self, disk_bytes: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvasir-test-"))
        self.disk_bytes = disk_bytes
        self.lost: list[
            str
        ] = []  # keys of files that went behind the cache's back; it counts their bytes until a start
        self.safe: set[tuple[int, ...]] = set()  # what must be found whole: flushed, and nothing had to go since
        self.offered: dict[Key, tuple[int, ...]] = {}
        self.held: list[tuple[Match, list[int]]] = []
        self.cache = self._open()

    def _open(self) -> Cache:
        places = {"tmpfs_dir": self.folder / "shm", "tmpfs_bytes": TMPFS_QUOTA, "disk_bytes": self.disk_bytes}
        return Cache.open(settings(self.folder / "disk", ram_bytes=RAM_QUOTA, **places))

    @rule(tokens=prompts, reason=st.sampled_from(list(Reason)))
    def offer(self, tokens: list[int], reason: Reason) -> None:
        for key in offer_all(self.cache, tokens, reason=reason):
            self.offered.setdefault(key, tuple(tokens))
        if not self._all_fits():
            self.safe.clear()

    @rule(tokens=prompts)
    def offer_and_flush(self, tokens: list[int]) -> None:
        self.offer(tokens, Reason.FINISH)
        assert self.cache.flush(30)
        if self._all_fits() and keys_of(tokens).isdisjoint(self.lost):
            self.safe.add(tuple(tokens))
            self._find_what_is_safe()

    @rule(tokens=prompts, more=prompts)
    def search(self, tokens: list[int], more: list[int]) -> None:
        prompt = tokens + more
        match = self.cache.longest(space(), prompt)
        for row in match.rows:
            assert row.key in self.offered, "found what nobody offered"
        check(self.cache, match, prompt)

    @rule(tokens=prompts)
    def hold(self, tokens: list[int]) -> None:
        self.held.append((self.cache.longest(space(), tokens), tokens))

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        match, tokens = self.held.pop()
        loaded = check(self.cache, match, tokens)
        assert loaded <= match.n_tokens

    @rule()
    def flush(self) -> None:
        assert self.cache.flush(30)

    @rule(keep=st.integers(0, 40))
    def prune(self, keep: int) -> None:
        self.cache.prune(keep_bytes=keep * KIB)
        self.safe.clear()

    @rule()
    def restart(self) -> None:
        self._release()
        self.cache.close()
        self.cache = self._open()
        self.lost.clear()
        assert self.cache.verify().bad == ()
        self._find_what_is_safe()

    @rule(at=st.integers(0, 10_000), bit=st.integers(0, 7))
    def corrupt(self, at: int, bit: int) -> None:
        self.cache.flush(30)
        if files := row_files(self.folder):
            path = files[at % len(files)]
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= 1 << bit
            path.write_bytes(data)
            self.cache.verify()
            self._give_up(path)

    @rule(at=st.integers(0, 1000))
    def lose_a_file(self, at: int) -> None:
        self.cache.flush(30)
        if files := row_files(self.folder):
            path = files[at % len(files)]
            path.unlink()
            self.lost.append(key_of(path))
            self._give_up(path)

    @invariant()
    def quotas_hold(self) -> None:
        if hasattr(self, "cache"):
            stats = self.cache.stats()
            assert stats.bytes_ram <= RAM_QUOTA
            assert stats.bytes_ramfile <= TMPFS_QUOTA
            assert stats.bytes_disk <= self.disk_bytes
            assert tree_bytes_now(self.folder / "shm") <= TMPFS_QUOTA
            assert tree_bytes_now(self.folder / "disk") <= self.disk_bytes

    def _all_fits(self) -> bool:
        """Whether the disk can hold every row there ever was, beside lost files that it still counts."""
        return (len(self.offered) + len(self.lost)) * ROW_BYTES <= self.disk_bytes

    def _find_what_is_safe(self) -> None:
        for tokens in self.safe:
            match = self.cache.longest(space(), tokens)
            assert match.n_tokens == len(tokens)
            assert check(self.cache, match, tokens) == len(tokens)

    def _give_up(self, path: Path) -> None:
        self.safe = {tokens for tokens in self.safe if key_of(path) not in keys_of(tokens)}

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self._release()
            self.cache.close()
            assert temp_files(self.folder) == []
            shutil.rmtree(self.folder)

    def _release(self) -> None:
        for match, _ in self.held:
            match.release()
        self.held.clear()


def key_of(path: Path) -> str:
    return path.name.partition("-")[0]


def keys_of(tokens: Sequence[int]) -> set[str]:
    """The keys of every prefix."""
    return {key.hex() for key in space().keys_at(tokens, range(1, len(tokens) + 1))}


def tree_bytes_now(folder: Path) -> int:
    try:
        return tree_bytes(folder)
    except FileNotFoundError:
        return tree_bytes_now(folder)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = hypothesis_settings(max_examples=25, stateful_step_count=20, deadline=None)
