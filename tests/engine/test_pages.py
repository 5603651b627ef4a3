"""The page pool's books."""

import pytest

from adaflash.engine.pages import NO_PARENT, PagePool, page_hash


def chain(*pages: list[int]) -> list[bytes]:
    names: list[bytes] = []
    for tokens in pages:
        names.append(page_hash(names[-1] if names else NO_PARENT, tokens))
    return names


def test_hash_covers_everything_before_it() -> None:
    assert chain([1, 2], [3, 4])[1] != chain([9, 2], [3, 4])[1]
    assert chain([1, 2], [3, 4])[1] != chain([3, 4])[0]
    assert chain([1, 2], [3, 4]) == chain([1, 2], [3, 4])


def test_published_pages_are_found_again_after_release() -> None:
    pool, names = PagePool(4, 2), chain([1, 2], [3, 4], [5, 6])
    pages = pool.allocate(3)
    for page, name in zip(pages, names, strict=True):
        pool.publish(page, name)
    pool.release(pages)
    assert pool.num_available == 4
    assert pool.match(names) == pages
    assert pool.match([*names[:2], b"other"]) == pages[:2]
    pool.check_integrity([pages, pages[:2]])


def test_match_stops_at_the_first_unknown_page() -> None:
    pool, names = PagePool(4, 2), chain([1, 2], [3, 4])
    (page,) = pool.allocate(1)
    pool.publish(page, names[1])
    assert pool.match(names) == []


def test_the_least_recently_used_tail_is_evicted_first() -> None:
    pool = PagePool(4, 2)
    old, new = chain([1, 2], [3, 4]), chain([5, 6], [7, 8])
    for names in (old, new):
        pages = pool.allocate(2)
        for page, name in zip(pages, names, strict=True):
            pool.publish(page, name)
        pool.release(pages)
    pool.allocate(1)
    assert len(pool.match(old)) == 1
    assert len(pool.match(new)) == 2


def test_equal_contents_keep_one_shared_page() -> None:
    pool, names = PagePool(2, 2), chain([1, 2])
    first, second = pool.allocate(2)
    pool.publish(first, names[0])
    pool.publish(second, names[0])
    pool.release([first])
    pool.release([second])
    pool.check_integrity([])
    assert pool.match(names) == [first]


def test_overspending_and_double_release_are_bugs() -> None:
    pool = PagePool(2, 2)
    with pytest.raises(AssertionError, match="3 pages wanted"):
        pool.allocate(3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(8, 16).pages_for(tokens) == pages
