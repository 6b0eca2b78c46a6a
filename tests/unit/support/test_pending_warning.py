"""A warning that is shown as soon as a filter lets it pass, and once."""

import warnings

import pytest

from mpmd.support.user_code import PendingWarning


def test_a_filter_that_raises_ends_in_an_error_once():
    pending = PendingWarning("say this")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "say")
        with pytest.raises(UserWarning, match="say this"):
            pending.show()
        pending.show()


def test_the_first_filter_that_fits_decides():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "say", module="another_module")
        warnings.filterwarnings("ignore", "says? th")
        pending = PendingWarning("say this")
        pending.show()
        assert pending.waits and not caught
        warnings.filterwarnings("always", "say", module=__name__.replace(".", r"\."))
        pending.show()
        pending.show()
    assert [str(w.message) for w in caught] == ["say this"]
