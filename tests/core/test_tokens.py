"""The token log: grows at its end, is cut at its end, and packs what the tree compares."""

import hashlib

import pytest

from holdfast.core import tokens
from holdfast.core.tokens import DIGESTS_KEPT, TOKEN_BYTES, TOKEN_MAX, TokenLog, common_bytes, pack, unpack


def test_a_log_grows_by_one_or_many_and_is_read_by_index_and_slice() -> None:
    log = TokenLog([3, 1])
    log.append(4)
    log.extend([1, 5])
    assert len(log) == 5
    assert [log[0], log[2], log[-1]] == [3, 4, 5]
    assert log.slice(1, 4) == [1, 4, 1]
    assert log.slice(4, 99) == [5]


def test_packed_tokens_come_back_as_they_were() -> None:
    tokens_given = [0, 7, TOKEN_MAX]
    assert len(pack(tokens_given)) == len(tokens_given) * TOKEN_BYTES
    assert unpack(pack(tokens_given)) == tokens_given
    assert unpack(b"") == []


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


class CountingHash:
    """A hash that counts the bytes that every one of its kind has taken."""

    taken = 0

    def __init__(self, state: "hashlib._Hash | None" = None) -> None:
        self._state = hashlib.sha256() if state is None else state

    def copy(self) -> "CountingHash":
        return CountingHash(self._state.copy())

    def update(self, data: bytes) -> None:
        CountingHash.taken += len(data)
        self._state.update(data)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


def test_a_digest_names_the_tokens_and_takes_only_those_that_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "sha256", CountingHash)

    def cost(log: TokenLog, length: int) -> int:
        before = CountingHash.taken
        assert log.digest(length) == hashlib.sha256(pack(log.slice(0, length))).hexdigest()
        return (CountingHash.taken - before) // TOKEN_BYTES

    log = TokenLog(range(1000))
    assert [cost(log, 1000), cost(log, 1000)] == [1000, 0]
    log.extend(range(50))
    assert [cost(log, 1050), cost(log, 1000), cost(log, 1020), cost(log, 1050)] == [50, 0, 20, 0]
    log.cut(1010)
    assert cost(log, 1010) == 10, "from the last length that the cut left"
    log.cut(1000)
    log.extend([7] * 60)
    assert cost(log, 1060) == 60, "what was cut is not what came after"
    for length in range(1061, 1061 + 2 * DIGESTS_KEPT):
        log.append(3)
        assert cost(log, length) == 1
    assert cost(log, 1000) == 1000, "only some of the last lengths are kept"
    assert cost(log, 0) == 0


def test_a_key_that_agrees_whole_is_compared_once() -> None:
    class Counted(bytes):
        compared = 0

        def startswith(self, *arguments: object) -> bool:
            Counted.compared += 1
            return super().startswith(*arguments)

    key = pack(range(64))
    packed = Counted(pack((1, 2)) + key + pack((3,)))
    assert common_bytes(key, packed, 2 * TOKEN_BYTES, len(packed), 4 * TOKEN_BYTES) == len(key)
    assert Counted.compared == 1
