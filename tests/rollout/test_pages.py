"""Pages are counted, shared without copies, found again by content, and never lost."""

import numpy as np
import pytest

from zerogap.rollout.pages import PagePool, chain_key, root_key

IDS = np.arange(16, dtype=np.int32)
ROOT = root_key(3, None, "abc")


def test_a_page_is_given_once_until_it_is_back():
    pool = PagePool(3, 16)
    pages = [pool.take() for _ in range(3)]
    assert sorted(pages) == [0, 1, 2]
    assert pool.take() is None
    assert pool.available == 0
    pool.give_back(pages[1])
    assert pool.take() == pages[1]
    pool.check()


def test_a_published_page_is_shared_and_outlives_its_first_holder():
    pool = PagePool(2, 16)
    page, key = pool.take(), chain_key(ROOT, IDS)
    pool.publish(page, key)
    assert pool.share(key) == page
    pool.give_back(page)
    assert pool.held == 1  # the second holder
    pool.give_back(page)
    assert pool.held == 0
    assert pool.share(key) == page  # unheld and still found
    pool.check()


def test_space_is_taken_from_the_least_recently_used_unheld_page():
    pool = PagePool(3, 16)
    pages = [pool.take() for _ in range(3)]
    keys = [chain_key(ROOT, IDS + i) for i in range(3)]
    for page, key in zip(pages, keys):
        pool.publish(page, key)
    for i in (1, 0, 2):
        pool.give_back(pages[i])
    assert pool.share(keys[1]) == pages[1]  # used again, then back: now the most recent
    pool.give_back(pages[1])
    assert pool.take() == pages[0]
    assert pool.share(keys[0]) is None
    assert pool.take() == pages[2]
    assert pool.take() == pages[1]
    pool.check()


def test_a_held_page_is_never_taken():
    pool = PagePool(2, 16)
    page, key = pool.take(), chain_key(ROOT, IDS)
    pool.publish(page, key)
    other = pool.take()
    assert pool.take() is None
    assert pool.share(key) == page != other


def test_the_first_page_published_under_a_key_keeps_it():
    pool = PagePool(2, 16)
    first, second, key = pool.take(), pool.take(), chain_key(ROOT, IDS)
    pool.publish(first, key)
    pool.publish(second, key)
    pool.give_back(second)
    assert pool.share(key) == first
    pool.check()


def test_forgetting_hides_all_pages_and_leaves_held_ones_to_their_holders():
    pool = PagePool(2, 16)
    held, idle = pool.take(), pool.take()
    pool.publish(held, chain_key(ROOT, IDS))
    pool.publish(idle, chain_key(ROOT, IDS + 1))
    pool.give_back(idle)
    pool.forget()
    assert pool.share(chain_key(ROOT, IDS)) is None
    assert pool.share(chain_key(ROOT, IDS + 1)) is None
    assert pool.held == 1
    pool.give_back(held)
    pool.check()
    assert pool.available == 2


def test_without_a_prefix_cache_nothing_is_found():
    pool = PagePool(1, 16, prefix_cache=False)
    page = pool.take()
    pool.publish(page, chain_key(ROOT, IDS))
    assert pool.share(chain_key(ROOT, IDS)) is None


@pytest.mark.parametrize(
    "other",
    [
        chain_key(root_key(4, None, "abc"), IDS),  # weight version
        chain_key(root_key(3, "scales-1", "abc"), IDS),  # KV scale set
        chain_key(root_key(3, None, "abd"), IDS),  # contract
        chain_key(ROOT, IDS + 1),  # ids
        chain_key(ROOT, IDS[::-1]),  # order of ids
        chain_key(chain_key(ROOT, IDS), IDS),  # the same ids one page later
    ],
)
def test_a_key_names_everything_the_content_depends_on(other):
    assert other != chain_key(ROOT, IDS)
    assert chain_key(ROOT, IDS) == chain_key(root_key(3, None, "abc"), IDS.copy())


def test_misuse_is_our_own_bug_and_asserts():
    pool = PagePool(1, 16)
    page = pool.take()
    pool.give_back(page)
    with pytest.raises(AssertionError, match="given back but nobody holds it"):
        pool.give_back(page)
    with pytest.raises(AssertionError, match="published but nobody holds it"):
        pool.publish(page, ROOT)
