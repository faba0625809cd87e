"""The fields of requests that the tests of the server sort are those of the package that is tested."""

from tests.clients.record_fields import RECORDED, recorded_text


def test_the_recorded_fields_are_those_of_the_package() -> None:
    assert RECORDED.read_text() == recorded_text(), "python -m tests.clients.record_fields"
