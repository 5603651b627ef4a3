"""Writing keys and values into their pages."""

from torch import Tensor


def write_kv(
    key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> None:
    """Store the T new tokens of a step in place.

    key_pages, value_pages: [pages, page_size, num_kv_heads, head_dim]; key, value: [T,
    num_kv_heads, head_dim]; slots: [T] int64, `page * page_size + offset`, all different.
    """
    # As whole rows: index_copy_ on three dimensions is far slower on the CPU.
    key_pages.flatten(0, 1).flatten(1).index_copy_(0, slots, key.flatten(1))
    value_pages.flatten(0, 1).flatten(1).index_copy_(0, slots, value.flatten(1))
