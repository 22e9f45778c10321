import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safer_tta.serve.limits import Refused
from safer_tta.serve.shares import Share, Shares

OWNERS = st.sampled_from(["anna", "bert", "carl", "dora"])


def fill(shares, owner, step=1):
    """Let an owner take as much as there is for that owner."""
    share = Share(shares, owner)
    with contextlib.suppress(Refused):
        while True:
            share.resize(share.size + step)
    return share


def test_an_owner_alone_may_hold_three_quarters_and_a_newcomer_as_much_of_the_rest():
    shares = Shares(1024, "too much", "uploads")
    assert [fill(shares, owner).size for owner in ("anna", "bert", "carl", "dora")] == [768, 192, 48, 12]


@given(st.lists(st.tuples(OWNERS, st.integers(0, 700)), max_size=40))
def test_whoever_holds_nothing_finds_room_and_the_total_is_kept(steps):
    shares = Shares(1000, "too much", "uploads")
    held = {owner: Share(shares, owner) for owner in ("anna", "bert", "carl", "dora")}
    for owner, size in steps:
        before = held[owner].size
        try:
            held[owner].resize(size)
        except Refused:
            assert size > before
            assert held[owner].size == before
        total = sum(share.size for share in held.values())
        assert total == shares.held.total() < 1000
    free = 1000 - shares.held.total()
    with Share(shares, "newcomer") as share:
        share.resize(3 * free // 4)
    assert "newcomer" not in shares.held


def test_what_a_request_held_is_given_back_however_it_ends():
    shares = Shares(100, "too much", "uploads")
    with Share(shares, "anna") as share:
        share.resize(50)
        share.resize(20)
        assert shares.held == {"anna": 20}
    assert not shares.held
    with Share(shares, "anna") as share:
        share.resize(30)
        with pytest.raises(Refused) as refused:
            share.resize(90)
        assert (refused.value.status, refused.value.reason) == (429, "uploads")
        assert shares.held == {"anna": 30}
    assert not shares.held
