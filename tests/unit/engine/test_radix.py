"""The radix tree finds what a plain comparison of all ledgers finds."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvasir.engine.radix import RadixTree, common_prefix


@dataclass(eq=False)
class Holder:
    tokens: list[int]


tokens = st.lists(st.integers(0, 2), max_size=12)


def by_hand(holders: list[Holder], wanted: list[int]) -> dict[int, int]:
    lengths = {}
    for holder in holders:
        n = 0
        while n < min(len(holder.tokens), len(wanted)) and holder.tokens[n] == wanted[n]:
            n += 1
        if n:
            lengths[id(holder)] = n
    return lengths


@given(
    entered=st.lists(tokens, max_size=8),
    grown=st.lists(tokens, max_size=8),
    gone=st.sets(st.integers(0, 7)),
    wanted=tokens,
)
def test_matches_are_those_of_a_plain_comparison(
    entered: list[list[int]], grown: list[list[int]], gone: set[int], wanted: list[int]
) -> None:
    tree: RadixTree[Holder] = RadixTree()
    holders = [Holder(list(each)) for each in entered]
    for holder in holders:
        tree.insert(holder)
    for holder, more in zip(holders, grown, strict=False):
        holder.tokens.extend(more)
    left = [holder for at, holder in enumerate(holders) if at not in gone]
    for holder in holders:
        if holder not in left:
            tree.remove(holder)
    found = tree.matches(wanted)
    assert {id(match.holder): match.n_tokens for match in found} == by_hand(left, wanted)
    assert [match.n_tokens for match in found] == sorted((match.n_tokens for match in found), reverse=True)
    assert len(tree) == len(left)


@given(entered=st.lists(tokens, min_size=1, max_size=8))
def test_an_emptied_tree_holds_nothing(entered: list[list[int]]) -> None:
    tree: RadixTree[Holder] = RadixTree()
    holders = [Holder(list(each)) for each in entered]
    for holder in holders:
        tree.insert(holder)
    for holder in holders:
        tree.remove(holder)
    assert len(tree) == 0
    assert not tree._root.children


@given(
    a=st.lists(st.integers(0, 1), max_size=1200),
    b=st.lists(st.integers(0, 1), max_size=1200),
    same=st.integers(0, 1500),
)
def test_common_prefix_is_exact_across_its_slices(a: list[int], b: list[int], same: int) -> None:
    head = [1] * same
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(head + a, head + b) == same + n
    assert common_prefix(a, [9, *b], offset=1) == n
