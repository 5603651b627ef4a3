"""Token ids in, token ids out: scheduling, pages, models and the speculative step."""
