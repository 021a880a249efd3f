"""Index, tiers and publish against a plain dictionary: whatever is served is what was offered."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir.cache import Cache, Key, Match, Reason
from tests.unit.cache.rig import BLOCK, KIB, check, offer_all, row_files, settings, space, temp_files, tree_bytes

RAM_QUOTA = 24 * KIB
DISK_QUOTA = 48 * KIB

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda bits: [bit for bit in bits for _ in range(BLOCK)]
) | st.lists(st.integers(0, 1), min_size=1, max_size=2 * BLOCK)


class CacheMachine(RuleBasedStateMachine):
    """Offers, searches, restarts, corruption, deletion and pruning in any order."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvasir-test-"))
        self.offered: dict[Key, tuple[int, ...]] = {}
        self.held: list[tuple[Match, list[int]]] = []
        self.cache = self._open()

    def _open(self) -> Cache:
        return Cache.open(settings(self.folder, ram_bytes=RAM_QUOTA, disk_bytes=DISK_QUOTA))

    @rule(tokens=prompts, reason=st.sampled_from(list(Reason)))
    def offer(self, tokens: list[int], reason: Reason) -> None:
        for key in offer_all(self.cache, tokens, reason=reason):
            self.offered.setdefault(key, tuple(tokens))

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

    @rule()
    def restart(self) -> None:
        self._release()
        self.cache.close()
        self.cache = self._open()
        assert self.cache.verify().bad == ()

    @rule(at=st.integers(0, 10_000), bit=st.integers(0, 7))
    def corrupt(self, at: int, bit: int) -> None:
        self.cache.flush(30)
        if files := row_files(self.folder):
            path = files[at % len(files)]
            data = bytearray(path.read_bytes())
            data[at % len(data)] ^= 1 << bit
            path.write_bytes(data)
            self.cache.verify()

    @rule(at=st.integers(0, 1000))
    def lose_a_file(self, at: int) -> None:
        self.cache.flush(30)
        if files := row_files(self.folder):
            files[at % len(files)].unlink()

    @invariant()
    def quotas_hold(self) -> None:
        if hasattr(self, "cache"):
            stats = self.cache.stats()
            assert stats.bytes_ram <= RAM_QUOTA
            assert stats.bytes_disk <= DISK_QUOTA
            assert tree_bytes_now(self.folder) <= DISK_QUOTA

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


def tree_bytes_now(folder: Path) -> int:
    try:
        return tree_bytes(folder)
    except FileNotFoundError:
        return tree_bytes_now(folder)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = hypothesis_settings(max_examples=25, stateful_step_count=20, deadline=None)
