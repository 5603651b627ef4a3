"""Who holds which page of the KV cache, and which pages can be shared. No tensors.

A page is in exactly one of three states:
    held       referenced by one or more sequences
    cached     referenced by none, its contents known by hash; the least recently used goes first
    free       referenced by none, contents worthless
"""

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

NO_PARENT = b""


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full page's contents: its tokens and, through `parent`, all tokens before them.

    A cryptographic hash, because a collision would show one user's context to another.
    """
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


class PagePool:
    """Reference-counted pages with a prefix cache (a hash chain over full pages, LRU)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._references = [0] * num_pages
        self._free = deque(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold the pages of the longest known prefix of `hashes`."""
        pages: list[int] = []
        for name in hashes:
            page = self._page_of.get(name)
            if page is None:
                break
            self._cached.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def allocate(self, count: int) -> list[int]:
        """Hold `count` fresh pages; the caller has checked `num_available`."""
        assert count <= self.num_available, f"{count} pages wanted, {self.num_available} available"
        return [self._take() for _ in range(count)]

    def publish(self, page: int, name: bytes) -> None:
        """The page is full and written: later requests may share it under `name`.

        If another page has the same contents already, that one stays the shared one.
        """
        assert self._references[page] > 0
        if name not in self._page_of and page not in self._hash_of:
            self._page_of[name] = page
            self._hash_of[page] = name

    def forget(self) -> None:
        """Share no page any more that is known now; sequences keep what they hold."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def release(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page of a sequence, in the sequence's order."""
        # Backwards, so that of a prefix the tail is evicted first: a chain is useless without its
        # head.
        for page in reversed(pages):
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that the books agree with what the sequences say they hold."""
        held = Counter(page for pages in holders for page in pages)
        for page, references in enumerate(self._references):
            assert references == held[page], f"page {page}: {references} != {held[page]} holders"
        idle = [*self._free, *self._cached]
        assert len(idle) == len(set(idle)), "a page is idle twice"
        assert set(idle) == {p for p, count in enumerate(self._references) if count == 0}
        assert {page: name for name, page in self._page_of.items()} == self._hash_of
        assert all(page in self._hash_of for page in self._cached)
        assert not any(page in self._hash_of for page in self._free)

    def _take(self) -> int:
        if self._free:
            page = self._free.popleft()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._hash_of.pop(page)]
        self._references[page] = 1
        return page
