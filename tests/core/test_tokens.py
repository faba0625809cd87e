"""The token log: grows at its end, is cut at its end, and packs what the tree compares."""

import pytest

from holdfast.core.tokens import TOKEN_BYTES, TOKEN_MAX, TokenLog, pack


def test_a_log_grows_by_one_or_many_and_is_read_by_index_and_slice() -> None:
    log = TokenLog([3, 1])
    log.append(4)
    log.extend([1, 5])
    assert len(log) == 5
    assert [log[0], log[2], log[-1]] == [3, 4, 5]
    assert log.slice(1, 4) == [1, 4, 1]
    assert log.slice(4, 99) == [5]


def test_a_cut_forgets_the_end_and_nothing_else() -> None:
    log = TokenLog(range(10))
    log.cut(7)
    assert log.slice(0, 10) == list(range(7))
    log.cut(7)
    assert len(log) == 7
    log.cut(0)
    assert len(log) == 0


@pytest.mark.parametrize("length", [-1, 4])
def test_a_cut_outside_the_log_is_refused(length: int) -> None:
    log = TokenLog([1, 2, 3])
    with pytest.raises(ValueError, match="cannot cut"):
        log.cut(length)
    assert log.slice(0, 3) == [1, 2, 3]


def test_the_packed_form_of_a_slice_is_the_pack_of_its_tokens() -> None:
    log = TokenLog([7, 0, TOKEN_MAX, 9])
    assert log.packed(1, 4) == pack([0, TOKEN_MAX, 9])
    assert len(log.packed(0, 4)) == 4 * TOKEN_BYTES
    assert log.packed(2, 2) == b""
