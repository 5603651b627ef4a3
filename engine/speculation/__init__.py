"""The speculative step: draft, head, budget, verify, accept, commit."""
