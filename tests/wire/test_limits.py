import pytest

from keepmask.errors import MaskError
from keepmask.wire.limits import DEFAULT_LIMITS, Limits


def test_what_is_at_a_limit_passes():
    limits = Limits(max_bytes=10, max_ids=3, max_rows=2)
    limits.check_bytes(10)
    limits.check(num_rows=2, num_ids=3)


@pytest.mark.parametrize(
    ("rows", "ids", "name"), [(3, 0, "Limits.max_rows"), (0, 4, "Limits.max_ids")], ids=["rows", "ids"]
)
def test_what_is_beyond_a_limit_is_refused_with_the_limit_named(rows, ids, name):
    with pytest.raises(MaskError, match=name):
        Limits(max_ids=3, max_rows=2).check(num_rows=rows, num_ids=ids)


def test_too_many_bytes_are_refused_with_the_limit_named():
    with pytest.raises(MaskError, match=r"11 bytes: at most 10 are decoded; raise Limits\.max_bytes"):
        Limits(max_bytes=10).check_bytes(11)


def test_default_limits_hold_a_long_context_of_wide_supports():
    DEFAULT_LIMITS.check(num_rows=131_072, num_ids=131_072 * 128)
